//! Least recently used, share by share because candidates are of one share.

use super::{Candidate, Now, Policy, Use, lowest};
use crate::expert::{ExpertId, Version};

/// Evicts the version whose last use or insertion is longest ago. Only the version that is used counts as used: a low
/// version beside a high one ages. Sequences do not matter to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lru;

impl Policy for Lru {
    fn on_use(&mut self, _expert: ExpertId, _usage: Use, _now: Now) {}

    fn victim(&mut self, _incoming: Version, candidates: &[Candidate], _now: Now) -> usize {
        lowest(candidates, |_| 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{Aged, aged, high, low, used, victim_of};
    use crate::expert::Precision;

    const NOW: Now = Now { token: 0, layer: 3 };

    fn after(script: &[u16]) -> Aged<Lru> {
        let mut lru = aged(Lru);
        script.iter().for_each(|&index| lru.on_insert(high(index), NOW));
        lru
    }

    #[test]
    fn the_oldest_candidate_goes() {
        assert_eq!(victim_of(&mut after(&[0, 1, 2]), &[0, 1, 2]), 0);
        assert_eq!(victim_of(&mut after(&[0, 1, 2]), &[2, 1, 0]), 0);
        assert_eq!(victim_of(&mut after(&[0, 1, 2, 0]), &[0, 1, 2]), 1);
        assert_eq!(victim_of(&mut after(&[0, 1, 2, 0]), &[2]), 2);
        assert_eq!(victim_of(&mut after(&[5, 1, 5, 1]), &[1, 5]), 5);
    }

    #[test]
    fn a_use_counts_like_an_insertion_for_the_version_used() {
        let mut lru = aged(Lru);
        let expert = high(0).expert;
        for version in [high(0), low(0), high(1)] {
            lru.on_insert(version, NOW);
        }
        lru.on_use(expert, used(Precision::High), NOW);
        lru.begin_sequence();
        assert_eq!(lru.victim(high(2), &[high(0), high(1)], NOW), 1);
        assert_eq!(lru.victim(high(2), &[high(0), high(1), low(0)], NOW), 2);
        lru.on_use(expert, Use::by_one(false, None, 0.5), NOW);
        assert_eq!(lru.victim(high(2), &[high(0), low(0)], NOW), 1, "skipped is not used");
        lru.on_use(expert, used(Precision::Low), NOW);
        assert_eq!(lru.victim(high(2), &[high(0), high(1), low(0)], NOW), 1);
    }
}
