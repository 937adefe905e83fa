//! Upgrades: while nothing else is read, a frequently used low version is replaced by its high version. The low one
//! serves until the high one is complete.

use super::{Observer, Reads, Residency};
use crate::cache::{SliceState, SlotId};
use crate::expert::Version;
use crate::load::LoadClass;

/// High versions on their way in the background, at the most.
const UPGRADES_MAX: usize = 2;

/// A high version that is read in the background.
#[derive(Clone, Copy, Debug)]
pub(super) struct Upgrade {
    version: Version,
    /// Pinned.
    slot: SlotId,
    failed: bool,
}

/// What is under way, and which block is looked at next.
#[derive(Debug, Default)]
pub(super) struct Upgrades {
    pub(super) underway: Vec<Upgrade>,
    next_layer: u16,
    /// None has started since the last token: one per token bounds what a wrong guess can cost.
    pub(super) may_start: bool,
}

impl Upgrades {
    pub(super) fn is_underway(&self, version: Version) -> bool {
        self.underway.iter().any(|upgrade| upgrade.version == version)
    }

    /// Whether a read that failed was an upgrade's.
    pub(super) fn fail(&mut self, version: Version) -> bool {
        let upgrade = self.underway.iter_mut().find(|upgrade| upgrade.version == version);
        upgrade.map(|upgrade| upgrade.failed = true).is_some()
    }

    /// Those that are needed are upgrades no more; their slots, to be unpinned.
    pub(super) fn take_over(&mut self, is_needed: impl Fn(Version) -> bool) -> Vec<SlotId> {
        let needed = self.underway.extract_if(.., |upgrade| is_needed(upgrade.version));
        needed.map(|upgrade| upgrade.slot).collect()
    }
}

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Looks after upgrades that have landed: the low version gives its slot back, a failed one is forgotten.
    pub(super) fn settle_upgrades(&mut self) {
        let Self { upgrades, layout, cache, counters, .. } = self;
        upgrades.underway.retain(|upgrade| {
            let kinds = layout.kinds(upgrade.version.expert.layer);
            if kinds.iter().any(|&kind| cache.state(upgrade.slot, kind) == SliceState::Loading) {
                return true;
            }
            cache.unpin(upgrade.slot);
            if upgrade.failed {
                cache.release(upgrade.version);
            } else {
                counters.upgrades += 1;
                cache.release(Version::low(upgrade.version.expert));
            }
            false
        });
    }

    /// Starts one, if nothing else is read and none has started since the last token.
    pub(super) fn upgrade_if_idle(&mut self) {
        let may_start = self.upgrades.may_start && self.upgrades.underway.len() < UPGRADES_MAX;
        if may_start && self.reads.outstanding() == 0 {
            self.upgrade();
        }
    }

    /// Upgrades between tokens only, at most one at a time, complete before the next token but one: what is resident
    /// does not depend on how fast reads are.
    pub(super) fn upgrade_in_step(&mut self) {
        self.settle_upgrades();
        while !self.upgrades.underway.is_empty() && self.wait() {
            self.settle_upgrades();
        }
        self.upgrade();
    }

    /// Replaces one low version by its high version, if one is worth it. One block a time: looking costs time too.
    fn upgrade(&mut self) {
        if self.precisions.is_exact() || !self.precisions.options.upgrade || !self.precisions.loads_high() {
            return;
        }
        let layer = self.upgrades.next_layer;
        self.upgrades.next_layer = (layer + 1) % self.layout.n_blocks().max(1);
        let Some(expert) = self.cache.upgrade(layer).filter(|&expert| !self.precisions.is_forced_low(expert)) else {
            return;
        };
        let version = Version::high(expert);
        let Some(acquired) = self.cache.acquire_upgrade(version) else { return };
        self.upgrades.may_start = false;
        self.takes(acquired.slot, version, acquired.evicted);
        // Nobody may evict it between its landing and `settle_upgrades`.
        self.cache.pin(acquired.slot);
        self.upgrades.underway.push(Upgrade { version, slot: acquired.slot, failed: false });
        let order = self.layout.load_order(layer, &[]);
        self.read_slots(LoadClass::Upgrade, &[(acquired.slot, version)], &order);
    }
}
