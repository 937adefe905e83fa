//! Predictors by the uses of whole tokens: the previous token, or this one, which only the simulator knows.

use super::{PredictShape, Predicted, Predictor, predicted};

/// Predicts that a layer uses the experts of the previous token again. A score is the router weight there.
#[derive(Clone, Debug)]
pub struct Previous {
    shape: PredictShape,
    /// By position of the layer.
    chosen: Vec<Vec<(u16, f32)>>,
}

impl Previous {
    pub fn new(shape: PredictShape) -> Self {
        let chosen = vec![Vec::new(); shape.layers.len()];
        Self { shape, chosen }
    }
}

impl Predictor for Previous {
    fn observe(&mut self, layer: u16, chosen: &[(u16, f32)]) {
        let Some(position) = self.shape.position(layer) else { return };
        let n_expert = self.shape.layers[position].1;
        let kept = &mut self.chosen[position];
        kept.clear();
        kept.extend(chosen.iter().filter(|(index, weight)| *index < n_expert && !weight.is_nan()));
    }

    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        let Some((target, ..)) = self.shape.target(layer, distance) else { return };
        // Later layers of the running token have not been observed: this is the token before.
        let position = self.shape.position(target);
        let chosen = position.map_or(&[][..], |position| &self.chosen[position]);
        out.extend(predicted(target, distance, chosen, |chosen| *chosen));
    }

    fn begin_sequence(&mut self) {
        self.chosen.iter_mut().for_each(Vec::clear);
    }

    fn fork(&self) -> Option<Box<dyn Predictor>> {
        Some(Box::new(Self::new(self.shape.clone())))
    }
}

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
