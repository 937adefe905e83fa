//! Candidates for eviction, shields, upgrades, and shares that shrink and grow again.
//!
//! Recent uses choose the expert to upgrade and its victim, not the policy, and what is copied while a link is idle: a
//! transfer that the next miss undoes is wasted, so an expert must be used clearly more than its victim.

use super::{Acquired, Cache, Candidate, ShareId, SlotId, Whereabouts};
use crate::expert::{ExpertId, Precision, Version};
use std::ops::Range;

/// Recent uses without which no expert is upgraded: two of them, at most a half-life apart.
pub(super) const UPGRADE_USES_MIN: f32 = 1.5;

/// Minimum ratio of an expert's recent uses to its victim's. Without it two experts of about equal use would take
/// turns.
pub(super) const UPGRADE_HYSTERESIS: f32 = 1.5;

impl Cache {
    /// Shields versions until [`Cache::unshield_all`], resident or not: others are evicted first. Unknown versions are
    /// ignored.
    ///
    /// HOBBIT (section 3.3) masks predicted experts like this. Versions in use are pinned and need no shield.
    pub fn shield(&mut self, versions: impl Iterator<Item = Version>) {
        for version in versions {
            let place = self.places.get_mut(version.expert);
            let Some(place) = place.and_then(|places| places[version.precision.index()].as_mut()) else { continue };
            if !std::mem::replace(&mut place.is_shielded, true) {
                self.shielded.push(version);
            }
        }
    }

    pub fn unshield_all(&mut self) {
        for version in std::mem::take(&mut self.shielded) {
            self.place_mut(version).is_shielded = false;
        }
    }

    /// Evicts a resident before all others, until it is used. Others are ignored.
    pub fn set_unwanted(&mut self, version: Version) {
        let place = self.places.get_mut(version.expert);
        let place = place.and_then(|places| places[version.precision.index()].as_mut());
        if let Some(place) = place.filter(|place| place.slot.is_some() && !place.is_unwanted) {
            place.is_unwanted = true;
            self.n_unwanted += 1;
        }
    }

    /// As [`Cache::acquire`], for a predicted version: it evicts no shielded one.
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

    /// Evictable residents of the share, in slot order: neither pinned nor loading, and not shielded unless all are.
    pub(super) fn evictable(&self, share: ShareId) -> impl Iterator<Item = Version> {
        let Range { start, end } = self.shares[&share].slots();
        let slots = &self.pools[usize::from(share.pool)][start as usize..end as usize];
        let free = move || slots.iter().filter(|slot| slot.is_evictable()).filter_map(|slot| slot.version);
        let is_shielded = |version| self.place(version).is_some_and(|place| place.is_shielded);
        let all_shielded = self.shielded.is_empty() || free().all(is_shielded);
        free().filter(move |version| all_shielded || !is_shielded(*version))
    }

    pub(super) fn victim(&mut self, incoming: Version, share: ShareId) -> Option<Version> {
        let mut candidates = std::mem::take(&mut self.candidates);
        let last_use = |version| self.place(version).map_or(0, |place| place.last_use);
        let candidate = |version| Candidate { version, last_use: last_use(version) };
        let is_narrow = self.stays_in_its_layer(incoming, share);
        let may_leave = |version: &Version| !is_narrow || version.expert.layer == incoming.expert.layer;
        candidates.extend(self.evictable(share).filter(may_leave).map(candidate));
        let is_unwanted = |version| self.place(version).is_some_and(|place| place.is_unwanted);
        if self.n_unwanted > 0 && candidates.iter().any(|candidate| is_unwanted(candidate.version)) {
            candidates.retain(|candidate| is_unwanted(candidate.version));
        }
        let victim = if candidates.is_empty() {
            None
        } else {
            Some(candidates[self.policy.victim(incoming, &candidates, self.now)].version)
        };
        candidates.clear();
        self.candidates = candidates;
        victim
    }

