//! How often each expert was used lately: a count that fades token by token.

use super::by_expert::ByExpert;
use crate::expert::ExpertId;

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
