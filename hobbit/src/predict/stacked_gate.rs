//! HOBBIT's stacked gate (section 3.3): hidden states change little from layer to layer, so the gating input of a layer
//! already says what the gates of the next ones will choose.

use super::gate::Gates;
use super::{PredictShape, Predicted, Predictor};

/// The k best of the scores, for each of the next layers. A score is the predicted router weight.
#[derive(Clone, Debug)]
pub struct StackedGate {
    gates: Gates,
}

impl StackedGate {
    /// The paper's largest useful distance: more layers ahead, the guesses get worse.
    pub const DISTANCE_MAX: u8 = 3;

    /// For distances 1 to `distance_max` (the paper's p).
    pub fn new(shape: PredictShape, distance_max: u8) -> Self {
        Self { gates: Gates::new(shape, distance_max) }
    }
}

impl Predictor for StackedGate {
    fn observe(&mut self, _layer: u16, _chosen: &[(u16, f32)]) {}

    fn scores(&mut self, layer: u16, distance: u8, scores: &[f32]) {
        self.gates.keep(layer, distance, scores, |_, k| k);
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
