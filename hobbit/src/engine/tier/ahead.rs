//! Prefetches into device slots: experts copied before their layers' routers have chosen (HOBBIT, section 3.3).
//!
//! Once a decoded layer and its own copies are submitted, the link is idle until the next router chooses. Predicted
//! experts of the next layers that the host holds and the device lacks are copied in that time. A submitted copy cannot
//! be withdrawn, and the next layer's misses queue behind it, so there are few at a time.
//! [`hobbit_core::load::prefetch`] chooses them by probability and by the link's idle time ([`Idle`]); [`pays`] adds
//! the cost of the eviction. `--prefetch all` copies every guess instead.
//!
//! From its submission on, such a copy is treated like any other: the slot counts as filled, and a product that uses it
//! waits for its event. Three things differ. It only takes slots that are not shielded. The host does not wait for it:
//! [`Tier::settled_so_far`] leaves it running. The host slots it reads stay pinned until it is known to have run, which
//! a wait for the compute stream shows at the latest one layer after its own ([`Tier::catch_up`]).

use std::collections::VecDeque;

use super::{Destination, Tier};
use crate::engine::ggml::Stream;
use crate::engine::host_reads::{Host, host_bytes};
use hobbit_core::cache::{Cache, SlotId};
use hobbit_core::expert::{SliceId, Version};
use hobbit_core::load::balance::RunningMean;
use hobbit_core::load::prefetch::{Estimates, Holdings, Link, Load, Pace, PrefetchOptions, Prefetcher};
use hobbit_core::predict::PredictShape;
use hobbit_core::residency::{LayerStep, Selection, Slots};

/// Maximum experts in flight for layers that have not run, if their worth is judged: the number a token uses in a layer
/// of today's models.
const OUTSTANDING_MAX: usize = 8;

/// All bytes of a wrong guess count as in flight: a submitted copy cannot be withdrawn.
const ALL_OF_IT: u64 = u64::MAX;

/// Assumed probability that an expert evicted for a wrong prefetch would have been used while it could have stayed, and
/// is copied again. A conservative estimate.
const MISSED_AGAIN: f64 = 0.5;

/// Prefetches to one device.
pub(in crate::engine) struct UploadsAhead {
    planner: Prefetcher,
    /// Copies that do not pay are left out; otherwise every guess is copied, as the papers do.
    judges: bool,
    pub(super) idle: Idle,
    /// In order of submission.
    underway: VecDeque<Underway>,
    /// No prefetch was on the link when the running layer began.
    was_alone: bool,
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
}

impl UploadsAhead {
    fn new(options: PrefetchOptions) -> Self {
        let judges = options.pace == Pace::Timed;
        let outstanding_max = if judges { OUTSTANDING_MAX } else { options.outstanding_max };
        let options = PrefetchOptions { outstanding_max, in_flight_bytes: ALL_OF_IT, ..options };
        let planner = Prefetcher::new(options, Default::default());
        Self { planner, judges, idle: Idle::default(), underway: VecDeque::new(), was_alone: true }
    }

    /// Measured seconds per byte of the link.
    pub(super) fn seconds_per_byte(&self) -> Option<f64> {
        self.idle.byte.get()
    }

    /// Whether every upload after `waited` up to `submitted` is a prefetch.
    pub(super) fn are_all(&self, waited: u64, submitted: u64) -> bool {
        let beyond = |own: &Underway| (own.last.min(submitted) + 1).saturating_sub(own.first.max(waited + 1));
        self.underway.iter().map(beyond).sum::<u64>() == submitted.saturating_sub(waited)
    }

    /// Uploads up to `done` have run; returns the host slots to unpin.
    pub(super) fn run_until(&mut self, done: u64) -> Vec<SlotId> {
        let n = self.underway.iter().take_while(|own| own.last <= done).count();
        self.underway.drain(..n).flat_map(|own| own.pins).collect()
    }

    /// The last upload for a layer that is over.
    fn last_over(&self) -> Option<u64> {
        self.underway.iter().filter(|own| own.is_over).map(|own| own.last).max()
    }

