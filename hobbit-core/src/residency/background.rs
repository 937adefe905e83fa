//! Work beside the layers: reading ahead ([`super::ahead`]), virtual experts ([`super::virtual_experts`]), and here
//! upgrades, free slots, and the residents of an earlier run.
//!
//! While nothing else is read, a frequently used low version is replaced by its high version; the low one serves
//! until the high one is complete. Free slots are filled in the order of the file, after the residents of an earlier
//! run.

use std::collections::BTreeSet;

use super::ahead::Lookahead;
use super::upgrades::{Upgrade, Upgrades};
use super::virtual_experts::VirtualExperts;
use super::{Observer, Reads, Residency};
use crate::cache::{SavedCache, SlotId};
use crate::expert::{ExpertId, Precision, Version};
use crate::load::LoadClass;
use crate::route::Phase;

/// Work that no product waits for.
#[derive(Default)]
pub(super) struct Background {
    pub(super) fill: Fill,
    pub(super) upgrades: Upgrades,
    /// While tokens are decoded, missing experts are not waited for.
    pub(super) virtual_experts: Option<VirtualExperts>,
    pub(super) lookahead: Option<Lookahead>,
}

impl Background {
    /// Whether upgrades or reads for free slots may be waiting or in flight.
    pub(super) fn is_reading(&self) -> bool {
        self.fill.is_reading || !self.upgrades.underway.is_empty()
    }

    /// Whether a version is replacing its low version, or arrives for a layer of virtual experts: it is not present
    /// before it is complete.
    pub(super) fn is_arriving(&self, version: Version) -> bool {
        self.virtual_experts.as_ref().is_some_and(|own| own.is_underway(version))
    }

    /// Whether every expert of a layer of virtual experts has a slot: then none gives way.
    pub(super) fn is_whole(&self, layer: u16) -> bool {
        self.virtual_experts.as_ref().is_some_and(|own| own.is_whole(layer))
    }

    /// Whether what is staged is meant for a later layer.
    pub(super) fn is_staged_ahead(&self, version: Version, layer: u16) -> bool {
        let is_outstanding = |own: &Lookahead| own.prefetcher.is_outstanding(version);
        version.expert.layer != layer && self.lookahead.as_ref().is_some_and(is_outstanding)
    }
}

/// High versions on their way in the background, at the most.
const UPGRADES_MAX: usize = 2;

/// Between two tokens, at most so many bytes are lined up.
const BETWEEN_TOKENS_BYTES: u64 = 16 << 20;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fill {
    /// Free slots are to be filled.
    is_on: bool,
    /// The same between two tokens.
    is_on_between_tokens: bool,
    /// Reads are lined up or on their way: those of a layer that runs may have to be withdrawn.
    pub(super) is_reading: bool,
    /// They are so few that an evaluation may begin beside them.
    is_little: bool,
    /// No slot was free at the last look, and none has become so.
    pub(super) is_done: bool,
}

/// Versions that are asked for at once: enough that the store is never without a read.
const READ_AT_ONCE: usize = 32;

impl<R: Reads, O: Observer> Residency<R, O> {
    // Upgrades

    /// Looks after upgrades that have landed.
    pub(super) fn settle_upgrades(&mut self) {
        self.counts.all.upgrades += self.background.upgrades.settle(&mut self.cache, &self.layout);
    }

    /// Starts one, if nothing else is read and none has started since the last token.
    pub(super) fn upgrade_if_idle(&mut self) {
        let may_start = self.background.upgrades.may_start && self.background.upgrades.underway.len() < UPGRADES_MAX;
        if may_start && self.in_flight.reader.outstanding() == 0 {
            self.upgrade();
        }
    }

    /// Upgrades between tokens only, at most one at a time, complete before the next token but one: what is resident
    /// does not depend on how fast reads are.
    pub(super) fn upgrade_in_step(&mut self) {
        self.settle_upgrades();
        while !self.background.upgrades.underway.is_empty() && self.wait() {
            self.settle_upgrades();
        }
        self.upgrade();
    }

    /// Replaces one low version by its high version, if one is worth it. One block a time: looking costs time too.
    fn upgrade(&mut self) {
        if self.precisions.is_exact() || !self.precisions.options.upgrade || !self.precisions.loads_high() {
            return;
        }
        let layer = self.background.upgrades.next_layer;
        self.background.upgrades.next_layer = (layer + 1) % self.layout.n_blocks().max(1);
        let Some(expert) = self.cache.upgrade(layer).filter(|&expert| !self.precisions.is_forced_low(expert)) else {
            return;
        };
        let version = Version::high(expert);
        let Some(acquired) = self.cache.acquire_upgrade(version) else { return };
        self.background.upgrades.may_start = false;
        self.takes(acquired.slot, version, acquired.evicted);
        // It must not be evicted between its landing and `settle_upgrades`.
        self.cache.pin(acquired.slot);
        self.background.upgrades.underway.push(Upgrade { version, slot: acquired.slot, failed: false });
        let order = self.layout.load_order(layer, &[]);
        self.read_slots(LoadClass::Upgrade, &[(acquired.slot, version)], &order);
    }

