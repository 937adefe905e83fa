//! Copies into device slots that no product waits for: prefetches, which are experts copied before their layers'
//! routers have chosen (HOBBIT, section 3.3), and promotions.
//!
//! Once a decoded layer and its own copies are submitted, the link is idle until the next router chooses. Predicted
//! experts of the next layers that the host holds and the device lacks are copied in that time. A submitted copy cannot
//! be withdrawn, and the next layer's misses queue behind it, so there are few at a time.
//! [`hobbit_core::load::prefetch`] chooses them by probability and by the link's idle time ([`Idle`]). `--prefetch all`
//! copies every guess instead.
//!
//! From its submission on, such a copy is treated like any other: the slot counts as filled, and a product that uses it
//! waits for its event. Three things differ. It only takes slots that are not shielded. The host does not wait for it:
//! [`Tier::settled_so_far`] leaves it running. The host slots it reads stay pinned until it is known to have run, which
//! a wait for the compute stream shows at the latest one layer after its own ([`Tier::catch_up`]).
//!
//! Promotions are versions that were of use and have no slot: misses that the CPU helper computed, experts that tokens
//! were routed away from, and high versions of experts used in low precision. Without them the device's slots would
//! stay as they are. They wait in a bounded queue ([`Tier::want`]) and are copied after layers without copies of their
//! own, if the cache gives them a slot ([`Cache::acquire_wanted`]). A promotion takes at most as long as the link has
//! been idle since its last copy for a product: it may delay the next one by that time.

mod idle;

use std::collections::VecDeque;

use self::idle::Idle;
use super::{Destination, Tier};
use crate::engine::ggml::Stream;
use crate::engine::memory::host_reads::{Host, host_bytes};
use hobbit_core::cache::{Cache, SlotId};
use hobbit_core::expert::{SliceId, Version};
use hobbit_core::load::prefetch::{Estimates, Holdings, Link, PrefetchOptions, PrefetchRule, Prefetcher};
use hobbit_core::predict::PredictShape;
use hobbit_core::residency::{LayerStep, Lookahead, Selection, Slots};

/// Maximum experts in flight for layers that have not run, if their worth is judged: a token of current models uses as
/// many in a layer.
const OUTSTANDING_MAX: usize = 8;

/// Part of a copy that must end before its layer begins: a submitted copy cannot be withdrawn. With a CPU helper all of
/// it must, as the CPU would compute the expert sooner than a late copy ends.
const IN_TIME_MIN: f64 = 0.5;
const IN_TIME_MIN_BESIDE_HELPER: f64 = 1.0;

/// Maximum versions that wait for a promotion: some layers' worth. The oldest ones give way.
const WANTED_MAX: usize = 64;

/// Prefetches and promotions to one device.
pub(crate) struct UploadsAhead {
    /// Chooses prefetches; `None`: there are none.
    planner: Option<Prefetcher>,
    pub(super) idle: Idle,
    /// In order of submission.
    underway: VecDeque<Underway>,
    /// No prefetch was on the link when the running layer began.
    was_alone: bool,
    /// Versions to promote, those wanted last at the end.
    wanted: VecDeque<Version>,
    /// Idle seconds of the link since it last copied for a product, less those of the promotions since then.
    spare: f64,
    /// When the last promotion will have run.
    promoted_at: f64,
}

/// Slices of one layer, submitted together, that may not have run yet.
struct Underway {
    /// First and last upload, in the tier's numbering.
    first: u64,
    last: u64,
    layer: u16,
    bytes: u64,
    /// Host slots that they read.
    pins: Vec<SlotId>,
    /// Their layer has run, or will never run.
    is_over: bool,
    /// Their layer had run already: it is over when it runs again.
    is_promotion: bool,
}

