//! Least recently used, layer by layer because candidates are of one layer.

use super::{Now, Policy, Use};
use crate::expert::ExpertId;

/// Evicts the expert whose last use or insertion is longest ago. Sequences do not matter to it.
#[derive(Clone, Debug, Default)]
pub struct Lru {
    events: u64,
    /// Event number of the last use, by layer and expert; 0 for never.
    last_use: Vec<Vec<u64>>,
}

impl Lru {
    fn mark(&mut self, expert: ExpertId) {
        let (layer, index) = (usize::from(expert.layer), usize::from(expert.index));
        if self.last_use.len() <= layer {
            self.last_use.resize(layer + 1, Vec::new());
        }
        let experts = &mut self.last_use[layer];
        if experts.len() <= index {
            experts.resize(index + 1, 0);
        }
        self.events += 1;
        experts[index] = self.events;
    }
}

impl Policy for Lru {
    fn on_insert(&mut self, expert: ExpertId, _now: Now) {
        self.mark(expert);
    }

    fn on_use(&mut self, expert: ExpertId, _usage: Use, _now: Now) {
        self.mark(expert);
    }

    fn victim(&mut self, incoming: ExpertId, candidates: &[ExpertId], _now: Now) -> usize {
        // Candidates were inserted, so the layer and the experts have entries.
        let last_use = &self.last_use[usize::from(incoming.layer)];
        let oldest = (0..candidates.len()).min_by_key(|&i| last_use[usize::from(candidates[i].index)]);
        oldest.unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Now = Now { token: 0, layer: 3 };

    fn expert(index: u16) -> ExpertId {
        ExpertId { layer: 3, index }
    }

    fn victim_of(script: &[u16], candidates: &[u16]) -> u16 {
        let mut lru = Lru::default();
        for &index in script {
            lru.on_insert(expert(index), NOW);
        }
        let candidates: Vec<_> = candidates.iter().copied().map(expert).collect();
        candidates[lru.victim(expert(99), &candidates, NOW)].index
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
    fn a_use_counts_like_an_insertion() {
        let mut lru = Lru::default();
        lru.on_insert(expert(0), NOW);
        lru.on_insert(expert(1), NOW);
        lru.on_use(expert(0), Use { hit: true }, NOW);
        lru.begin_sequence();
        assert_eq!(lru.victim(expert(2), &[expert(0), expert(1)], NOW), 1);
    }
}
