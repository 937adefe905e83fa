//! Hits under LRU for every number of slots at once (Mattson's stack distances).

use super::recording::{Recording, need_order};
use crate::tuned::LayerPenalty;

/// Hits of one layer by number of slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HitCurve {
    by_slots: Vec<u64>,
    n_uses: u64,
}

impl HitCurve {
    /// `by_slots[n]` is the number of hits with n slots, ascending; beyond its end the number stays the same.
    pub fn new(by_slots: Vec<u64>, n_uses: u64) -> Self {
        Self { by_slots, n_uses }
    }

    /// Curve from a fitted file, in millionths of a use per token. Empty without measurements.
    pub fn fitted(penalty: &LayerPenalty) -> Self {
        let millionths = |penalty: f64| (penalty * 1e6) as u64;
        let all = millionths(penalty.at(0.0).unwrap_or(0.0));
        let saved = |slots: u16| all.saturating_sub(millionths(penalty.at(f64::from(slots)).unwrap_or(0.0)));
        Self::new((0..=penalty.n_expert).map(saved).collect(), all)
    }

    /// Needed experts, hits and misses.
    pub fn n_uses(&self) -> u64 {
        self.n_uses
    }

    /// Hit rates by number of slots, `0.0..=1.0`.
    pub fn rates(&self) -> Vec<f64> {
        self.by_slots.iter().map(|hits| *hits as f64 / self.n_uses.max(1) as f64).collect()
    }

    /// Hits with `n_slots` slots.
    pub fn hits(&self, n_slots: u32) -> u64 {
        let last = self.by_slots.len().saturating_sub(1);
        self.by_slots.get((n_slots as usize).min(last)).copied().unwrap_or(0)
    }
}

/// The curve of each layer of a recording, from an LRU list of the needed experts in order, in one precision.
///
/// A layer that needs more experts at once than it has slots does slightly better in a replay, which keeps experts in
/// use.
pub fn hit_curves(recording: &Recording) -> Vec<HitCurve> {
    let mut order = Vec::new();
    let layers = recording.header.model.layers.iter();
    let of_layer = |layer: &crate::trace::Layer| {
        let mut stack: Vec<u16> = Vec::new();
        let mut n_uses = 0;
        let mut at_depth = vec![0u64; usize::from(layer.n_expert) + 1];
        for record in recording.batches().flat_map(|batch| &batch.layers).filter(|own| own.layer == layer.layer) {
            need_order(record, &mut order);
            n_uses += order.len() as u64;
            for &expert in &order {
                if let Some(depth) = stack.iter().rposition(|other| *other == expert).map(|at| stack.len() - at) {
                    at_depth[depth] += 1;
                    stack.remove(stack.len() - depth);
                }
                stack.push(expert);
            }
        }
        let mut sum = 0;
        HitCurve::new(at_depth.into_iter().map(|hits| (sum += hits, sum).1).collect(), n_uses)
    };
    layers.map(of_layer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fitted_curve_saves_what_it_says() {
        let penalty = LayerPenalty { layer: 0, n_expert: 4, slots: vec![0, 2, 4], penalty: vec![2.0, 1.0, 0.5] };
        let curve = HitCurve::fitted(&penalty);
        assert_eq!((curve.n_uses(), curve.rates()), (2_000_000, vec![0.0, 0.25, 0.5, 0.625, 0.75]));
        assert_eq!(HitCurve::fitted(&LayerPenalty::default()).n_uses(), 0);
    }
}
