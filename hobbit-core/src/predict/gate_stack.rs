//! What the routers of several layers say about one input.
//!
//! A router multiplies its layer's input by a matrix, the *gate*. The inputs of neighbouring layers are alike, so this
//! layer's input through the next layers' gates predicts their choice (HOBBIT's stacked gate, Fate's cross-layer gate).
//! A gate in float is read where its owner keeps it ([`GateRows`]): routers are ordinary weights, which llama.cpp holds
//! in memory already, and all of them together can be a tenth of a small budget.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Popularity, top_k};

/// Gates of all layers together, in bytes: more than any model has (a layer of 512 experts and width 8192 takes 16 MiB).
const STACK_BYTES_MAX: usize = 4 << 30;

/// A router's matrix, wherever it lies.
pub trait GateRows: Send + Sync {
    /// `[n_expert][width]`, the same at every call.
    fn rows(&self) -> &[f32];
}

impl GateRows for Vec<f32> {
    fn rows(&self) -> &[f32] {
        self
    }
}

/// What turns logits into probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// The exponentials' shares of their sum; of all experts, or, which gives the same ratios, of those that were chosen.
    Softmax,
    /// One by one.
    Sigmoid,
    /// One by one, the square root of softplus.
    SqrtSoftplus,
}

/// Experts in groups, of which a token takes the best: by the sum of each one's two best experts (DeepSeek-V3, section 2.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Groups of equally many neighbours.
    pub n: usize,
    /// Of these a token takes so many.
    pub n_used: usize,
}

/// What a router says of all experts about one token, `[n_expert]` each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterScores {
    /// By these experts are chosen: with the bias of the choice; negative infinity in groups that are not taken.
    pub selection: Vec<f32>,
    /// Of these the weights of the chosen ones are made: without that bias.
    pub weights: Vec<f32>,
}

/// One layer's router.
#[derive(Clone)]
pub struct Gate {
    /// The matrix, `[n_expert][width]`.
    pub rows: Arc<dyn GateRows>,
    /// Added to the logits, `[n_expert]`.
    pub bias: Option<Vec<f32>>,
    /// Added to the probabilities before the choice, `[n_expert]`.
    pub choice_bias: Option<Vec<f32>>,
    /// What turns logits into probabilities.
    pub gating: Gating,
    /// `None`: a token may take any experts.
    pub groups: Option<Groups>,
}

/// Routers by layer. Filled as layers run for the first time.
#[derive(Clone, Default)]
pub struct GateStack {
    gates: BTreeMap<u16, Gate>,
    width: usize,
    /// Floats of all matrices.
    n_floats: usize,
    /// Reused: logits of one product, and the best of a router's.
    logits: Vec<f32>,
    best: Vec<u16>,
}

impl GateStack {
    /// Whether the layer's router is known.
    pub fn knows(&self, layer: u16) -> bool {
        self.gates.contains_key(&layer)
    }

    /// What turns its logits into probabilities; `None` where it is not known.
    pub fn gating(&self, layer: u16) -> Option<Gating> {
        self.gates.get(&layer).map(|gate| gate.gating)
    }

    /// Whether there is room for a gate `[n_expert][width]` beside the others, which are all of one width.
    pub fn takes(&self, width: usize, n_expert: usize) -> bool {
        let is_usual = width > 0 && (self.width == 0 || width == self.width);
        is_usual && (self.n_floats + n_expert * width) * size_of::<f32>() <= STACK_BYTES_MAX
    }

    /// Adds (or replaces) the router of a layer, the rows of whose matrix have `width` floats. `false`, and nothing has changed, where
    /// [`GateStack::takes`] says no, or a row or bias is not whole.
    pub fn add(&mut self, layer: u16, width: usize, gate: Gate) -> bool {
        let n_floats = gate.rows.rows().len();
        let n_expert = n_floats / width.max(1);
        let is_whole = |bias: &Option<Vec<f32>>| bias.as_ref().is_none_or(|bias| bias.len() == n_expert);
        let biases_fit = is_whole(&gate.bias) && is_whole(&gate.choice_bias);
        if !self.takes(width, n_expert) || n_floats != n_expert * width || !biases_fit {
            return false;
        }
        self.width = width;
        self.n_floats += n_floats;
        if let Some(before) = self.gates.insert(layer, gate) {
            self.n_floats -= before.rows.rows().len();
        }
        true
    }