    fn is_over(&mut self, layer: Option<u16>) {
        let of_layer = |own: &&mut Underway| layer.is_none_or(|layer| own.layer == layer);
        self.underway.iter_mut().filter(of_layer).for_each(|own| own.is_over = true);
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
        let share = self.cache.share_of(version)?;
        (!self.cache.slots_of_share(share).is_empty()).then(|| self.host.layout.bytes(version))?
    }

    fn n_used(&self, layer: u16) -> usize {
        let known = self.shape.layers.iter().find(|(own, ..)| *own == layer);
        known.map_or(1, |(.., n_used)| usize::from(*n_used))
    }
}

impl Tier {
    /// Enables prefetches. Devices that compute in host memory get none.
    pub(in crate::engine) fn copy_ahead(&mut self, options: PrefetchOptions) {
        self.ahead = (!self.is_unified()).then(|| UploadsAhead::new(options));
    }

    /// The router of a layer has chosen for a decode batch. `waited`: total seconds of waiting for files.
    pub(in crate::engine) fn chose(&mut self, layer: u16, waited: f64) {
        let now = self.clock.seconds() - waited;
        let Some(ahead) = &mut self.ahead else { return };
        ahead.idle.chose(layer, now);
        ahead.was_alone = ahead.underway.is_empty();
    }

    /// A layer of a decode batch, whose router chose `selection`, has been submitted: submits prefetches for the next
    /// layers.
    pub(in crate::engine) fn upload_ahead(&mut self, host: &mut Host, step: &LayerStep, selection: &Selection) {
        let Some(mut ahead) = self.ahead.take() else { return };
        let used: Vec<Version> = step.used.iter().map(|&used| step.version(used)).collect();
        self.counters.ahead_used += used.iter().filter(|used| ahead.planner.is_outstanding(**used)).count() as u64;
        ahead.planner.settle(step.layer, &selection.tokens(), &used, false);
        let own_bytes = self.counters.uploaded_bytes - self.before.1;
        ahead.planner.estimates = ahead.idle.estimates(own_bytes);
        let queued_bytes = ahead.underway.iter().filter(|own| own.layer != step.layer && !own.is_over);
        let link = Link { queued_bytes: queued_bytes.map(|own| own.bytes).sum(), ..Link::default() };
        let found = host.ask_ahead(|slots, predictor, shape, distance_max| {
            let held = DeviceHoldings { host: slots, cache: &self.cache, shape };
            let mut found = ahead.planner.look_ahead(predictor, step.layer, distance_max, &held);
            let probabilities = ahead.planner.probabilities(&found, &held);
            let judges = ahead.judges;
            found.wanted.retain(|predicted| {
                let versions = [Version::high(predicted.expert), Version::low(predicted.expert)];
                let on_host = versions.into_iter().find(|version| slots.cache.is_complete(*version));
                let of_expert = probabilities.iter().find(|(expert, _)| *expert == predicted.expert);
                let p = of_expert.map_or(0.0, |(_, probability)| f64::from(*probability));
                let bytes = on_host.and_then(|version| held.bytes(version));
                bytes.is_some_and(|bytes| {
                    !judges || pays(p, &ahead.planner.estimates, predicted.distance, bytes, link.queued_bytes)
                })
            });
            ahead.planner.plan(&found, link, &held)
        });
        self.cache.unshield_all();
        let is_alone = ahead.was_alone && found.as_ref().is_none_or(Vec::is_empty);
        ahead.idle.submitted(own_bytes, is_alone && self.unmeasured > 0);
        if let Some(loads) = found {
            self.cache.shield(ahead.planner.masked());
            for loads in loads.chunk_by(|a, b| a.version.expert.layer == b.version.expert.layer) {
                self.upload_for_layer(host, &mut ahead, loads);
            }
        }
        self.ahead = Some(ahead);
    }