    pub(super) fn vacate(&mut self, version: Version) {
        let Whereabouts { share, slot, is_unwanted, .. } = self.place_mut(version);
        let (share, index) = (*share, slot.take().unwrap_or_else(|| panic!("{version} is not resident")));
        let was_unwanted = std::mem::take(is_unwanted);
        self.n_unwanted -= u32::from(was_unwanted);
        self.pools[usize::from(share.pool)][index as usize].vacate();
        self.shares.get_mut(&share).expect("places name shares there are").count(version.expert.layer, false);
    }

    /// Gives a share its first `n_slots` slots, at most as many as it had initially. Returns the evicted residents of
    /// the other slots, in slot order; `None`, without a change, if one of them is pinned or loading.
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

    /// Slots that a share was made with, the most that [`Cache::resize_share`] gives. 0 for unknown shares.
    pub fn most_of_share(&self, share: ShareId) -> u32 {
        self.shares.get(&share).map_or(0, |share| share.most)
    }

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

    /// The expert of `layer` to upgrade next: the one with the most recent uses (equal ones: the lowest index) among
    /// those
    /// - whose low version is ready, and whose high version has a share and is not resident;
    /// - that have at least about two recent uses;
    /// - whose high version's share has an empty slot, or an evictable resident with fewer recent uses than theirs
    ///   divided by a hysteresis factor of 1.5.
    pub fn upgrade(&self, layer: u16) -> Option<ExpertId> {
        let mut best: Option<(f32, ExpertId)> = None;
        for (places, index) in self.places.layer(layer).iter().zip(0..=u16::MAX) {
            let expert = ExpertId { layer, index };
            let Some(high) = &places[Precision::High.index()] else { continue };
            if !self.is_complete(Version::low(expert)) || high.slot.is_some() {
                continue;
            }
            let uses = self.recent.get(expert, self.now.token);
            let is_more_used = best.is_none_or(|(most, _)| uses > most);
            if uses >= UPGRADE_USES_MIN && is_more_used && self.yields(high.share, uses) {
                best = Some((uses, expert));
            }
        }
        best.map(|(_, expert)| expert)
    }

    /// As [`Cache::acquire`], but evicts the resident with the fewest recent uses (equal ones: the lowest slot).
    ///
    /// # Panics
    /// If `version` is resident already, or no share has it.
    pub fn acquire_upgrade(&mut self, version: Version) -> Option<Acquired> {
        self.acquire_from(version, |own, share| {
            let (coldest, _) = own.coldest(share)?;
            own.policy.on_remove(coldest, own.now);
            Some(coldest)
        })
    }

    /// As [`Cache::acquire_upgrade`], for a version that nothing waits for. It evicts only if it has at least about two
    /// recent uses, and 1.5 times as many as its victim, which is not shielded.
    ///
    /// # Panics
    /// As [`Cache::acquire`].
    pub fn acquire_wanted(&mut self, version: Version) -> Option<Acquired> {
        let uses = self.recent.get(version.expert, self.now.token);
        self.acquire_from(version, |own, share| {
            let (coldest, fewest) = own.coldest(share)?;
            let is_shielded = own.place(coldest).is_some_and(|place| place.is_shielded);
            let may_leave = !own.stays_in_its_layer(version, share) || coldest.expert.layer == version.expert.layer;
            if uses < UPGRADE_USES_MIN || fewest >= uses / UPGRADE_HYSTERESIS || is_shielded || !may_leave {
                return None;
            }
            own.policy.on_remove(coldest, own.now);
            Some(coldest)
        })
    }

    /// Whether the share has a slot for an expert with so many recent uses.
    fn yields(&self, share: ShareId, uses: f32) -> bool {
        self.shares[&share].has_empty()
            || self.coldest(share).is_some_and(|(_, coldest)| coldest < uses / UPGRADE_HYSTERESIS)
    }

    /// The evictable resident of the share with the fewest recent uses, and those.
    fn coldest(&self, share: ShareId) -> Option<(Version, f32)> {
        let uses = |version: Version| (version, self.recent.get(version.expert, self.now.token));
        self.evictable(share).map(uses).min_by(|a, b| a.1.total_cmp(&b.1))
    }
}
