//! Shares that get fewer slots, or back what they had.

use super::{Cache, ShareId, SlotId};
use crate::expert::Version;

impl Cache {
    /// Gives a share `n_slots` slots from now on, the lowest of those it was made with and never more than these.
    /// Residents of slots that go are evicted and returned, in slot order; the policy is told. `None`, and no change, if one
    /// of them is pinned or loading.
    ///
    /// # Panics
    /// If there is no such share.
    pub fn resize_share(&mut self, share: ShareId, n_slots: u32) -> Option<Vec<Version>> {
        let entry = &self.shares[&share];
        let n_slots = n_slots.min(entry.most);
        let slots = entry.slots();
        let going = (slots.start + n_slots).min(slots.end)..slots.end;
        let going = &self.pools[usize::from(share.pool)][going.start as usize..going.end as usize];
        if going.iter().any(|slot| slot.version.is_some() && !slot.is_evictable()) {
            return None;
        }
        let evicted: Vec<Version> = going.iter().filter_map(|slot| slot.version).collect();
        for &version in &evicted {
            self.vacate(version);
            self.policy.on_remove(version, self.now);
        }
        self.shares.get_mut(&share).expect("looked up above").capacity = n_slots;
        Some(evicted)
    }

    /// Slots that a share was made with: what [`Cache::resize_share`] can give it. 0 for shares there are not.
    pub fn most_of_share(&self, share: ShareId) -> u32 {
        self.shares.get(&share).map_or(0, |share| share.most)
    }

    /// Every share there is, by pool and layer.
    pub fn shares(&self) -> impl Iterator<Item = ShareId> {
        self.shares.keys().copied()
    }

    /// Whether nothing in the share is pinned or loading.
    pub fn is_share_idle(&self, share: ShareId) -> bool {
        let slots = self.slots_of_share(share);
        slots
            .map(|index| self.slot(SlotId { pool: share.pool, index }))
            .all(|slot| slot.version.is_none() || slot.is_evictable())
    }
}