    /// Copies versions of one layer, kind by kind in the order of its products.
    fn upload_for_layer(&mut self, host: &mut Host, ahead: &mut UploadsAhead, loads: &[Load]) {
        let Some(layer) = loads.first().map(|load| load.version.expert.layer) else { return };
        let kinds = host.layout().kinds(layer).to_vec();
        let (mut taken, mut pins) = (Vec::new(), Vec::new());
        for version in loads.iter().map(|load| load.version) {
            let Some((used, pin)) = host.pin_complete(version) else {
                ahead.planner.failed(version);
                continue;
            };
            let Some(acquired) = self.cache.acquire_ahead(version) else {
                host.unpin(vec![pin]);
                ahead.planner.failed(version);
                continue;
            };
            kinds.iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
            taken.push((version, used, acquired.slot));
            pins.push(pin);
        }
        if taken.is_empty() {
            return;
        }
        let first = self.submitted + 1;
        let bytes = loads.iter().map(|load| load.bytes).sum();
        for &kind in &kinds {
            for &(version, used, slot) in &taken {
                let slice = SliceId { version, kind };
                let (data, _) = host_bytes(host, slice, used).expect("it was complete when it was pinned");
                // SAFETY: the host's slot is pinned until the upload has run: `UploadsAhead::run_until`.
                unsafe { self.upload(slice, host.reads().shape(slice), data, Destination::Slot(slot)) };
            }
        }
        self.counters.ahead += taken.len() as u64;
        ahead.underway.push_back(Underway { first, last: self.submitted, layer, bytes, pins, is_over: false });
    }

    /// A layer has been submitted to `compute`. Unused prefetches for earlier layers have had a layer's time: `compute`
    /// waits for them too, so that the next wait for the stream releases the host slots they read.
    pub(in crate::engine) fn catch_up(&mut self, compute: &Stream) {
        let last = self.ahead.as_ref().and_then(UploadsAhead::last_over);
        last.into_iter().for_each(|last| self.wait_for_upload(compute, last));
        if let (Some(ahead), Some(layer)) = (&mut self.ahead, self.busy) {
            ahead.is_over(Some(layer));
        }
    }

    /// A token or a batch has ended.
    pub(super) fn end_ahead(&mut self) {
        let Some(ahead) = &mut self.ahead else { return };
        ahead.planner.abandon();
        ahead.is_over(None);
        self.cache.unshield_all();
    }
}

/// Whether a copy that is used with probability `p`, behind `queued` bytes, saves more than it risks. Adds the cost of
/// the slot it takes to the costs that [`hobbit_core::load::prefetch`] counts.
fn pays(p: f64, estimates: &Estimates, distance: u8, bytes: u64, queued: u64) -> bool {
    let times = (estimates.layer_seconds(), estimates.load_seconds(bytes), estimates.load_seconds(queued));
    let (Some(layer), Some(load), Some(before)) = times else { return false };
    let slack = f64::from(distance) * layer - before;
    p * load.min(slack) > (1.0 - p) * ((load - slack).max(0.0) + MISSED_AGAIN * load)
}

// Idle time of the link after a layer's own copies, until the next router has chosen: the time available for
// prefetches. Learned while layers run. Reads no clock: the caller gives the times.

/// Idle time of a link that is never idle; running means do not accept zero.
const NEVER_SECONDS: f64 = 1e-9;

/// Running means of the link's speed and of its idle time per layer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Idle {
    byte: RunningMean,
    /// After layers without copies of their own, and after layers with some: little is left to compute after those
    /// copies.
    per_layer: [RunningMean; 2],
    running: Option<Running>,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    layer: u16,
    since: f64,
    /// Bytes of its own copies, once they were submitted.
    bytes: Option<u64>,
}

impl Idle {
    /// `bytes` bytes took `seconds` on the link.
    pub(super) fn observe_link(&mut self, bytes: u64, seconds: f64) {
        if bytes > 0 {
            self.byte.add(seconds / bytes as f64);
        }
    }

    /// The router of `layer` has chosen for a decode batch at the time `now`, which excludes waits for files.
    fn chose(&mut self, layer: u16, now: f64) {
        let Some(before) = self.running.replace(Running { layer, since: now, bytes: None }) else { return };
        let (Some(bytes), Some(copying)) = (before.bytes, before.bytes.and_then(|bytes| self.seconds_of(bytes))) else {
            return;
        };
        // The time from the last layer to the first includes more than a layer.
        if before.layer < layer {
            let idle = (now - before.since - copying).max(NEVER_SECONDS);
            self.per_layer[usize::from(bytes > 0)].add(idle);
        }
    }

