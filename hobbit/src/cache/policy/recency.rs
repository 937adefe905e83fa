//! When each version was used last, and who ranks lowest with that as the tie-break.

use super::Use;
use crate::cache::by_expert::ByExpert;
use crate::expert::{ExpertId, Precision, Version};

/// Event numbers of last uses and insertions: a clock finer than the token.
#[derive(Clone, Debug, Default)]
pub(super) struct LastUse {
    events: u64,
    /// By [`Precision::index`]; 0 for never.
    last: ByExpert<[u64; Precision::COUNT]>,
}

impl LastUse {
    /// `version` was used or inserted just now. Its expert's other version ages.
    pub(super) fn mark(&mut self, version: Version) {
        self.events += 1;
        self.last.entry(version.expert)[version.precision.index()] = self.events;
    }

    /// The version in which a token uses an expert was used just now; none where it does without.
    pub(super) fn on_use(&mut self, expert: ExpertId, usage: Use) {
        if let Some(precision) = usage.precision {
            self.mark(Version { expert, precision });
        }
    }

    /// Number of the last event of `version`; 0 for never.
    pub(super) fn of(&self, version: Version) -> u64 {
        self.last.get(version.expert).map_or(0, |last| last[version.precision.index()])
    }

    /// Position of the candidate whose last use is longest ago.
    pub(super) fn oldest(&self, candidates: &[Version]) -> usize {
        self.lowest(candidates, |_| 0.0)
    }

    /// Position of the candidate of the lowest value; of equal values, the one whose last use is longest ago.
    pub(super) fn lowest(&self, candidates: &[Version], value: impl Fn(Version) -> f64) -> usize {
        let rank = |version: Version| (value(version), self.of(version));
        let ranks = candidates.iter().copied().map(rank).enumerate();
        let lowest = ranks.min_by(|(_, a), (_, b)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        lowest.map_or(0, |(position, _)| position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_rank_first_and_age_breaks_ties() {
        let [a, b, c] = [0, 1, 2].map(|index| Version::high(ExpertId { layer: 0, index }));
        let mut last_use = LastUse::default();
        [b, a, c].into_iter().for_each(|version| last_use.mark(version));
        assert_eq!(last_use.oldest(&[a, b, c]), 1);
        assert_eq!(last_use.lowest(&[a, b, c], |version| f64::from(version == b)), 0);
        assert_eq!(last_use.lowest(&[a, b, c], |version| -f64::from(version == c)), 2);
        assert_eq!(last_use.oldest(&[a, Version::low(a.expert)]), 1, "never used");
    }
}
