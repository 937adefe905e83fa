//! Upgrades: while nothing else is read, a frequently used low version is replaced by its high version; the low one
//! serves until the high one is complete.

use super::interfaces::Observer;
use super::interfaces::Reads;
use super::memory::{Memory, Progress};
use super::precisions::Precisions;
use crate::cache::Cache;
use crate::expert::{ExpertId, Version};
use crate::load::LoadClass;
use crate::route::Rerouting;

/// High versions on their way in the background, at the most.
const UPGRADES_MAX: usize = 2;

/// Upgrades in flight, and the block that is looked at next.
#[derive(Debug, Default)]
pub(super) struct Upgrades {
    /// High versions that are read in the background. Their slots are pinned.
    underway: Vec<Version>,
    next_layer: u16,
    /// None has started since the last token: one per token bounds what a wrong guess can cost.
    may_start: bool,
    /// Low versions that a high one has replaced.
    pub(super) n_complete: u64,
}

impl Upgrades {
    pub(super) fn are_underway(&self) -> bool {
        !self.underway.is_empty()
    }

    pub(super) fn is_underway(&self, version: Version) -> bool {
        self.underway.contains(&version)
    }

    /// Needed versions are upgrades no more: from here on their reads are like any other, and fail the batch.
    pub(super) fn take_over(&mut self, cache: &mut Cache, is_needed: impl Fn(Version) -> bool) {
        for version in self.underway.extract_if(.., |version| is_needed(*version)) {
            cache.unpin(cache.lookup(version).expect("a pinned version stays"));
        }
    }

    /// Ends those that have landed: the low version gives its slot back, a failed one is forgotten.
    pub(super) fn settle<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>) {
        self.underway.retain(|&version| {
            let progress = memory.progress(version);
            if progress == Progress::Loading {
                return true;
            }
            let is_complete = progress == Progress::Complete;
            memory.cache.unpin(memory.cache.lookup(version).expect("a pinned version stays"));
            memory.cache.release(if is_complete { Version::low(version.expert) } else { version });
            self.n_complete += u64::from(is_complete);
            false
        });
    }

    /// A token is done: the next upgrade may start.
    pub(super) fn end_token(&mut self) {
        self.may_start = true;
    }

    /// Starts one, if nothing else is read and none has started since the last token.
    pub(super) fn start_if_idle<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>, precisions: &Precisions) {
        let may_start = self.may_start && self.underway.len() < UPGRADES_MAX;
        if may_start && memory.in_flight.reader.outstanding() == 0 {
            self.start(memory, precisions);
        }
    }

    /// Upgrades between tokens only, at most one at a time, complete before the next token but one: what is resident
    /// does not depend on how fast reads are.
    pub(super) fn step<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>, precisions: &Precisions) {
        self.settle(memory);
        while self.are_underway() && memory.wait() {
            self.settle(memory);
        }
        self.start(memory, precisions);
    }

    /// Replaces one low version by its high version, if one is worth it. One block a time: looking costs time too.
    fn start<R: Reads, O: Observer>(&mut self, memory: &mut Memory<R, O>, precisions: &Precisions) {
        if precisions.is_exact() || !precisions.options.upgrade || !precisions.loads_high() {
            return;
        }
        let layer = self.next_layer;
        self.next_layer = (layer + 1) % memory.layout.n_blocks().max(1);
        let Some(expert) = memory.cache.upgrade(layer).filter(|&expert| !precisions.is_forced_low(expert)) else {
            return;
        };
        let version = Version::high(expert);
        let Some(acquired) = memory.cache.acquire_upgrade(version) else { return };
        self.may_start = false;
        memory.takes(acquired.slot, version, acquired.evicted);
        // It must not be evicted between its landing and `settle`.
        memory.cache.pin(acquired.slot);
        self.underway.push(version);
        let order = memory.layout.load_order(layer, &[]);
        memory.read_slots(LoadClass::Upgrade, &[(acquired.slot, version)], &order);
    }

    /// Whether using an expert now in high precision costs nothing in the host's slots. No virtual expert concerns it.
    pub(super) fn is_present(&self, cache: &Cache, rerouting: &Rerouting, expert: ExpertId) -> bool {
        let high = Version::high(expert);
        let slot = cache.lookup(high).filter(|_| !self.is_underway(high));
        slot.is_some_and(|slot| !rerouting.only_present || cache.is_ready(slot))
    }
}
