//! What is chosen of an expert, and the books on it.

use super::present::present;
use super::step::Asked;
use super::wanted::Wanted;
use super::{NeededExpert, Observer, Reads, Residency};
use crate::cache::Use;
use crate::expert::{ExpertId, Precision, SliceId, Version};
use crate::options::Knob;
use crate::predict::Predictor;
use crate::route::{Phase, Rerouted, Routing, resolve};
use crate::stats::{LayerStats, PrecisionCounts, RerouteCounts};

/// Counted since a residency was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Needed experts that were there: one for each distinct expert that a layer needed.
    pub hits: u64,
    /// Needed experts that were not.
    pub misses: u64,
    /// Slices read.
    pub slices_loaded: u64,
    /// Bytes moved.
    pub bytes_read: u64,
    /// Seconds in which somebody waited for a read.
    pub wait_seconds: f64,
    /// Uses, one for each token and each expert its router chose, by precision.
    pub used: PrecisionCounts,
    /// Needed experts whose high version was not there, by what was done.
    pub missed: PrecisionCounts,
    /// Uses that went elsewhere than their router said.
    pub rerouted: RerouteCounts,
    /// Low versions that a high one replaced in the background.
    pub upgrades: u64,
    /// The layer that is computed, or was last; 0 between two batches.
    pub layer: u16,
}

