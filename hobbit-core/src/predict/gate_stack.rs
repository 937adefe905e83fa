//! Scores of several layers' routers for one input.
//!
//! A router multiplies its layer's input by a matrix, the *gate*. The inputs of neighbouring layers are alike, so this
//! layer's input through the next layers' gates predicts their choice (HOBBIT's stacked gate, Fate's cross-layer gate).
//! A gate in float is read where its owner keeps it ([`GateRows`]): routers are ordinary weights, which llama.cpp holds
//! in memory already, and all of them together can be a tenth of a small budget.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Popularity, top_k};

/// Gates of all layers together, in bytes: more than any model has (a layer of 512 experts and width 8192 takes 16
/// MiB).
const STACK_BYTES_MAX: usize = 4 << 30;

/// A router's matrix, in its owner's memory.
pub trait GateRows: Send + Sync {
    /// `[n_expert][width]`, the same at every call.
    fn rows(&self) -> &[f32];
}

impl GateRows for Vec<f32> {
    fn rows(&self) -> &[f32] {
        self
    }
}

/// The function from logits to probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Over all experts, or over the chosen ones, which gives the same ratios.
    Softmax,
    Sigmoid,
    /// The square root of softplus.
    SqrtSoftplus,
}

/// Groups of experts. A token takes the groups with the best sum of two experts (DeepSeek-V3, section 2.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Groups of equally many neighbours.
    pub n: usize,
    /// Groups that a token takes.
    pub n_used: usize,
}

/// A router's scores of all experts for one token, `[n_expert]` each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterScores {
    /// Scores that decide the choice, with its bias; negative infinity in groups that are not taken.
    pub selection: Vec<f32>,
    /// Scores that become the weights of the chosen experts, without that bias.
    pub weights: Vec<f32>,
}

#[derive(Clone)]
pub struct Gate {
    /// The matrix, `[n_expert][width]`.
    pub rows: Arc<dyn GateRows>,
    /// Added to the logits, `[n_expert]`.
    pub bias: Option<Vec<f32>>,
    /// Added to the probabilities before the choice, `[n_expert]`.
    pub choice_bias: Option<Vec<f32>>,
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
    pub fn knows(&self, layer: u16) -> bool {
        self.gates.contains_key(&layer)
    }

    /// `None` for an unknown router.
    pub fn gating(&self, layer: u16) -> Option<Gating> {
        self.gates.get(&layer).map(|gate| gate.gating)
    }

    /// Whether there is room for another gate `[n_expert][width]`; all gates have one width.
    pub fn takes(&self, width: usize, n_expert: usize) -> bool {
        let is_usual = width > 0 && (self.width == 0 || width == self.width);
        is_usual && (self.n_floats + n_expert * width) * size_of::<f32>() <= STACK_BYTES_MAX
    }

    /// Adds or replaces the router of a layer; the rows of its matrix have `width` floats. `false`, without a change,
    /// if [`GateStack::takes`] refuses, or a row or bias is incomplete.
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

    /// For each input of `width` floats, the probabilities of the experts of `layers`, by index. Layers without a known
    /// router are left out. A row of the gates is multiplied by all inputs while it is in the CPU's cache.
    ///
    /// One product of the stacked gates, `[sum of n_expert][width]` times `[width]` (HOBBIT, section 3.3).
    pub fn scores_of(&mut self, inputs: &[&[f32]], layers: &[u16]) -> Vec<Vec<(u16, Vec<f32>)>> {
        let Self { gates, logits, width, .. } = self;
        let width = (*width).max(1);
        let mut all = vec![Vec::new(); inputs.len()];
        if inputs.iter().any(|x| x.len() != width) {
            return all;
        }
        for (layer, gate) in layers.iter().filter_map(|layer| gates.get(layer).map(|gate| (*layer, gate))) {
            let rows = gate.rows.rows();
            let n_expert = rows.len() / width;
            if let [x] = inputs {
                gate.logits(x, logits);
            } else {
                logits.clear();
                logits.resize(n_expert * inputs.len(), 0.0);
                for (expert, row) in rows.chunks_exact(width).enumerate() {
                    for (token, x) in inputs.iter().enumerate() {
                        logits[token * n_expert + expert] = dot(row, x);
                    }
                }
            }
            for (scores, logits) in all.iter_mut().zip(logits.chunks_exact(n_expert.max(1))) {
                scores.push((layer, gate.probabilities(logits)));
            }
        }
        all
    }

    /// Scores of one layer, from logits that its router has computed, with its bias: `[n_tokens][n_expert]`. Empty
    /// for an unknown router.
    pub fn scores_of_logits(&self, layer: u16, logits: &[f32]) -> Vec<f32> {
        let Some(gate) = self.gates.get(&layer) else { return Vec::new() };
        let n_expert = gate.rows.rows().len() / self.width.max(1);
        let mut scores = RouterScores::default();
        let mut all = Vec::with_capacity(logits.len());
        for logits in logits.chunks_exact(n_expert.max(1)) {
            scores.weights.clear();
            scores.weights.extend_from_slice(logits);
            gate.decide(&mut scores);
            shares(&mut scores.selection);
            all.extend_from_slice(&scores.selection);
        }
        all
    }

