//! Which expert deserves its high version when the link is idle, and whose slot that takes.
//!
//! Both questions are answered by recent uses ([`RecentUses`]) instead of the policy: an upgrade that the next
//! miss undoes has wasted a whole transfer, so an expert must be clearly more used than whom it displaces.

use super::by_expert::ByExpert;
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
        self.acquire_from(version, |own, share| {
            let (coldest, _) = own.coldest(share)?;
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

/// Tokens after which a use counts half.
const HALF_LIFE_TOKENS: f32 = 32.0;

/// Uses per expert, each worth `2^(-age / half-life)`: at most about 46.7 for an expert that every token uses.
#[derive(Clone, Debug, Default)]
pub(super) struct RecentUses {
    counts: ByExpert<Count>,
}

/// A count as it was at some token: it fades when it is read.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    uses: f32,
    token: u64,
}

impl Count {
    fn at(self, token: u64) -> f32 {
        let age = token.saturating_sub(self.token) as f32;
        self.uses * (-age / HALF_LIFE_TOKENS).exp2()
    }
}

impl RecentUses {
    /// Token `token` uses `expert`. Tokens never go back without [`RecentUses::clear`].
    pub(super) fn add(&mut self, expert: ExpertId, token: u64) {
        let count = self.counts.entry(expert);
        *count = Count { uses: count.at(token) + 1.0, token };
    }

    /// The expert's uses as they count at `token`.
    pub(super) fn get(&self, expert: ExpertId, token: u64) -> f32 {
        self.counts.get(expert).map_or(0.0, |count| count.at(token))
    }

    /// Forgets all uses.
    pub(super) fn clear(&mut self) {
        self.counts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPERT: ExpertId = ExpertId { layer: 1, index: 2 };

    #[test]
    fn a_use_counts_half_after_a_half_life() {
        let mut recent = RecentUses::default();
        assert_eq!(recent.get(EXPERT, 5), 0.0);
        recent.add(EXPERT, 5);
        assert_eq!([5, 37, 69].map(|token| recent.get(EXPERT, token)), [1.0, 0.5, 0.25]);
        recent.add(EXPERT, 37);
        assert_eq!(recent.get(EXPERT, 37), 1.5);
        assert_eq!(recent.get(ExpertId { index: 1, ..EXPERT }, 37), 0.0);
        assert_eq!(recent.get(EXPERT, u64::MAX), 0.0, "fades to nothing, not below");
        recent.clear();
        assert_eq!(recent.get(EXPERT, 37), 0.0);
    }

    #[test]
    fn constant_use_has_a_limit() {
        let mut recent = RecentUses::default();
        (0..5000).for_each(|token| recent.add(EXPERT, token));
        let limit = 1.0 / (1.0 - (-1.0 / HALF_LIFE_TOKENS).exp2());
        assert!((recent.get(EXPERT, 4999) - limit).abs() < 0.01, "{limit}");
    }
}
