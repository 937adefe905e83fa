//! The predictor that knows the future, for the simulator.

use super::{PredictShape, Predicted, Predictor, predicted};

/// Uses of one token: by layer, experts and their router weights in falling order.
pub type FutureToken = Vec<(u16, Vec<(u16, f32)>)>;

/// Predicts a trace's own uses, to measure the worth of a perfect predictor. [`Predictor::begin_token`] takes the next
/// batch of tokens.
#[derive(Clone, Debug)]
pub struct Oracle<I> {
    shape: PredictShape,
    future: I,
    tokens: Vec<FutureToken>,
}

impl<I: Iterator<Item = Vec<FutureToken>> + Send> Oracle<I> {
    /// `future` gives the tokens of each batch in order; after its end nothing is predicted.
    pub fn new(shape: PredictShape, future: I) -> Self {
        Self { shape, future, tokens: Vec::new() }
    }
}

impl<I: Iterator<Item = Vec<FutureToken>> + Send> Predictor for Oracle<I> {
    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        let Some((target, n_expert, _)) = self.shape.target(layer, distance) else { return };
        for (token, layers) in (0..).zip(&self.tokens) {
            let Some((_, chosen)) = layers.iter().find(|(layer, _)| *layer == target) else { continue };
            let chosen = chosen.iter().filter(|(index, _)| *index < n_expert);
            let of_token = predicted(target, distance, chosen, |chosen| *chosen);
            out.extend(of_token.map(|predicted| Predicted { token, ..predicted }));
        }
    }

    fn begin_token(&mut self) {
        self.tokens = self.future.next().unwrap_or_default();
    }
}
