//! Asks for reads, and takes back those that have not started.

use std::collections::BTreeMap;

use super::devices::DeviceResidency;
use super::memory::{Ended, Memory};
use super::observer::Observer;
use super::reads::{Landed, Read, Reads, Target};
use crate::cache::{SliceState, SlotId};
use crate::expert::{ExpertId, SliceKind, Version};
use crate::load::LoadClass;
use crate::predict::Popularity;

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

    /// Fills what is free of the next layer's high share, and lines the rest up for staging: first what most tokens are
    /// expected to use. `most`: how many high versions will be wanted, if other versions may stand in for them.
    pub(super) fn read_next_layer(
        &mut self,
        layer: u16,
        most: Option<usize>,
        expected: &Popularity,
        devices: &dyn DeviceResidency,
    ) {
        let Some(next) = (layer + 1..self.layout.n_blocks()).find(|&layer| self.layout.has(layer)) else { return };
        let order = self.layout.load_order(next, &[]);
        let mut missing: Vec<Version> = (0..self.layout.n_expert(next))
            .map(|index| Version::high(ExpertId { layer: next, index }))
            .filter(|&version| self.cache.lookup(version).is_none() && !devices.has(version))
            .filter(|&version| most.is_none() || self.cache.lookup(Version::low(version.expert)).is_none())
            .collect();
        expected.sort(&mut missing, |version| version.expert.index);
        missing.truncate(most.unwrap_or(usize::MAX));
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
