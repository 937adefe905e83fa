//! Upgrades to high versions while the link is idle.
//!
//! Recent uses ([`RecentUses`]) choose the expert and the victim, not the policy: an upgrade that the next miss undoes
//! has wasted a whole transfer, so an expert must be used clearly more than its victim.

use super::by_expert::ByExpert;
use super::{Acquired, Cache, ShareId};
use crate::expert::{ExpertId, Precision, Version};

/// Recent uses without which no expert is upgraded: two of them, at most a half-life apart.
pub(super) const UPGRADE_USES_MIN: f32 = 1.5;

/// Minimum ratio of an expert's recent uses to its victim's. Without it two experts of about equal use would take
/// turns.
pub(super) const UPGRADE_HYSTERESIS: f32 = 1.5;

impl Cache {
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

fn faded(tokens: f32) -> f32 {
    (-tokens / HALF_LIFE_TOKENS).exp2()
}

/// Uses of an expert by tokens that are evaluated at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Uses {
    /// Tokens that chose it.
    pub(super) n: u32,
    /// Tokens after the last of them.
    pub(super) since: u32,
    /// Tokens that are evaluated at once.
    pub(super) of: u32,
}

impl Uses {
    /// Their count at the last token, as if they came at equal distances up to the last of them.
    fn count(self) -> f32 {
        let Self { n, since, of } = self;
        let last = faded(since as f32);
        if n <= 1 {
            return last;
        }
        let distance = (of.saturating_sub(since).max(n)) as f32 / n as f32;
        last * (1.0 - faded(distance * n as f32)) / (1.0 - faded(distance))
    }
}

/// Uses per expert, each worth `2^(-age / half-life)`: at most about 46.7 for an expert that every token uses.
#[derive(Clone, Debug, Default)]
pub(super) struct RecentUses {
    counts: ByExpert<Count>,
}

/// A count at some token; reading fades it.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    uses: f32,
    token: u64,
}

impl Count {
    fn at(self, token: u64) -> f32 {
        let age = token.saturating_sub(self.token) as f32;
        self.uses * faded(age)
    }
}

impl RecentUses {
    /// Tokens up to `token` use `expert`. Tokens never go back without [`RecentUses::clear`].
    pub(super) fn add(&mut self, expert: ExpertId, token: u64, uses: Uses) {
        let count = self.counts.entry(expert);
        *count = Count { uses: count.at(token) + uses.count(), token };
    }

    pub(super) fn get(&self, expert: ExpertId, token: u64) -> f32 {
        self.counts.get(expert).map_or(0.0, |count| count.at(token))
    }

    pub(super) fn clear(&mut self) {
        self.counts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPERT: ExpertId = ExpertId { layer: 1, index: 2 };
    const ONE: Uses = Uses { n: 1, since: 0, of: 1 };

    #[test]
    fn a_batch_counts_about_as_its_tokens_do_one_by_one() {
        for (n_tokens, every) in [(512, 1), (512, 2), (64, 8), (7, 3), (2, 1)] {
            let mut one_by_one = RecentUses::default();
            let users: Vec<u64> = (0..n_tokens).filter(|token| token % every == 0).collect();
            users.iter().for_each(|token| one_by_one.add(EXPERT, *token, ONE));
            let mut at_once = RecentUses::default();
            let since = (n_tokens - 1 - users[users.len() - 1]) as u32;
            at_once.add(EXPERT, n_tokens - 1, Uses { n: users.len() as u32, since, of: n_tokens as u32 });
            let [expected, found] = [one_by_one, at_once].map(|recent| recent.get(EXPERT, n_tokens - 1));
            assert!((found / expected - 1.0).abs() < 0.1, "{n_tokens} {every}: {found}, {expected} one by one");
        }
        assert_eq!(ONE.count(), 1.0);
        assert!(Uses { n: 9, since: 3, of: 2 }.count().is_finite(), "more than there are");
    }

    #[test]
    fn a_use_counts_half_after_a_half_life() {
        let mut recent = RecentUses::default();
        assert_eq!(recent.get(EXPERT, 5), 0.0);
        recent.add(EXPERT, 5, ONE);
        assert_eq!([5, 37, 69].map(|token| recent.get(EXPERT, token)), [1.0, 0.5, 0.25]);
        recent.add(EXPERT, 37, ONE);
        assert_eq!(recent.get(EXPERT, 37), 1.5);
        assert_eq!(recent.get(ExpertId { index: 1, ..EXPERT }, 37), 0.0);
        assert_eq!(recent.get(EXPERT, u64::MAX), 0.0, "fades to nothing, not below");
        recent.clear();
        assert_eq!(recent.get(EXPERT, 37), 0.0);
    }

    #[test]
    fn constant_use_has_a_limit() {
        let mut recent = RecentUses::default();
        (0..5000).for_each(|token| recent.add(EXPERT, token, ONE));
        let limit = 1.0 / (1.0 - (-1.0 / HALF_LIFE_TOKENS).exp2());
        assert!((recent.get(EXPERT, 4999) - limit).abs() < 0.01, "{limit}");
    }
}
