//! The host's memory: which version is in which slot or staging slot, and the reads that bring them.
//!
//! It does not know why a version is read: [`Memory::ended`] lists reads that ended, for the planner of prefetches, and
//! [`Memory::progress`] says how far a version has come.

use std::collections::BTreeMap;

use super::in_flight::{InFlight, Place, Staging};
use super::interfaces::{DeviceResidency, Observer, Read, Reads, Target};
use super::layout::Layout;
use super::selection::{LayerStep, Used};
use crate::cache::{Cache, ShareId, SliceState, SlotId};
use crate::expert::{ExpertId, SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::predict::Popularity;
use crate::route::n_least_popular;
use crate::store::ReadDone;

/// The host's slots and the reads that fill them.
pub struct Memory<R: Reads, O> {
    pub(super) cache: Cache,
    pub(super) layout: Layout,
    pub(super) in_flight: InFlight<R>,
    pub(super) observer: O,
    pub(super) moved: Moved,
    /// Versions whose reads ended, in order; emptied by its reader.
    pub(super) ended: Vec<(Version, Ended)>,
    /// No slot was free at the last fill, and none has become so.
    pub(super) is_full: bool,
    /// See [`super::Parts::overlaps`].
    overlaps: bool,
}

/// Residents of the host's slots, for copies to a device.
#[derive(Clone, Copy)]
pub struct Slots<'a> {
    pub cache: &'a Cache,
    pub layout: &'a Layout,
}

/// Slices and bytes that were read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moved {
    pub(super) slices: u64,
    pub(super) bytes: u64,
    /// Seconds of waiting for it.
    pub(super) wait_seconds: f64,
}

/// How the read of a version ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Complete,
    Failed,
    /// It was taken back before it began.
    Withdrawn,
}

/// State of a version that was to be read into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Loading,
    Complete,
    Failed,
    /// It was taken back before it began, or has left again.
    Gone,
}

impl<R: Reads, O: Observer> Memory<R, O> {
    pub(super) fn new(in_flight: InFlight<R>, observer: O, cache: Cache, layout: Layout, overlaps: bool) -> Self {
        let (moved, ended) = (Moved::default(), Vec::new());
        Self { cache, layout, in_flight, observer, moved, ended, is_full: false, overlaps }
    }

    /// Whether experts are computed while others of their layer are read or copied.
    pub fn overlaps(&self) -> bool {
        self.overlaps
    }

    // Slots

