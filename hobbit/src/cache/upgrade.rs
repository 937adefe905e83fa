//! Which expert deserves its high version when the link is idle, and whose slot that takes.
//!
//! Both questions are answered by recent uses (see [`super::recent`]) instead of the policy: an upgrade that the next
//! miss undoes has wasted a whole transfer, so an expert must be clearly more used than whom it displaces.

use super::{Acquired, Cache, ShareId};
use crate::expert::{ExpertId, Precision, Version};

/// Recent uses without which no expert is upgraded: two of them, at most a half-life apart.
pub(super) const UPGRADE_USES_MIN: f32 = 1.5;

/// How many times more recent uses an expert must have than whom its high version displaces. Without it two experts
/// of about equal use would take turns.
pub(super) const UPGRADE_HYSTERESIS: f32 = 1.5;

impl Cache {
    /// The expert of `layer` to upgrade next: the one with the most recent uses (equal ones: the lowest index) among
    /// those
    /// - whose low version is resident and ready, and whose high version has a share and is not resident;
    /// - that have at least about two recent uses;
    /// - whose high version's share has an empty slot, or an evictable resident with fewer recent uses than theirs
    ///   divided by a hysteresis factor of 1.5.
    ///
    /// [`Cache::acquire_upgrade`] takes the slot that this answer counts on.
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

    /// Makes `version` resident like [`Cache::acquire`], but where that asks the policy, this evicts the resident with
    /// the fewest recent uses (equal ones: the lowest slot). The policy is told.
    /// `None` when the share has no slots or everything in it is pinned or loading; the cache is then unchanged.
    ///
    /// # Panics
    /// If `version` is resident already, or no share has it.
    pub fn acquire_upgrade(&mut self, version: Version) -> Option<Acquired> {
        let share = self.share_for(version);
        let evicted = match self.shares[&share].has_empty() {
            true => None,
            false => Some(self.coldest(share)?.0),
        };
        if let Some(evicted) = evicted {
            self.policy.on_remove(evicted, self.now);
        }
        Some(self.insert(version, share, evicted))
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
