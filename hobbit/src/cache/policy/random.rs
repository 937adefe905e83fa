//! Whoever chance names: what the papers' tables are normalised by. For the simulator.

use super::{Candidate, Now, Policy, Use};
use crate::expert::{ExpertId, Version};

/// Evicts each candidate with equal probability: of equal seeds and calls, the same ones.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator's beginning.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits (splitmix64).
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Policy for Random {
    fn on_use(&mut self, _expert: ExpertId, _usage: Use, _now: Now) {}

    fn victim(&mut self, _incoming: Version, candidates: &[Candidate], _now: Now) -> usize {
        // The high bits of a product are as even as 64 bits make them.
        ((u128::from(self.next()) * candidates.len() as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{aged, insert, victim_of};

    fn victims(seed: u64) -> Vec<u16> {
        let mut random = aged(Random::new(seed));
        insert(&mut random, &[0, 1, 2, 3]);
        (0..400).map(|_| victim_of(&mut random, &[0, 1, 2, 3])).collect()
    }

    #[test]
    fn everybody_leaves_as_often_and_a_seed_tells_the_order() {
        let drawn = victims(0);
        for index in 0..4 {
            let n = drawn.iter().filter(|victim| **victim == index).count();
            assert!((70..=130).contains(&n), "{index}: {n} of 400");
        }
        assert_eq!(drawn, victims(0));
        assert_ne!(drawn, victims(1));
    }
}
