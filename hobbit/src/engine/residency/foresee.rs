//! Reads what the next layers are expected to use before they ask. Decisions are [`crate::predict`]'s and
//! [`crate::load::prefetch`]'s; here is when they are made, and what becomes of them.
//!
//! For each layer of a single token: the router has chosen, reads for the layer itself are under way. The predictor sees
//! the choice (and what the next layers' routers say about this layer's input), the experts that it names are shielded from
//! eviction, and as soon as nothing waits for the link, those that are missing are read.

mod device;

use std::time::Instant;

use super::{Residency, Staged, Step, Target};
use crate::expert::{SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::load::prefetch::{Governor, GovernorOptions, Holdings, Link, PrefetchOptions, Prefetcher};
use crate::options::Prefetch;
use crate::predict::{Ahead, PredictShape, Predictor, Recall};
use crate::stats::{PrefetchReport, RecallReport};

/// What looks ahead, and what it knows.
pub(in super::super) struct Foresight {
    predictor: Box<dyn Predictor>,
    prefetcher: Prefetcher,
    governor: Governor,
    recall: Recall,
    shape: PredictShape,
    distance_max: u8,
    /// The layer that chose last, when, and for how many seconds the engine had waited by then.
    chose: Option<(u16, Instant, f64)>,
    /// What follows the running layer, until it has been planned.
    ahead: Option<Ahead>,
    /// Hits and uses by then.
    counted: (u64, u64),
    /// Seconds waited, and bytes and seconds of reading, when the token began.
    before: (f64, u64, f64),
}

impl Foresight {
    /// `thresholds` as the engine's.
    pub(in super::super) fn new(
        predictor: Box<dyn Predictor>,
        shape: PredictShape,
        options: PrefetchOptions,
        prefetch: Prefetch,
        distance_max: u8,
    ) -> Self {
        let governor = match prefetch {
            Prefetch::Auto => Governor::new(GovernorOptions::default()),
            Prefetch::On => Governor::fixed(true),
            Prefetch::Off => Governor::fixed(false),
        };
        Self {
            predictor,
            prefetcher: Prefetcher::new(options, Default::default()),
            governor,
            recall: Recall::default(),
            shape,
            distance_max,
            chose: None,
            ahead: None,
            counted: (0, 0),
            before: (0.0, 0, 0.0),
        }
    }

    fn report(&self) -> PrefetchReport {
        let recall = |distance| {
            let counts = self.recall.total(distance);
            RecallReport { distance, recall: counts.recall(), precision: counts.precision() }
        };
        PrefetchReport {
            counters: *self.prefetcher.counters(),
            governor: self.governor.report(),
            recall: (1..=self.distance_max).map(recall).filter(|recall| recall.recall.is_some()).collect(),
        }
    }
}

impl Residency {
    /// The router of a layer has chosen for a single token: `chosen` experts with their weights, which sum to 1, from the
    /// input `x`. `step` is what was made of it. `elsewhere`: whether a version is on the device that computes the layer.
    pub(in super::super) fn foresee(
        &mut self,
        step: &Step,
        chosen: &[(u16, f32)],
        x: Option<&[f32]>,
        elsewhere: &dyn Fn(Version) -> bool,
    ) {
        let Some(mut foresight) = self.foresight.take() else { return };
        let layer = step.layer;
        let (now, waited) = (Instant::now(), self.counters.wait_seconds);
        if let Some((before, at, waited_before)) = foresight.chose.replace((layer, now, waited)) {
            // Between the last layer and the first lies more than a layer.
            if before < layer {
                let seconds = now.duration_since(at).as_secs_f64() - (waited - waited_before);
                foresight.prefetcher.estimates.observe_layer(seconds.max(0.0));
            }
        }
        foresight.recall.observe(layer, chosen);
        foresight.predictor.observe(layer, chosen);
        if let Some(x) = x.filter(|_| foresight.predictor.needs_scores()) {
            let target = |distance| foresight.shape.target(layer, distance).map(|(layer, ..)| layer);
            let layers: Vec<u16> = (1..=foresight.distance_max).map_while(target).collect();
            for (distance, target) in (1u8..).zip(&layers) {
                if let Some((_, scores)) = self.gates.scores(x, &[*target]).pop() {
                    let n_used = foresight.shape.target(layer, distance).map_or(0, |(.., n_used)| usize::from(n_used));
                    self.recorder.iter_mut().for_each(|recorder| recorder.foretold(distance, &scores, n_used));
                    foresight.predictor.scores(layer, distance, &scores);
                }
            }
        }
        self.record_predictions(&mut *foresight.predictor, layer, foresight.distance_max);
        let used: Vec<Version> = step.used.iter().map(|&used| step.version(used)).collect();
        let counted = (self.counters.hits, self.counters.hits + self.counters.misses);
        let (hits_before, uses_before) = std::mem::replace(&mut foresight.counted, counted);
        foresight.prefetcher.estimates.observe_uses(counted.0 - hits_before, counted.1 - uses_before);
        let settled = foresight.prefetcher.settle(layer, chosen, &used, self.is_waited_for());
        foresight.governor.account(settled.saved_seconds, settled.delayed_seconds);
        let ahead = {
            let Foresight { predictor, prefetcher, shape, distance_max, .. } = &mut foresight;
            let holdings = Held { residency: self, shape, elsewhere };
            prefetcher.look_ahead(&mut **predictor, layer, *distance_max, &holdings)
        };
        for distance in 1..=ahead.depth {
            if let Some((target, ..)) = foresight.shape.target(layer, distance) {
                let predicted: Vec<_> = ahead.of_layer(target).copied().collect();
                foresight.recall.expect(target, distance, &predicted);
            }
        }
        self.cache.unshield_all();
        if foresight.governor.is_on() {
            let both = |expert| [Version::high(expert), Version::low(expert)];
            let likely = {
                let Foresight { prefetcher, shape, .. } = &foresight;
                prefetcher.likely(&ahead, &Held { residency: self, shape, elsewhere })
            };
            self.cache.shield(likely.into_iter().flat_map(both));
            foresight.ahead = Some(ahead);
        }
        self.foresight = Some(foresight);
        self.read_ahead(step);
    }

    /// Lines reads for the next layers up: they start when nothing is waited for.
    fn read_ahead(&mut self, step: &Step) {
        let Some(mut foresight) = self.foresight.take() else { return };
        let Some(ahead) = foresight.ahead.take() else {
            self.foresight = Some(foresight);
            return;
        };
        let bytes_of =
            |targets: &mut dyn Iterator<Item = Target>| -> u64 { targets.map(|own| self.bytes_of(own)).sum() };
        let (demanded, others): (Vec<Target>, Vec<Target>) =
            self.targets.iter().flatten().partition(|target| self.is_wanted(**target));
        let missing = bytes_of(&mut demanded.into_iter());
        let used: u64 = step.used.iter().filter_map(|&used| self.version_bytes(step.version(used))).sum();
        // While what is missing is read, what is there is computed: that time is not left for the next layers.
        let estimates = &foresight.prefetcher.estimates;
        let there = 1.0 - missing as f64 / used.max(missing).max(1) as f64;
        let computed = there * estimates.layer_seconds().unwrap_or(0.0);
        let link = Link {
            is_busy: false,
            queued_bytes: bytes_of(&mut others.into_iter()),
            elapsed_seconds: estimates.load_seconds(missing).unwrap_or(0.0).min(computed),
        };
        let loads = {
            let Foresight { prefetcher, shape, .. } = &mut foresight;
            // What is on the running layer's device is not among what is wanted.
            let holdings = Held { residency: self, shape, elsewhere: &|_| false };
            prefetcher.plan(&ahead, link, &holdings)
        };
        for load in loads {
            let order = self.load_order(load.version.expert.layer, &[]);
            if let Some(acquired) = self.cache.acquire(load.version) {
                order.iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
                self.read_slots(LoadClass::Prefetch, &[(acquired.slot, load.version)], &order);
            } else if !self.stage_ahead(load.version, &order) {
                foresight.prefetcher.failed(load.version);
            }
        }
        self.foresight = Some(foresight);
    }

    /// Reads a version without a slot into staging, of which half stays free for what products wait for. Whether there was
    /// room.
    fn stage_ahead(&mut self, version: Version, order: &[SliceKind]) -> bool {
        if self.staging.n_free() < order.len() + self.staging.len() / 2 {
            return false;
        }
        let mut requests = Vec::with_capacity(order.len());
        for slice in order.iter().map(|&kind| SliceId { version, kind }) {
            if let Some(slot) = self.staging.take(slice) {
                requests.push(self.staging_request(slot, slice));
            }
        }
        self.submit(LoadClass::Prefetch, requests);
        true
    }

    /// Whether what is staged is meant for a later layer.
    pub(super) fn is_staged_ahead(&self, slice: SliceId, layer: u16) -> bool {
        let is_outstanding = |own: &Foresight| own.prefetcher.is_outstanding(slice.version);
        slice.version.expert.layer != layer && self.foresight.as_ref().is_some_and(is_outstanding)
    }

    /// Reads ahead of this version were withdrawn.
    pub(super) fn read_ahead_dropped(&mut self, version: Version) {
        self.foresight.iter_mut().for_each(|foresight| foresight.prefetcher.dropped(version));
    }

    /// A slice of a version has been read, or not.
    pub(super) fn read_ahead_landed(&mut self, version: Version, is_ok: bool) {
        let layer = self.layers[usize::from(version.expert.layer)].as_ref();
        let kinds = layer.map_or(&[][..], |layer| &layer.kinds);
        let Some(foresight) = self.foresight.as_mut().filter(|own| own.prefetcher.is_outstanding(version)) else {
            return;
        };
        let is_staged = |kind: &SliceKind| {
            let staged = self.staging.get(SliceId { version, kind: *kind });
            staged.is_some_and(|staged| staged != Staged::Loading)
        };
        let is_there = match self.cache.lookup(version) {
            Some(slot) => self.cache.is_ready(slot),
            None => kinds.iter().all(is_staged),
        };
        match is_ok {
            false => foresight.prefetcher.failed(version),
            true if is_there => {
                foresight.prefetcher.landed(version);
            }
            true => {}
        }
    }

    /// A batch is over.
    pub(super) fn foresight_end_batch(&mut self, n_tokens: u32, seconds: f64) {
        let copies_ahead = self.copies_ahead();
        let stats = self.loader.stats();
        let now = (self.counters.wait_seconds, stats.bytes, stats.busy.as_secs_f64());
        let Some(foresight) = self.foresight.as_mut() else { return };
        let (waited, bytes, busy) = std::mem::replace(&mut foresight.before, now);
        foresight.prefetcher.estimates.observe_load(now.1 - bytes, now.2 - busy);
        foresight.ahead = None;
        foresight.chose = None;
        foresight.recall.forget_expected();
        if n_tokens == 1 {
            // The host does not see what copies to a device delay: then whole tokens are compared.
            foresight.governor.end_token(if copies_ahead { seconds } else { now.0 - waited });
        }
        let left = foresight.prefetcher.abandon();
        foresight.predictor.begin_token();
        self.cache.unshield_all();
        debug_assert!(left.is_empty() || n_tokens > 1, "every layer was settled: {left:?}");
    }

    pub(super) fn foresight_begin_sequence(&mut self) {
        self.foresight.iter_mut().for_each(|foresight| foresight.predictor.begin_sequence());
    }

    /// What looking ahead did; `None` where nothing does.
    pub(in super::super) fn prefetch_report(&self) -> Option<PrefetchReport> {
        self.foresight.as_ref().map(Foresight::report)
    }

    /// Whether the next layers' routers are to be asked.
    pub(in super::super) fn wants_input(&self) -> bool {
        self.wants_scores || self.foresight.as_ref().is_some_and(|foresight| foresight.predictor.needs_scores())
    }

    /// Whether the running layer waits for a read.
    fn is_waited_for(&self) -> bool {
        self.targets.iter().flatten().any(|target| self.is_wanted(*target))
    }

    pub(super) fn bytes_of(&self, target: Target) -> u64 {
        match target {
            Target::Slot { slice, .. } | Target::Staging { slice, .. } => self.shape(slice).bytes,
            Target::Record { version, .. } => self.version_bytes(version).unwrap_or(0),
        }
    }

    /// Bytes of all slices of a version.
    pub(super) fn version_bytes(&self, version: Version) -> Option<u64> {
        self.catalog.source(version).map(|source| self.catalog.classes[usize::from(source.class)].bytes())
    }
}

/// What the planner may know.
struct Held<'a> {
    residency: &'a Residency,
    shape: &'a PredictShape,
    elsewhere: &'a dyn Fn(Version) -> bool,
}

impl Holdings for Held<'_> {
    fn is_resident(&self, version: Version) -> bool {
        let staged = |kind: &SliceKind| self.residency.staging.get(SliceId { version, kind: *kind }).is_some();
        self.residency.cache.lookup(version).is_some()
            || self.residency.kinds(version.expert.layer).iter().all(staged)
            || (self.elsewhere)(version)
            || self.residency.is_on_idle_device(version)
    }

    fn bytes(&self, version: Version) -> Option<u64> {
        self.residency.cache.share_of(version)?;
        self.residency.version_bytes(version)
    }

    fn n_used(&self, layer: u16) -> usize {
        let known = self.shape.layers.iter().find(|(own, ..)| *own == layer);
        known.map_or(1, |(.., n_used)| usize::from(*n_used))
    }
}
