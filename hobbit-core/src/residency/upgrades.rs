//! Upgrades: high versions that replace low ones in the background.

use super::layout::Layout;
use crate::cache::{Cache, SliceState, SlotId};
use crate::expert::{ExpertId, Version};
use crate::route::Rerouting;

/// A high version that is read in the background.
#[derive(Clone, Copy, Debug)]
pub(super) struct Upgrade {
    pub(super) version: Version,
    pub(super) slot: SlotId,
    pub(super) failed: bool,
}

/// Upgrades in flight, and the block that is looked at next.
#[derive(Debug, Default)]
pub(super) struct Upgrades {
    pub(super) underway: Vec<Upgrade>,
    pub(super) next_layer: u16,
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

    /// Looks after those that have landed: the low version gives its slot back, a failed one is forgotten. Returns the
    /// number of the others.
    pub(super) fn settle(&mut self, cache: &mut Cache, layout: &Layout) -> u64 {
        let mut n_complete = 0;
        self.underway.retain(|&Upgrade { version, slot, failed }| {
            if layout.kinds(version.expert.layer).iter().any(|&kind| cache.state(slot, kind) == SliceState::Loading) {
                return true;
            }
            cache.unpin(slot);
            cache.release(if failed { version } else { Version::low(version.expert) });
            n_complete += u64::from(!failed);
            false
        });
        n_complete
    }
}

/// Whether using an expert now in high precision costs nothing in the host's slots. No virtual expert concerns it.
pub(super) fn is_present(cache: &Cache, upgrades: &Upgrades, rerouting: &Rerouting, expert: ExpertId) -> bool {
    let high = Version::high(expert);
    let slot = cache.lookup(high).filter(|_| !upgrades.is_underway(high));
    slot.is_some_and(|slot| !rerouting.only_present || cache.is_ready(slot))
}
