//! HOBBIT's weighted sum (section 3.4, equation 3), and its parts as policies of their own.

use std::fmt;
use std::str::FromStr;

use super::{Candidate, Now, Policy, Use, lowest};
use crate::cache::slots::ByExpert;
use crate::expert::{ExpertId, Precision, Version};

/// Evicts the lowest `w_lru*R/T + w_lfu*F/T + w_lhu*H/T + w_fld*(1 - ((l_t - l_i + L) mod L)/L)`.
///
/// In tokens of this sequence: `T` are all so far, `R` is the one that used the expert last, `F` how many used it, and
/// `H` how many of them in high precision. `l_t` is the expert's layer, `l_i` the running one. Among equal sums it
/// evicts the least recently used.
///
/// With all of the weight on one part it is
/// - LFU, least frequently used. Counts start over with each sequence: each prefers experts of its own, and training
///   balances them over many (section 5.5.3: 4.5 % more hits than counts that are never reset);
/// - LHU, least high-precision used: losing such an expert costs only a low load. Without low versions it is LFU;
/// - FLD, farthest layer distance. In shares of one layer only the tie-break remains.
#[derive(Clone, Debug)]
pub struct Hobbit {
    weights: Weights,
    n_layers: u16,
    /// Whether counts start over with each sequence.
    forgets: bool,
    records: ByExpert<Record>,
}

/// An expert's uses in this sequence. Skipped ones do not count; those of both versions count together.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// `R`: the token that used it last, counted from 1; 0 for none.
    last_token: u64,
    /// `F`: how many tokens used it.
    uses: u64,
    /// `H`: how many of them in high precision.
    high_uses: u64,
}

impl Hobbit {
    pub fn new(weights: Weights, n_layers: u16) -> Self {
        Self { weights, n_layers, forgets: true, records: ByExpert::default() }
    }

    /// LFU of the whole run, the paper's "model level" (section 5.5.3): counts are never reset. For the simulator.
    pub(crate) fn lfu_of_model(n_layers: u16) -> Self {
        let weights = Weights { lru: 0.0, lfu: 1.0, lhu: 0.0, fld: 0.0 };
        Self { forgets: false, ..Self::new(weights, n_layers) }
    }

    fn priority(&self, expert: ExpertId, now: Now) -> f64 {
        let Weights { lru, lfu, lhu, fld } = self.weights;
        let record = self.records.get(expert).copied().unwrap_or_default();
        let part = |weight: f32, count: u64| f64::from(weight) * count as f64 / (now.token + 1) as f64;
        part(lru, record.last_token)
            + part(lfu, record.uses)
            + part(lhu, record.high_uses)
            + f64::from(fld) * nearness(expert.layer, now.layer, self.n_layers)
    }
}

/// `p_fld`: 1 for the running layer, less for layers that run later.
fn nearness(layer: u16, running: u16, n_layers: u16) -> f64 {
    let n_layers = i32::from(n_layers.max(1));
    let ahead = (i32::from(layer) - i32::from(running)).rem_euclid(n_layers);
    1.0 - f64::from(ahead) / f64::from(n_layers)
}

impl Policy for Hobbit {
    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        let Some(precision) = usage.precision else { return };
        let record = self.records.entry(expert);
        let n_tokens = u64::from(usage.n_tokens);
        record.last_token = (now.token + 1).saturating_sub(usage.since.into());
        record.uses += n_tokens;
        record.high_uses += if precision == Precision::High { n_tokens } else { 0 };
    }

    fn begin_sequence(&mut self) {
        if self.forgets {
            self.records.clear();
        }
    }

    fn victim(&mut self, _incoming: Version, candidates: &[Candidate], now: Now) -> usize {
        lowest(candidates, |version| self.priority(version.expert, now))
    }
}

/// How much each part of HOBBIT's priority counts (section 3.4, equation 3): not negative, together 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    pub lru: f32,
    pub lfu: f32,
    pub lhu: f32,
    pub fld: f32,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "policy weights '{found}': {why}; give four numbers from 0 up, not all 0, for recency, frequency, high-precision \
     frequency and layer distance, for example 0.3,0.3,0.3,0.1"
)]
pub struct WeightsError {
    pub found: String,
    why: &'static str,
}

impl Weights {
    /// Weights in the order of [`Weights`]'s fields, divided by their sum.
    ///
    /// # Errors
    /// [`WeightsError`] unless all are finite, none is negative and one is not 0.
    pub fn new(weights: [f32; 4]) -> Result<Self, WeightsError> {
        let fail = |why| WeightsError { found: weights.map(|weight| weight.to_string()).join(","), why };
        if weights.iter().any(|weight| !weight.is_finite() || *weight < 0.0) {
            return Err(fail("a weight is negative or no number"));
        }
        let sum: f64 = weights.into_iter().map(f64::from).sum();
        if sum == 0.0 {
            return Err(fail("all weights are 0"));
        }
        let [lru, lfu, lhu, fld] = weights.map(|weight| (f64::from(weight) / sum) as f32);
        Ok(Self { lru, lfu, lhu, fld })
    }
}

impl Default for Weights {
    /// The paper fits them to each model (`hobbit-sim calibrate`). These are near the means of fits on traces of the
    /// bundled demo model and of a synthetic one with 64 experts, at 37.5 to 75 % and 25 to 75 % of the experts: 0.38
    /// recency to 0.62 frequency. The traces are exact, so frequency is divided evenly between all uses and high ones.
    /// Inside a share of one layer, distance has no effect.
    fn default() -> Self {
        Self { lru: 0.34, lfu: 0.28, lhu: 0.28, fld: 0.1 }
    }
}

