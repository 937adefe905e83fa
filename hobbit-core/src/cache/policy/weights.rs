//! The weights of HOBBIT's sum.

use std::fmt;
use std::str::FromStr;

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
    use proptest::prelude::*;

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
