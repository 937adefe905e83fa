//! Reads what the next layers are expected to use before they ask. Decisions are [`crate::predict`]'s and
//! [`crate::load::prefetch`]'s; here is when they are made, and what becomes of them.
//!
//! For each layer of a batch that decodes: the router has chosen, reads for the layer itself are under way. The
//! predictor sees the choice (and what the next layers' routers say about this layer's input), the experts that it
//! names are shielded from eviction, and as soon as nothing waits for the link, those that are missing are read.

use super::in_flight::Staging;
use super::interfaces::DeviceResidency;
use super::interfaces::Observer;
use super::interfaces::Reads;
use super::layout::Layout;
use super::memory::{Ended, Memory};
use super::selection::LayerStep;
use super::selection::TokenChoices;
use crate::cache::{Acquired, Cache};
use crate::expert::{SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::load::prefetch::{Governor, Holdings, Link, Load, Prefetcher};
use crate::predict::{Lanes, PredictShape, Predictor, Recall};
use crate::route::Phase;
use crate::stats::{PrefetchReport, RecallReport};

#[derive(Clone, Debug)]
pub struct LookaheadOptions {
    pub shape: PredictShape,
    pub distance_max: u8,
    /// Not all that delays tokens are waits for reads: prefetching is tried even where they hardly wait.
    pub hides_waits: bool,
}

/// Predictor and planner of prefetches, and their measurements.
pub struct Lookahead {
    predictor: Lanes,
    prefetcher: Prefetcher,
    governor: Governor,
    options: LookaheadOptions,
    recall: Recall,
    /// The layer that chose last, when, and the seconds of waiting until then.
    chose: Option<(u16, f64, f64)>,
    /// Seconds waited, and bytes and seconds of reading, when the token began.
    before: (f64, u64, f64),
}

/// Lowers a layer's scores of experts that are missing, because tokens will be rerouted: the host's slots, the layer,
/// its scores, and how many experts will be chosen.
pub(super) type Lower<'a> = &'a dyn Fn(&Cache, u16, &mut [f32], usize);

/// Scores that routers give for one input: each one's layer, and the probabilities of its experts, `[n_expert]`.
pub type ScoresByLayer = Vec<(u16, Vec<f32>)>;

/// A layer that has not run: layers with experts until it, and its block number.
pub type Later = (u8, u16);

impl Lookahead {
    /// Nothing has been seen yet.
    pub fn new(
        predictor: Box<dyn Predictor>,
        prefetcher: Prefetcher,
        governor: Governor,
        options: LookaheadOptions,
    ) -> Self {
        let (recall, before, predictor) = (Recall::default(), (0.0, 0, 0.0), Lanes::new(predictor));
        Self { predictor, prefetcher, governor, options, recall, chose: None, before }
    }

    /// Measured seconds per byte of reads.
    pub(super) fn seconds_per_byte(&self) -> Option<f64> {
        self.prefetcher.estimates.load_seconds(1)
    }

    /// Whether predictions are made. Routers' products take time, which is saved while prefetching is off.
    pub(super) fn predicts(&self, is_watched: bool) -> bool {
        self.governor.predicts() || is_watched
    }

    /// Whether predictions need scores of the next layers' routers.
    pub(super) fn needs_scores(&self) -> bool {
        self.predictor.needs_scores()
    }

    /// Whether what is staged is meant for a later layer.
    pub(super) fn is_staged_ahead(&self, version: Version, layer: u16) -> bool {
        version.expert.layer != layer && self.prefetcher.is_outstanding(version)
    }

    pub(super) fn begin_batch(&mut self, phase: Phase, n_tokens: u32) {
        self.predictor.begin_batch(if phase.is_decode() { n_tokens as usize } else { 1 });
    }

    pub(super) fn begin_sequence(&mut self) {
        self.predictor.begin_sequence();
    }

    /// Notes which reads have ended.
    pub(super) fn hear(&mut self, ended: &mut Vec<(Version, Ended)>) {
        for (version, how) in ended.drain(..) {
            match how {
                Ended::Complete => self.prefetcher.landed(version),
                Ended::Failed => self.prefetcher.failed(version),
                Ended::Withdrawn => self.prefetcher.dropped(version),
            }
        }
    }

    /// Learns the time of layers from a layer that has chosen now, after `waited` seconds of waiting in all. `known`:
    /// its seconds without waits; `None`: measured.
    pub(super) fn time(&mut self, layer: u16, now: f64, waited: f64, known: Option<f64>) {
        let before = self.chose.replace((layer, now, waited));
        let measured = match before {
            // Between the last layer and the first lies more than a layer.
            Some((before, at, waited_before)) if before < layer => Some(now - at - (waited - waited_before)),
            _ => None,
        };
        if let Some(seconds) = known.or(measured) {
            self.prefetcher.estimates.observe_layer(seconds.max(0.0));
        }
    }

    /// Layers whose routers the predictor asks about the running layer's input.
    pub(super) fn layers_to_score(&self, layer: u16) -> Vec<Later> {
        if !self.predictor.needs_scores() {
            return Vec::new();
        }
        let target = |distance| self.options.shape.target(layer, distance).map(|(target, ..)| (distance, target));
        (1..=self.options.distance_max).map_while(target).collect()
    }

    /// Shows the predictor the choice of a layer, and later routers' `scores`. `lower` lowers the scores of experts
    /// that are missing, because tokens will be rerouted.
    fn show(
        &mut self,
        layer: u16,
        tokens: &TokenChoices,
        scores: Vec<ScoresByLayer>,
        memory: &mut Memory<impl Reads, impl Observer>,
        lower: Lower,
    ) {
        self.predictor.set_width(tokens.wanted.len());
        self.recall.observe(layer, &union(tokens.used.as_ref().unwrap_or(&tokens.wanted)));
        for (token, wanted) in tokens.wanted.iter().enumerate() {
            if let Some(lane) = self.predictor.of_token(token) {
                lane.observe(layer, wanted);
            }
        }
        if self.predictor.needs_scores() {
            for (token, scores) in scores.into_iter().enumerate() {
                for (target, mut scores) in scores {
                    let at = |distance: &u8| {
                        self.options.shape.target(layer, *distance).is_some_and(|later| later.0 == target)
                    };
                    let Some(distance) = (1..=self.options.distance_max).find(at) else { continue };
                    let Some((.., n_used)) = self.options.shape.target(layer, distance) else { continue };
                    memory.observer.router_scores(token, distance, &scores, usize::from(n_used));
                    lower(&memory.cache, target, &mut scores, usize::from(n_used));
                    let lane = self.predictor.of_token(token);
                    if let Some(lane) = lane {
                        lane.scores(layer, distance, &scores);
                    }
                }
            }
        } else if memory.observer.is_watching() {
            // For every layer in reach, not only for those that are looked at.
            let mut predicted = Vec::new();
            for distance in 1..=self.options.distance_max {
                self.predictor.predict(layer, distance, &mut predicted);
            }
            memory.observer.predicted(&predicted);
        }
    }

    /// After the choice of a layer's router for a batch that decodes, and the `step` made of it: shields what comes
    /// next from eviction, and reads what is worth it.
    pub(super) fn predict(
        &mut self,
        memory: &mut Memory<impl Reads, impl Observer>,
        step: &LayerStep,
        tokens: &TokenChoices,
        scores: Vec<ScoresByLayer>,
        devices: &dyn DeviceResidency,
        lower: Lower,
    ) {
        let layer = step.layer;
        let (waited, queued_bytes) = memory.in_flight.queued_bytes(&memory.cache, &memory.layout);
        self.show(layer, tokens, scores, memory, lower);
        let chosen = tokens.used.as_ref().unwrap_or(&tokens.wanted);
        let used: Vec<Version> = step.versions().collect();
        self.prefetcher.estimates.observe_uses(step.n_hits, used.len() as u64);
        self.prefetcher.settle(layer, chosen, &used);
        let Memory { cache, in_flight, layout, .. } = &mut *memory;
        let Self { predictor, prefetcher, governor, options, recall, .. } = self;
        let held = HostHoldings { cache, staging: &in_flight.staging, layout, shape: &options.shape, devices };
        let ahead = prefetcher.look_ahead(predictor, layer, options.distance_max, &held);
        for distance in 1..=ahead.depth {
            if let Some((target, ..)) = options.shape.target(layer, distance) {
                let predicted: Vec<_> = ahead.of_layer(target).copied().collect();
                recall.expect(target, distance, &predicted);
            }
        }
        if !governor.is_on() {
            cache.unshield_all();
            return;
        }
        let bytes_used: u64 = used.iter().filter_map(|&version| layout.bytes(version)).sum();
        // While what is missing is read, what is there is computed: that time is not left for the next layers.
        let there = 1.0 - waited as f64 / bytes_used.max(waited).max(1) as f64;
        let computed = there * prefetcher.estimates.layer_seconds().unwrap_or(0.0);
        let link = Link {
            queued_bytes,
            elapsed_seconds: prefetcher.estimates.load_seconds(waited).unwrap_or(0.0).min(computed),
        };
        let loads = prefetcher.plan(&ahead, link, &held);
        cache.unshield_all();
        cache.shield(prefetcher.shielded());
        self.read_ahead(memory, loads);
    }

    /// Lines reads for the next layers up: they start when nothing is waited for.
    fn read_ahead(&mut self, memory: &mut Memory<impl Reads, impl Observer>, loads: Vec<Load>) {
        for Load { version, .. } in loads {
            let order = memory.layout.load_order(version.expert.layer, &[]);
            if let Some(Acquired { slot, evicted }) = memory.cache.acquire_ahead(version) {
                memory.takes(slot, version, evicted);
                memory.read_slots(LoadClass::Prefetch, &[(slot, version)], &order);
            } else if let Some(reads) = memory.in_flight.stage_ahead(version, &order, &memory.layout) {
                memory.submit(LoadClass::Prefetch, reads);
            } else {
                self.prefetcher.failed(version);
            }
        }
    }

    /// A batch of `n_tokens` tokens was evaluated in `seconds`.
    pub(super) fn end_batch(
        &mut self,
        memory: &mut Memory<impl Reads, impl Observer>,
        phase: Phase,
        n_tokens: u32,
        seconds: f64,
    ) {
        let stats = memory.in_flight.reader.stats();
        let now = (memory.moved.wait_seconds, stats.bytes, stats.busy.as_secs_f64());
        let (waited, bytes, busy) = std::mem::replace(&mut self.before, now);
        self.prefetcher.estimates.observe_load(now.1 - bytes, now.2 - busy);
        self.chose = None;
        self.recall.forget_expected();
        if phase.is_decode() {
            let waited = if self.options.hides_waits { seconds } else { now.0 - waited };
            self.governor.end_batch(n_tokens, seconds, waited);
        } else {
            self.governor.interrupt();
        }
        self.prefetcher.abandon();
        memory.cache.unshield_all();
    }

    /// Counts of prefetches.
    pub fn report(&self) -> PrefetchReport {
        let recall = |distance| {
            let counts = self.recall.total(distance);
            RecallReport { distance, recall: counts.recall(), precision: counts.precision() }
        };
        let recall = (1..=self.options.distance_max).map(recall).filter(|recall| recall.recall.is_some()).collect();
        PrefetchReport { counters: self.prefetcher.counters, governor: self.governor.report(), recall }
    }

    /// Asks the predictor, which has been shown the running layer's choice, about the next layers: it comes with the
    /// model's shape and how far to look at most. `None` while nothing is read ahead.
    pub fn ask(&mut self) -> Option<(&mut dyn Predictor, &PredictShape, u8)> {
        let Self { predictor, options, governor, .. } = self;
        governor.is_on().then_some((predictor as &mut dyn Predictor, &options.shape, options.distance_max))
    }
}

/// The experts of a batch's tokens, each once.
fn union(tokens: &[Vec<(u16, f32)>]) -> Vec<(u16, f32)> {
    let mut all: Vec<(u16, f32)> = Vec::new();
    for (index, weight) in tokens.iter().flatten() {
        if tokens.len() == 1 || all.iter().all(|(known, _)| known != index) {
            all.push((*index, *weight));
        }
    }
    all
}

/// Holdings of the host, for the planner.
struct HostHoldings<'a> {
    cache: &'a Cache,
    staging: &'a Staging,
    layout: &'a Layout,
    shape: &'a PredictShape,
    devices: &'a dyn DeviceResidency,
}

impl Holdings for HostHoldings<'_> {
    fn is_resident(&self, version: Version) -> bool {
        let is_staged = |kind: &SliceKind| self.staging.get(SliceId { version, kind: *kind }).is_some();
        self.cache.lookup(version).is_some()
            || self.layout.kinds(version.expert.layer).iter().all(is_staged)
            || self.devices.has_on_any(version)
    }

    fn bytes(&self, version: Version) -> Option<u64> {
        self.cache.pools().share_of(version)?;
        self.layout.bytes_missing(self.cache, version)
    }

    fn n_used(&self, layer: u16) -> usize {
        let known = self.shape.layers.iter().find(|(known, ..)| *known == layer);
        known.map_or(1, |(.., n_used)| usize::from(*n_used))
    }
}
