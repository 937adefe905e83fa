//! Routing over a text: how often each expert was chosen, the unimportance of its uses, and the sensitivity of each
//! expert to fewer bits.
//!
//! EdgeMoE lowers one expert at a time and measures the loss, E x L runs over the text for each width. Here every
//! *layer* is lowered once, and its measured loss (mean KL divergence from the exact predictions) is divided in
//! proportion to I_e * |W_e|^4. Of these predictions the highest are measured alone, as in the paper, and the others
//! are corrected by the ratio of both.
//!
//! ```text
//! I_e = sum over the expert's uses of its squared router weight   (Uses::importance)
//! |W_e| = norm of all its matrices together                       (LayerNorms)
//! ```
//!
//! An expert adds its router weight times its output to a token's hidden state. Its output is proportional to two
//! matrices' norms, and KL divergence is quadratic in small errors.

use std::collections::BTreeMap;

use super::format::LayerWidth;
use crate::expert::ExpertId;
use crate::route::unimportance;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Uses {
    /// By layer and expert; no longer than the highest index that was used.
    layers: BTreeMap<u16, Vec<ExpertUses>>,
    /// Uses as a token's first expert.
    pub n_first: u64,
    /// Unimportance of every other use, `0.0..=1.0`, in no particular order.
    pub samples: Vec<f32>,
    scratch: Vec<f32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ExpertUses {
    n: u64,
    /// Sum of squared router weights.
    squares: f64,
    /// Sum of router weights without their sign.
    weights: f64,
}

impl Uses {
    /// Adds the choices of a layer's router: ids and weights, both `[n_tokens][n_used]`. Ignores invalid ids (negative
    /// or 65535 and more) and weights that are not numbers.
    pub fn observe(&mut self, layer: u16, n_used: usize, experts: &[i32], weights: &[f32]) {
        let uses = self.layers.entry(layer).or_default();
        for (ids, weights) in experts.chunks(n_used.max(1)).zip(weights.chunks(n_used.max(1))) {
            unimportance(weights, &mut self.scratch);
            // If the weights do not rank the experts, every one counts as first.
            let first = self.scratch.iter().position(|s| *s == 0.0);
            self.n_first += u64::from(first.is_some());
            self.samples.extend(self.scratch.iter().enumerate().filter(|(i, _)| Some(*i) != first).map(|(_, s)| *s));
            for (id, weight) in ids.iter().zip(weights) {
                let Ok(index) = u16::try_from(*id).map(usize::from) else { continue };
                if uses.len() <= index {
                    uses.resize(index + 1, ExpertUses::default());
                }
                uses[index].n += 1;
                let square = f64::from(*weight).powi(2);
                if square.is_finite() {
                    uses[index].squares += square;
                    uses[index].weights += f64::from(weight.abs());
                }
            }
        }
    }

    pub fn layers(&self) -> impl Iterator<Item = u16> {
        self.layers.keys().copied()
    }

    pub fn n_uses(&self, layer: u16, index: u16) -> u64 {
        self.of(layer, index).n
    }

    fn of(&self, layer: u16, index: u16) -> ExpertUses {
        self.layers.get(&layer).and_then(|uses| uses.get(usize::from(index))).copied().unwrap_or_default()
    }

    /// Importance of each of a layer's `n_expert` experts: the sum of its squared router weights, plus one use with the
    /// layer's mean weight, because an expert that this text did not use is not worthless. All 1 for a layer without
    /// uses.
    pub fn importance(&self, layer: u16, n_expert: usize) -> Vec<f64> {
        let Some(uses) = self.layers.get(&layer) else { return vec![1.0; n_expert] };
        let n: u64 = uses.iter().map(|uses| uses.n).sum();
        let mean = uses.iter().map(|uses| uses.squares).sum::<f64>() / n.max(1) as f64;
        let mean = if mean > 0.0 { mean } else { 1.0 };
        (0..n_expert).map(|e| uses.get(e).map_or(0.0, |uses| uses.squares) + mean).collect()
    }

    /// A layer's experts, `0..n_expert`, by falling sum of their router weights, as virtual experts are chosen.
    pub fn most_wanted(&self, layer: u16, n_expert: u16) -> Vec<u16> {
        let wanted = |index: u16| self.of(layer, index).weights;
        let mut order: Vec<u16> = (0..n_expert).collect();
        order.sort_by(|a, b| wanted(*b).total_cmp(&wanted(*a)).then(a.cmp(b)));
        order
    }
}

/// Divides a layer's measured loss among its experts: `importance` and `norms` are `[n_expert]`. Without any difference
/// between experts, each gets the same.
pub fn divide(measured: f64, importance: &[f64], norms: &[f32]) -> Vec<f64> {
    let parts: Vec<f64> = importance.iter().zip(norms).map(|(i, norm)| i.max(0.0) * f64::from(*norm).powi(4)).collect();
    let total: f64 = parts.iter().sum();
    if total > 0.0 && total.is_finite() {
        parts.into_iter().map(|part| measured * part / total).collect()
    } else {
        vec![measured / parts.len().max(1) as f64; parts.len()]
    }
}

/// The `share` of all experts that are predicted to lose most, the highest first.
pub fn most_sensitive(layers: &[LayerWidth], share: f64) -> Vec<ExpertId> {
    let of_layer = |own: &LayerWidth| {
        let layer = own.layer;
        let losses = own.experts.clone();
        (0u16..).zip(losses).map(move |(index, loss)| (loss, ExpertId { layer, index }))
    };
    let mut experts: Vec<(f64, ExpertId)> = layers.iter().flat_map(of_layer).collect();
    experts.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    experts.truncate((experts.len() as f64 * share.clamp(0.0, 1.0)).ceil() as usize);
    experts.into_iter().map(|(_, expert)| expert).collect()
}

/// Puts the losses of experts that were lowered alone in place of predicted ones. The other predictions are multiplied
/// by the ratio of both sums, so that all losses are of the same kind.
pub fn take_measured(layers: &mut [LayerWidth], measured: &[(ExpertId, f64)]) {
    let (mut sum, mut predicted) = (0.0, 0.0);
    let losses: BTreeMap<ExpertId, f64> = measured.iter().copied().collect();
    for own in layers.iter() {
        for (index, loss) in (0u16..).zip(&own.experts) {
            if let Some(measured) = losses.get(&ExpertId { layer: own.layer, index }) {
                (sum, predicted) = (sum + measured, predicted + loss);
            }
        }
    }
    let ratio = if sum > 0.0 && predicted > 0.0 { sum / predicted } else { 1.0 };
    for own in layers {
        own.measured.clear();
        for (index, loss) in (0u16..).zip(&mut own.experts) {
            match losses.get(&ExpertId { layer: own.layer, index }) {
                Some(measured) => {
                    *loss = *measured;
                    own.measured.push(index);
                }
                None => *loss *= ratio,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::SliceTypes;

    #[test]
    fn the_highest_predictions_are_measured_and_the_others_follow() {
        let layer = |layer, experts: &[f64]| LayerWidth {
            layer,
            types: SliceTypes::default(),
            kl: experts.iter().sum(),
            experts: experts.to_vec(),
            measured: Vec::new(),
        };
        let mut layers = vec![layer(2, &[1.0, 8.0, 2.0, 4.0]), layer(5, &[4.0, 16.0])];
        let expert = |layer, index| ExpertId { layer, index };
        let most = most_sensitive(&layers, 0.5);
        assert_eq!(most, [expert(5, 1), expert(2, 1), expert(2, 3)]);
        assert_eq!(most_sensitive(&layers, 0.01), most[..1]);
        assert!(most_sensitive(&layers, 0.0).is_empty() && most_sensitive(&layers, 1.0).len() == 6);
        // Three were predicted to lose 28 together, and lose 14.
        take_measured(&mut layers, &[(most[0], 5.0), (most[1], 6.0), (most[2], 3.0)]);
        assert_eq!((&layers[0].experts[..], &layers[0].measured[..]), (&[0.5, 6.0, 1.0, 3.0][..], &[1, 3][..]));
        assert_eq!((&layers[1].experts[..], &layers[1].measured[..]), (&[2.0, 5.0][..], &[1][..]));
        let before = layers.clone();
        take_measured(&mut layers, &[]);
        assert_eq!(layers[0].experts, before[0].experts, "nothing measured changes nothing");
    }

    #[test]
    fn uses_are_counted_with_their_weights() {
        let mut uses = Uses::default();
        uses.observe(3, 2, &[0, 2, 2, 0], &[0.75, 0.25, 0.5, 0.5]);
        assert_eq!((uses.n_uses(3, 0), uses.n_uses(3, 1), uses.n_uses(3, 2)), (2, 0, 2));
        let mean = (0.5625 + 0.0625 + 0.25 + 0.25) / 4.0;
        assert_eq!(uses.importance(3, 4), [0.8125 + mean, mean, 0.3125 + mean, mean]);
        assert_eq!((uses.most_wanted(3, 4), uses.most_wanted(4, 2)), (vec![0, 2, 1, 3], vec![0, 1]));
        assert_eq!((uses.n_first, uses.samples.as_slice()), (2, [0.75, 0.5].as_slice()));
        assert_eq!(uses.importance(4, 2), [1.0, 1.0]);
    }

    #[test]
    fn senseless_choices_count_nothing() {
        let mut uses = Uses::default();
        uses.observe(0, 2, &[-1, 1], &[f32::NAN, 0.5]);
        uses.observe(0, 0, &[], &[]);
        assert_eq!((uses.n_uses(0, 0), uses.n_uses(0, 1)), (0, 1));
        assert!(uses.importance(0, 2).iter().all(|i| i.is_finite() && *i > 0.0));
    }

    #[test]
    fn shares_follow_importance_and_norms_and_add_up_to_the_measurement() {
        assert_eq!(divide(8.0, &[1.0, 2.0, 5.0], &[1.0; 3]), [1.0, 2.0, 5.0]);
        assert_eq!(divide(34.0, &[1.0, 2.0, 1.0], &[1.0, 2.0, 1.0]), [1.0, 32.0, 1.0]);
        assert_eq!(divide(8.0, &[0.0, 0.0], &[1.0, 1.0]), [4.0, 4.0]);
        assert_eq!(divide(8.0, &[1.0, 1.0], &[f32::INFINITY, 1.0]), [4.0, 4.0]);
        assert_eq!(divide(8.0, &[], &[]), [0.0; 0]);
    }
}
