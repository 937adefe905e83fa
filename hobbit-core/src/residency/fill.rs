//! Free slots are filled while nobody waits for a read: what is there already need not be read later. In the order of
//! the file; what an earlier run left ([`super::restore`]) has come before.

use super::{Observer, Reads, Residency};
use crate::cache::SlotId;
use crate::expert::{ExpertId, Version};
use crate::load::LoadClass;
use crate::route::Phase;

/// Between two tokens, at most so many bytes are lined up.
const BETWEEN_TOKENS_BYTES: u64 = 16 << 20;

/// How far it has come.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fill {
    /// Somebody wants it.
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

impl<R: Reads, O: Observer> Residency<R, O> {
    /// From now on free slots are filled while nobody waits, unless that would be seen in what a repeatable run or a
    /// trace depends on, or high versions are not wanted at all, or experts are virtual. Not for policies that take an insertion for a use.
    /// `between_tokens`: also between two tokens of an answer.
    pub fn fill_free_slots(&mut self, between_tokens: bool) {
        let is_repeatable = self.observer.is_watching() || self.precisions.options.deterministic;
        let is_fixed = is_repeatable || self.virtual_experts.is_some();
        self.fill.is_on = !is_fixed && self.precisions.loads_high();
        self.fill.is_on_between_tokens = self.fill.is_on && between_tokens;
        self.idle();
    }

    /// Nobody will need anything for a while: lines up reads for all free slots. An evaluation withdraws them.
    pub fn idle(&mut self) {
        if self.fill.is_on && !self.fill.is_done {
            self.poll();
            self.fill.is_little = false;
            let layers: Vec<u16> = self.layout.layers().collect();
            self.fill_slots(layers, u64::MAX);
        }
    }

    /// Waits for all that [`Residency::idle`] lines up. Bytes of the versions that are ready in slots then.
    pub fn finish_filling(&mut self) -> u64 {
        self.idle();
        while self.reads.outstanding() > 0 {
            self.reads.drain(&mut self.landed);
            self.land();
        }
        self.poll();
        let ready = self.cache.residents().filter(|(_, slot)| self.cache.is_ready(*slot));
        ready.filter_map(|(version, _)| self.layout.bytes(version)).sum()
    }

    /// A token is done, and the next may follow at once: the deepest layers leave most time.
    pub(super) fn fill_between_tokens(&mut self) {
        if self.fill.is_on_between_tokens && !self.fill.is_done && self.reads.outstanding() == 0 {
            self.fill.is_little = true;
            let layers: Vec<u16> = self.layout.layers().rev().collect();
            self.fill_slots(layers, BETWEEN_TOKENS_BYTES);
        }
    }

    /// An evaluation begins: the disk, and the memory that slots have yet to be given, are for what it needs.
    pub(super) fn pause_filling(&mut self, phase: Phase) {
        if !phase.is_decode() || !self.fill.is_little {
            self.stop_filling(None);
        }
    }

    fn fill_slots(&mut self, layers: Vec<u16>, most_bytes: u64) {
        let mut bytes = 0;
        for layer in layers {
            let mut slots: Vec<(SlotId, Version)> = Vec::new();
            for index in 0..self.layout.n_expert(layer) {
                let version = Version::high(ExpertId { layer, index });
                if bytes >= most_bytes || self.cache.lookup(version).is_some() || !self.cache.has_empty_slot(version) {
                    continue;
                }
                let Some(slot) = self.acquire(version) else { continue };
                bytes += self.layout.bytes(version).unwrap_or(0);
                slots.push((slot, version));
            }
            if !slots.is_empty() {
                self.fill.is_reading = true;
                let order = self.layout.load_order(layer, &[]);
                self.read_slots(LoadClass::Fill, &slots, &order);
            }
            if bytes >= most_bytes {
                return;
            }
        }
        self.fill.is_done = bytes == 0;
    }

    /// Withdraws what has not started: of one layer, or everything.
    pub(super) fn stop_filling(&mut self, layer: Option<u16>) {
        if !self.fill.is_reading {
            return;
        }
        if layer.is_none() {
            self.reads.forget_fills();
        }
        let is_of_layer = |version: Version| layer.is_none_or(|layer| version.expert.layer == layer);
        let withdrawn = self.withdraw(LoadClass::Fill, is_of_layer);
        self.fill.is_done &= withdrawn.is_empty();
        withdrawn.into_iter().for_each(|asked| self.cancel(asked.target));
        self.fill.is_reading = self.reads.outstanding() > 0;
    }
}