impl UploadsAhead {
    fn new(options: Option<PrefetchOptions>) -> Self {
        let with_bounds = |options: PrefetchOptions| {
            let outstanding_max =
                if options.rule == PrefetchRule::Timed { OUTSTANDING_MAX } else { options.outstanding_max };
            PrefetchOptions { outstanding_max, ..options }
        };
        let planner = options.map(|options| Prefetcher::new(with_bounds(options), Default::default()));
        let (underway, wanted) = (VecDeque::new(), VecDeque::new());
        Self { planner, idle: Idle::default(), underway, was_alone: true, wanted, spare: 0.0, promoted_at: 0.0 }
    }

    /// Measured seconds per byte of the link.
    pub(super) fn seconds_per_byte(&self) -> Option<f64> {
        self.idle.seconds_per_byte()
    }

    /// Whether no product waits for any upload after `waited` up to `submitted`.
    pub(super) fn are_all(&self, waited: u64, submitted: u64) -> bool {
        let beyond = |copies: &Underway| (copies.last.min(submitted) + 1).saturating_sub(copies.first.max(waited + 1));
        self.underway.iter().map(beyond).sum::<u64>() == submitted.saturating_sub(waited)
    }

    /// Uploads up to `done` have run; returns the host slots to unpin.
    pub(super) fn run_until(&mut self, done: u64) -> Vec<SlotId> {
        let n = self.underway.iter().take_while(|copies| copies.last <= done).count();
        self.underway.drain(..n).flat_map(|copies| copies.pins).collect()
    }

    /// The last upload for a layer that is over.
    fn last_over(&self) -> Option<u64> {
        self.underway.iter().filter(|copies| copies.is_over).map(|copies| copies.last).max()
    }

    /// Prefetches for a layer, or for all, are over.
    fn is_over(&mut self, layer: Option<u16>) {
        let of_layer = |copies: &&mut Underway| !copies.is_promotion && layer.is_none_or(|layer| copies.layer == layer);
        self.underway.iter_mut().filter(of_layer).for_each(|copies| copies.is_over = true);
    }

    /// The router of a layer has chosen: promotions after the layer's last run have had a token's time.
    fn runs_again(&mut self, layer: u16) {
        let of_layer = |copies: &&mut Underway| copies.is_promotion && copies.layer == layer;
        self.underway.iter_mut().filter(of_layer).for_each(|copies| copies.is_over = true);
    }

    fn want(&mut self, version: Version) {
        self.wanted.retain(|wanted| *wanted != version);
        if self.wanted.len() == WANTED_MAX {
            self.wanted.pop_front();
        }
        self.wanted.push_back(version);
    }
}

/// The planner's view of the device's slots.
struct DeviceHoldings<'a> {
    host: Slots<'a>,
    cache: &'a Cache,
    shape: &'a PredictShape,
}

impl Holdings for DeviceHoldings<'_> {
    fn is_resident(&self, version: Version) -> bool {
        self.cache.lookup(version).is_some()
    }

    fn bytes(&self, version: Version) -> Option<u64> {
        let share = self.cache.pools().share_of(version)?;
        (!self.cache.pools().slots_of_share(share).is_empty()).then(|| self.host.layout.bytes(version))?
    }

    fn n_used(&self, layer: u16) -> usize {
        let known = self.shape.layers.iter().find(|(known, ..)| *known == layer);
        known.map_or(1, |(.., n_used)| usize::from(*n_used))
    }
}

impl Tier {
    /// Enables prefetches, if there are options for them, and promotions: of misses that the CPU computes, and of
    /// others if `promotes`. Devices that compute in host memory get none.
    pub(crate) fn copy_ahead(&mut self, prefetches: Option<PrefetchOptions>, promotes: bool) {
        let has_helper = self.helper.balancer.is_some();
        let in_time_min = if has_helper { IN_TIME_MIN_BESIDE_HELPER } else { IN_TIME_MIN };
        let prefetches = prefetches.map(|options| PrefetchOptions { in_time_min, ..options });
        let is_of_use = prefetches.is_some() || promotes || has_helper;
        self.ahead = (self.serves.layers && !self.is_unified() && is_of_use).then(|| UploadsAhead::new(prefetches));
    }

