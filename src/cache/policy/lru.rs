//! Least recently used, share by share because candidates are of one share.

use super::{Now, Policy, Use};
use crate::cache::by_expert::ByExpert;
use crate::expert::{ExpertId, Precision, Version};

/// Evicts the version whose last use or insertion is longest ago. Only the version that is used counts as used: a low
/// version beside a high one ages. Sequences do not matter to it.
#[derive(Clone, Debug, Default)]
pub struct Lru {
    events: u64,
    /// Event number of the last use, by [`Precision::index`]; 0 for never.
    last_use: ByExpert<[u64; Precision::COUNT]>,
}

impl Lru {
    fn mark(&mut self, version: Version) {
        self.events += 1;
        self.last_use.entry(version.expert)[version.precision.index()] = self.events;
    }
}

impl Policy for Lru {
    fn on_insert(&mut self, version: Version, _now: Now) {
        self.mark(version);
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, _now: Now) {
        if let Some(precision) = usage.precision {
            self.mark(Version { expert, precision });
        }
    }

    fn victim(&mut self, _incoming: Version, candidates: &[Version], _now: Now) -> usize {
        let last_use = |version: Version| self.last_use.get(version.expert).map(|uses| uses[version.precision.index()]);
        (0..candidates.len()).min_by_key(|&i| last_use(candidates[i])).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Now = Now { token: 0, layer: 3 };

    fn high(index: u16) -> Version {
        Version::high(ExpertId { layer: 3, index })
    }

    fn victim_of(script: &[u16], candidates: &[u16]) -> u16 {
        let mut lru = Lru::default();
        for &index in script {
            lru.on_insert(high(index), NOW);
        }
        let candidates: Vec<_> = candidates.iter().copied().map(high).collect();
        candidates[lru.victim(high(99), &candidates, NOW)].expert.index
    }

    #[test]
    fn the_oldest_candidate_goes() {
        assert_eq!(victim_of(&[0, 1, 2], &[0, 1, 2]), 0);
        assert_eq!(victim_of(&[0, 1, 2], &[2, 1, 0]), 0);
        assert_eq!(victim_of(&[0, 1, 2, 0], &[0, 1, 2]), 1);
        assert_eq!(victim_of(&[0, 1, 2, 0], &[2]), 2);
        assert_eq!(victim_of(&[5, 1, 5, 1], &[1, 5]), 5);
    }

    #[test]
    fn a_use_counts_like_an_insertion_for_the_version_used() {
        let mut lru = Lru::default();
        let low = Version::low(high(0).expert);
        for version in [high(0), low, high(1)] {
            lru.on_insert(version, NOW);
        }
        lru.on_use(low.expert, Use { hit: true, precision: Some(Precision::High) }, NOW);
        lru.begin_sequence();
        assert_eq!(lru.victim(high(2), &[high(0), high(1)], NOW), 1);
        assert_eq!(lru.victim(high(2), &[high(0), high(1), low], NOW), 2);
        lru.on_use(low.expert, Use { hit: false, precision: None }, NOW);
        assert_eq!(lru.victim(high(2), &[high(0), low], NOW), 1, "skipped is not used");
        lru.on_use(low.expert, Use { hit: true, precision: Some(Precision::Low) }, NOW);
        assert_eq!(lru.victim(high(2), &[high(0), high(1), low], NOW), 1);
    }
}
