//! Free slots are filled while nobody waits for a read: what is there already need not be read later. In the order of the
//! file; what an earlier run left (`warm`) has come before.

use super::Residency;
use crate::cache::SlotId;
use crate::cache::policy::PolicyKind;
use crate::expert::{ExpertId, Version};
use crate::load::LoadClass;
use crate::store::Arena;

/// Between two tokens, at most so many bytes are lined up.
const BETWEEN_TOKENS_BYTES: u64 = 16 << 20;

/// How far it has come.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fill {
    /// Reads are lined up or on their way.
    is_reading: bool,
    /// They are so few that an evaluation may begin beside them.
    is_little: bool,
    /// No slot was free at the last look, and none has become so.
    is_done: bool,
}

impl Residency {
    /// Nobody will need anything for a while: lines up reads for all free slots. An evaluation withdraws them.
    pub(in super::super) fn idle(&mut self) {
        if self.fills && !self.fill.is_done {
            self.poll();
            self.fill.is_little = false;
            self.fill_slots(0..self.catalog.layers.len(), u64::MAX);
        }
    }

    /// Waits for all that [`Residency::idle`] lines up. Bytes of the versions that are ready in slots then.
    pub(in super::super) fn finish_filling(&mut self) -> u64 {
        self.idle();
        while !self.loader.is_idle() {
            let done = self.loader.drain();
            self.land(done);
        }
        self.poll();
        let ready = self.cache.residents().filter(|(_, slot)| self.cache.is_ready(*slot));
        ready.filter_map(|(version, _)| self.version_bytes(version)).sum()
    }

    /// A token is done, and the next may follow at once: the deepest layers leave most time.
    pub(super) fn fill_between_tokens(&mut self) {
        if self.fills_between_tokens && !self.fill.is_done && self.loader.is_idle() {
            self.fill.is_little = true;
            self.fill_slots((0..self.catalog.layers.len()).rev(), BETWEEN_TOKENS_BYTES);
        }
    }

    /// An evaluation begins: the disk, and the memory that slots have yet to be given, are for what it needs.
    pub(in super::super) fn begin_batch(&mut self, n_tokens: u32) {
        if n_tokens > 1 || !self.fill.is_little {
            self.stop_filling(None);
        }
    }

    /// Whether slots that are free may be filled with what nobody has asked for. Traces and repeatable runs must not depend
    /// on how fast reads are; devices keep what they need themselves.
    pub(super) fn may_fill(&self, policy: PolicyKind) -> bool {
        // Others take an insertion for a use.
        let is_indifferent = policy == PolicyKind::Foresight || self.description.plan.is_fully_resident();
        let is_repeatable = self.recorder.is_some() || self.precisions.options.deterministic;
        is_indifferent && !is_repeatable && self.tiers.is_empty() && self.precisions.loads_high()
    }

    fn fill_slots(&mut self, layers: impl Iterator<Item = usize>, most_bytes: u64) {
        let mut bytes = 0;
        for at in layers {
            let (layer, n_expert) = (self.catalog.layers[at].layer, self.catalog.layers[at].n_expert);
            let mut reads: Vec<(SlotId, Version)> = Vec::new();
            for version in (0..n_expert).map(|index| Version::high(ExpertId { layer, index })) {
                if bytes >= most_bytes || self.cache.lookup(version).is_some() || !self.cache.has_empty_slot(version) {
                    continue;
                }
                let Some(acquired) = self.cache.acquire(version) else { continue };
                self.load_order(layer, &[]).iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
                bytes += self.version_bytes(version).unwrap_or(0);
                reads.push((acquired.slot, version));
            }
            self.read_fill(&reads);
            if bytes >= most_bytes {
                return;
            }
        }
        self.fill.is_done = bytes == 0;
    }

    /// Reads versions of one layer.
    fn read_fill(&mut self, reads: &[(SlotId, Version)]) {
        let Some(&(_, Version { expert, .. })) = reads.first() else { return };
        let order = self.load_order(expert.layer, &[]);
        self.fill.is_reading = true;
        self.read_slots(LoadClass::Fill, reads, &order);
    }

    /// Whether reads of a layer that runs may have to be withdrawn.
    pub(super) fn is_filling(&self) -> bool {
        self.fill.is_reading
    }

    /// Withdraws what has not started: of one layer, or everything.
    pub(super) fn stop_filling(&mut self, layer: Option<u16>) {
        if !self.fill.is_reading {
            return;
        }
        if layer.is_none() {
            self.pools.iter().for_each(Arena::need_nothing);
        }
        let targets = &self.targets;
        let is_of = |target: &super::Target| layer.is_none_or(|layer| target.version().expert.layer == layer);
        let withdrawn =
            self.loader.withdraw(LoadClass::Fill, |ticket| targets[ticket as usize].as_ref().is_some_and(is_of));
        self.fill.is_done &= withdrawn.is_empty();
        for ticket in withdrawn {
            let target = self.targets[ticket as usize].take().expect("a waiting read has a target");
            self.unread(target);
        }
        self.fill.is_reading = !self.loader.is_idle();
    }

    /// Slots may be free again.
    pub(super) fn fill_again_later(&mut self) {
        self.fill.is_done = false;
    }
}