    /// The version would be of use in a slot. It is copied there when the link is idle.
    pub(crate) fn want(&mut self, version: Version) {
        if self.slots.cache.pools().share_of(version).is_some() {
            self.ahead.iter_mut().for_each(|ahead| ahead.want(version));
        }
    }

    /// The router of a layer has chosen for a decode batch. `waited`: total seconds of waiting for files.
    pub(crate) fn chose(&mut self, layer: u16, waited: f64) {
        // Waits for files pass on the host's clock.
        let waited = if self.speed.clock.is_hosts() { waited } else { 0.0 };
        let now = self.speed.clock.seconds() - waited;
        let Some(ahead) = &mut self.ahead else { return };
        ahead.idle.chose(layer, now);
        ahead.runs_again(layer);
        ahead.was_alone = ahead.underway.iter().all(|copies| copies.is_promotion) && ahead.promoted_at <= now + waited;
    }

    /// A layer of a decode batch, whose router chose `selection`, has been submitted: submits prefetches for the next
    /// layers, and promotions.
    pub(crate) fn upload_ahead(&mut self, host: &mut Host, step: &LayerStep, selection: &Selection) {
        let Some(mut ahead) = self.ahead.take() else { return };
        let own_bytes = self.counters.uploaded_bytes - self.speed.before.1;
        let estimates = ahead.idle.estimates(own_bytes);
        let is_queued = |copies: &&Underway| !copies.is_promotion && !copies.is_over && copies.layer != step.layer;
        let mut queued_bytes: u64 = ahead.underway.iter().filter(is_queued).map(|copies| copies.bytes).sum();
        if let Some(seconds_per_byte) = ahead.seconds_per_byte() {
            // As much as is left of a promotion.
            queued_bytes += ((ahead.promoted_at - self.speed.clock.seconds()).max(0.0) / seconds_per_byte) as u64;
        }
        self.slots.cache.unshield_all();
        let before = self.counters.uploaded_bytes;
        if let Some(mut planner) = ahead.planner.take() {
            planner.estimates = estimates;
            self.prefetch(host, &mut planner, &mut ahead.underway, (step, selection), queued_bytes);
            ahead.planner = Some(planner);
        }
        let ahead_bytes = self.counters.uploaded_bytes - before;
        let idle = estimates.layer_seconds().unwrap_or(0.0) - estimates.load_seconds(ahead_bytes).unwrap_or(0.0);
        ahead.spare = if own_bytes > 0 { 0.0 } else { (ahead.spare + idle).max(0.0) };
        let measured = own_bytes == 0 && self.promote(host, &mut ahead, &estimates);
        let is_alone = ahead.was_alone && ahead_bytes == 0 && !measured;
        ahead.idle.submitted(own_bytes, is_alone && self.speed.unmeasured > 0);
        self.ahead = Some(ahead);
    }

    /// Submits prefetches for the layers after the one of `step`, and shields what is likely to be used there.
    fn prefetch(
        &mut self,
        host: &mut Host,
        planner: &mut Prefetcher,
        underway: &mut VecDeque<Underway>,
        (step, selection): (&LayerStep, &Selection),
        queued_bytes: u64,
    ) {
        let used: Vec<Version> = step.used.iter().map(|&used| step.version(used)).collect();
        self.counters.ahead_used += used.iter().filter(|used| planner.is_outstanding(**used)).count() as u64;
        planner.settle(step.layer, &selection.tokens(), &used);
        let link = Link { queued_bytes, ..Link::default() };
        let Some((predictor, shape, distance_max)) = host.lookahead.as_mut().and_then(Lookahead::ask) else { return };
        let slots = host.memory.slots();
        let held = DeviceHoldings { host: slots, cache: &self.slots.cache, shape };
        let mut found = planner.look_ahead(predictor, step.layer, distance_max, &held);
        found.wanted.retain(|predicted| {
            let versions = [Version::high(predicted.expert), Version::low(predicted.expert)];
            versions.into_iter().any(|version| slots.cache.is_complete(version))
        });
        let loads = planner.plan(&found, link, &held);
        self.slots.cache.shield(planner.shielded());
        for loads in loads.chunk_by(|a, b| a.version.expert.layer == b.version.expert.layer) {
            let versions: Vec<Version> = loads.iter().map(|load| load.version).collect();
            let taken = self.upload_for_layer(host, underway, &versions, false);
            versions.into_iter().filter(|version| !taken.contains(version)).for_each(|other| planner.failed(other));
            self.counters.ahead += taken.len() as u64;
        }
    }

