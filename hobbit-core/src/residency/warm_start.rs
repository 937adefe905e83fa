//! The residents of an earlier run.

use std::collections::BTreeSet;

use super::interfaces::Observer;
use super::interfaces::Reads;
use super::memory::Memory;
use crate::cache::{SavedCache, SlotId};
use crate::expert::{ExpertId, Version};
use crate::load::LoadClass;

/// Versions that are asked for at once: enough that the store is never without a read.
const READ_AT_ONCE: usize = 32;

impl<R: Reads, O: Observer> Memory<R, O> {
    /// Shows the policy what it learned in an earlier run.
    pub fn load_statistics(&mut self, saved: &SavedCache) {
        self.cache.load_statistics(saved);
    }

    /// Reads what was resident in an earlier run, as far as there are slots: how many versions are there then. Whatever
    /// else is resident leaves. Reads that fail are made again when they are needed.
    pub fn restore(&mut self, saved: &SavedCache) -> u64 {
        let wanted: BTreeSet<Version> = saved.residents.iter().copied().collect();
        // Experts that passed through on their way to a device make room; the others need not be read again.
        let passed = self.cache.residents().map(|(version, _)| version).filter(|version| !wanted.contains(version));
        for version in passed.collect::<Vec<_>>() {
            self.cache.release(version);
        }
        let mut taken = self.cache.restore(saved);
        taken.sort_by_key(|(_, version)| (version.expert.layer, version.precision, version.expert.index));
        let is_alike = |a: &(SlotId, Version), b: &(SlotId, Version)| {
            (a.1.expert.layer, a.1.precision) == (b.1.expert.layer, b.1.precision)
        };
        for slots in taken.chunk_by(is_alike).flat_map(|alike| alike.chunks(READ_AT_ONCE)) {
            let Version { expert: ExpertId { layer, .. }, precision } = slots[0].1;
            for &(slot, version) in slots {
                self.takes(slot, version, None);
            }
            let order = self.layout.load_order(layer, &[]);
            self.read_slots(LoadClass::on_demand(precision), slots, &order);
            while self.in_flight.reader.outstanding() > READ_AT_ONCE && self.wait() {}
        }
        self.settle();
        for (_, version) in taken {
            if !self.cache.is_complete(version) {
                self.cache.release(version);
            }
        }
        wanted.into_iter().filter(|&version| self.cache.is_complete(version)).count() as u64
    }

    /// The experts that fit, as residents of an earlier run. `experts`: the most wanted is last.
    pub fn that_fit(&self, experts: &[ExpertId]) -> SavedCache {
        let residents = experts.iter().copied().map(Version::high).collect();
        let saved = SavedCache { residents, ..SavedCache::default() };
        SavedCache { residents: self.cache.pools().that_fit(&saved), ..saved }
    }

    /// As [`Memory::restore`], without a read: it is there at once.
    pub fn assume(&mut self, saved: &SavedCache) {
        for (slot, version) in self.cache.restore(saved) {
            for &kind in self.layout.kinds(version.expert.layer) {
                self.cache.set_loading(slot, kind);
                self.cache.set_ready(slot, kind);
            }
        }
    }

    /// The residents, for another run.
    pub fn save(&mut self, name: &str) -> SavedCache {
        self.cache.save(name)
    }
}
