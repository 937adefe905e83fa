//! Least high-precision used in this sequence (HOBBIT, section 4.4: `LeastHighPrecisionUsed`).

use super::records::Records;
use super::{Now, Policy, Use};
use crate::expert::{ExpertId, Version};

/// Evicts the expert with the fewest high-precision uses `H` since the sequence began: losing it costs only a low
/// load. Of equal ones, the least recently used goes. Without low versions it is [`super::Lfu`].
#[derive(Clone, Debug, Default)]
pub struct Lhu {
    records: Records,
}

impl Policy for Lhu {
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
        self.records.lowest(candidates, |expert| self.records.of(expert).high_uses as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{at, high, insert, token, used, victim_of};
    use crate::expert::Precision;

    #[test]
    fn low_uses_do_not_count() {
        let mut lhu = Lhu::default();
        insert(&mut lhu, &[0, 1]);
        for time in 0..3 {
            lhu.on_use(high(0).expert, used(Precision::Low), at(time));
        }
        token(&mut lhu, 3, &[1]);
        assert_eq!(victim_of(&mut lhu, &[0, 1]), 0);
        token(&mut lhu, 4, &[0]);
        assert_eq!(victim_of(&mut lhu, &[0, 1]), 1, "equal counts go by age");
        lhu.begin_sequence();
        token(&mut lhu, 0, &[1]);
        assert_eq!(victim_of(&mut lhu, &[0, 1]), 0);
    }
}