    /// Copies wanted versions, the last first, in the time for which the link has been idle. It drops versions that are
    /// resident, that have left host memory, or that would evict better ones: the next use wants them again. Returns
    /// whether the host has waited for a copy, to measure the link.
    fn promote(&mut self, host: &mut Host, ahead: &mut UploadsAhead, estimates: &Estimates) -> bool {
        let mut again = Vec::new();
        let mut measured = false;
        while let Some(version) = ahead.wanted.pop_back() {
            let has_room =
                self.slots.cache.pools().share_of(version).is_some() && self.slots.cache.lookup(version).is_none();
            let Some(bytes) = host.layout().bytes(version).filter(|_| has_room) else { continue };
            let seconds = estimates.load_seconds(bytes);
            if seconds.is_some_and(|seconds| seconds > ahead.spare) {
                ahead.wanted.push_back(version);
                break;
            }
            let began = self.speed.clock.seconds();
            if self.upload_for_layer(host, &mut ahead.underway, &[version], true).is_empty() {
                // The running layer pins what it uses.
                again.extend((self.busy == Some(version.expert.layer)).then_some(version));
                continue;
            }
            self.counters.promoted += 1;
            let Some(seconds) = seconds else {
                // Where the CPU computes every miss, nothing else measures the link.
                self.copies.stream.synchronize();
                ahead.idle.observe_link(bytes, self.speed.clock.seconds() - began);
                measured = true;
                break;
            };
            ahead.spare -= seconds;
            ahead.promoted_at = ahead.promoted_at.max(began) + seconds;
        }
        ahead.wanted.extend(again.into_iter().rev());
        measured
    }

    /// Copies versions of one layer into slots, kind by kind in the order of its products. Returns those that are in
    /// host memory and get a slot.
    fn upload_for_layer(
        &mut self,
        host: &mut Host,
        underway: &mut VecDeque<Underway>,
        versions: &[Version],
        is_promotion: bool,
    ) -> Vec<Version> {
        let Some(layer) = versions.first().map(|version| version.expert.layer) else { return Vec::new() };
        let kinds = host.layout().kinds(layer).to_vec();
        let (mut taken, mut pins) = (Vec::new(), Vec::new());
        for &version in versions {
            let Some((used, pin)) = host.memory.pin_complete(version) else { continue };
            let acquired = if is_promotion {
                self.slots.cache.acquire_wanted(version)
            } else {
                self.slots.cache.acquire_ahead(version)
            };
            let Some(acquired) = acquired else {
                host.memory.unpin(vec![pin]);
                continue;
            };
            kinds.iter().for_each(|&kind| self.slots.cache.set_loading(acquired.slot, kind));
            taken.push((version, used, acquired.slot));
            pins.push(pin);
        }
        if taken.is_empty() {
            return Vec::new();
        }
        let (first, before) = (self.copies.submitted + 1, self.counters.uploaded_bytes);
        // A measurement of the link is of a layer's own copies.
        let busy = self.busy.take();
        for &kind in &kinds {
            for &(version, used, slot) in &taken {
                let slice = SliceId { version, kind };
                let (data, _) = host_bytes(host, slice, used).expect("it was complete when it was pinned");
                // SAFETY: the host's slot is pinned until the upload has run: `UploadsAhead::run_until`.
                unsafe { self.upload(slice, host.reads().shape(slice), data, Destination::Slot(slot)) };
            }
        }
        self.busy = busy;
        let (last, bytes) = (self.copies.submitted, self.counters.uploaded_bytes - before);
        underway.push_back(Underway { first, last, layer, bytes, pins, is_over: false, is_promotion });
        taken.into_iter().map(|(version, ..)| version).collect()
    }

