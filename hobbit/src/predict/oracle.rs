//! The future, for what a perfect predictor would be worth.

use super::{PredictShape, Predicted, Predictor};
use crate::expert::ExpertId;

/// What one token will use: by layer, experts and their router weights in falling order.
pub type FutureToken = Vec<(u16, Vec<(u16, f32)>)>;

/// Predicts what the tokens of a trace did. [`Predictor::begin_token`] takes the next of them.
#[derive(Clone, Debug)]
pub struct Oracle<I> {
    shape: PredictShape,
    future: I,
    token: FutureToken,
}

impl<I: Iterator<Item = FutureToken> + Send> Oracle<I> {
    /// `future` gives the tokens in order; after its end nothing is predicted.
    pub fn new(shape: PredictShape, future: I) -> Self {
        Self { shape, future, token: FutureToken::new() }
    }
}

impl<I: Iterator<Item = FutureToken> + Send> Predictor for Oracle<I> {
    fn observe(&mut self, _layer: u16, _chosen: &[(u16, f32)]) {}

    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        let Some((target, n_expert, _)) = self.shape.target(layer, distance) else { return };
        let Some((_, chosen)) = self.token.iter().find(|(layer, _)| *layer == target) else { return };
        out.extend(chosen.iter().filter(|(index, _)| *index < n_expert).map(|&(index, weight)| Predicted {
            expert: ExpertId { layer: target, index },
            score: weight.clamp(0.0, 1.0),
            distance,
        }));
    }

    fn begin_token(&mut self) {
        self.token = self.future.next().unwrap_or_default();
    }
}
