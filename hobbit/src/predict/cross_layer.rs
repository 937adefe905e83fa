//! Fate's cross-layer gate (section 4.2): what the next gate nearly chooses, it often does choose in the end.

use super::gate::Gates;
use super::{PredictShape, Predicted, Predictor};

/// Every expert of the next layer whose score is above a percentile, and the k best in any case. A score is the predicted
/// router weight; beyond the k best, what the weight would be beside them.
#[derive(Clone, Debug)]
pub struct CrossLayer {
    gates: Gates,
    percentile: f32,
}

impl CrossLayer {
    /// The paper's: a quarter of the experts.
    pub const PERCENTILE: f32 = 0.75;

    /// `percentile` `0.0..=1.0`: 0 predicts every expert, 1 the k best. What is outside, or no number, counts as the
    /// nearest end (no number: 1).
    pub fn new(shape: PredictShape, percentile: f32) -> Self {
        let percentile = if percentile.is_nan() { 1.0 } else { percentile.clamp(0.0, 1.0) };
        Self { gates: Gates::new(shape, 1), percentile }
    }
}

impl CrossLayer {
    /// The same rule for distances 1 to `distance_max`; the paper's is 1.
    pub fn up_to(mut self, distance_max: u8) -> Self {
        self.gates.reach(distance_max);
        self
    }
}

/// Scores above the percentile, by nearest rank, of `n`.
fn n_above(percentile: f32, n: u16) -> u16 {
    n - (f32::from(n) * percentile).ceil() as u16
}

impl Predictor for CrossLayer {
    fn observe(&mut self, _layer: u16, _chosen: &[(u16, f32)]) {}

    fn scores(&mut self, layer: u16, distance: u8, scores: &[f32]) {
        self.gates.keep(layer, distance, scores, |n_expert, _| n_above(self.percentile, n_expert));
    }

    fn needs_scores(&self) -> bool {
        true
    }

    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        self.gates.predict(layer, distance, out);
    }

    fn begin_token(&mut self) {
        self.gates.clear();
    }

    fn begin_sequence(&mut self) {
        self.gates.clear();
    }
}
