//! Upgrades: while the disk has nothing else to do, a frequently used low version is replaced by its high version. The
//! low one serves until the high one is complete.

use super::{Residency, Upgrade};
use crate::cache::SliceState;
use crate::expert::Version;
use crate::load::LoadClass;

impl Residency {
    /// Replaces one low version by its high version, if one is worth it. One layer a time: looking costs time too.
    pub(super) fn upgrade(&mut self) {
        if self.precisions.is_exact() || !self.precisions.options.upgrade || !self.precisions.loads_high() {
            return;
        }
        let layer = self.upgrade_layer;
        self.upgrade_layer = (layer + 1) % self.layers.len() as u16;
        let Some(expert) = self.cache.upgrade(layer).filter(|&expert| !self.precisions.is_forced_low(expert)) else {
            return;
        };
        let version = Version::high(expert);
        let Some(acquired) = self.cache.acquire_upgrade(version) else { return };
        self.may_upgrade = false;
        let order = self.load_order(layer, &[]);
        order.iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
        // Nobody may evict it between its landing and `settle_upgrades`.
        self.cache.pin(acquired.slot);
        self.upgrades.push(Upgrade { version, slot: acquired.slot, failed: false });
        self.read_slots(LoadClass::Upgrade, &[(acquired.slot, version)], &order);
    }

    /// Looks after upgrades that have landed: the low version gives its slot back, a failed one is forgotten.
    pub(super) fn settle_upgrades(&mut self) {
        let mut upgrades = std::mem::take(&mut self.upgrades);
        upgrades.retain(|upgrade| {
            let states = self.layer(upgrade.version.expert.layer).kinds.iter();
            let loading = states.map(|&kind| self.cache.state(upgrade.slot, kind)).any(|s| s == SliceState::Loading);
            if loading {
                return true;
            }
            self.cache.unpin(upgrade.slot);
            if upgrade.failed {
                self.cache.release(upgrade.version);
            } else {
                self.counters.upgrades += 1;
                self.cache.release(Version::low(upgrade.version.expert));
            }
            false
        });
        self.upgrades = upgrades;
    }

    /// Upgrades between tokens only, at most one at a time, complete before the next token but one: what is resident
    /// does not depend on how fast reads are.
    pub(super) fn upgrade_in_step(&mut self) {
        while !self.upgrades.is_empty() {
            self.settle_upgrades();
            if !self.upgrades.is_empty() && !self.wait() {
                break;
            }
        }
        self.upgrade();
    }
}