    /// What the routers of `layers` (ascending) say about the input `x` of `width` floats: each layer and the
    /// probabilities of its experts, by index. Layers whose router is not known are left out.
    ///
    /// One product of the stacked gates, `[sum of n_expert][width]` times `[width]` (HOBBIT, section 3.3).
    pub fn scores(&mut self, x: &[f32], layers: &[u16]) -> Vec<(u16, Vec<f32>)> {
        if x.len() != self.width {
            return Vec::new();
        }
        let Self { gates, logits, .. } = self;
        let stack: Vec<(u16, &Gate)> =
            layers.iter().filter_map(|layer| gates.get(layer).map(|gate| (*layer, gate))).collect();
        product(stack.iter().map(|(_, gate)| gate.rows.rows()), x, logits);
        let mut rest = &logits[..];
        let of_gate = |(layer, gate): (u16, &Gate)| {
            let (own, others) = rest.split_at(gate.rows.rows().len() / x.len());
            rest = others;
            (layer, gate.probabilities(own))
        };
        stack.into_iter().map(of_gate).collect()
    }

    /// The same of several inputs, each of `width` floats: a row of the gates is multiplied by all of them while it is near.
    pub fn scores_of(&mut self, inputs: &[&[f32]], layers: &[u16]) -> Vec<Vec<(u16, Vec<f32>)>> {
        if let [x] = inputs {
            return vec![self.scores(x, layers)];
        }
        let Self { gates, logits, width, .. } = self;
        let mut all = vec![Vec::new(); inputs.len()];
        if inputs.iter().any(|x| x.len() != *width) {
            return all;
        }
        for (layer, gate) in layers.iter().filter_map(|layer| gates.get(layer).map(|gate| (*layer, gate))) {
            let rows = gate.rows.rows();
            let n_expert = rows.len() / (*width).max(1);
            logits.clear();
            logits.resize(n_expert * inputs.len(), 0.0);
            for (expert, row) in rows.chunks_exact((*width).max(1)).enumerate() {
                for (token, x) in inputs.iter().enumerate() {
                    logits[token * n_expert + expert] = dot(row, x);
                }
            }
            for (scores, logits) in all.iter_mut().zip(logits.chunks_exact(n_expert.max(1))) {
                scores.push((layer, gate.probabilities(logits)));
            }
        }
        all
    }

    /// What the router of `layer` says about the input `x` of `width` floats. `false`, and `out` is as it was, where it is not known.
    pub fn judge(&mut self, x: &[f32], layer: u16, out: &mut RouterScores) -> bool {
        let Self { gates, logits, width, .. } = self;
        let Some(gate) = gates.get(&layer).filter(|_| x.len() == *width) else { return false };
        product([gate.rows.rows()], x, logits);
        gate.judge(logits, out);
        true
    }

    /// What the router of `layer` would choose for each of several inputs of `width` floats, `n_used` experts a token.
    /// Nothing where the router is not known.
    pub fn popularity<'x>(
        &mut self,
        inputs: impl IntoIterator<Item = &'x [f32]>,
        layer: u16,
        n_used: usize,
        out: &mut Popularity,
    ) {
        out.clear();
        let Self { gates, logits, best, width, .. } = self;
        let Some(gate) = gates.get(&layer) else { return };
        for x in inputs.into_iter().filter(|x| x.len() == *width) {
            product([gate.rows.rows()], x, logits);
            top_k(&gate.probabilities(logits), n_used, best);
            out.add(best.iter().copied());
        }
    }
}

/// The rows of stacked matrices `[n][width]` times `x`, `[width]`: `out` is replaced by as many logits as there are rows.
fn product<'a>(matrices: impl IntoIterator<Item = &'a [f32]>, x: &[f32], out: &mut Vec<f32>) {
    out.clear();
    for rows in matrices {
        out.extend(rows.chunks_exact(x.len()).map(|row| dot(row, x)));
    }
}

impl Gate {
    fn judge(&self, logits: &[f32], out: &mut RouterScores) {
        let RouterScores { selection, weights } = out;
        weights.clear();
        match &self.bias {
            Some(bias) => weights.extend(logits.iter().zip(bias).map(|(logit, bias)| logit + bias)),
            None => weights.extend_from_slice(logits),
        }
        match self.gating {
            Gating::Softmax => {
                let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                weights.iter_mut().for_each(|weight| *weight = (*weight - max).exp());
                let sum: f32 = weights.iter().sum();
                weights.iter_mut().for_each(|weight| *weight /= sum);
            }
            Gating::Sigmoid => weights.iter_mut().for_each(|weight| *weight = 1.0 / (1.0 + (-*weight).exp())),
            // As ggml has it: of large values softplus is the value.
            Gating::SqrtSoftplus => weights.iter_mut().for_each(|weight| {
                let softplus = if *weight > 20.0 { *weight } else { (1.0 + weight.exp()).ln() };
                *weight = softplus.sqrt();
            }),
        }
        selection.clear();
        match &self.choice_bias {
            Some(bias) => selection.extend(weights.iter().zip(bias).map(|(weight, bias)| weight + bias)),
            None => selection.extend_from_slice(weights),
        }
        if let Some(groups) = self.groups {
            groups.mask(selection);
        }
    }

