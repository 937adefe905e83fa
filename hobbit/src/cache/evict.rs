//! Who may leave, whom the policy chooses of them, and predictions that shield.

use super::{Acquired, Cache, Candidate, ShareId, Whereabouts};
use crate::expert::Version;
use std::ops::Range;

impl Cache {
    /// Shields versions until [`Cache::unshield_all`], resident or not: whoever needs a slot evicts others, while there
    /// are others that may leave. Versions that the model does not have are passed over.
    ///
    /// HOBBIT (section 4.3) masks predicted experts so. What the running layer uses is pinned and needs no shield.
    pub fn shield(&mut self, versions: impl Iterator<Item = Version>) {
        for version in versions {
            let place = self.places.get_mut(version.expert);
            let Some(place) = place.and_then(|places| places[version.precision.index()].as_mut()) else { continue };
            if !std::mem::replace(&mut place.is_shielded, true) {
                self.shielded.push(version);
            }
        }
    }

    /// Nothing is shielded any more.
    pub fn unshield_all(&mut self) {
        for version in std::mem::take(&mut self.shielded) {
            self.place_mut(version).is_shielded = false;
        }
    }

    /// As [`Cache::acquire`], for a version that is only expected to be used: nobody leaves who is shielded.
    ///
    /// # Panics
    /// As [`Cache::acquire`].
    pub fn acquire_ahead(&mut self, version: Version) -> Option<Acquired> {
        let share = self.share_for(version);
        let is_shielded = |version| self.place(version).is_some_and(|place| place.is_shielded);
        if !self.shares[&share].has_empty() && self.evictable(share).all(is_shielded) {
            return None;
        }
        self.acquire(version)
    }

    /// Residents of the share that may leave, in slot order: neither pinned nor loading, and not shielded unless all of
    /// those are.
    pub(super) fn evictable(&self, share: ShareId) -> impl Iterator<Item = Version> {
        let Range { start, end } = self.shares[&share].slots();
        let slots = &self.pools[usize::from(share.pool)][start as usize..end as usize];
        let free = move || slots.iter().filter(|slot| slot.is_evictable()).filter_map(|slot| slot.version);
        let is_shielded = |version| self.place(version).is_some_and(|place| place.is_shielded);
        let all_shielded = self.shielded.is_empty() || free().all(is_shielded);
        free().filter(move |version| all_shielded || !is_shielded(*version))
    }

    /// Whom the policy evicts for `incoming`.
    pub(super) fn victim(&mut self, incoming: Version, share: ShareId) -> Option<Version> {
        let mut candidates = std::mem::take(&mut self.candidates);
        let last_use = |version| self.place(version).map_or(0, |place| place.last_use);
        let candidate = |version| Candidate { version, last_use: last_use(version) };
        candidates.extend(self.evictable(share).map(candidate));
        let victim = match candidates.is_empty() {
            true => None,
            false => Some(candidates[self.policy.victim(incoming, &candidates, self.now)].version),
        };
        candidates.clear();
        self.candidates = candidates;
        victim
    }

    /// Empties the slot of a resident.
    pub(super) fn vacate(&mut self, version: Version) {
        let Whereabouts { share, slot, .. } = self.place_mut(version);
        let (share, index) = (*share, slot.take().unwrap_or_else(|| panic!("{version} is not resident")));
        self.pools[usize::from(share.pool)][index as usize].vacate();
        self.shares.get_mut(&share).expect("places name shares there are").n_filled -= 1;
    }
}