    pub fn slots(&self) -> Slots<'_> {
        Slots { cache: &self.cache, layout: &self.layout }
    }

    /// Gives a version a slot, whose slices are loading from then on; `None` where it finds none.
    pub(super) fn acquire(&mut self, version: Version) -> Option<SlotId> {
        let acquired = self.cache.acquire(version)?;
        self.takes(acquired.slot, version, acquired.evicted);
        Some(acquired.slot)
    }

    /// A version has a slot from now on, and will be read.
    pub(super) fn takes(&mut self, slot: SlotId, version: Version, evicted: Option<Version>) {
        if let Some(evicted) = evicted {
            self.observer.evicted(evicted);
        }
        for &kind in self.layout.kinds(version.expert.layer) {
            self.cache.set_loading(slot, kind);
        }
    }

    /// Empties a version's slot, unless it is in use.
    pub(super) fn free(&mut self, version: Version) -> bool {
        let is_free = self.cache.release(version);
        if is_free {
            self.observer.evicted(version);
        }
        is_free
    }

    /// Sets the number of slots of a share, at most its first number; residents of dropped slots leave.
    /// `false`, and no change, if one of them is in use. To be called after [`super::Residency::quiesce`].
    pub fn resize_share(&mut self, share: ShareId, n_slots: u32) -> bool {
        let Some(evicted) = self.cache.resize_share(share, n_slots) else { return false };
        evicted.into_iter().for_each(|version| self.observer.evicted(version));
        self.is_full = false;
        true
    }

    /// Pins a version that is complete in a slot, until the slot is given to [`Memory::unpin`]. `None` where it is not.
    pub fn pin_complete(&mut self, version: Version) -> Option<(Used, SlotId)> {
        let slot = self.cache.lookup(version).filter(|slot| self.cache.is_ready(*slot))?;
        self.cache.pin(slot);
        let share = self.layout.share_of(version);
        let row = Some(self.layout.row(version.expert.layer, share, slot));
        let (index, precision) = (version.expert.index, version.precision);
        Some((Used { index, precision, share, row, is_on_device: false }, slot))
    }

    /// Slots of a finished step may be evicted again.
    pub fn unpin(&mut self, slots: Vec<SlotId>) {
        slots.into_iter().for_each(|slot| self.cache.unpin(slot));
    }

    /// Whether all slices of a version are in its slot or in staging.
    fn is_complete(&self, version: Version) -> bool {
        let is_staged = |kind: &SliceKind| self.in_flight.staging.is_ready(SliceId { version, kind: *kind });
        match self.cache.lookup(version) {
            Some(slot) => self.cache.is_ready(slot),
            None => self.layout.kinds(version.expert.layer).iter().all(is_staged),
        }
    }

    pub(super) fn progress(&self, version: Version) -> Progress {
        let Some(slot) = self.cache.lookup(version) else { return Progress::Gone };
        let kinds = self.layout.kinds(version.expert.layer);
        let is_any = |state| kinds.iter().any(|&kind| self.cache.state(slot, kind) == state);
        match (is_any(SliceState::Loading), is_any(SliceState::Free)) {
            (true, _) => Progress::Loading,
            (false, true) => Progress::Failed,
            (false, false) => Progress::Complete,
        }
    }

    // Slices

    /// Where a slice that a step uses is now.
    pub fn locate(&self, slice: SliceId, used: Used) -> Place {
        self.in_flight.locate(slice, used, &self.cache)
    }

    /// The product of a staged slice is done: its staging slot takes the next one.
    pub fn release(&mut self, slice: SliceId) {
        self.in_flight.staging.release(slice);
        self.pump();
    }

    pub fn n_staging(&self) -> usize {
        self.in_flight.staging.len()
    }

    /// Sets the number of staging slots; what is staged is dropped. To be called after [`super::Residency::quiesce`].
    ///
    /// # Panics
    /// If a read into staging is in flight.
    pub fn set_staging(&mut self, n_slots: usize) {
        let InFlight { staging, .. } = &mut self.in_flight;
        staging.retain(|_| false);
        assert_eq!(staging.n_free(), staging.len(), "a read would write into another slice's slot");
        *staging = Staging::new(Some(n_slots));
    }

    /// Frees the staging slots for `slice`, which no read in flight brings: other staged slices are dropped, so none
    /// may be in use. False if there are no staging slots.
    pub fn force_staging(&mut self, slice: SliceId, used: Used) -> bool {
        // A slice that has a slot is read into it or not at all.
        if used.row.is_some() {
            return false;
        }
        if !self.is_staged_or_cached(slice, used) {
            self.in_flight.force_staging(slice);
            self.pump();
        }
        self.is_staged_or_cached(slice, used)
    }

    /// Whether [`Memory::force_staging`] keeps what is staged.
    pub fn is_staged_or_cached(&self, slice: SliceId, used: Used) -> bool {
        used.row.is_some() || self.in_flight.staging.get(slice).is_some()
    }

    // Answers

    /// Takes what has landed, without waiting.
    ///
    /// Failures are kept for [`Memory::take_failure`].
    pub fn poll(&mut self) {
        self.in_flight.reader.poll(&mut self.in_flight.landed);
        self.land();
    }

    /// Waits until something lands. False when nothing is on its way.
    pub fn wait(&mut self) -> bool {
        let started = self.in_flight.reader.seconds();
        if !self.in_flight.reader.wait(&mut self.in_flight.landed) {
            return false;
        }
        self.moved.wait_seconds += self.in_flight.reader.seconds() - started;
        self.land();
        true
    }

    /// Waits until every read is answered. Whether any was.
    pub(super) fn drain(&mut self) -> bool {
        self.in_flight.reader.drain(&mut self.in_flight.landed);
        let has_answers = !self.in_flight.landed.is_empty();
        self.land();
        has_answers
    }

    /// Without overlap: waits until whatever of a step has a slot is there. What streams through staging cannot be
    /// there all at once.
    pub fn wait_for_all(&mut self, step: &LayerStep, kinds: &[SliceKind]) {
        let is_pending = |memory: &Self| {
            let of_slots = step.used.iter().filter(|used| used.row.is_some());
            let mut slices = of_slots
                .flat_map(|&used| kinds.iter().map(move |&kind| (SliceId { version: step.version(used), kind }, used)));
            slices.any(|(slice, used)| memory.locate(slice, used) == Place::Pending)
        };
        while !self.overlaps && is_pending(self) && self.wait() {}
    }

    /// The first wanted read that failed since the last call.
    pub fn take_failure(&mut self) -> Option<R::Error> {
        self.in_flight.failure.take()
    }

    /// After a failed batch: waits for what is in flight and forgets how it ended, so that it does not fail the next.
    pub fn settle(&mut self) {
        self.stop_filling(None);
        self.in_flight.forget_queue(true);
        loop {
            while self.wait() {}
            // Reads into free slots that have started.
            if !self.drain() {
                break;
            }
        }
        self.in_flight.failure = None;
    }

    /// Takes the answers that have come.
    fn land(&mut self) {
        let mut landed = std::mem::take(&mut self.in_flight.landed);
        for answer in landed.drain(..) {
            self.land_one(answer);
        }
        self.in_flight.landed = landed;
        self.pump();
    }

    fn land_one(&mut self, ReadDone { ticket, result }: ReadDone<R::Error>) {
        let asked = self.in_flight.answer(ticket, &mut self.cache);
        // If an upgrade fails, the low version goes on serving. A read ahead that failed is tried again when its layer
        // runs, if it is needed at all.
        let is_wanted = asked.class != LoadClass::Upgrade && self.in_flight.is_wanted(asked.target, &self.cache);
        let n_slices = self.arrived(asked.target, result.is_ok());
        match result {
            Ok(bytes) => {
                self.moved.slices += n_slices as u64;
                self.moved.bytes += bytes;
            }
            Err(error) if is_wanted => {
                self.in_flight.failure.get_or_insert(error);
            }
            Err(_) => {}
        }
    }

    /// Slices of a read are complete, or free again. Returns their number.
    pub(super) fn arrived(&mut self, target: Target, is_ok: bool) -> usize {
        let (slot, kinds) = match &target {
            Target::Slot { slot, slice } => (Some(*slot), std::slice::from_ref(&slice.kind)),
            Target::Record { slot, version } => (Some(*slot), self.layout.kinds(version.expert.layer)),
            Target::Staging { slot, slice } => {
                self.in_flight.staging.landed(*slot, is_ok);
                (None, std::slice::from_ref(&slice.kind))
            }
        };
        for (slot, &kind) in slot.iter().flat_map(|slot| kinds.iter().map(move |kind| (*slot, kind))) {
            if is_ok { self.cache.set_ready(slot, kind) } else { self.cache.set_failed(slot, kind) }
        }
        let (n_slices, version) = (kinds.len(), target.version());
        if !is_ok {
            self.ended.push((version, Ended::Failed));
        } else if self.is_complete(version) {
            self.ended.push((version, Ended::Complete));
        }
        n_slices
    }
}

