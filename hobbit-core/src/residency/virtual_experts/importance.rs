//! How much experts were wanted lately.

use std::collections::BTreeMap;

use crate::expert::ExpertId;

/// Tokens after which a use counts half.
const HALF_LIFE_TOKENS: f64 = 64.0;

/// A unit beyond this is brought back to 1, and everything with it.
const UNIT_MAX: f64 = 1e100;

/// The sum for each expert, over the uses that its router chose, of ‖x‖ · g · ‖E‖ (SwapMoE, section 3.2): the
/// norm of the layer's input, the router's weight before anything was masked, the norm of the expert's weights. Uses
/// fade with the tokens after them. The norms may come later than uses: they are factors of whole sums.
#[derive(Debug, Default)]
pub(super) struct Importance {
    /// By block number.
    layers: BTreeMap<u16, Layer>,
}

#[derive(Debug)]
struct Layer {
    /// ‖E‖ by expert; 1 for others.
    norms: Vec<f32>,
    /// The sum of ‖x‖ · g by expert. Instead of decaying every sum, the unit of later tokens grows.
    wanted: Vec<f64>,
    unit: f64,
    /// The norm of the first input: others are told as shares of it, so that inputs that are not known count as one.
    first_input: Option<f64>,
}

impl Default for Layer {
    fn default() -> Self {
        Self { norms: Vec::new(), wanted: Vec::new(), unit: 1.0, first_input: None }
    }
}

impl Importance {
    /// Sets ‖E‖ of a layer's experts; a value that is no number above 0 counts as 1.
    pub(super) fn set_norms(&mut self, layer: u16, norms: Vec<f32>) {
        self.layers.entry(layer).or_default().norms = norms;
    }

    /// Tokens of a layer want these experts: `ids` `[n_tokens][n_used]`; `weights` alike, or empty where they are not
    /// known: then all are equal; `inputs` `[n_tokens]`, or empty where they are not known: then as the layer's first
    /// one that was.
    pub(super) fn observe(&mut self, layer: u16, ids: &[u16], weights: &[f32], inputs: &[f32], n_used: usize) {
        let n_used = n_used.max(1);
        let layer = self.layers.entry(layer).or_default();
        let growth = (1.0 / HALF_LIFE_TOKENS).exp2();
        for (token, ids) in ids.chunks(n_used).enumerate() {
            layer.unit *= growth;
            if layer.unit > UNIT_MAX {
                layer.wanted.iter_mut().for_each(|wanted| *wanted /= layer.unit);
                layer.unit = 1.0;
            }
            let input = number(inputs.get(token).copied().filter(|norm| *norm > 0.0), 0.0);
            let input = if input > 0.0 { input / *layer.first_input.get_or_insert(input) } else { 1.0 };
            for (rank, &id) in ids.iter().enumerate() {
                let index = usize::from(id);
                if layer.wanted.len() <= index {
                    layer.wanted.resize(index + 1, 0.0);
                }
                let weight = weights.get(token * n_used + rank).map(|weight| weight.abs());
                layer.wanted[index] += layer.unit * input * number(weight, 1.0 / n_used as f64);
            }
        }
    }

    /// An expert's importance now, in units of the last token's.
    pub(super) fn of(&self, expert: ExpertId) -> f64 {
        let Some(layer) = self.layers.get(&expert.layer) else { return 0.0 };
        let index = usize::from(expert.index);
        let norm = number(layer.norms.get(index).copied().filter(|norm| *norm > 0.0), 1.0);
        layer.wanted.get(index).map_or(0.0, |wanted| wanted / layer.unit * norm)
    }

    /// An expert counts as never wanted.
    pub(super) fn forget(&mut self, expert: ExpertId) {
        let layer = self.layers.get_mut(&expert.layer);
        if let Some(wanted) = layer.and_then(|layer| layer.wanted.get_mut(usize::from(expert.index))) {
            *wanted = 0.0;
        }
    }
}

/// A value that is one, else another.
fn number(value: Option<f32>, otherwise: f64) -> f64 {
    value.filter(|value| value.is_finite()).map_or(otherwise, f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(importance: &Importance, index: u16) -> f64 {
        importance.of(ExpertId { layer: 3, index })
    }

    #[test]
    fn uses_count_by_input_weight_and_norm() {
        let mut importance = Importance::default();
        importance.observe(3, &[5; 4], &[0.0; 4], &[3.0], 4);
        importance.observe(3, &[0, 1, 2, 3], &[0.5, -0.25, 1.0, 1.0], &[6.0], 4);
        assert_eq!([of(&importance, 0), of(&importance, 1)], [1.0, 0.5], "no norms yet");
        importance.set_norms(3, vec![1.0, 4.0, f32::NAN, 0.0]);
        let found: Vec<f64> = (0..6).map(|index| of(&importance, index)).collect();
        assert_eq!(found, [1.0, 2.0, 2.0, 2.0, 0.0, 0.0], "what is no norm counts as 1");
        assert_eq!(importance.of(ExpertId { layer: 4, index: 0 }), 0.0);
        importance.forget(ExpertId { layer: 3, index: 1 });
        importance.forget(ExpertId { layer: 9, index: 9 });
        assert_eq!([of(&importance, 0), of(&importance, 1)], [1.0, 0.0]);
    }

    #[test]
    fn experts_without_scores_count_alike() {
        let mut importance = Importance::default();
        importance.observe(3, &[0, 1], &[], &[], 2);
        assert_eq!([0, 1].map(|index| of(&importance, index)), [0.5, 0.5]);
        importance.observe(3, &[2, 3], &[f32::NAN, f32::INFINITY], &[f32::NAN], 2);
        assert_eq!([2, 3].map(|index| of(&importance, index)), [0.5, 0.5]);
    }

    #[test]
    fn uses_fade_and_never_overflow() {
        let mut importance = Importance::default();
        importance.observe(3, &[7], &[1.0], &[], 1);
        (0..64).for_each(|_| importance.observe(3, &[8], &[0.0], &[], 1));
        assert!((of(&importance, 7) - 0.5).abs() < 1e-9);
        importance.observe(3, &[9; 100_000], &[], &[], 1);
        let most = 1.0 / (1.0 - (-1.0f64 / 64.0).exp2());
        assert!((of(&importance, 9) - most).abs() < 1e-6 && of(&importance, 7) < 1e-100);
        // A batch counts as its tokens do one by one.
        let (mut at_once, mut one_by_one) = (Importance::default(), Importance::default());
        at_once.observe(3, &[1, 2, 1, 4], &[0.5, 0.5, 0.75, 0.25], &[], 2);
        one_by_one.observe(3, &[1, 2], &[0.5, 0.5], &[], 2);
        one_by_one.observe(3, &[1, 4], &[0.75, 0.25], &[], 2);
        assert_eq!(
            (0..5).map(|i| of(&at_once, i)).collect::<Vec<_>>(),
            (0..5).map(|i| of(&one_by_one, i)).collect::<Vec<_>>()
        );
    }
}