    /// Scores of the router of `layer` for the input `x` of `width` floats. `false`, without a change, for an unknown
    /// one.
    pub fn judge(&mut self, x: &[f32], layer: u16, out: &mut RouterScores) -> bool {
        let Self { gates, logits, width, .. } = self;
        let Some(gate) = gates.get(&layer).filter(|_| x.len() == *width) else { return false };
        gate.logits(x, logits);
        gate.judge(logits, out);
        true
    }

    /// Counts the choices of the router of `layer` for several inputs of `width` floats, `n_used` experts a token.
    /// Nothing for an unknown router.
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
            gate.logits(x, logits);
            top_k(&gate.probabilities(logits), n_used, best);
            out.add(best.iter().copied());
        }
    }
}

impl Gate {
    fn logits(&self, x: &[f32], out: &mut Vec<f32>) {
        out.clear();
        out.extend(self.rows.rows().chunks_exact(x.len()).map(|row| dot(row, x)));
    }

    fn judge(&self, logits: &[f32], out: &mut RouterScores) {
        out.weights.clear();
        match &self.bias {
            Some(bias) => out.weights.extend(logits.iter().zip(bias).map(|(logit, bias)| logit + bias)),
            None => out.weights.extend_from_slice(logits),
        }
        self.decide(out);
    }

