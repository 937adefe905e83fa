//! What gates of later layers said about the running token.

use super::{PredictShape, Predicted, top_k};
use crate::expert::ExpertId;

/// The best of each layer's scores, from the layer that computed them.
#[derive(Clone, Debug)]
pub(super) struct Gates {
    shape: PredictShape,
    /// By distance, from 1: the layer that predicted and what it predicted.
    latest: Vec<(Option<u16>, Vec<Predicted>)>,
    best: Vec<u16>,
}

impl Gates {
    /// For distances 1 to `distance_max`.
    pub(super) fn new(shape: PredictShape, distance_max: u8) -> Self {
        Self { shape, latest: vec![(None, Vec::new()); usize::from(distance_max)], best: Vec::new() }
    }

    /// Changes the largest distance; what was kept is forgotten.
    pub(super) fn reach(&mut self, distance_max: u8) {
        self.latest = vec![(None, Vec::new()); usize::from(distance_max)];
    }

    /// Keeps the best scores. `width` says how many, of experts and experts used per token; never fewer than are used.
    ///
    /// A prediction's score is its router weight: its share of the k best.
    pub(super) fn keep(&mut self, layer: u16, distance: u8, scores: &[f32], width: impl Fn(u16, u16) -> u16) {
        let Some((target, n_expert, k)) = self.shape.target(layer, distance) else { return };
        let Some((from, predicted)) = self.latest.get_mut(usize::from(distance) - 1) else { return };
        *from = None;
        if scores.len() != usize::from(n_expert) {
            return;
        }
        *from = Some(layer);
        predicted.clear();
        top_k(scores, usize::from(width(n_expert, k).max(k)), &mut self.best);
        let score_of = |&index: &u16| scores[usize::from(index)].max(0.0);
        let of_best: f32 = self.best.iter().take(usize::from(k)).map(score_of).sum();
        predicted.extend(self.best.iter().map(|index| {
            // Without a positive score, or with an infinite one, the order is all there is to say.
            let share = if of_best > 0.0 { score_of(index) / of_best } else { 0.0 };
            let score = if share.is_nan() { 1.0 } else { share.min(1.0) };
            Predicted { expert: ExpertId { layer: target, index: *index }, score, distance }
        }));
    }

    pub(super) fn predict(&self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        let latest = usize::from(distance).checked_sub(1).and_then(|i| self.latest.get(i));
        if let Some((from, predicted)) = latest
            && *from == Some(layer)
        {
            out.extend_from_slice(predicted);
        }
    }

    pub(super) fn clear(&mut self) {
        self.latest.iter_mut().for_each(|(from, _)| *from = None);
    }
}