    // Free slots

    /// From now on free slots are filled while no product waits, unless that would be seen in what a repeatable run
    /// or a trace depends on, or high versions are not wanted at all, or experts are virtual. Not for policies that
    /// take an insertion for a use. `between_tokens`: also between two tokens of an answer.
    pub fn fill_free_slots(&mut self, between_tokens: bool) {
        let is_repeatable = self.observer.is_watching() || self.precisions.options.deterministic;
        let is_fixed = is_repeatable || self.background.virtual_experts.is_some();
        self.background.fill.is_on = !is_fixed && self.precisions.loads_high();
        self.background.fill.is_on_between_tokens = self.background.fill.is_on && between_tokens;
        self.idle();
    }

    /// Lines up reads for all free slots, while the session is idle. An evaluation withdraws them.
    pub fn idle(&mut self) {
        if self.background.fill.is_on && !self.background.fill.is_done {
            self.poll();
            self.background.fill.is_little = false;
            let layers: Vec<u16> = self.layout.layers().collect();
            self.fill_slots(layers, u64::MAX);
        }
    }

    /// Waits for all that [`Residency::idle`] lines up. Bytes of the versions that are ready in slots then.
    pub fn finish_filling(&mut self) -> u64 {
        self.idle();
        while self.in_flight.reader.outstanding() > 0 {
            self.drain();
        }
        self.poll();
        let ready = self.cache.residents().filter(|(_, slot)| self.cache.is_ready(*slot));
        ready.filter_map(|(version, _)| self.layout.bytes(version)).sum()
    }

    /// A token is done, and the next may follow at once: the deepest layers leave most time.
    pub(super) fn fill_between_tokens(&mut self) {
        if self.background.fill.is_on_between_tokens
            && !self.background.fill.is_done
            && self.in_flight.reader.outstanding() == 0
        {
            self.background.fill.is_little = true;
            let layers: Vec<u16> = self.layout.layers().rev().collect();
            self.fill_slots(layers, BETWEEN_TOKENS_BYTES);
        }
    }

    /// An evaluation begins: the disk, and the memory that slots have yet to be given, are for what it needs.
    pub(super) fn pause_filling(&mut self, phase: Phase) {
        if !phase.is_decode() || !self.background.fill.is_little {
            self.stop_filling(None);
        }
    }

    fn fill_slots(&mut self, layers: Vec<u16>, most_bytes: u64) {
        let mut bytes = 0;
        for layer in layers {
            let mut slots: Vec<(SlotId, Version)> = Vec::new();
            let experts = (0..self.layout.n_expert(layer)).map(|index| ExpertId { layer, index });
            let has_all =
                self.cache.capacity_of_layer(layer, Precision::High) >= u32::from(self.layout.n_expert(layer));
            // Low versions beside all high ones save copies to a device; otherwise a high version saves more reads.
            let low = experts.clone().filter(|_| has_all).map(Version::low);
            for version in experts.map(Version::high).chain(low) {
                if bytes >= most_bytes || self.cache.lookup(version).is_some() || !self.cache.has_empty_slot(version) {
                    continue;
                }
                let Some(slot) = self.acquire(version) else { continue };
                bytes += self.layout.bytes(version).unwrap_or(0);
                slots.push((slot, version));
            }
            slots.sort_by_key(|(_, version)| version.precision);
            for alike in slots.chunk_by(|a, b| a.1.precision == b.1.precision) {
                self.background.fill.is_reading = true;
                let order = self.layout.load_order(layer, &[]);
                self.read_slots(LoadClass::Fill, alike, &order);
            }
            if bytes >= most_bytes {
                return;
            }
        }
        self.background.fill.is_done = bytes == 0;
    }

    /// Withdraws what has not started: of one layer, or everything.
    pub(super) fn stop_filling(&mut self, layer: Option<u16>) {
        if !self.background.fill.is_reading {
            return;
        }
        if layer.is_none() {
            self.in_flight.reader.forget_fills();
        }
        let is_of_layer = |version: Version| layer.is_none_or(|layer| version.expert.layer == layer);
        let withdrawn = self.in_flight.withdraw(LoadClass::Fill, is_of_layer, &mut self.cache);
        self.background.fill.is_done &= withdrawn.is_empty();
        withdrawn.into_iter().for_each(|asked| self.cancel(asked.target));
        self.background.fill.is_reading = self.in_flight.reader.outstanding() > 0;
    }

    // Warm start

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

    /// The same without a read: it is there at once.
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