    /// A layer has been submitted to `compute`. Unused prefetches for earlier layers have had a layer's time: `compute`
    /// waits for them too, so that the next wait for the stream releases the host slots they read.
    pub(crate) fn catch_up(&mut self, compute: &Stream) {
        let last = self.ahead.as_ref().and_then(UploadsAhead::last_over);
        if let Some(last) = last {
            self.copies.wait_for_upload(compute, last);
        }
        if let (Some(ahead), Some(layer)) = (&mut self.ahead, self.busy) {
            ahead.is_over(Some(layer));
        }
    }

    /// A token or a batch has ended.
    pub(super) fn end_ahead(&mut self) {
        let Some(ahead) = &mut self.ahead else { return };
        ahead.planner.iter_mut().for_each(Prefetcher::abandon);
        ahead.is_over(None);
        self.slots.cache.unshield_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit_core::expert::ExpertId;

    fn underway(first: u64, last: u64, layer: u16) -> Underway {
        let pins = vec![SlotId { pool: 0, index: last as u32 }];
        Underway { first, last, layer, bytes: 1, pins, is_over: false, is_promotion: false }
    }

    #[test]
    fn the_host_gets_back_what_has_been_read() {
        let mut ahead = UploadsAhead::new(None);
        ahead.underway.extend([underway(4, 6, 1), underway(9, 14, 2)]);
        assert!(ahead.are_all(3, 6) && ahead.are_all(5, 6) && ahead.are_all(14, 14));
        assert!(!ahead.are_all(2, 6) && !ahead.are_all(3, 8), "1, 2, 3, 7 and 8 are for products");
        assert!(ahead.are_all(8, 14));
        assert_eq!(ahead.last_over(), None);
        ahead.is_over(Some(1));
        assert_eq!(ahead.last_over(), Some(6));
        assert_eq!(ahead.run_until(5), []);
        assert_eq!(ahead.run_until(8), [SlotId { pool: 0, index: 6 }]);
        ahead.is_over(None);
        assert_eq!(ahead.last_over(), Some(14));
        assert_eq!(ahead.run_until(20), [SlotId { pool: 0, index: 14 }]);
        assert!(ahead.are_all(20, 20) && !ahead.are_all(20, 21));
    }

    #[test]
    fn a_promotion_has_the_time_until_its_layer_runs_again() {
        let mut ahead = UploadsAhead::new(None);
        ahead.underway.push_back(Underway { is_promotion: true, ..underway(1, 3, 1) });
        ahead.is_over(Some(1));
        ahead.is_over(None);
        ahead.runs_again(2);
        assert_eq!(ahead.last_over(), None);
        ahead.runs_again(1);
        assert_eq!(ahead.last_over(), Some(3));
        for index in 0..=WANTED_MAX as u16 {
            ahead.want(Version::high(ExpertId { layer: 0, index }));
        }
        ahead.want(Version::high(ExpertId { layer: 0, index: 1 }));
        assert_eq!(ahead.wanted.len(), WANTED_MAX);
        let ends = [ahead.wanted.front(), ahead.wanted.back()].map(|version| version.unwrap().expert.index);
        assert_eq!(ends, [2, 1], "the oldest gave way, and 1 is wanted anew");
    }
}
