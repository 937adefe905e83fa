//! Least frequently used in this sequence.

use super::records::Records;
use super::{Now, Policy, Use};
use crate::expert::{ExpertId, Version};

/// Evicts the expert with the fewest uses `F` since the sequence began; of equal ones, the least recently used.
///
/// Counts start over with each sequence: sequences prefer experts of their own, and training balances them over many
/// (HOBBIT, section 5.5.3: 4.5 % more hits than counts that are never reset).
#[derive(Clone, Debug, Default)]
pub struct Lfu {
    records: Records,
}

impl Policy for Lfu {
    fn on_insert(&mut self, version: Version, _now: Now) {
        self.records.on_insert(version);
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        self.records.on_use(expert, usage, now);
    }

    fn begin_sequence(&mut self) {
        self.records.clear();
    }

    fn victim(&mut self, _incoming: Version, candidates: &[Version], _now: Now) -> usize {
        self.records.lowest(candidates, |expert| self.records.of(expert).uses as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{insert, token, victim_of};

    #[test]
    fn the_least_used_of_the_sequence_goes() {
        let mut lfu = Lfu::default();
        insert(&mut lfu, &[0, 1, 2]);
        token(&mut lfu, 0, &[0, 1]);
        token(&mut lfu, 1, &[0, 2]);
        token(&mut lfu, 2, &[0, 1]);
        assert_eq!(victim_of(&mut lfu, &[0, 1, 2]), 2);
        assert_eq!(victim_of(&mut lfu, &[0, 1]), 1);
        token(&mut lfu, 3, &[2]);
        assert_eq!(victim_of(&mut lfu, &[0, 1, 2]), 1, "equal counts go by age");
        lfu.begin_sequence();
        token(&mut lfu, 0, &[1]);
        assert_eq!(victim_of(&mut lfu, &[0, 1, 2]), 0, "counts start over, ages do not");
    }
}