// Asking for reads, and withdrawing those that have not started.

impl<R: Reads, O: Observer> Memory<R, O> {
    /// Reads versions into their slots, whose slices are all loading.
    pub(super) fn read_slots(&mut self, class: LoadClass, slots: &[(SlotId, Version)], order: &[SliceKind]) {
        let reads = self.in_flight.of_slots(class, slots, order, &mut self.cache, &self.layout);
        self.submit(class, reads);
    }

    /// Pins a resident version, and asks for slices of it that an earlier failure left free.
    pub(super) fn load_free_slices(&mut self, slot: SlotId, version: Version, order: &[SliceKind]) {
        let free: Vec<SliceKind> =
            order.iter().copied().filter(|&kind| self.cache.state(slot, kind) == SliceState::Free).collect();
        for &kind in &free {
            self.cache.set_loading(slot, kind);
        }
        self.cache.pin(slot);
        let class = LoadClass::on_demand(version.precision);
        let reads = self.in_flight.of_slices(class, slot, version, &free, &self.layout);
        self.submit(class, reads);
    }

    /// Fills what is free of the next layer's shares, and lines the rest up for staging: first what most tokens are
    /// expected to use. `most`: how many high versions will be wanted, if other versions may stand in for them.
    /// `low_share`: the part of the layer's experts, least popular first, that will be low; high versions where the
    /// popularity is not known.
    pub(super) fn read_next_layer(
        &mut self,
        layer: u16,
        (most, low_share): (Option<usize>, f32),
        expected: &Popularity,
        devices: &dyn DeviceResidency,
    ) {
        let Some(next) = (layer + 1..self.layout.n_blocks()).find(|&layer| self.layout.has(layer)) else { return };
        let order = self.layout.load_order(next, &[]);
        let mut experts: Vec<ExpertId> =
            (0..self.layout.n_expert(next)).map(|index| ExpertId { layer: next, index }).collect();
        expected.sort(&mut experts, |expert| expert.index);
        let n_low = if expected.is_empty() { 0 } else { n_least_popular(experts.len(), low_share) };
        let low = experts.split_off(experts.len() - n_low);
        let is_missing = |expert: &ExpertId| {
            let [high, low] = [Version::high(*expert), Version::low(*expert)];
            let is_here = self.cache.lookup(high).is_some() || devices.has(high);
            !is_here && (most.is_none() || self.cache.lookup(low).is_none())
        };
        let high = experts.into_iter().filter(is_missing).map(Version::high).take(most.unwrap_or(usize::MAX));
        let as_low = |expert| {
            if self.layout.has_version(Version::low(expert)) { Version::low(expert) } else { Version::high(expert) }
        };
        let missing: Vec<Version> = high.chain(low.into_iter().filter(is_missing).map(as_low)).collect();
        let mut filled = Vec::new();
        let mut rest = Vec::new();
        for version in missing {
            let slot = if self.cache.has_empty_slot(version) { self.acquire(version) } else { None };
            match slot {
                Some(slot) => filled.push((slot, version)),
                None => rest.push(version),
            }
        }
        self.in_flight.stage_next_layer(&rest, &order);
        self.read_slots(LoadClass::ReadAhead, &filled, &order);
    }

