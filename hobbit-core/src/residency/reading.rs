//! Submits reads and takes their answers: here the reads in flight meet the cache, the background work, the
//! counters and the observer.

use std::collections::BTreeMap;

use super::devices::DeviceResidency;
use super::step::{LayerStep, Used};
use super::{Landed, Observer, Place, Read, Reads, Residency, Target};
use crate::cache::SlotId;
use crate::expert::{ExpertId, SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::predict::Popularity;

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Makes background reads of versions that a step uses urgent.
    pub(super) fn promote(&mut self, step: &LayerStep) {
        if !self.in_flight.is_reading_ahead && !self.background.is_reading() {
            return;
        }
        // An upgrade whose expert a device has remains one: without its pin, its slot could be evicted at once.
        let is_needed = |version| step.used.iter().any(|&used| !used.is_on_device && step.version(used) == version);
        // From here on its read is one like any other: if it fails, the batch does.
        for slot in self.background.upgrades.take_over(is_needed) {
            self.cache.unpin(slot);
        }
        self.in_flight.promote(is_needed);
    }

    /// Drops reads ahead that have not started and that the running layer has no use for: what the router chose is
    /// known now.
    pub(super) fn drop_obsolete(&mut self, layer: u16) {
        // Virtual experts come while layers run.
        if self.background.virtual_experts.is_none() {
            self.stop_filling(Some(layer));
        }
        if !self.in_flight.is_reading_ahead {
            return;
        }
        for class in [LoadClass::ReadAhead, LoadClass::Prefetch] {
            for asked in self.in_flight.withdraw(class, |version| version.expert.layer == layer, &mut self.cache) {
                let version = asked.target.version();
                self.background.lookahead.iter_mut().for_each(|own| own.prefetcher.dropped(version));
                self.observer.withdrawn(version, self.layout.bytes_of(asked));
                self.cancel(asked.target);
            }
        }
        self.in_flight.is_reading_ahead = self.in_flight.reader.outstanding() > 0;
    }

    /// Fills what is free of the next layer's high share, and lines the rest up for staging: first who most tokens are
    /// expected to use. `n_high`: so many the running layer uses in high precision.
    pub(super) fn look_ahead(
        &mut self,
        layer: u16,
        n_high: usize,
        expected: &Popularity,
        devices: &dyn DeviceResidency,
    ) {
        let Some(next) = (layer + 1..self.layout.n_blocks()).find(|&layer| self.layout.has(layer)) else { return };
        let is_exact = self.precisions.is_exact();
        // How far a read ahead has come decides what may be evicted for the next: a matter of speed.
        if !self.precisions.loads_high()
            || self.precisions.options.deterministic && !(is_exact && self.rerouting.is_off())
        {
            return;
        }
        let order = self.layout.load_order(next, &[]);
        let n_expert = self.layout.n_expert(next);
        let mut missing: Vec<Version> = (0..n_expert)
            .map(|index| Version::high(ExpertId { layer: next, index }))
            .filter(|&version| self.cache.lookup(version).is_none() && !devices.has(version))
            .filter(|&version| is_exact || self.cache.lookup(Version::low(version.expert)).is_none())
            .collect();
        expected.sort(&mut missing, |version| version.expert.index);
        // About as many as here are wanted in high precision.
        missing.truncate(if is_exact { usize::from(n_expert) } else { n_high });
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

    /// Reads versions into their slots, whose slices are all loading.
    pub(super) fn read_slots(&mut self, class: LoadClass, slots: &[(SlotId, Version)], order: &[SliceKind]) {
        let reads = self.in_flight.of_slots(slots, order, &mut self.cache, &self.layout);
        self.submit(class, reads);
    }

    /// Where a slice that a step uses is now.
    pub fn locate(&self, slice: SliceId, used: Used) -> Place {
        self.in_flight.locate(slice, used, &self.cache)
    }

    /// The product of a staged slice is done: its staging slot takes the next one.
    pub fn release(&mut self, slice: SliceId) {
        self.in_flight.staging.release(slice);
        self.pump();
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

    /// Whether [`Residency::force_staging`] keeps what is staged.
    pub fn is_staged_or_cached(&self, slice: SliceId, used: Used) -> bool {
        used.row.is_some() || self.in_flight.staging.get(slice).is_some()
    }

    /// Takes what has landed, without waiting.
    ///
    /// Failures are kept for [`Residency::take_failure`].
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
        self.counts.all.wait_seconds += self.in_flight.reader.seconds() - started;
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
        let is_pending = |own: &Self| {
            let of_slots = step.used.iter().filter(|used| used.row.is_some());
            let mut slices = of_slots
                .flat_map(|&used| kinds.iter().map(move |&kind| (SliceId { version: step.version(used), kind }, used)));
            slices.any(|(slice, used)| own.locate(slice, used) == Place::Pending)
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

    fn land_one(&mut self, Landed { ticket, result }: Landed<R::Error>) {
        let target = self.in_flight.answer(ticket, &mut self.cache).target;
        let version = target.version();
        let is_wanted = self.in_flight.is_wanted(target, &self.cache);
        let n_slices = self.arrived(target, result.is_ok());
        let is_staged = matches!(target, Target::Staging { .. });
        match result {
            Ok(bytes) => {
                self.counts.all.slices_loaded += n_slices as u64;
                self.counts.all.bytes_read += bytes;
            }
            // The low version goes on serving.
            Err(_) if !is_staged && self.background.upgrades.fail(version) => {}
            // A read ahead that failed is tried again when its layer runs, if it is needed at all.
            Err(error) if is_wanted => {
                self.in_flight.failure.get_or_insert(error);
            }
            Err(_) => {}
        }
    }

    /// Slices of a read are complete, or free again. Returns their number.
    fn arrived(&mut self, target: Target, is_ok: bool) -> usize {
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
        let n_slices = kinds.len();
        self.read_ahead_landed(target.version(), is_ok);
        n_slices
    }

    /// Forgets a read that never started.
    pub(super) fn cancel(&mut self, target: Target) {
        let version = target.version();
        self.background.upgrades.fail(version);
        self.arrived(target, false);
        if !matches!(target, Target::Staging { .. }) {
            self.cache.release(version);
        }
    }

    /// Asks for reads of one class.
    pub(super) fn submit(&mut self, class: LoadClass, reads: Vec<Read>) {
        if reads.is_empty() {
            return;
        }
        self.in_flight.is_reading_ahead |= matches!(class, LoadClass::ReadAhead | LoadClass::Prefetch);
        let refused = self.in_flight.reader.submit(class, &reads);
        if class.is_background() && self.observer.is_watching() {
            let is_refused = |read: &&Read| refused.iter().any(|own| own.ticket == read.ticket);
            self.tell_observer(class, reads.iter().filter(|read| !is_refused(read)));
        }
        for Landed { ticket, result } in refused {
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
}