/// Counts of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct LayerCounts {
    hits: u64,
    misses: u64,
    used: PrecisionCounts,
    rerouted: RerouteCounts,
}

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Counts so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Counts of each layer with experts, ascending.
    pub fn layer_stats(&self) -> Vec<LayerStats> {
        let stats = |layer: u16| {
            let LayerCounts { hits, misses, used, rerouted } = self.by_layer[usize::from(layer)];
            let slots = self.cache.capacity_of_layer(layer, Precision::High);
            LayerStats { layer, slots, hits, misses, used, rerouted: rerouted.uses, refused: rerouted.refused }
        };
        self.layout.layers().map(stats).collect()
    }

    /// A batch begins.
    pub fn begin_batch(&mut self, phase: Phase, n_tokens: u32) {
        if !self.begin_virtual_batch(phase) {
            self.pause_filling(phase);
        }
        self.cache.begin_batch(n_tokens);
        if let Some(lookahead) = &mut self.lookahead {
            lookahead.predictor.begin_batch(if phase.is_decode() { n_tokens as usize } else { 1 });
        }
    }

    /// A batch of so many tokens was evaluated, in so many seconds: the next token begins.
    pub fn end_batch(&mut self, phase: Phase, n_tokens: u32, seconds: f64) {
        self.counters.layer = 0;
        self.lookahead_end_batch(phase, seconds);
        self.cache.end_batch(n_tokens);
        self.upgrades.may_start = true;
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

    /// A new sequence begins.
    pub fn begin_sequence(&mut self) {
        self.cache.begin_sequence();
        if let Some(lookahead) = &mut self.lookahead {
            lookahead.predictor.begin_sequence();
        }
    }

    /// The router's probabilities of all experts of a layer for one token, `[n_expert]`, for the policy: once per token.
    pub fn tell_scores(&mut self, layer: u16, scores: &[f32]) {
        self.cache.scores(layer, scores);
    }

    /// The router of a layer has chosen for so many tokens: they are counted.
    pub(super) fn enter(&mut self, layer: u16, n_tokens: usize) {
        self.cache.begin_layer(layer, u32::try_from(n_tokens).unwrap_or(u32::MAX));
    }

    /// Notes which layer is computed, and tells who looks on.
    pub(super) fn begin_record(&mut self, layer: u16, routing: &Routing, weights: &[f32], scores: &[f32]) {
        self.counters.layer = layer;
        self.observer.begin_layer(layer, routing, weights, scores, self.counters.wait_seconds);
    }

    /// The precision in which a needed expert is used, if at all, whether it is a hit, and the books on it.
    pub(super) fn choose(
        &mut self,
        expert: ExpertId,
        asked: Asked,
        is_elsewhere: &dyn Fn(Version) -> bool,
    ) -> (Option<Precision>, bool) {
        let demand = asked.demands[usize::from(expert.index)];
        let [high, low] = [Version::high(expert), Version::low(expert)];
        let has_low = !self.precisions.is_exact() && self.layout.has_version(low);
        let high_slot = self.cache.lookup(high);
        let high_elsewhere = is_elsewhere(high);
        let is_resident = [
            // A high version that arrives in the background does not count before it is complete.
            high_elsewhere || high_slot.is_some() && !self.upgrades.is_underway(high),
            has_low && (is_elsewhere(low) || self.cache.lookup(low).is_some()),
        ];
        let precision = match self.precisions.is_forced_low(expert) && has_low {
            true => Some(Precision::Low),
            false => resolve(demand, is_resident, has_low),
        };
        let version = precision.map(|precision| Version { expert, precision });
        let is_elsewhere = version.is_some_and(is_elsewhere);
        let slot = version.and_then(|version| self.cache.lookup(version));
        let hit = is_elsewhere || slot.is_some_and(|slot| self.cache.is_ready(slot));
        // What is elsewhere is not used here: it may age.
        if !is_elsewhere {
            match asked.wanted {
                None => self.touch(expert, asked.routing, asked.shares, hit, precision),
                // Who stands in for another is used, and not wanted: what policies learn is what routers say.
                Some(wanted) if wanted.has(expert.index) => {
                    self.touch(expert, &wanted.routing, &wanted.shares, hit, precision);
                }
                Some(_) => {}
            }
        }
        let n_uses = asked.routing.pairs_of(expert.index).len() as u64;
        self.counters.used.count(precision, n_uses);
        self.by_layer[usize::from(expert.layer)].used.count(precision, n_uses);
        if !high_elsewhere && high_slot.is_none_or(|slot| !self.cache.is_ready(slot)) {
            self.counters.missed.count(precision, 1);
        }
        self.count(expert.layer, hit);
        if self.observer.is_watching() {
            let bytes = version.and_then(|version| self.layout.bytes_missing(&self.cache, version)).unwrap_or(0);
            let is_there = is_elsewhere || slot.is_some() || version.is_some_and(|version| self.is_staged(version));
            self.observer.needed(&NeededExpert { expert, demand, version, hit, is_there, bytes });
        }
        (precision, hit)
    }

    fn touch(&mut self, expert: ExpertId, routing: &Routing, shares: &[f32], hit: bool, precision: Option<Precision>) {
        let weight = shares.get(usize::from(expert.index)).copied().unwrap_or(0.0);
        let (n_tokens, since) = routing.uses_of(expert.index);
        self.cache.touch(expert, Use { hit, precision, weight, n_tokens, since });
    }

    /// Tells the policy of experts that the router wanted and nobody uses: they are missing.
    pub(super) fn touch_unused(&mut self, layer: u16, wanted: &Wanted, used: &Routing) {
        for &index in wanted.routing.needed.iter().filter(|&&index| used.pairs_of(index).is_empty()) {
            self.touch(ExpertId { layer, index }, &wanted.routing, &wanted.shares, false, Some(Precision::High));
        }
    }

    /// Whether an expert can be used now in high precision without another read; one that is on its way can, unless tokens
    /// wait for nothing. `is_elsewhere`: whether a version is where the products run.
    pub fn is_present(&self, expert: ExpertId, is_elsewhere: &dyn Fn(Version) -> bool) -> bool {
        if let Some(masked) = &self.masked {
            return !masked.contains(&expert);
        }
        if self.is_whole(expert.layer) {
            return true;
        }
        let is_arriving = self.is_arriving(Version::high(expert)) && !is_elsewhere(Version::high(expert));
        !is_arriving && present(&self.cache, &self.upgrades, &self.rerouting, expert, is_elsewhere)
    }

    /// A layer's tokens have been sent elsewhere.
    pub(super) fn count_rerouted(&mut self, layer: u16, outcome: Rerouted) {
        let of_layer = &mut self.by_layer[usize::from(layer)].rerouted;
        *of_layer = *of_layer + outcome.into();
        self.counters.rerouted = self.counters.rerouted + outcome.into();
    }

    /// Whether some of a version without a slot has been read into staging, or is on its way there.
    fn is_staged(&self, version: Version) -> bool {
        let kinds = self.layout.kinds(version.expert.layer);
        kinds.iter().any(|&kind| self.staging.get(SliceId { version, kind }).is_some())
    }

    fn count(&mut self, layer: u16, hit: bool) {
        let LayerCounts { hits, misses, .. } = &mut self.by_layer[usize::from(layer)];
        *(if hit { hits } else { misses }) += 1;
        *(if hit { &mut self.counters.hits } else { &mut self.counters.misses }) += 1;
    }
}
