//! What a policy would do that knew the next few tokens. For the simulator.

use super::{Belady, Candidate, Now, Policy, Use};
use crate::cache::ShareId;
use crate::expert::{ExpertId, Version};

/// Evicts whom another policy would, of those that are not needed for a while; only where all candidates are needed sooner it
/// evicts as [`Belady`] does. So it tells what seeing so far ahead is worth.
pub struct Near {
    belady: Belady,
    other: Box<dyn Policy>,
    /// In the unit of [`super::Upcoming::time`].
    reach: u64,
}

impl Near {
    /// With sight of what comes within `reach`.
    pub fn new(belady: Belady, other: Box<dyn Policy>, reach: u64) -> Self {
        Self { belady, other, reach }
    }
}

impl Policy for Near {
    fn on_share(&mut self, share: ShareId, members: &[Version]) {
        self.other.on_share(share, members);
    }

    fn on_insert(&mut self, version: Version, now: Now) {
        self.belady.on_insert(version, now);
        self.other.on_insert(version, now);
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        self.belady.on_use(expert, usage, now);
        self.other.on_use(expert, usage, now);
    }

    fn on_scores(&mut self, layer: u16, scores: &[f32], now: Now) {
        self.other.on_scores(layer, scores, now);
    }

    fn on_remove(&mut self, version: Version, now: Now) {
        self.belady.on_remove(version, now);
        self.other.on_remove(version, now);
    }

    fn begin_sequence(&mut self) {
        self.other.begin_sequence();
    }

    fn victim(&mut self, incoming: Version, candidates: &[Candidate], now: Now) -> usize {
        let is_far = |candidate: &Candidate| !self.belady.is_needed_within(candidate.version.expert, self.reach);
        let (places, far): (Vec<usize>, Vec<Candidate>) =
            candidates.iter().copied().enumerate().filter(|(_, candidate)| is_far(candidate)).unzip();
        if far.is_empty() {
            let victim = self.belady.victim(incoming, candidates, now);
            self.other.on_remove(candidates[victim].version, now);
            return victim;
        }
        let victim = places[self.other.victim(incoming, &far, now)];
        self.belady.on_remove(candidates[victim].version, now);
        victim
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{aged, high, insert, token, victim_of};
    use crate::cache::policy::{Lru, Upcoming};
    use crate::expert::Precision;

    #[test]
    fn beyond_its_sight_another_policy_decides() {
        let victim = |reach| {
            let uses = [(1, 1), (2, 2), (3, 0), (4, 1), (6, 2), (9, 0)];
            let future =
                uses.map(|(time, index)| Upcoming { time, expert: high(index).expert, demand: Some(Precision::High) });
            let mut near = aged(Near::new(Belady::new(future, 1.0), Box::new(Lru), reach));
            insert(&mut near, &[0, 1, 2]);
            [1, 2, 0].into_iter().zip(0..).for_each(|(index, time)| token(&mut near, time, &[index]));
            victim_of(&mut near, &[0, 1, 2])
        };
        assert_eq!(victim(0), 1, "the least recently used");
        assert_eq!([1, 2].map(victim), [2; 2], "at 3, 1 comes at 4");
        assert_eq!([3, 5].map(victim), [0; 2], "and 2 at 6");
        assert_eq!(victim(6), 0, "all are in sight, 0 comes last");
    }
}
