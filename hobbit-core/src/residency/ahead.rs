//! Reads what the next layers are expected to use before they ask. Decisions are [`crate::predict`]'s and
//! [`crate::load::prefetch`]'s; here is when they are made, and what becomes of them.
//!
//! For each layer of a batch that decodes: the router has chosen, reads for the layer itself are under way. The
//! predictor sees the choice (and what the next layers' routers say about this layer's input), the experts that it
//! names are shielded from eviction, and as soon as nothing waits for the link, those that are missing are read.

use super::devices::DeviceResidency;
use super::in_flight::Staging;
use super::layout::Layout;
use super::selection::TokenChoices;
use super::step::{LayerStep, Used};
use super::upgrades::is_present;
use super::{Observer, Reads, Residency};
use crate::cache::{Acquired, Cache, SlotId};
use crate::expert::{ExpertId, SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::load::prefetch::{Governor, Holdings, Link, Load, Prefetcher};
use crate::predict::{Ahead, Lanes, PredictShape, Predictor, Recall};
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
    pub(super) predictor: Lanes,
    pub(super) prefetcher: Prefetcher,
    governor: Governor,
    options: LookaheadOptions,
    recall: Recall,
    /// The layer that chose last, when, and the seconds of waiting until then.
    chose: Option<(u16, f64, f64)>,
    /// Seconds waited, and bytes and seconds of reading, when the token began.
    before: (f64, u64, f64),
}

/// Scores that routers give for one input: each one's layer, and the probabilities of its experts, `[n_expert]`.
pub type ScoresByLayer = Vec<(u16, Vec<f32>)>;

/// A layer that has not run: layers with experts until it, and its block number.
pub type Later = (u8, u16);

/// Residents of the host's slots, for copies to a device.
#[derive(Clone, Copy)]
pub struct Slots<'a> {
    pub cache: &'a Cache,
    pub layout: &'a Layout,
}

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

    /// Learns the time of layers from a layer that has chosen now, after `waited` seconds of waiting in all.
    fn time(&mut self, layer: u16, now: f64, waited: f64, known: Option<f64>) {
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
    fn layers_to_score(&self, layer: u16) -> Vec<Later> {
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
        observer: &mut impl Observer,
        lower: &dyn Fn(u16, &mut [f32], usize),
    ) {
        self.predictor.set_width(tokens.wanted.len());
        self.recall.observe(layer, &union(tokens.used.as_ref().unwrap_or(&tokens.wanted)));
        for (token, wanted) in tokens.wanted.iter().enumerate() {
            self.predictor.of_token(token).into_iter().for_each(|lane| lane.observe(layer, wanted));
        }
        if self.predictor.needs_scores() {
            for (token, scores) in scores.into_iter().enumerate() {
                for (target, mut scores) in scores {
                    let at =
                        |distance: &u8| self.options.shape.target(layer, *distance).is_some_and(|own| own.0 == target);
                    let Some(distance) = (1..=self.options.distance_max).find(at) else { continue };
                    let Some((.., n_used)) = self.options.shape.target(layer, distance) else { continue };
                    observer.router_scores(token, distance, &scores, usize::from(n_used));
                    lower(target, &mut scores, usize::from(n_used));
                    let lane = self.predictor.of_token(token);
                    lane.into_iter().for_each(|lane| lane.scores(layer, distance, &scores));
                }
            }
        } else if observer.is_watching() {
            // For every layer in reach, not only for those that are looked at.
            let mut predicted = Vec::new();
            for distance in 1..=self.options.distance_max {
                self.predictor.predict(layer, distance, &mut predicted);
            }
            observer.predicted(&predicted);
        }
    }

    /// Predicts the experts of the next layers.
    fn look(
        &mut self,
        layer: u16,
        cache: &Cache,
        staging: &Staging,
        layout: &Layout,
        devices: &dyn DeviceResidency,
    ) -> Ahead {
        let held = HostHoldings { cache, staging, layout, shape: &self.options.shape, devices };
        let ahead = self.prefetcher.look_ahead(&mut self.predictor, layer, self.options.distance_max, &held);
        for distance in 1..=ahead.depth {
            if let Some((target, ..)) = self.options.shape.target(layer, distance) {
                let predicted: Vec<_> = ahead.of_layer(target).copied().collect();
                self.recall.expect(target, distance, &predicted);
            }
        }
        ahead
    }
}

