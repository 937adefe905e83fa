//! Reads: what is asked for, in which order, and where the answers go.

use std::collections::BTreeMap;

use super::layer::DeviceResidency;
use super::layout::RestBytes;
use super::reads::Asked;
use super::step::LayerStep;
use super::{Landed, Observer, Read, Reads, Residency, Target};
use crate::cache::SlotId;
use crate::expert::{ExpertId, SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::predict::Popularity;

/// Records up to this many bytes are read at once: measured, a read of 1.5 MiB wins over three of 0.5. Of larger ones
/// the first product need not wait for the last slice: at 5 MiB one read is 10 % slower than three.
const RECORD_BYTES_MAX: u64 = 2 << 20;

/// The same where at most [`FEW_READS`] versions are read: slice by slice would be no earlier.
const RECORD_BYTES_MAX_OF_FEW: u64 = 8 << 20;
const FEW_READS: usize = 2;

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Makes background reads of versions that a step uses urgent.
    pub(super) fn promote(&mut self, step: &LayerStep) {
        if self.upgrades.underway.is_empty() && !self.is_reading_ahead && !self.fill.is_reading {
            return;
        }
        let is_needed = |version: Version| step.versions().any(|used| used == version);
        // From here on its read is one like any other: if it fails, the batch does.
        for slot in self.upgrades.take_over(is_needed) {
            self.cache.unpin(slot);
        }
        let tickets = &self.tickets;
        let mut needed = |ticket: u64| tickets.get(ticket).is_some_and(|target| is_needed(target.version()));
        self.reads.promote(&mut needed, LoadClass::OnDemandHigh);
    }

    /// Drops reads ahead that have not started and that the running layer has no use for: what the router chose is
    /// known now.
    pub(super) fn drop_obsolete(&mut self, layer: u16) {
        // Virtual experts come while layers run.
        if self.virtual_experts.is_none() {
            self.stop_filling(Some(layer));
        }
        if !self.is_reading_ahead {
            return;
        }
        for class in [LoadClass::ReadAhead, LoadClass::Prefetch] {
            for asked in self.withdraw(class, |version| version.expert.layer == layer) {
                let version = asked.target.version();
                if let Some(lookahead) = &mut self.lookahead {
                    lookahead.prefetcher.dropped(version);
                }
                let bytes = self.bytes_of(asked);
                self.observer.withdrawn(version, bytes);
                self.cancel(asked.target);
            }
        }
        self.is_reading_ahead = self.reads.outstanding() > 0;
    }

    /// Takes back reads of a class that have not started: what they were for.
    pub(super) fn withdraw(&mut self, class: LoadClass, is_obsolete: impl Fn(Version) -> bool) -> Vec<Asked> {
        let Self { reads, tickets, .. } = self;
        let mut unwanted = |ticket: u64| tickets.get(ticket).is_some_and(|target| is_obsolete(target.version()));
        let withdrawn = reads.withdraw(class, &mut unwanted);
        withdrawn.into_iter().map(|ticket| self.answered(ticket)).collect()
    }

    /// The read of a ticket, which is over: the slot beside it is unpinned.
    fn answered(&mut self, ticket: u64) -> Asked {
        let asked = self.tickets.answer(ticket);
        if let Some(held) = asked.held {
            self.cache.unpin(held);
        }
        asked
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
        if self.stages_ahead {
            for &kind in &order {
                self.ahead.extend(rest.iter().map(|&version| SliceId { version, kind }));
            }
        }
        self.read_slots(LoadClass::ReadAhead, &filled, &order);
    }

    /// Submits reads as long as there are staging slots and slices to stage.
    pub(super) fn pump(&mut self) {
        loop {
            let (class, slice) = match (self.queue.front(), self.ahead.front()) {
                (Some(&slice), _) => (LoadClass::on_demand(slice.version.precision), slice),
                (None, Some(&slice)) => (LoadClass::ReadAhead, slice),
                (None, None) => return,
            };
            if self.staging.get(slice).is_none() {
                let Some(slot) = self.staging.take(slice) else { return };
                let read = self.tickets.read(Target::Staging { slot, slice }, self.layout.slice_bytes(slice));
                self.submit(class, vec![read]);
            }
            match class {
                LoadClass::ReadAhead => self.ahead.pop_front(),
                _ => self.queue.pop_front(),
            };
        }
    }

    /// Reads versions into their slots, whose slices are all loading: small records at once, others slice by slice,
    /// first the slices that are multiplied first.
    pub(super) fn read_slots(&mut self, class: LoadClass, slots: &[(SlotId, Version)], order: &[SliceKind]) {
        let most = if slots.len() <= FEW_READS { RECORD_BYTES_MAX_OF_FEW } else { RECORD_BYTES_MAX };
        let mut reads = Vec::with_capacity(slots.len() * order.len());
        let mut by_slice = Vec::new();
        for &(slot, version) in slots {
            let part = self.layout.part_of(&self.cache, version);
            let whole = part.map_or(self.layout.record_bytes(version), |(_, rest)| rest.record);
            match whole.filter(|bytes| *bytes <= most) {
                Some(bytes) => reads.push(self.read(Target::Record { slot, version }, bytes, part)),
                None => by_slice.push((slot, version, part)),
            }
        }
        for &kind in order {
            for &(slot, version, part) in &by_slice {
                let slice = SliceId { version, kind };
                let bytes = part.map_or(self.layout.slice_bytes(slice), |(_, rest)| rest.slices[kind.index()]);
                reads.push(self.read(Target::Slot { slot, slice }, bytes, part));
            }
        }
        self.submit(class, reads);
    }

    /// A read into a slot, beside a low version that it needs no bytes of.
    pub(super) fn read(&mut self, target: Target, bytes: u64, part: Option<(SlotId, RestBytes)>) -> Read {
        let held = part.map(|(slot, _)| slot);
        if let Some(held) = held {
            self.cache.pin(held);
        }
        self.tickets.read_beside(target, bytes, held)
    }

    /// Whether the running split waits for this read.
    fn is_wanted(&self, target: Target) -> bool {
        self.running == Some(target.version().expert.layer)
            && match target {
                Target::Slot { slot, .. } | Target::Record { slot, .. } => self.cache.is_pinned(slot),
                Target::Staging { slice, .. } => self.staging.get(slice).is_some(),
            }
    }

    /// Bytes of outstanding reads: of those that the running split waits for, whatever they were asked for as, and of
    /// the others.
    pub(super) fn queued(&self) -> (u64, u64) {
        let (mut waited, mut background) = (0, 0);
        for asked in self.tickets.outstanding() {
            *(if self.is_wanted(asked.target) { &mut waited } else { &mut background }) += self.bytes_of(asked);
        }
        (waited, background)
    }

    /// Takes the answers in [`Residency::landed`].
    pub(super) fn land(&mut self) {
        let mut landed = std::mem::take(&mut self.landed);
        for answer in landed.drain(..) {
            self.land_one(answer);
        }
        self.landed = landed;
        self.pump();
    }

    fn land_one(&mut self, Landed { ticket, result }: Landed<R::Error>) {
        let target = self.answered(ticket).target;
        let version = target.version();
        let is_wanted = self.is_wanted(target);
        let n_slices = self.arrived(target, result.is_ok());
        let is_staged = matches!(target, Target::Staging { .. });
        self.read_ahead_landed(version, result.is_ok());
        match result {
            Ok(bytes) => {
                self.counters.slices_loaded += n_slices as u64;
                self.counters.bytes_read += bytes;
            }
            // The low version goes on serving.
            Err(_) if !is_staged && self.upgrades.fail(version) => {}
            // A read ahead that failed is tried again when its layer runs, if it is needed at all.
            Err(error) if is_wanted => {
                self.failure.get_or_insert(error);
            }
            Err(_) => {}
        }
    }

    /// Slices of a read are complete, or free again. Returns their number.
    fn arrived(&mut self, target: Target, is_ok: bool) -> usize {
        let (slot, kinds) = match &target {
            Target::Slot { slot, slice } => (*slot, std::slice::from_ref(&slice.kind)),
            Target::Record { slot, version } => (*slot, self.layout.kinds(version.expert.layer)),
            Target::Staging { slot, .. } => {
                self.staging.landed(*slot, is_ok);
                return 1;
            }
        };
        for &kind in kinds {
            match is_ok {
                true => self.cache.set_ready(slot, kind),
                false => self.cache.set_failed(slot, kind),
            }
        }
        kinds.len()
    }

    /// Forgets a read that never started.
    pub(super) fn cancel(&mut self, target: Target) {
        let version = target.version();
        self.read_ahead_landed(version, false);
        self.upgrades.fail(version);
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
        self.is_reading_ahead |= matches!(class, LoadClass::ReadAhead | LoadClass::Prefetch);
        let refused = self.reads.submit(class, &reads);
        if class.is_background() && self.observer.is_watching() {
            let is_refused = |read: &&Read| refused.iter().any(|own| own.ticket == read.ticket);
            self.tell_of(class, reads.iter().filter(|read| !is_refused(read)));
        }
        for Landed { ticket, result } in refused {
            let target = self.answered(ticket).target;
            if let (Err(error), false) = (result, class.is_background()) {
                self.failure.get_or_insert(error);
            }
            self.cancel(target);
        }
    }

    /// Tells who looks on of reads that no product waits for, all parts of a version together.
    fn tell_of<'a>(&mut self, class: LoadClass, reads: impl Iterator<Item = &'a Read>) {
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

    /// Bytes of weights that a read brings.
    pub(super) fn bytes_of(&self, Asked { target, held }: Asked) -> u64 {
        if let Some(rest) = self.layout.rest(target.version()).filter(|_| held.is_some()) {
            return match target {
                Target::Slot { slice, .. } | Target::Staging { slice, .. } => rest.slices[slice.kind.index()],
                Target::Record { .. } => rest.slices.iter().sum(),
            };
        }
        match target {
            Target::Slot { slice, .. } | Target::Staging { slice, .. } => self.layout.slice_bytes(slice),
            Target::Record { version, .. } => self.layout.bytes(version).unwrap_or(0),
        }
    }
}
