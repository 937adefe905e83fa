//! High versions that replace low ones in the background, as in `engine::residency`.

use super::replay::{Replay, Target, WHOLE};
use crate::cache::{SliceState, SlotId};
use crate::expert::{Precision, Version};
use crate::load::LoadClass;
use crate::options::PrecisionMode;

/// High versions on their way in the background, at the most.
const UPGRADES_MAX: usize = 2;

/// What is under way, and which layer is looked at next.
#[derive(Debug)]
pub(super) struct Upgrades {
    layers: Vec<u16>,
    next: usize,
    /// One per token.
    may_start: bool,
    underway: Vec<(Version, SlotId)>,
}

impl Upgrades {
    pub(super) fn new(layers: Vec<u16>) -> Self {
        Self { layers, next: 0, may_start: false, underway: Vec::new() }
    }

    pub(super) fn next_token(&mut self) {
        self.may_start = true;
    }

    pub(super) fn is_underway(&self, version: Version) -> bool {
        self.underway.iter().any(|(own, _)| *own == version)
    }

    /// Those that are needed are upgrades no more; their slots, to be unpinned.
    pub(super) fn take_over(&mut self, is_needed: impl Fn(Version) -> bool) -> Vec<SlotId> {
        let (taken, left) = self.underway.drain(..).partition(|(version, _)| is_needed(*version));
        self.underway = left;
        let taken: Vec<(Version, SlotId)> = taken;
        taken.into_iter().map(|(_, slot)| slot).collect()
    }
}

impl Replay<'_> {
    /// Where an upgrade has landed, the low version gives its slot back.
    pub(super) fn settle_upgrades(&mut self) {
        for (version, slot) in std::mem::take(&mut self.upgrades.underway) {
            if self.cache.state(slot, WHOLE) == SliceState::Loading {
                self.upgrades.underway.push((version, slot));
                continue;
            }
            self.cache.unpin(slot);
            self.outcome.upgrades += 1;
            self.cache.release(Version::low(version.expert));
        }
    }

    pub(super) fn upgrade_if_idle(&mut self) {
        if self.upgrades.may_start && self.upgrades.underway.len() < UPGRADES_MAX && self.link.is_idle() {
            self.upgrade();
        }
    }

    /// Between tokens, complete before the next but one.
    pub(super) fn upgrade_in_step(&mut self) {
        while !self.upgrades.underway.is_empty() {
            self.settle_upgrades();
            let Some(lands_at) = self.link.next_landing().filter(|_| !self.upgrades.underway.is_empty()) else { break };
            self.pass(lands_at);
        }
        self.upgrade();
    }

    fn upgrade(&mut self) {
        let is_on =
            self.config.mode == PrecisionMode::Dynamic && self.config.upgrade && self.config.thresholds.t1 > 0.0;
        if !is_on || self.upgrades.layers.is_empty() {
            return;
        }
        // The engine counts blocks without experts too; they have nobody to upgrade and cost it a turn.
        let layer = self.upgrades.layers[self.upgrades.next];
        self.upgrades.next = (self.upgrades.next + 1) % self.upgrades.layers.len();
        let Some(expert) = self.cache.upgrade(layer) else { return };
        let version = Version { expert, precision: Precision::High };
        let Some(acquired) = self.cache.acquire_upgrade(version) else { return };
        self.leaves(acquired.evicted);
        self.upgrades.may_start = false;
        self.cache.set_loading(acquired.slot, WHOLE);
        self.cache.pin(acquired.slot);
        self.upgrades.underway.push((version, acquired.slot));
        self.submit(LoadClass::Upgrade, Target::Slot(acquired.slot, version));
    }
}