/// The experts of a batch's tokens, each once.
fn union(tokens: &[Vec<(u16, f32)>]) -> Vec<(u16, f32)> {
    let mut all: Vec<(u16, f32)> = Vec::new();
    for (index, weight) in tokens.iter().flatten() {
        if tokens.len() == 1 || all.iter().all(|(own, _)| own != index) {
            all.push((*index, *weight));
        }
    }
    all
}

impl<R: Reads, O: Observer> Residency<R, O> {
    /// The lookahead while it makes predictions. Routers' products take time, which is saved while prefetching is off.
    fn predicting(&self) -> Option<&Lookahead> {
        self.background.lookahead.as_ref().filter(|own| own.governor.predicts() || self.observer.is_watching())
    }

    /// Whether tokens are looked ahead of while they are decoded: not where they use only what is there.
    pub fn looks_ahead(&self) -> bool {
        self.predicting().is_some() && self.background.virtual_experts.is_none()
    }

    /// Whether the next layers' routers are to be asked.
    pub fn asks_routers(&self) -> bool {
        self.predicting().is_some_and(|lookahead| lookahead.predictor.needs_scores())
    }

    /// Later layers whose routers are to score the running layer's input.
    pub(super) fn layers_to_score(&self, layer: u16) -> Vec<Later> {
        self.background.lookahead.as_ref().map_or(Vec::new(), |own| own.layers_to_score(layer))
    }

    /// After the choice of a layer's router for a batch that decodes, and the `step` made of it: shields what comes
    /// next from eviction, and reads what is worth it. `seconds` of the layer without waits; `None`: measured.
    pub(super) fn predict(
        &mut self,
        step: &LayerStep,
        tokens: &TokenChoices,
        scores: Vec<ScoresByLayer>,
        seconds: Option<f64>,
        devices: &dyn DeviceResidency,
    ) {
        let Self { background, in_flight, cache, layout, observer, rerouting, .. } = self;
        let (Some(lookahead), upgrades) = (&mut background.lookahead, &background.upgrades) else { return };
        let (waited, queued_bytes) = in_flight.queued_bytes(cache, layout);
        let staging = &in_flight.staging;
        let layer = step.layer;
        lookahead.time(layer, in_flight.reader.seconds(), self.counts.all.wait_seconds, seconds);
        let lower = |target: u16, scores: &mut [f32], n_used: usize| {
            let is_there = |index| {
                let expert = ExpertId { layer: target, index };
                let is_on_device = devices.has_on_any(Version::high(expert));
                is_on_device || !devices.copies() && is_present(cache, upgrades, rerouting, expert)
            };
            rerouting.lower_missing(scores, n_used, &is_there);
        };
        lookahead.show(layer, tokens, scores, observer, &lower);
        let chosen = tokens.used.as_ref().unwrap_or(&tokens.wanted);
        let used: Vec<Version> = step.versions().collect();
        lookahead.prefetcher.estimates.observe_uses(step.n_hits, used.len() as u64);
        lookahead.prefetcher.settle(layer, chosen, &used, waited > 0);
        let ahead = lookahead.look(layer, cache, staging, layout, devices);
        cache.unshield_all();
        if !lookahead.governor.is_on() {
            return;
        }
        let Lookahead { prefetcher, options, .. } = lookahead;
        let held = HostHoldings { cache, staging, layout, shape: &options.shape, devices };
        let bytes_used: u64 = used.iter().filter_map(|&version| layout.bytes(version)).sum();
        // While what is missing is read, what is there is computed: that time is not left for the next layers.
        let there = 1.0 - waited as f64 / bytes_used.max(waited).max(1) as f64;
        let computed = there * prefetcher.estimates.layer_seconds().unwrap_or(0.0);
        let link = Link {
            queued_bytes,
            elapsed_seconds: prefetcher.estimates.load_seconds(waited).unwrap_or(0.0).min(computed),
        };
        let loads = prefetcher.plan(&ahead, link, &held);
        cache.shield(prefetcher.masked());
        self.read_ahead(loads);
    }

    /// Lines reads for the next layers up: they start when nothing is waited for.
    fn read_ahead(&mut self, loads: Vec<Load>) {
        for Load { version, .. } in loads {
            let order = self.layout.load_order(version.expert.layer, &[]);
            if let Some(Acquired { slot, evicted }) = self.cache.acquire_ahead(version) {
                self.takes(slot, version, evicted);
                if let (Some(lookahead), Some(evicted)) = (&mut self.background.lookahead, evicted) {
                    lookahead.prefetcher.evicted(evicted);
                }
                self.read_slots(LoadClass::Prefetch, &[(slot, version)], &order);
            } else if let Some(reads) = self.in_flight.stage_ahead(version, &order, &self.layout) {
                self.submit(LoadClass::Prefetch, reads);
            } else if let Some(lookahead) = &mut self.background.lookahead {
                lookahead.prefetcher.failed(version);
            }
        }
    }