impl FromStr for Weights {
    type Err = WeightsError;

    fn from_str(text: &str) -> Result<Self, WeightsError> {
        let fail = |why| WeightsError { found: text.to_owned(), why };
        let weights: Result<Vec<f32>, _> = text.split(',').map(|number| number.trim().parse()).collect();
        let weights = weights.map_err(|_| fail("not numbers separated by commas"))?;
        let weights: [f32; 4] = weights.try_into().map_err(|_| fail("not four numbers"))?;
        Self::new(weights).map_err(|error| fail(error.why))
    }
}

impl fmt::Display for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{},{}", self.lru, self.lfu, self.lhu, self.fld)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::tests::scripts::{Aged, aged, at, high, insert, token, used, victim_of};
    use proptest::prelude::*;

    fn hobbit(weights: &str) -> Aged<Hobbit> {
        aged(Hobbit::new(weights.parse().unwrap(), 4))
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
    fn a_batch_counts_as_its_tokens_do_one_by_one() {
        let (n, chosen) = (6, [[0, 1], [0, 2], [0, 1], [3, 0], [1, 2], [0, 2]]);
        let mut one_by_one = hobbit("0.25,0.25,0.25,0.25");
        (0..n).for_each(|at| token(&mut one_by_one, at, &chosen[at as usize]));
        let mut at_once = hobbit("0.25,0.25,0.25,0.25");
        for index in 0..4 {
            let users: Vec<u64> = (0..n).filter(|at| chosen[*at as usize].contains(&index)).collect();
            let since = (n - 1 - users[users.len() - 1]) as u32;
            let usage = Use { n_tokens: users.len() as u32, since, ..used(Precision::High) };
            at_once.on_use(high(index).expert, usage, at(n - 1));
        }
        for index in 0..4 {
            let priority = |own: &Aged<Hobbit>| own.priority(high(index).expert, at(n));
            assert_eq!(priority(&at_once), priority(&one_by_one), "{index}");
            let Record { uses, .. } = *at_once.records.get(high(index).expert).unwrap();
            assert!(uses as f64 / n as f64 <= 1.0);
        }
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
    fn the_least_used_of_the_sequence_goes() {
        let mut lfu = hobbit("0,1,0,0");
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

    #[test]
    fn of_the_model_it_forgets_nothing() {
        let mut lfu = aged(Hobbit::lfu_of_model(4));
        insert(&mut lfu, &[0, 1]);
        (0..3).for_each(|time| token(&mut lfu, time, &[0]));
        lfu.begin_sequence();
        (0..2).for_each(|time| token(&mut lfu, time, &[1]));
        assert_eq!(victim_of(&mut lfu, &[0, 1]), 1, "three uses of the run, two of the sequence");
    }

    #[test]
    fn the_layer_that_runs_last_goes() {
        let mut fld = aged(Hobbit::new("0,0,0,1".parse().unwrap(), 8));
        let of_layer = |layer| Version::high(ExpertId { layer, index: 0 });
        let candidates = [4, 3, 7, 0, 2, 1].map(of_layer);
        candidates.iter().for_each(|&version| fld.on_insert(version, at(0)));
        // Layer 3 runs: 2 comes round in seven layers, 4 is next.
        assert_eq!(candidates[fld.victim(of_layer(5), &candidates, at(0))].expert.layer, 2);
        assert_eq!(candidates[fld.victim(of_layer(5), &candidates[..4], at(0))].expert.layer, 0);
        assert_eq!([3, 4, 2].map(|layer| nearness(layer, 3, 8)), [1.0, 0.875, 0.125]);
        assert_eq!(nearness(3, 3, 0), 1.0, "no layers is one");
    }

    #[test]
    fn four_numbers_become_parts_of_one() {
        assert_eq!("2, 1,1,0".parse(), Ok(Weights { lru: 0.5, lfu: 0.25, lhu: 0.25, fld: 0.0 }));
        assert_eq!("0.34,0.28,0.28,0.1".parse(), Ok(Weights::default()));
        assert_eq!(Weights::default().to_string(), "0.34,0.28,0.28,0.1");
    }

    #[test]
    fn others_are_refused_with_a_remedy() {
        for (text, why) in [
            ("", "not numbers"),
            ("1,2,3", "not four"),
            ("1,2,3,4,5", "not four"),
            ("1,2,3,x", "not numbers"),
            ("1,-1,0,0", "negative"),
            ("1,NaN,0,0", "no number"),
            ("inf,1,0,0", "no number"),
            ("0,0,0,0", "all weights are 0"),
        ] {
            let error = text.parse::<Weights>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("policy weights '{text}': ")) && error.contains(why), "{error}");
            assert!(error.ends_with("for example 0.3,0.3,0.3,0.1"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn they_sum_to_one_and_round_trip(weights in prop::array::uniform4(0.0f32..1e30)) {
            prop_assume!(weights.iter().any(|weight| *weight > 0.0));
            let parsed = Weights::new(weights).unwrap();
            let Weights { lru, lfu, lhu, fld } = parsed;
            prop_assert!((lru + lfu + lhu + fld - 1.0).abs() < 1e-6);
            let again: Weights = parsed.to_string().parse().unwrap();
            prop_assert!((again.lru - lru).abs() < 1e-6 && (again.fld - fld).abs() < 1e-6);
        }
    }
}