    /// The layer that chose last has submitted `bytes` bytes of its own. `is_alone`: nothing else is on the link while
    /// it runs.
    fn submitted(&mut self, bytes: u64, is_alone: bool) {
        self.running.iter_mut().for_each(|running| running.bytes = is_alone.then_some(bytes));
    }

    /// Estimates for the planner after a layer that has copied `bytes` bytes of its own; times count from the end of
    /// these copies.
    fn estimates(&self, bytes: u64) -> Estimates {
        let mut estimates = Estimates::seeded(self.byte.get().map_or(0.0, f64::recip));
        let [without, with] = self.per_layer.map(|mean| mean.get());
        // If layers always have copies, the idle time after these is a lower bound.
        let idle = if bytes > 0 { with } else { without.or(with) };
        idle.into_iter().for_each(|seconds| estimates.observe_layer(seconds));
        estimates
    }

    fn seconds_of(&self, bytes: u64) -> Option<f64> {
        if bytes == 0 { Some(0.0) } else { self.byte.get().map(|seconds| seconds * bytes as f64) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_a_copy_the_surer_it_has_to_be() {
        let mut estimates = Estimates::default();
        assert!(!pays(1.0, &estimates, 1, 100, 0), "nothing is known");
        estimates.observe_layer(1.0);
        estimates.observe_load(100, 1.0);
        for (p, distance, bytes, queued, expected) in [
            (0.34, 1, 100, 0, true),
            (0.33, 1, 100, 0, false),
            (0.34, 1, 100, 10, false),
            (0.34, 2, 100, 100, true),
            // Takes four layers: saves one, or costs three and half a reload of the evicted expert.
            (0.84, 1, 400, 0, true),
            (0.83, 1, 400, 0, false),
            (1.0, 1, 100, 100, false),
        ] {
            assert_eq!(pays(p, &estimates, distance, bytes, queued), expected, "{p} {distance} {bytes} {queued}");
        }
    }

    fn underway(first: u64, last: u64, layer: u16) -> Underway {
        let pins = vec![SlotId { pool: 0, index: last as u32 }];
        Underway { first, last, layer, bytes: 1, pins, is_over: false }
    }

    #[test]
    fn the_host_gets_back_what_has_been_read() {
        let mut ahead = UploadsAhead::new(PrefetchOptions::default());
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
    fn what_a_layers_own_copies_leave() {
        let mut idle = Idle::default();
        assert_eq!(idle.estimates(0), Estimates::default());
        idle.observe_link(1000, 2.0);
        // Layer, time of its choice, its bytes, and whether it had the link to itself.
        for (layer, at, bytes, is_alone) in
            [(0, 10.0, 0, true), (1, 13.0, 500, true), (2, 15.0, 0, false), (3, 22.0, 0, true), (0, 99.0, 0, true)]
        {
            idle.chose(layer, at);
            idle.submitted(bytes, is_alone);
        }
        assert_eq!(idle.estimates(0).layer_seconds(), Some(3.0), "layer 0: layer 2 was disturbed, 3 was the last");
        assert_eq!(idle.estimates(500).layer_seconds(), Some(1.0), "layer 1: 2 seconds, in one of which it copied");
        assert_eq!(idle.estimates(0).load_seconds(250), Some(0.5));
    }

    #[test]
    fn a_saturated_link_is_never_idle() {
        let mut idle = Idle::default();
        idle.observe_link(1000, 1.0);
        for layer in 0..2 {
            idle.chose(layer, f64::from(layer));
            idle.submitted(2000, true);
        }
        assert_eq!(idle.estimates(1).layer_seconds(), Some(NEVER_SECONDS));
        assert_eq!(idle.estimates(0).layer_seconds(), Some(NEVER_SECONDS));
    }
}