    /// How likely each expert is chosen, as far as one number says it: shares of the sum.
    fn probabilities(&self, logits: &[f32]) -> Vec<f32> {
        let mut scores = RouterScores::default();
        self.judge(logits, &mut scores);
        let mut shares = scores.selection;
        shares.iter_mut().for_each(|share| *share = share.max(0.0));
        let sum: f32 = shares.iter().sum();
        if sum > 0.0 {
            shares.iter_mut().for_each(|share| *share /= sum);
        }
        shares
    }
}

impl Groups {
    /// Sets the scores of experts whose group is not taken to negative infinity.
    fn mask(self, selection: &mut [f32]) {
        let size = selection.len() / self.n.max(1);
        if self.n < 2 || size == 0 || selection.len() != size * self.n {
            return;
        }
        let best_two = |group: &[f32]| {
            let by_size = |best: [f32; 2], &score: &f32| match score {
                _ if score > best[0] => [score, best[0]],
                _ if score > best[1] => [best[0], score],
                _ => best,
            };
            let [first, second] = group.iter().fold([f32::NEG_INFINITY; 2], by_size);
            if size > 1 { first + second } else { first }
        };
        let of_groups: Vec<f32> = selection.chunks(size).map(best_two).collect();
        let mut taken = Vec::new();
        top_k(&of_groups, self.n_used, &mut taken);
        for (group, scores) in selection.chunks_mut(size).enumerate() {
            if !taken.contains(&(group as u16)) {
                scores.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Sums of sixteen lanes: the compiler makes vector code of it that takes a matrix as fast as memory and caches give it (30 to
/// 100 GB/s, a core of an AMD EPYC). Of two or four rows at once it makes slower code.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gates(gating: Gating) -> GateStack {
        let mut gates = GateStack::default();
        let mut add = |layer, scale: f32, bias| {
            let rows = vec![scale, 0.0, 0.0, scale];
            assert!(gates.add(layer, 2, Gate { rows: Arc::new(rows), bias, choice_bias: None, gating, groups: None }));
        };
        add(3, 1.0, None);
        add(5, 2.0, Some(vec![0.0, 4.0]));
        gates
    }

    #[test]
    fn each_layer_has_its_own_rows_and_bias() {
        let mut gates = gates(Gating::Softmax);
        assert!(gates.knows(3) && !gates.knows(4));
        let scores = gates.scores(&[1.0, 0.0], &[3, 4, 5]);
        let odds: Vec<(u16, f32)> = scores.iter().map(|(layer, p)| (*layer, (p[0] / p[1]).ln())).collect();
        assert_eq!(odds.iter().map(|odds| odds.0).collect::<Vec<_>>(), [3, 5]);
        assert!((odds[0].1 - 1.0).abs() < 1e-5 && (odds[1].1 + 2.0).abs() < 1e-5, "{odds:?}");
        assert!(scores.iter().all(|(_, p)| (p.iter().sum::<f32>() - 1.0).abs() < 1e-6));
        assert!(gates.scores(&[1.0], &[3]).is_empty(), "an input of another width");
    }

    #[test]
    fn a_stack_says_what_its_gates_say_one_by_one() {
        let mut stack = GateStack::default();
        for (layer, n_expert) in [(0, 3), (2, 5), (3, 8)] {
            let rows: Vec<f32> =
                (0..n_expert * 37).map(|i| ((i * 7919 + usize::from(layer)) % 83) as f32 / 83.0).collect();
            let gate =
                Gate { rows: Arc::new(rows), bias: None, choice_bias: None, gating: Gating::Softmax, groups: None };
            assert!(stack.add(layer, 37, gate));
        }
        let x: Vec<f32> = (0..37).map(|i| (i % 5) as f32 - 2.0).collect();
        let one_by_one: Vec<_> = [0, 2, 3].into_iter().flat_map(|layer| stack.scores(&x, &[layer])).collect();
        assert_eq!(stack.scores(&x, &[0, 1, 2, 3]), one_by_one, "to the last bit");
        assert_eq!(
            one_by_one.iter().map(|(layer, scores)| (*layer, scores.len())).collect::<Vec<_>>(),
            [(0, 3), (2, 5), (3, 8)]
        );
    }

    #[test]
    fn a_prompts_popular_experts_are_counted() {
        let mut gates = gates(Gating::Softmax);
        let mut popularity = Popularity::default();
        let inputs: [&[f32]; 4] = [&[1.0, 0.0], &[0.0, 1.0], &[2.0, 1.0], &[1.0]];
        gates.popularity(inputs, 3, 1, &mut popularity);
        assert_eq!([0, 1].map(|expert| popularity.of(expert)), [2, 1], "an input of another width tells nothing");
        gates.popularity(inputs, 4, 1, &mut popularity);
        assert_eq!(popularity, Popularity::default(), "an unknown router");
    }

    #[test]
    fn sigmoid_scores_are_shares_too() {
        let scores = gates(Gating::Sigmoid).scores(&[0.0, 0.0], &[3]);
        assert_eq!(scores, [(3, vec![0.5, 0.5])]);
    }

    fn judged(gate: Gate, logits: &[f32]) -> RouterScores {
        let mut scores = RouterScores::default();
        gate.judge(logits, &mut scores);
        scores
    }

    #[test]
    fn the_bias_of_a_choice_is_not_in_the_weights() {
        let gate = Gate {
            rows: Arc::new(Vec::new()),
            bias: None,
            choice_bias: Some(vec![0.25, 0.0, -1.0]),
            gating: Gating::Sigmoid,
            groups: None,
        };
        let scores = judged(gate.clone(), &[0.0; 3]);
        assert_eq!(scores.weights, [0.5; 3]);
        assert_eq!(scores.selection, [0.75, 0.5, -0.5]);
        assert_eq!(gate.probabilities(&[0.0; 3]), [0.6, 0.4, 0.0]);
    }

    #[test]
    fn softplus_is_ggmls() {
        let gate = Gate {
            rows: Arc::new(Vec::new()),
            bias: None,
            choice_bias: None,
            gating: Gating::SqrtSoftplus,
            groups: None,
        };
        let scores = judged(gate, &[0.0, 25.0, -100.0]);
        assert!((scores.weights[0] - 2.0f32.ln().sqrt()).abs() < 1e-6);
        assert_eq!(scores.weights[1..], [5.0, 0.0]);
        assert_eq!(scores.selection, scores.weights);
    }

    #[test]
    fn experts_of_groups_that_are_not_taken_are_out() {
        let gate = |n_used| Gate {
            rows: Arc::new(Vec::new()),
            bias: None,
            choice_bias: None,
            gating: Gating::Sigmoid,
            groups: Some(Groups { n: 3, n_used }),
        };
        // By their two best: the third group, then the first, whose one good expert is the best of all.
        let logits = [4.0, -3.0, -9.0, 0.1, 0.2, 0.0, 1.0, 1.0, -9.0];
        let taken = |n_used| {
            let selection = judged(gate(n_used), &logits).selection;
            (0..9).filter(|&expert| selection[expert] > f32::NEG_INFINITY).collect::<Vec<_>>()
        };
        assert_eq!([taken(1), taken(2)], [vec![6, 7, 8], vec![3, 4, 5, 6, 7, 8]]);
        assert_eq!(gate(1).probabilities(&logits)[0], 0.0);
    }

    #[test]
    fn gates_that_do_not_fit_are_refused() {
        let mut gates = gates(Gating::Softmax);
        let gate = |rows: usize, bias: Option<usize>| Gate {
            rows: Arc::new(vec![0.0; rows]),
            bias: bias.map(|n| vec![0.0; n]),
            choice_bias: None,
            gating: Gating::Softmax,
            groups: None,
        };
        assert!(!gates.add(7, 3, gate(6, None)), "another width");
        assert!(!gates.add(7, 2, gate(5, None)), "half a row");
        assert!(!gates.add(7, 2, gate(6, Some(2))), "a bias too few");
        assert!(!gates.add(7, 0, gate(0, None)) && !gates.takes(2, STACK_BYTES_MAX / 8));
        assert!(!gates.knows(7) && gates.add(7, 2, gate(6, Some(3))));
    }

    #[test]
    fn dot_takes_every_element() {
        let a: Vec<f32> = (0..37).map(|i| i as f32).collect();
        assert_eq!(dot(&a, &a), (0..37).map(|i| (i * i) as f32).sum::<f32>());
    }
}
