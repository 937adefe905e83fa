//! Counters of a residency.

use super::layout::Layout;
use crate::cache::Cache;
use crate::expert::Precision;
use crate::stats::{LayerStats, PrecisionCounts, RerouteCounts};

/// Counted since a residency was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Needed experts that were there: one for each distinct expert that a layer needed.
    pub hits: u64,
    /// Needed experts that were not.
    pub misses: u64,
    /// Those of them that only drafts needed.
    pub draft_misses: u64,
    pub slices_loaded: u64,
    pub bytes_read: u64,
    pub wait_seconds: f64,
    /// Uses, one for each token and each expert its router chose, by precision.
    pub used: PrecisionCounts,
    /// Needed experts whose high version was not there, by what was done.
    pub missed: PrecisionCounts,
    /// Uses that went elsewhere than their router said.
    pub rerouted: RerouteCounts,
    /// Low versions that a high one replaced in the background.
    pub upgrades: u64,
    /// As [`PhaseStats::in_order`](crate::stats::PhaseStats::in_order).
    pub in_order: u64,
    /// The layer that is computed, or was last; 0 between two batches.
    pub layer: u16,
}

/// Counts of all layers together, and of each by block.
pub(super) struct Counts {
    pub(super) all: Counters,
    by_layer: Vec<LayerCounts>,
}

impl Counts {
    pub(super) fn new(n_blocks: u16) -> Self {
        Self { all: Counters::default(), by_layer: vec![LayerCounts::default(); usize::from(n_blocks)] }
    }

    /// Counts of each layer with experts, ascending.
    pub(super) fn of_layers(&self, layout: &Layout, cache: &Cache) -> Vec<LayerStats> {
        let stats = |layer: u16| {
            let LayerCounts { hits, misses, used, rerouted } = self.by_layer[usize::from(layer)];
            let slots = cache.pools().capacity_of_layer(layer, Precision::High);
            LayerStats { layer, slots, hits, misses, used, rerouted: rerouted.uses, refused: rerouted.refused }
        };
        layout.layers().map(stats).collect()
    }

    pub(super) fn needed(&mut self, layer: u16, hit: bool) {
        let LayerCounts { hits, misses, .. } = &mut self.by_layer[usize::from(layer)];
        *(if hit { hits } else { misses }) += 1;
        *(if hit { &mut self.all.hits } else { &mut self.all.misses }) += 1;
    }

    /// Counts uses in a precision; `None`: they were left out.
    pub(super) fn used(&mut self, layer: u16, precision: Option<Precision>, n_uses: u64) {
        self.all.used.count(precision, n_uses);
        self.by_layer[usize::from(layer)].used.count(precision, n_uses);
    }

    pub(super) fn rerouted(&mut self, layer: u16, outcome: RerouteCounts) {
        let of_layer = &mut self.by_layer[usize::from(layer)].rerouted;
        *of_layer = *of_layer + outcome;
        self.all.rerouted = self.all.rerouted + outcome;
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct LayerCounts {
    hits: u64,
    misses: u64,
    used: PrecisionCounts,
    rerouted: RerouteCounts,
}
