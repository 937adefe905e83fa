//! LRU lists by class of frequency, as llama.cpp's expert cache keeps them.

use super::{Candidate, Now, Policy, Use, lowest};
use crate::cache::slots::ByExpert;
use crate::expert::{ExpertId, Version};

/// Tokens after which a use counts half.
const HALF_LIFE: f64 = 128.0;

/// Evicts the least recently used of the lowest class of frequency.
///
/// llama.cpp's `docs/moe-cache.md` (autumn 2026) describes lists by frequency with a half-life of 128 tokens, in one
/// pool over all layers. Assumed, because no more is said: an expert's class is the whole part of the binary logarithm
/// of its uses, which halve every 128 tokens; uses count whether the expert is resident or not, and from one sequence
/// to the next; fewer than two uses are the lowest class. An expert of every token reaches class 7.
///
/// The cache before that, `--moe-cache-mib`, is [`super::Lru`] in the same pool, and copies every miss.
#[derive(Clone, Debug, Default)]
pub struct ClassLru {
    uses: ByExpert<Uses>,
    /// Tokens of earlier sequences, and the token now running.
    before: u64,
    token: u64,
}

/// Uses of an expert, as they counted at a token.
#[derive(Clone, Copy, Debug, Default)]
struct Uses {
    count: f64,
    at: u64,
}

impl Uses {
    fn count_at(self, token: u64) -> f64 {
        self.count * (-(token.saturating_sub(self.at) as f64) / HALF_LIFE).exp2()
    }
}

impl ClassLru {
    fn class(&self, expert: ExpertId) -> f64 {
        let count = self.uses.get(expert).map_or(0.0, |uses| uses.count_at(self.token));
        count.max(1.0).log2().floor()
    }

    fn advance(&mut self, now: Now) {
        self.token = self.token.max(self.before + now.token);
    }
}

impl Policy for ClassLru {
    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        self.advance(now);
        let token = self.token;
        let uses = self.uses.entry(expert);
        *uses = Uses { count: uses.count_at(token) + f64::from(usage.n_tokens), at: token };
    }

    fn begin_sequence(&mut self) {
        self.before = self.token + 1;
    }

    fn victim(&mut self, _incoming: Version, candidates: &[Candidate], now: Now) -> usize {
        self.advance(now);
        lowest(candidates, |version| self.class(version.expert))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::tests::scripts::{aged, at, high, insert, token, victim_of};

    #[test]
    fn the_oldest_of_the_lowest_class_goes() {
        let mut policy = aged(ClassLru::default());
        insert(&mut policy, &[0, 1, 2]);
        for (time, index) in [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 2)] {
            token(&mut policy, time, &[index]);
        }
        // Two uses less a little, and almost three.
        assert_eq!([0, 1, 2].map(|index| policy.class(high(index).expert)), [0.0, 1.0, 0.0]);
        assert_eq!(victim_of(&mut policy, &[0, 1, 2]), 0, "equal classes go by age");
        assert_eq!(victim_of(&mut policy, &[1, 2]), 2, "the higher class stays, though it is older");
    }

    #[test]
    fn uses_halve_every_128_tokens_and_outlive_a_sequence() {
        let mut policy = aged(ClassLru::default());
        insert(&mut policy, &[0, 1]);
        (0..8).for_each(|_| token(&mut policy, 0, &[0]));
        (0..8).for_each(|_| token(&mut policy, 127, &[1]));
        policy.begin_sequence();
        token(&mut policy, 0, &[2]);
        assert_eq!([0, 1].map(|index| policy.class(high(index).expert)), [2.0, 2.0], "8 uses 128 and 1 tokens ago");
        policy.advance(at(127));
        assert_eq!([0, 1].map(|index| policy.class(high(index).expert)), [1.0, 2.0]);
        policy.advance(at(1000));
        assert_eq!([0, 1].map(|index| policy.class(high(index).expert)), [0.0, 0.0]);
        assert_eq!(victim_of(&mut policy, &[1, 0]), 0);
    }

    #[test]
    fn an_expert_of_every_token_reaches_class_7() {
        let mut policy = aged(ClassLru::default());
        (0..4000).for_each(|time| token(&mut policy, time, &[0]));
        assert_eq!(policy.class(high(0).expert), 7.0);
    }
}