    /// Turns logits into weights, in place, and these into the scores that decide the choice.
    fn decide(&self, RouterScores { selection, weights }: &mut RouterScores) {
        match self.gating {
            Gating::Softmax => {
                let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                weights.iter_mut().for_each(|weight| *weight = (*weight - max).exp());
                let sum: f32 = weights.iter().sum();
                weights.iter_mut().for_each(|weight| *weight /= sum);
            }
            Gating::Sigmoid => weights.iter_mut().for_each(|weight| *weight = 1.0 / (1.0 + (-*weight).exp())),
            // As in ggml: the softplus of a large value is the value.
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

    fn probabilities(&self, logits: &[f32]) -> Vec<f32> {
        let mut scores = RouterScores::default();
        self.judge(logits, &mut scores);
        shares(&mut scores.selection);
        scores.selection
    }
}

/// Turns scores that decide a choice into estimated probabilities: each expert's share of the sum.
fn shares(selection: &mut [f32]) {
    selection.iter_mut().for_each(|share| *share = share.max(0.0));
    let sum: f32 = selection.iter().sum();
    if sum > 0.0 {
        selection.iter_mut().for_each(|share| *share /= sum);
    }
}

impl Groups {
    /// Masks the experts of groups that are not taken.
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

/// Sums of sixteen lanes: the compiler vectorises it to the speed of memory and caches (30 to 100 GB/s on a core of an
/// AMD EPYC). Two or four rows at once are slower.
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

    fn gate(rows: Vec<f32>, gating: Gating) -> Gate {
        Gate { rows: Arc::new(rows), bias: None, choice_bias: None, gating, groups: None }
    }

    fn gates() -> GateStack {
        let mut gates = GateStack::default();
        assert!(gates.add(3, 2, gate(vec![1.0, 0.0, 0.0, 1.0], Gating::Softmax)));
        let biased = Gate { bias: Some(vec![0.0, 4.0]), ..gate(vec![2.0, 0.0, 0.0, 2.0], Gating::Softmax) };
        assert!(gates.add(5, 2, biased));
        gates
    }

    #[test]
    fn each_layer_has_its_own_rows_and_bias() {
        let mut gates = gates();
        assert!(gates.knows(3) && !gates.knows(4));
        let scores = gates.scores_of(&[&[1.0, 0.0]], &[3, 4, 5]).remove(0);
        let odds: Vec<(u16, f32)> = scores.iter().map(|(layer, p)| (*layer, (p[0] / p[1]).ln())).collect();
        assert_eq!(odds.iter().map(|odds| odds.0).collect::<Vec<_>>(), [3, 5]);
        assert!((odds[0].1 - 1.0).abs() < 1e-5 && (odds[1].1 + 2.0).abs() < 1e-5, "{odds:?}");
        assert!(scores.iter().all(|(_, p)| (p.iter().sum::<f32>() - 1.0).abs() < 1e-6));
        assert!(gates.scores_of(&[&[1.0]], &[3])[0].is_empty(), "an input of another width");
    }

    #[test]
    fn several_inputs_and_layers_score_as_one_by_one() {
        let mut stack = GateStack::default();
        for (layer, n_expert) in [(0, 3), (2, 5), (3, 8)] {
            let row = |i: usize| ((i * 7919 + usize::from(layer)) % 83) as f32 / 83.0;
            assert!(stack.add(layer, 37, gate((0..n_expert * 37).map(row).collect(), Gating::Softmax)));
        }
        let [x, y] = [5, 7].map(|n| (0..37).map(|i| (i % n) as f32 - 2.0).collect::<Vec<f32>>());
        let both = stack.scores_of(&[&x, &y], &[0, 1, 2, 3]);
        for (x, found) in [&x, &y].into_iter().zip(both) {
            let one_by_one: Vec<_> =
                [0, 2, 3].iter().flat_map(|&layer| stack.scores_of(&[x], &[layer]).remove(0)).collect();
            assert_eq!(found, one_by_one, "to the last bit");
            assert!(found.iter().map(|(layer, scores)| (*layer, scores.len())).eq([(0, 3), (2, 5), (3, 8)]));
        }
    }

    #[test]
    fn a_prompts_popular_experts_are_counted() {
        let mut gates = gates();
        let mut popularity = Popularity::default();
        let inputs: [&[f32]; 4] = [&[1.0, 0.0], &[0.0, 1.0], &[2.0, 1.0], &[1.0]];
        gates.popularity(inputs, 3, 1, &mut popularity);
        assert_eq!([0, 1].map(|expert| popularity.of(expert)), [2, 1], "inputs of another width do not count");
        gates.popularity(inputs, 4, 1, &mut popularity);
        assert_eq!(popularity, Popularity::default(), "an unknown router");
    }

    fn judged(gate: &Gate, logits: &[f32]) -> RouterScores {
        let mut scores = RouterScores::default();
        gate.judge(logits, &mut scores);
        scores
    }

    #[test]
    fn logits_of_a_router_need_no_product() {
        let mut gates = gates();
        let inputs = [[1.0, -0.5], [0.25, 2.0]];
        for (layer, bias) in [(3, [0.0, 0.0]), (5, [0.0, 4.0])] {
            let scale = gates.gates[&layer].rows.rows()[0];
            let logits = inputs.map(|input| [scale * input[0] + bias[0], scale * input[1] + bias[1]]);
            let expected: Vec<f32> = gates
                .scores_of(&[&inputs[0], &inputs[1]], &[layer])
                .into_iter()
                .flat_map(|of_token| of_token.into_iter().flat_map(|(_, scores)| scores))
                .collect();
            assert_eq!(gates.scores_of_logits(layer, logits.as_flattened()), expected);
        }
        assert!(gates.scores_of_logits(4, &[0.0; 2]).is_empty());
    }

    #[test]
    fn the_bias_of_a_choice_is_not_in_the_weights() {
        let gate = Gate { choice_bias: Some(vec![0.25, 0.0, -1.0]), ..gate(Vec::new(), Gating::Sigmoid) };
        let scores = judged(&gate, &[0.0; 3]);
        assert_eq!((scores.weights, scores.selection), (vec![0.5; 3], vec![0.75, 0.5, -0.5]));
        assert_eq!(gate.probabilities(&[0.0; 3]), [0.6, 0.4, 0.0]);
    }

    #[test]
    fn softplus_is_ggmls() {
        let scores = judged(&gate(Vec::new(), Gating::SqrtSoftplus), &[0.0, 25.0, -100.0]);
        assert!((scores.weights[0] - 2.0f32.ln().sqrt()).abs() < 1e-6);
        assert_eq!(scores.weights[1..], [5.0, 0.0]);
        assert_eq!(scores.selection, scores.weights);
    }

    #[test]
    fn experts_of_other_groups_are_out() {
        let of = |n_used| Gate { groups: Some(Groups { n: 3, n_used }), ..gate(Vec::new(), Gating::Sigmoid) };
        // By their two best: the third group, then the second. The first has the best expert, but no second one.
        let logits = [4.0, -3.0, -9.0, 0.1, 0.2, 0.0, 1.0, 1.0, -9.0];
        let taken = |n_used| {
            let selection = judged(&of(n_used), &logits).selection;
            (0..9).filter(|&expert| selection[expert] > f32::NEG_INFINITY).collect::<Vec<_>>()
        };
        assert_eq!([taken(1), taken(2)], [vec![6, 7, 8], vec![3, 4, 5, 6, 7, 8]]);
        assert_eq!(of(1).probabilities(&logits)[0], 0.0);
    }

    #[test]
    fn gates_that_do_not_fit_are_refused() {
        let mut gates = gates();
        let of = |rows: usize, bias: Option<usize>| Gate {
            bias: bias.map(|n| vec![0.0; n]),
            ..gate(vec![0.0; rows], Gating::Softmax)
        };
        assert!(!gates.add(7, 3, of(6, None)), "another width");
        assert!(!gates.add(7, 2, of(5, None)), "half a row");
        assert!(!gates.add(7, 2, of(6, Some(2))), "a short bias");
        assert!(!gates.add(7, 0, of(0, None)) && !gates.takes(2, STACK_BYTES_MAX / 8));
        assert!(!gates.knows(7) && gates.add(7, 2, of(6, Some(3))));
    }

    #[test]
    fn dot_takes_every_element() {
        let a: Vec<f32> = (0..37).map(|i| i as f32).collect();
        assert_eq!(dot(&a, &a), (0..37).map(|i| (i * i) as f32).sum::<f32>());
    }
}
