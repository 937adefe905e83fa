//! HOBBIT's weighted sum (section 4.4, equation 3).

use super::fld::nearness;
use super::records::Records;
use super::{Now, Policy, Use, Weights};
use crate::expert::{ExpertId, Version};

/// Evicts the lowest `w_lru*R/T + w_lfu*F/T + w_lhu*H/T + w_fld*(1 - ((l_t - l_i + L) mod L)/L)`.
///
/// `T` are the tokens of the sequence so far, `R` the one that used the expert last, `F` how many used it and `H` how
/// many of them in high precision: all of this sequence. `l_t` is the expert's layer, `l_i` the running one. Of equal
/// sums the least recently used goes.
#[derive(Clone, Debug)]
pub struct Hobbit {
    weights: Weights,
    n_layers: u16,
    records: Records,
}

impl Hobbit {
    /// For a model of so many layers.
    pub fn new(weights: Weights, n_layers: u16) -> Self {
        Self { weights, n_layers, records: Records::default() }
    }

    fn priority(&self, expert: ExpertId, now: Now) -> f64 {
        let Weights { lru, lfu, lhu, fld } = self.weights;
        let record = self.records.of(expert);
        let part = |weight: f32, count: u64| f64::from(weight) * count as f64 / (now.token + 1) as f64;
        part(lru, record.last_token)
            + part(lfu, record.uses)
            + part(lhu, record.high_uses)
            + f64::from(fld) * nearness(expert.layer, now.layer, self.n_layers)
    }
}

impl Policy for Hobbit {
    fn on_insert(&mut self, version: Version, _now: Now) {
        self.records.on_insert(version);
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        self.records.on_use(expert, usage, now);
    }

    fn begin_sequence(&mut self) {
        self.records.clear();
    }

    fn victim(&mut self, _incoming: Version, candidates: &[Version], now: Now) -> usize {
        self.records.lowest(candidates, |expert| self.priority(expert, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{at, high, insert, token, used, victim_of};
    use crate::expert::Precision;

    fn hobbit(weights: &str) -> Hobbit {
        Hobbit::new(weights.parse().unwrap(), 4)
    }

    #[test]
    fn the_sum_is_the_papers() {
        let mut hobbit = hobbit("0.5,0.25,0.125,0.125");
        token(&mut hobbit, 0, &[0]);
        hobbit.on_use(high(0).expert, used(Precision::Low), at(2));
        // T = 4, R = 3, F = 2, H = 1, and layer 3 comes one layer after layer 2.
        let expected = 0.5 * 0.75 + 0.25 * 0.5 + 0.125 * 0.25 + 0.125 * 0.75;
        assert_eq!(hobbit.priority(high(0).expert, Now { token: 3, layer: 2 }), expected);
    }

    #[test]
    fn each_weight_alone_is_its_policy() {
        let victim = |weights: &str| {
            let mut hobbit = hobbit(weights);
            insert(&mut hobbit, &[0, 1, 2]);
            token(&mut hobbit, 0, &[0, 0, 0, 0, 0]);
            (0..3).for_each(|_| hobbit.on_use(high(2).expert, used(Precision::Low), at(2)));
            token(&mut hobbit, 3, &[1]);
            victim_of(&mut hobbit, &[2, 1, 0])
        };
        assert_eq!(victim("1,0,0,0"), 0, "R = 1, 4, 3");
        assert_eq!(victim("0,1,0,0"), 1, "F = 5, 1, 3");
        assert_eq!(victim("0,0,1,0"), 2, "H = 5, 1, 0");
        assert_eq!(victim("0,0,0,1"), 2, "all equal: of the high versions this one's last event is the first");
    }

    #[test]
    fn a_new_sequence_forgets() {
        let mut hobbit = hobbit("0.4,0.4,0.1,0.1");
        insert(&mut hobbit, &[0, 1]);
        (0..5).for_each(|time| token(&mut hobbit, time, &[0]));
        assert_eq!(victim_of(&mut hobbit, &[0, 1]), 1);
        hobbit.begin_sequence();
        token(&mut hobbit, 0, &[1]);
        assert_eq!(victim_of(&mut hobbit, &[0, 1]), 0);
    }
}
