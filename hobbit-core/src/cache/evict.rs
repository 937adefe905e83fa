//! Victims of evictions, upgrades, and shares that shrink and grow again.
//!
//! Recent uses choose the expert to upgrade and its victim, not the policy, and what is copied while a link is idle: a
//! transfer that the next miss undoes is wasted, so an expert must be used clearly more than its victim.

use super::{Acquired, Cache, Candidate, ShareId};
use crate::expert::{ExpertId, Version};

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
        versions.for_each(|version| self.pools.shield(version));
    }

    pub fn unshield_all(&mut self) {
        self.pools.unshield_all();
    }

    /// Evicts a resident before all others, until it is used. Others are ignored.
    pub(crate) fn set_unwanted(&mut self, version: Version) {
        self.pools.set_unwanted(version);
    }

    /// As [`Cache::acquire`], for a predicted version: it evicts no shielded one.
    ///
    /// # Panics
    /// As [`Cache::acquire`].
    pub fn acquire_ahead(&mut self, version: Version) -> Option<Acquired> {
        let share = self.pools.share_for(version);
        if !self.pools.has_empty(share) && self.pools.evictable(share).all(|version| self.pools.is_shielded(version)) {
            return None;
        }
        self.acquire(version)
    }

    pub(super) fn victim(&mut self, incoming: Version, share: ShareId) -> Option<Version> {
        let mut candidates = std::mem::take(&mut self.candidates);
        let candidate = |version| Candidate { version, last_use: self.pools.last_use(version) };
        let is_narrow = self.stays_in_its_layer(incoming, share);
        let may_leave = |version: &Version| !is_narrow || version.expert.layer == incoming.expert.layer;
        candidates.extend(self.pools.evictable(share).filter(may_leave).map(candidate));
        let is_unwanted = |candidate: &Candidate| self.pools.is_unwanted(candidate.version);
        if self.pools.has_unwanted() && candidates.iter().any(is_unwanted) {
            candidates.retain(is_unwanted);
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

    /// Gives a share its first `n_slots` slots, at most as many as it had initially. Returns the evicted residents of
    /// the other slots, in slot order; `None`, without a change, if one of them is pinned or loading.
    ///
    /// # Panics
    /// If there is no such share.
    pub fn resize_share(&mut self, share: ShareId, n_slots: u32) -> Option<Vec<Version>> {
        let evicted = self.pools.resize_share(share, n_slots)?;
        for &version in &evicted {
            self.policy.on_remove(version, self.now);
        }
        Some(evicted)
    }

    /// The expert of `layer` to upgrade next: the one with the most recent uses (equal ones: the lowest index) among
    /// those
    /// - whose low version is ready, and whose high version has a share and is not resident;
    /// - that have at least about two recent uses;
    /// - whose high version's share has an empty slot, or an evictable resident with fewer recent uses than theirs
    ///   divided by a hysteresis factor of 1.5.
    pub fn upgrade(&self, layer: u16) -> Option<ExpertId> {
        let mut best: Option<(f32, ExpertId)> = None;
        for (expert, share) in self.pools.upgradable(layer) {
            let uses = self.recent.get(expert, self.now.token);
            let is_more_used = best.is_none_or(|(most, _)| uses > most);
            let yields = || {
                self.pools.has_empty(share)
                    || self.coldest(share).is_some_and(|(_, coldest)| coldest < uses / UPGRADE_HYSTERESIS)
            };
            if uses >= UPGRADE_USES_MIN && is_more_used && yields() {
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
        self.acquire_from(version, |cache, share| {
            let (coldest, _) = cache.coldest(share)?;
            cache.policy.on_remove(coldest, cache.now);
            Some(coldest)
        })
    }

    /// As `Cache::acquire_upgrade`, for a version that nothing waits for. It evicts only if it has at least about two
    /// recent uses, and 1.5 times as many as its victim, which is not shielded.
    ///
    /// # Panics
    /// As [`Cache::acquire`].
    pub fn acquire_wanted(&mut self, version: Version) -> Option<Acquired> {
        let uses = self.recent.get(version.expert, self.now.token);
        self.acquire_from(version, |cache, share| {
            let (coldest, fewest) = cache.coldest(share)?;
            let is_shielded = cache.pools.is_shielded(coldest);
            let may_leave = !cache.stays_in_its_layer(version, share) || coldest.expert.layer == version.expert.layer;
            if uses < UPGRADE_USES_MIN || fewest >= uses / UPGRADE_HYSTERESIS || is_shielded || !may_leave {
                return None;
            }
            cache.policy.on_remove(coldest, cache.now);
            Some(coldest)
        })
    }

    /// The evictable resident of the share with the fewest recent uses, and those.
    fn coldest(&self, share: ShareId) -> Option<(Version, f32)> {
        let uses = |version: Version| (version, self.recent.get(version.expert, self.now.token));
        self.pools.evictable(share).map(uses).min_by(|a, b| a.1.total_cmp(&b.1))
    }
}