    /// Submits reads as long as there are staging slots and slices to stage.
    pub(super) fn pump(&mut self) {
        while let Some((class, read)) = self.in_flight.next_staged(&self.layout) {
            self.submit(class, vec![read]);
        }
    }

    /// Asks for reads of one class.
    pub(super) fn submit(&mut self, class: LoadClass, reads: Vec<Read>) {
        if reads.is_empty() {
            return;
        }
        self.in_flight.is_reading_ahead |= matches!(class, LoadClass::ReadAhead | LoadClass::Prefetch);
        self.in_flight.is_filling |= class == LoadClass::Fill;
        let refused = self.in_flight.reader.submit(class, &reads);
        if class.is_background() && self.observer.is_watching() {
            let is_refused = |read: &&Read| refused.iter().any(|refused| refused.ticket == read.ticket);
            self.tell_observer(class, reads.iter().filter(|read| !is_refused(read)));
        }
        for ReadDone { ticket, result } in refused {
            let target = self.in_flight.answer(ticket, &mut self.cache).target;
            if let (Err(error), false) = (result, class.is_background()) {
                self.in_flight.failure.get_or_insert(error);
            }
            self.cancel(target);
        }
    }

    /// Tells the observer of reads that no product waits for, all parts of a version together.
    fn tell_observer<'a>(&mut self, class: LoadClass, reads: impl Iterator<Item = &'a Read>) {
        let mut whole: BTreeMap<Version, (u64, bool)> = BTreeMap::new();
        for read in reads {
            let (bytes, is_rest) = whole.entry(read.target.version()).or_default();
            *bytes += read.bytes;
            *is_rest |= read.held.is_some();
        }
        for (version, (bytes, is_rest)) in whole {
            let rest = self.layout.rest(version).filter(|_| is_rest).map(|rest| rest.slices.iter().sum());
            let all = rest.or_else(|| self.layout.bytes(version)).unwrap_or(bytes);
            self.observer.loading(version, class, bytes, all);
        }
    }

    // Withdrawing

    /// Drops reads ahead that have not started and are not for `layer`, which runs: its router's choice is known now.
    pub(super) fn drop_ahead(&mut self, layer: u16) {
        if !self.in_flight.is_reading_ahead {
            return;
        }
        for class in [LoadClass::ReadAhead, LoadClass::Prefetch] {
            for asked in self.in_flight.withdraw(class, |version| version.expert.layer == layer, &mut self.cache) {
                let version = asked.target.version();
                self.ended.push((version, Ended::Withdrawn));
                self.observer.withdrawn(version, self.layout.bytes_of(asked));
                self.cancel(asked.target);
            }
        }
        self.in_flight.is_reading_ahead = self.in_flight.reader.outstanding() > 0;
    }

    /// From now on [`Memory::wait`] waits for `bytes` bytes of the reads for free slots, too.
    pub fn hasten_filling(&mut self, bytes: u64) {
        let (mut chosen, mut left) = (Vec::new(), bytes);
        for asked in self.in_flight.outstanding().filter(|asked| asked.class == LoadClass::Fill) {
            chosen.push(asked.target.version());
            left = left.saturating_sub(self.layout.bytes_of(asked));
            if left == 0 {
                break;
            }
        }
        self.in_flight.promote(|version| chosen.contains(&version));
    }

    /// Withdraws reads for free slots that have not started: of one layer, or all.
    pub(super) fn stop_filling(&mut self, layer: Option<u16>) {
        if !self.in_flight.is_filling {
            return;
        }
        if layer.is_none() {
            self.in_flight.reader.forget_fills();
        }
        let is_of_layer = |version: Version| layer.is_none_or(|layer| version.expert.layer == layer);
        let withdrawn = self.in_flight.withdraw(LoadClass::Fill, is_of_layer, &mut self.cache);
        self.is_full &= withdrawn.is_empty();
        withdrawn.into_iter().for_each(|asked| self.cancel(asked.target));
        self.in_flight.is_filling = self.in_flight.reader.outstanding() > 0;
    }

    /// Forgets a read that never started.
    fn cancel(&mut self, target: Target) {
        self.arrived(target, false);
        if !matches!(target, Target::Staging { .. }) {
            self.cache.release(target.version());
        }
    }
}