    /// A slice of a version has been read, or not.
    pub(super) fn read_ahead_landed(&mut self, version: Version, is_ok: bool) {
        let is_outstanding = |own: &Lookahead| own.prefetcher.is_outstanding(version);
        if !self.background.lookahead.as_ref().is_some_and(is_outstanding) || is_ok && !self.is_complete(version) {
            return;
        }
        if let Some(Lookahead { prefetcher, .. }) = &mut self.background.lookahead {
            if is_ok { prefetcher.landed(version) } else { prefetcher.failed(version) }
        }
    }

    pub(super) fn lookahead_end_batch(&mut self, phase: Phase, n_tokens: u32, seconds: f64) {
        let Some(lookahead) = &mut self.background.lookahead else { return };
        let stats = self.in_flight.reader.stats();
        let now = (self.counts.all.wait_seconds, stats.bytes, stats.busy.as_secs_f64());
        let (waited, bytes, busy) = std::mem::replace(&mut lookahead.before, now);
        lookahead.prefetcher.estimates.observe_load(now.1 - bytes, now.2 - busy);
        lookahead.chose = None;
        lookahead.recall.forget_expected();
        if phase.is_decode() {
            let waited = if lookahead.options.hides_waits { seconds } else { now.0 - waited };
            lookahead.governor.end_batch(n_tokens, seconds, waited);
        } else {
            lookahead.governor.interrupt();
        }
        lookahead.prefetcher.abandon();
        self.cache.unshield_all();
    }

    /// Counts of prefetches; `None` without a predictor.
    pub fn prefetch_report(&self) -> Option<PrefetchReport> {
        let Lookahead { prefetcher, governor, recall, options, .. } = self.background.lookahead.as_ref()?;
        let recall = |distance| {
            let counts = recall.total(distance);
            RecallReport { distance, recall: counts.recall(), precision: counts.precision() }
        };
        Some(PrefetchReport {
            counters: prefetcher.counters,
            governor: governor.report(),
            recall: (1..=options.distance_max).map(recall).filter(|recall| recall.recall.is_some()).collect(),
        })
    }

    /// Asks the predictor, which has been shown the running layer's choice, about the next layers: `ask` gets it with
    /// the model's shape and how far to look at most. `None` while nothing is read ahead.
    pub fn ask_ahead<T>(&mut self, ask: impl FnOnce(Slots, &mut dyn Predictor, &PredictShape, u8) -> T) -> Option<T> {
        let lookahead = self.background.lookahead.as_mut().filter(|lookahead| lookahead.governor.is_on())?;
        let slots = Slots { cache: &self.cache, layout: &self.layout };
        Some(ask(slots, &mut lookahead.predictor, &lookahead.options.shape, lookahead.options.distance_max))
    }

    /// Whether all slices of a version are in its slot or in staging.
    fn is_complete(&self, version: Version) -> bool {
        let is_staged = |kind: &SliceKind| self.in_flight.staging.is_ready(SliceId { version, kind: *kind });
        match self.cache.lookup(version) {
            Some(slot) => self.cache.is_ready(slot),
            None => self.layout.kinds(version.expert.layer).iter().all(is_staged),
        }
    }

    /// Pins a version that is complete in a slot, until the slot is given to [`Residency::unpin`]. `None` where it is
    /// not.
    pub fn pin_complete(&mut self, version: Version) -> Option<(Used, SlotId)> {
        let slot = self.cache.lookup(version).filter(|slot| self.cache.is_ready(*slot))?;
        self.cache.pin(slot);
        let share = self.layout.share_of(version);
        let row = Some(self.layout.row(version.expert.layer, share, slot));
        let (index, precision) = (version.expert.index, version.precision);
        Some((Used { index, precision, share, row, is_on_device: false }, slot))
    }
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
        self.cache.share_of(version)?;
        self.layout.bytes_missing(self.cache, version)
    }

    fn displaces(&self, version: Version) -> bool {
        !self.cache.has_empty_slot(version)
    }

    fn n_used(&self, layer: u16) -> usize {
        let known = self.shape.layers.iter().find(|(own, ..)| *own == layer);
        known.map_or(1, |(.., n_used)| usize::from(*n_used))
    }
}
