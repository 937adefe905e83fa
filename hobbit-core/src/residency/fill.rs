//! Fills free slots while no product waits: first with the experts of an earlier run, then in the order of the file.

use super::interfaces::Observer;
use super::interfaces::Reads;
use super::memory::Memory;
use crate::cache::SlotId;
use crate::expert::{ExpertId, Precision, Version};
use crate::load::LoadClass;
use crate::route::Phase;

/// Maximum bytes that are lined up between two tokens.
const BETWEEN_TOKENS_BYTES: u64 = 16 << 20;

#[derive(Clone, Debug, Default)]
pub(super) struct Fill {
    is_on: bool,
    /// Also between two tokens.
    is_on_between_tokens: bool,
    /// Reads are so few that an evaluation may begin beside them.
    is_little: bool,
    /// These first, in this order.
    first: Vec<Version>,
}

impl Fill {
    pub(super) fn new(is_on: bool, between_tokens: bool, first: Vec<Version>) -> Self {
        Self { is_on, is_on_between_tokens: is_on && between_tokens, is_little: false, first }
    }

    /// Lines up reads for all free slots, while the session is idle. An evaluation withdraws them.
    pub(super) fn idle<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>) {
        if self.is_on && !memory.is_full {
            memory.poll();
            self.is_little = false;
            let layers: Vec<u16> = memory.layout.layers().collect();
            fill_slots(memory, &self.first, layers, u64::MAX);
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
            fill_slots(memory, &self.first, layers, BETWEEN_TOKENS_BYTES);
        }
    }

    /// An evaluation begins: the disk, and the memory that slots have yet to be given, are for what it needs.
    pub(super) fn pause<R: Reads, O: Observer>(&self, memory: &mut Memory<R, O>, phase: Phase) {
        if !phase.is_decode() || !self.is_little {
            memory.stop_filling(None);
        }
    }
}

fn fill_slots<R: Reads, O: Observer>(memory: &mut Memory<R, O>, first: &[Version], layers: Vec<u16>, most_bytes: u64) {
    let mut bytes = 0;
    for alike in first.chunk_by(is_alike) {
        bytes += fill_alike(memory, alike.iter().copied(), most_bytes.saturating_sub(bytes));
    }
    for layer in layers {
        let n_expert = memory.layout.n_expert(layer);
        let experts = (0..n_expert).map(|index| ExpertId { layer, index });
        let has_all = memory.cache.pools().capacity_of_layer(layer, Precision::High) >= u32::from(n_expert);
        bytes += fill_alike(memory, experts.clone().map(Version::high), most_bytes.saturating_sub(bytes));
        // Low versions beside all high ones save copies to a device; otherwise a high version saves more reads.
        if has_all {
            bytes += fill_alike(memory, experts.map(Version::low), most_bytes.saturating_sub(bytes));
        }
        if bytes >= most_bytes {
            return;
        }
    }
    memory.is_full = bytes == 0;
}

/// Whether one call reads both: they are of one layer and precision.
fn is_alike(a: &Version, b: &Version) -> bool {
    (a.expert.layer, a.precision) == (b.expert.layer, b.precision)
}

/// Lines up reads for those of the versions, all alike, that are missing and find a free slot, until they are
/// `most_bytes` or more. Returns their bytes.
fn fill_alike<R: Reads, O: Observer>(
    memory: &mut Memory<R, O>,
    versions: impl Iterator<Item = Version>,
    most_bytes: u64,
) -> u64 {
    let mut bytes = 0;
    let mut slots: Vec<(SlotId, Version)> = Vec::new();
    for version in versions {
        if bytes >= most_bytes || memory.cache.lookup(version).is_some() || !memory.cache.has_empty_slot(version) {
            continue;
        }
        let Some(slot) = memory.acquire(version) else { continue };
        bytes += memory.layout.bytes(version).unwrap_or(0);
        slots.push((slot, version));
    }
    if let Some((_, Version { expert, .. })) = slots.first() {
        let order = memory.layout.load_order(expert.layer, &[]);
        memory.read_slots(LoadClass::Fill, &slots, &order);
    }
    bytes
}
