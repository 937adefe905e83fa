//! The policies' clock, and how much each expert was used of late.

use super::slots::ByExpert;
use crate::expert::ExpertId;

/// Counts a sequence's tokens. A batch comes in ubatches, each of which goes through all layers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenClock {
    /// Tokens before the running batch, and before its running ubatch.
    before_batch: u64,
    before_part: u64,
    /// Tokens of the running ubatch: the maximum of its layers, because the last layer may see only those whose logits
    /// are wanted.
    n_tokens: u32,
    /// The layer of the running ubatch that has chosen last.
    layer: Option<u16>,
}

impl TokenClock {
    /// A batch that was not ended does not count.
    pub(super) fn begin_batch(&mut self) {
        *self = Self { before_batch: self.before_batch, before_part: self.before_batch, n_tokens: 0, layer: None };
    }

    /// The router of a layer has chosen. Layers of a ubatch ascend: one that does not begins the next ubatch.
    pub(super) fn begin_layer(&mut self, layer: u16, n_tokens: u32) {
        if self.layer.is_some_and(|before| layer <= before) {
            self.before_part += u64::from(self.n_tokens);
            self.n_tokens = 0;
        }
        (self.layer, self.n_tokens) = (Some(layer), self.n_tokens.max(n_tokens));
    }

    pub(super) fn end_batch(&mut self, n_tokens: u32) {
        self.before_batch += u64::from(n_tokens);
        self.begin_batch();
    }

    /// Tokens of the sequence before the last one of the running ubatch; between two batches, all of them.
    pub(super) fn token(&self) -> u64 {
        self.before_part + u64::from(self.n_tokens.saturating_sub(1))
    }

    /// Tokens of the running ubatch, at least one.
    pub(super) fn n_tokens(&self) -> u32 {
        self.n_tokens.max(1)
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

    #[test]
    fn a_batch_counts_all_of_its_tokens_part_by_part() {
        let mut clock = TokenClock::default();
        clock.end_batch(10);
        clock.begin_batch();
        let mut seen = Vec::new();
        // In the second ubatch the last layer sees only the token whose logits are wanted.
        for (layer, n_tokens) in [(0, 4), (1, 4), (2, 4), (0, 3), (1, 3), (2, 1)] {
            clock.begin_layer(layer, n_tokens);
            seen.push(clock.token());
        }
        assert_eq!(seen, [13, 13, 13, 16, 16, 16]);
        clock.end_batch(7);
        assert_eq!(clock.token(), 17);
        // A batch that failed.
        clock.begin_batch();
        [0, 1, 0].into_iter().for_each(|layer| clock.begin_layer(layer, 4));
        assert_eq!(clock.token(), 24);
        clock.begin_batch();
        assert_eq!((clock.token(), clock.n_tokens()), (17, 1));
    }
}
