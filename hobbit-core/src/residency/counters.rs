//! Counters of a residency, and the uses that policies see.

use super::devices::DeviceResidency;
use super::observer::NeededExpert;
use super::selection::Selection;
use super::upgrades::is_present;
use super::{Observer, Reads, Residency};
use crate::expert::{ExpertId, Precision, Version};
use crate::options::Knob;
use crate::predict::Predictor;
use crate::route::{Phase, Rerouted};
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

    fn needed(&mut self, layer: u16, hit: bool) {
        let LayerCounts { hits, misses, .. } = &mut self.by_layer[usize::from(layer)];
        *(if hit { hits } else { misses }) += 1;
        *(if hit { &mut self.all.hits } else { &mut self.all.misses }) += 1;
    }

    /// So many uses in a precision; `None`: they were left out.
    fn used(&mut self, layer: u16, precision: Option<Precision>, n_uses: u64) {
        self.all.used.count(precision, n_uses);
        self.by_layer[usize::from(layer)].used.count(precision, n_uses);
    }

    pub(super) fn rerouted(&mut self, layer: u16, outcome: Rerouted) {
        let of_layer = &mut self.by_layer[usize::from(layer)].rerouted;
        *of_layer = *of_layer + outcome.into();
        self.all.rerouted = self.all.rerouted + outcome.into();
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct LayerCounts {
    hits: u64,
    misses: u64,
    used: PrecisionCounts,
    rerouted: RerouteCounts,
}

impl<R: Reads, O: Observer> Residency<R, O> {
    pub fn counters(&self) -> Counters {
        self.counts.all
    }

    /// Counts of each layer with experts, ascending.
    pub fn layer_stats(&self) -> Vec<LayerStats> {
        let stats = |layer: u16| {
            let LayerCounts { hits, misses, used, rerouted } = self.counts.by_layer[usize::from(layer)];
            let slots = self.cache.capacity_of_layer(layer, Precision::High);
            LayerStats { layer, slots, hits, misses, used, rerouted: rerouted.uses, refused: rerouted.refused }
        };
        self.layout.layers().map(stats).collect()
    }

    /// Counts a layer whose products could not be computed expert by expert.
    pub fn count_in_order(&mut self) {
        self.counts.all.in_order += 1;
    }

    pub fn begin_batch(&mut self, phase: Phase, n_tokens: u32) {
        if !self.begin_virtual_batch(phase) {
            self.pause_filling(phase);
        }
        self.drafts.forget();
        self.cache.begin_batch(!phase.is_decode());
        if let Some(lookahead) = &mut self.background.lookahead {
            lookahead.predictor.begin_batch(if phase.is_decode() { n_tokens as usize } else { 1 });
        }
    }

    /// A batch of so many tokens was evaluated, in so many seconds: the next token begins.
    pub fn end_batch(&mut self, phase: Phase, n_tokens: u32, seconds: f64) {
        self.counts.all.layer = 0;
        self.lookahead_end_batch(phase, n_tokens, seconds);
        self.cache.end_batch(self.drafts.n_certain(n_tokens));
        self.background.upgrades.may_start = true;
        if self.precisions.options.deterministic {
            self.upgrade_in_step();
        }
        self.end_virtual_batch(phase, n_tokens, seconds);
        if phase.is_decode() {
            if let Some(latency) = &mut self.latency {
                latency.end_token(seconds);
                *match latency.knob() {
                    Knob::CacheBias => &mut self.rerouting.bias,
                    Knob::Substitute => &mut self.rerouting.substitute,
                } = latency.strength();
            }
            self.fill_between_tokens();
        }
    }

    pub fn begin_sequence(&mut self) {
        self.cache.begin_sequence();
        if let Some(lookahead) = &mut self.background.lookahead {
            lookahead.predictor.begin_sequence();
        }
    }

    /// The router's probabilities of all experts of a layer for one token, `[n_expert]`, for the policy: once per
    /// token.
    pub fn tell_scores(&mut self, layer: u16, scores: &[f32]) {
        self.cache.scores(layer, scores);
    }

    /// Counts a needed expert, which is used in this precision, and tells the policy and the observer. Whether it is
    /// there.
    pub(super) fn count_use(
        &mut self,
        expert: ExpertId,
        precision: Option<Precision>,
        selection: &Selection,
        devices: &dyn DeviceResidency,
    ) -> bool {
        let version = precision.map(|precision| Version { expert, precision });
        let is_on_device = version.is_some_and(|version| devices.has(version));
        let slot = version.and_then(|version| self.cache.lookup(version));
        // How far a read has come depends on the disk's speed.
        let is_ready = |slot| self.precisions.options.deterministic || self.cache.is_ready(slot);
        let hit = is_on_device || slot.is_some_and(is_ready);
        // A device has its own policy: its residents may age here.
        if !is_on_device {
            self.drafts.touch(&mut self.cache, selection, expert, hit, precision);
        }
        let n_uses = selection.routing.pairs_of(expert.index).len() as u64;
        self.counts.used(expert.layer, precision, n_uses);
        let high = Version::high(expert);
        if !devices.has(high) && (devices.copies() || !self.cache.is_complete(high)) {
            self.counts.all.missed.count(precision, 1);
        }
        self.counts.needed(expert.layer, hit);
        self.counts.all.draft_misses += u64::from(!hit && self.drafts.is_alone(selection, expert));
        if self.observer.is_watching() {
            let demand = selection.demands[usize::from(expert.index)];
            let bytes = version.and_then(|version| self.layout.bytes_missing(&self.cache, version)).unwrap_or(0);
            let is_there = is_on_device
                || slot.is_some()
                || version.is_some_and(|version| self.in_flight.is_staged(version, &self.layout));
            self.observer.needed(&NeededExpert { expert, demand, version, hit, is_there, bytes });
        }
        hit
    }

    /// Tells the policy of experts that the router chose and no token uses: they are missing.
    pub(super) fn touch_unused(&mut self, selection: &Selection) {
        for expert in selection.passed_over() {
            self.drafts.touch(&mut self.cache, selection, expert, false, Some(Precision::High));
        }
    }

    /// Whether experts that are missing may be replaced by others in this phase.
    pub fn may_reroute(&self, phase: Phase) -> bool {
        !self.rerouting.is_off() && (phase.is_decode() || self.reroutes_prompts)
    }

    /// Whether using an expert now in high precision costs nothing where products run. One that is on its way costs
    /// nothing either, unless tokens use only complete experts.
    pub(super) fn is_present(&self, expert: ExpertId, devices: &dyn DeviceResidency) -> bool {
        if let Some(masked) = &self.masked {
            return !masked.contains(&expert);
        }
        let high = Version::high(expert);
        if devices.copies() {
            return devices.has(high);
        }
        if self.background.is_whole(expert.layer) {
            return true;
        }
        devices.has(high)
            || !self.background.is_arriving(high)
                && is_present(&self.cache, &self.background.upgrades, &self.rerouting, expert)
    }
}
