//! Fills free slots while no product waits, in the order of the file, after the residents of an earlier run.

use super::interfaces::Observer;
use super::interfaces::Reads;
use super::memory::Memory;
use crate::cache::SlotId;
use crate::expert::{ExpertId, Precision, Version};
use crate::load::LoadClass;
use crate::route::Phase;

/// Maximum bytes that are lined up between two tokens.
const BETWEEN_TOKENS_BYTES: u64 = 16 << 20;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fill {
    is_on: bool,
    /// Also between two tokens.
    is_on_between_tokens: bool,
    /// Reads are so few that an evaluation may begin beside them.
    is_little: bool,
}

impl Fill {
    pub(super) fn new(is_on: bool, between_tokens: bool) -> Self {
        Self { is_on, is_on_between_tokens: is_on && between_tokens, is_little: false }
    }

    /// Lines up reads for all free slots, while the session is idle. An evaluation withdraws them.
    pub(super) fn idle<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>) {
        if self.is_on && !memory.is_full {
            memory.poll();
            self.is_little = false;
            let layers: Vec<u16> = memory.layout.layers().collect();
            fill_slots(memory, layers, u64::MAX);
        }
    }

    /// Waits for all that [`Fill::idle`] lines up. Bytes of the versions that are ready in slots then.
    pub(super) fn finish<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>) -> u64 {
        self.idle(memory);
        while memory.in_flight.reader.outstanding() > 0 {
            memory.drain();
        }
        memory.poll();
        let ready = memory.cache.residents().filter(|(_, slot)| memory.cache.is_ready(*slot));
        ready.filter_map(|(version, _)| memory.layout.bytes(version)).sum()
    }

    /// A token is done, and the next may follow at once: the deepest layers leave most time.
    pub(super) fn between_tokens<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>) {
        if self.is_on_between_tokens && !memory.is_full && memory.in_flight.reader.outstanding() == 0 {
            self.is_little = true;
            let layers: Vec<u16> = memory.layout.layers().rev().collect();
            fill_slots(memory, layers, BETWEEN_TOKENS_BYTES);
        }
    }

    /// An evaluation begins: the disk, and the memory that slots have yet to be given, are for what it needs.
    pub(super) fn pause<R: Reads, O: Observer>(&self, memory: &mut Memory<R, O>, phase: Phase) {
        if !phase.is_decode() || !self.is_little {
            memory.stop_filling(None);
        }
    }
}

fn fill_slots<R: Reads, O: Observer>(memory: &mut Memory<R, O>, layers: Vec<u16>, most_bytes: u64) {
    let mut bytes = 0;
    for layer in layers {
        let mut slots: Vec<(SlotId, Version)> = Vec::new();
        let n_expert = memory.layout.n_expert(layer);
        let experts = (0..n_expert).map(|index| ExpertId { layer, index });
        let has_all = memory.cache.pools().capacity_of_layer(layer, Precision::High) >= u32::from(n_expert);
        // Low versions beside all high ones save copies to a device; otherwise a high version saves more reads.
        let low = experts.clone().filter(|_| has_all).map(Version::low);
        for version in experts.map(Version::high).chain(low) {
            if bytes >= most_bytes || memory.cache.lookup(version).is_some() || !memory.cache.has_empty_slot(version) {
                continue;
            }
            let Some(slot) = memory.acquire(version) else { continue };
            bytes += memory.layout.bytes(version).unwrap_or(0);
            slots.push((slot, version));
        }
        slots.sort_by_key(|(_, version)| version.precision);
        for alike in slots.chunk_by(|a, b| a.1.precision == b.1.precision) {
            let order = memory.layout.load_order(layer, &[]);
            memory.read_slots(LoadClass::Fill, alike, &order);
        }
        if bytes >= most_bytes {
            return;
        }
    }
    memory.is_full = bytes == 0;
}
