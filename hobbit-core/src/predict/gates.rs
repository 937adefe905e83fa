//! Predictors by the gates of later layers on this layer's input: hidden states change little from layer to layer, so
//! the input already tells most of what those gates will choose.

use super::{PredictShape, Predicted, Predictor, predicted, top_k};

/// The best scores of each layer ahead. A prediction's score is its router weight: its share of the k best.
#[derive(Clone, Debug)]
pub struct Gates {
    shape: PredictShape,
    /// Scores above it are predicted beside the k best; at 1 none.
    percentile: f32,
    /// By distance, from 1: the layer that predicted and its predictions.
    latest: Vec<(Option<u16>, Vec<Predicted>)>,
    best: Vec<u16>,
}

impl Gates {
    /// The largest p that HOBBIT tried; it recommends 1 to 3, as guesses get worse with distance.
    pub const DISTANCE_MAX: u8 = 4;
    /// Fate's: a quarter of the experts.
    pub const PERCENTILE: f32 = 0.75;

    /// HOBBIT's stacked gate (section 3.3): the k best of each of the next `distance_max` layers (the paper's p).
    pub fn stacked(shape: PredictShape, distance_max: u8) -> Self {
        Self::cross_layer(shape, distance_max, 1.0)
    }

    /// Fate's cross-layer gate (section 4.2), whose distance is 1: every expert of a layer whose score is above a
    /// percentile, and the k best in any case.
    ///
    /// `percentile` is clamped to `0.0..=1.0`: 0 predicts every expert, 1 the k best. NaN counts as 1.
    pub fn cross_layer(shape: PredictShape, distance_max: u8, percentile: f32) -> Self {
        let percentile = if percentile.is_nan() { 1.0 } else { percentile.clamp(0.0, 1.0) };
        Self { shape, percentile, latest: vec![(None, Vec::new()); usize::from(distance_max)], best: Vec::new() }
    }
}

impl Predictor for Gates {
    fn scores(&mut self, layer: u16, distance: u8, scores: &[f32]) {
        let Some((target, n_expert, k)) = self.shape.target(layer, distance) else { return };
        let Some((from, predictions)) = self.latest.get_mut(usize::from(distance) - 1) else { return };
        *from = None;
        if scores.len() != usize::from(n_expert) {
            return;
        }
        *from = Some(layer);
        predictions.clear();
        // Scores above the percentile, by nearest rank.
        let n_above = n_expert - (f32::from(n_expert) * self.percentile).ceil() as u16;
        top_k(scores, usize::from(n_above.max(k)), &mut self.best);
        let score_of = |&index: &u16| scores[usize::from(index)].max(0.0);
        let of_best: f32 = self.best.iter().take(usize::from(k)).map(score_of).sum();
        predictions.extend(predicted(target, distance, &self.best, |index| {
            // Without a positive score, or with an infinite one, only the order counts.
            let share = if of_best > 0.0 { score_of(index) / of_best } else { 0.0 };
            (*index, if share.is_nan() { 1.0 } else { share })
        }));
    }

    fn needs_scores(&self) -> bool {
        true
    }

    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        let latest = usize::from(distance).checked_sub(1).and_then(|i| self.latest.get(i));
        if let Some((from, predictions)) = latest
            && *from == Some(layer)
        {
            out.extend_from_slice(predictions);
        }
    }

    fn begin_token(&mut self) {
        self.latest.iter_mut().for_each(|(from, _)| *from = None);
    }

    fn begin_sequence(&mut self) {
        self.begin_token();
    }

    fn fork(&self) -> Option<Box<dyn Predictor>> {
        Some(Box::new(Self::cross_layer(self.shape.clone(), self.latest.len() as u8, self.percentile)))
    }
}
