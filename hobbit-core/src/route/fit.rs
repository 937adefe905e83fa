//! Thresholds for a target mix of high, low and skip, from the uses of a calibration run.

use std::str::FromStr;

use super::{Demand, Thresholds};

/// Shares of the uses of experts by demand. They add up to 1.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Shares {
    /// Share that asks for high precision.
    pub high: f64,
    /// Share for which low precision is enough.
    pub low: f64,
    /// Share that is skipped.
    pub skip: f64,
}

/// Shares that do not divide a whole.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("expected three percentages that add up to 100, high/low/skip: 67/30/3")]
pub struct SharesError;

impl FromStr for Shares {
    type Err = SharesError;

    /// `67/30/3` in percent.
    fn from_str(text: &str) -> Result<Self, SharesError> {
        let parts: Option<Vec<f64>> = text.split('/').map(|part| part.trim().parse().ok()).collect();
        let Some(&[high, low, skip]) = parts.as_deref() else { return Err(SharesError) };
        Self::new(high / 100.0, low / 100.0, skip / 100.0)
    }
}

impl Shares {
    /// Checked shares.
    ///
    /// # Errors
    /// [`SharesError`] unless each is `0.0..=1.0` and the sum is 1 (to a millionth).
    pub fn new(high: f64, low: f64, skip: f64) -> Result<Self, SharesError> {
        let are_shares = [high, low, skip].iter().all(|share| (0.0..=1.0).contains(share));
        if !are_shares || (high + low + skip - 1.0).abs() > 1e-6 {
            return Err(SharesError);
        }
        Ok(Self { high, low, skip })
    }

    /// Demands of these uses under `thresholds`: `n_first` uses of a token's first expert, and the unimportances of all
    /// others. All zero without uses.
    pub fn reached(thresholds: Thresholds, n_first: u64, samples: &[f32]) -> Self {
        let mut counts = [0u64; 3];
        counts[thresholds.demand(0.0) as usize] += n_first;
        for &s in samples {
            counts[thresholds.demand(s) as usize] += 1;
        }
        let n_uses = (n_first + samples.len() as u64).max(1) as f64;
        let share = |demand: Demand| counts[demand as usize] as f64 / n_uses;
        Self { high: share(Demand::High), low: share(Demand::Low), skip: share(Demand::Skip) }
    }

    /// Sum of the differences, `0.0..=2.0`.
    fn distance(self, other: Self) -> f64 {
        (self.high - other.high).abs() + (self.low - other.low).abs() + (self.skip - other.skip).abs()
    }
}

/// Thresholds, and their mix on the samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// Valid for [`Thresholds::new`].
    pub thresholds: Thresholds,
    /// The mix reached: samples of equal unimportance get equal demands.
    pub shares: Shares,
}

/// There is nothing to fit to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no use of an expert was seen, so no thresholds can be fitted; give a longer text")]
pub struct NoUses;

/// The thresholds whose mix comes nearest to `target` (least sum of the three differences; of equals the highest T1,
/// then the highest T2).
///
/// `n_first` counts uses of a token's first expert, `samples` are the unimportances ([`super::unimportance`]) of all
/// other uses, in any order; NaN counts as 0, as in the scorer. A threshold that no sample exceeds is 1, so that no
/// later use exceeds it either.
pub fn fit(n_first: u64, mut samples: Vec<f32>, target: Shares) -> Result<Fit, NoUses> {
    for s in &mut samples {
        *s = if s.is_nan() { 0.0 } else { s.clamp(0.0, 1.0) };
    }
    samples.sort_unstable_by(f32::total_cmp);
    let n_uses = n_first + samples.len() as u64;
    if n_uses == 0 {
        return Err(NoUses);
    }
    let cuts = cuts(n_first, &samples);
    let share = |count: u64| count as f64 / n_uses as f64;

    // Only T1 moves the share of high, only T2 that of skip, and the distance grows with either's error: the best pair
    // is among the neighbours of the target.
    let nothing = Cut { threshold: 0.0, n_within: 0 };
    let t1s: Vec<Cut> = std::iter::once(nothing).chain(cuts.iter().copied()).collect();
    let t1s = neighbours(&t1s, |cut| share(cut.n_within) <= target.high);
    let t2s = neighbours(&cuts, |cut| share(cut.n_within) <= 1.0 - target.skip);
    let pairs = t1s.iter().flat_map(|t1| t2s.iter().map(move |t2| (t1, t2)));
    let pairs = pairs.filter(|(t1, t2)| t1.threshold <= t2.threshold);
    let fits = pairs.map(|(t1, t2)| {
        let (n_high, n_within) = (t1.n_within, t2.n_within);
        let shares = Shares { high: share(n_high), low: share(n_within - n_high), skip: share(n_uses - n_within) };
        Fit { thresholds: Thresholds { t1: t1.threshold, t2: t2.threshold }, shares }
    });
    let nearest = fits.min_by(|a, b| {
        let distances = a.shares.distance(target).total_cmp(&b.shares.distance(target));
        distances.then(b.thresholds.t1.total_cmp(&a.thresholds.t1)).then(b.thresholds.t2.total_cmp(&a.thresholds.t2))
    });
    Ok(nearest.expect("the lowest T1 goes with every T2"))
}

/// A threshold, and the number of uses within it.
#[derive(Clone, Copy, Debug)]
struct Cut {
    threshold: f32,
    n_within: u64,
}

/// Every way to divide the sorted samples by a threshold above 0, ascending: never empty.
fn cuts(n_first: u64, sorted: &[f32]) -> Vec<Cut> {
    let n_zero = sorted.partition_point(|s| *s <= 0.0);
    let mut cuts = Vec::new();
    // Half of the least sample includes only first experts and uses that rank with them.
    let below = sorted.get(n_zero).map_or(1.0, |least| least / 2.0);
    if below > 0.0 {
        cuts.push(Cut { threshold: below, n_within: n_first + n_zero as u64 });
    }
    for (i, &s) in sorted.iter().enumerate().skip(n_zero) {
        if sorted.get(i + 1).is_none_or(|next| *next > s) {
            cuts.push(Cut { threshold: s, n_within: n_first + i as u64 + 1 });
        }
    }
    if let Some(last) = cuts.last_mut() {
        last.threshold = 1.0;
    }
    cuts
}

/// The last cut within the target and the first beyond it, if they exist.
fn neighbours(cuts: &[Cut], is_within: impl Fn(&Cut) -> bool) -> &[Cut] {
    let first_beyond = cuts.partition_point(is_within);
    &cuts[first_beyond.saturating_sub(1)..(first_beyond + 1).min(cuts.len())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fitted(n_first: u64, samples: &[f32], target: (f64, f64, f64)) -> (f32, f32, (f64, f64, f64)) {
        let target = Shares::new(target.0, target.1, target.2).unwrap();
        let Fit { thresholds, shares } = fit(n_first, samples.to_vec(), target).unwrap();
        assert_eq!(Thresholds::new(thresholds.t1, thresholds.t2), Ok(thresholds));
        (thresholds.t1, thresholds.t2, (shares.high, shares.low, shares.skip))
    }

    #[test]
    fn ten_uses() {
        // Five tokens of two experts.
        let samples = [0.75, 0.5, 0.625, 0.875, 0.9375];
        assert_eq!(fitted(5, &samples, (0.7, 0.2, 0.1)), (0.625, 0.875, (0.7, 0.2, 0.1)));
        assert_eq!(fitted(5, &samples, (0.5, 0.5, 0.0)), (0.25, 1.0, (0.5, 0.5, 0.0)));
        // First experts cannot be skipped, and either all of them are high or none; of equals, all.
        assert_eq!(fitted(5, &samples, (0.0, 0.0, 1.0)), (0.25, 0.25, (0.5, 0.0, 0.5)));
        assert_eq!(fitted(5, &samples, (0.0, 0.2, 0.8)), (0.0, 0.25, (0.0, 0.5, 0.5)));
        assert_eq!(fitted(5, &samples, (0.4, 0.6, 0.0)), (0.25, 1.0, (0.5, 0.5, 0.0)));
    }

    #[test]
    fn whole_targets_are_the_ends() {
        let samples = [0.75, 0.5];
        assert_eq!(fitted(2, &samples, (1.0, 0.0, 0.0)), (1.0, 1.0, (1.0, 0.0, 0.0)));
        assert_eq!(fitted(2, &samples, (0.0, 1.0, 0.0)), (0.0, 1.0, (0.0, 1.0, 0.0)));
        // One expert per token.
        assert_eq!(fitted(3, &[], (0.5, 0.5, 0.0)), (1.0, 1.0, (1.0, 0.0, 0.0)));
        assert_eq!(fitted(3, &[], (0.25, 0.75, 0.0)), (0.0, 1.0, (0.0, 1.0, 0.0)));
    }

    #[test]
    fn equal_samples_are_not_told_apart() {
        assert_eq!(fitted(2, &[0.5; 6], (0.75, 0.25, 0.0)).2, (1.0, 0.0, 0.0));
        assert_eq!(fitted(2, &[f32::NAN, 0.5, 7.0, -3.0], (0.7, 0.1, 0.2)).2, (4.0 / 6.0, 1.0 / 6.0, 1.0 / 6.0));
    }

    #[test]
    fn records_that_cannot_be_fitted_are_refused() {
        let target = Shares::new(0.67, 0.30, 0.03).unwrap();
        assert_eq!(fit(0, Vec::new(), target), Err(NoUses));
        for (high, low, skip) in [(0.5, 0.5, 0.5), (1.5, -0.5, 0.0), (f64::NAN, 0.5, 0.5), (0.0, 0.0, 0.0)] {
            assert!(Shares::new(high, low, skip).is_err());
        }
        assert_eq!("67/30/3".parse(), Ok(target));
        for text in ["", "67/30", "67/30/4", "67/30/3/0", "a/b/c"] {
            assert_eq!(text.parse::<Shares>(), Err(SharesError), "{text}");
        }
    }

    /// All pairs of thresholds that could make a difference.
    fn best_distance(n_first: u64, samples: &[f32], target: Shares) -> f64 {
        let mut values: Vec<f32> = samples.iter().copied().chain([0.0, 1e-6, 1.0]).collect();
        values.sort_unstable_by(f32::total_cmp);
        let pairs = values.iter().flat_map(|&t1| values.iter().map(move |&t2| Thresholds::new(t1, t2)));
        let distances = pairs.flatten().map(|t| Shares::reached(t, n_first, samples).distance(target));
        distances.fold(f64::INFINITY, f64::min)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_sample_makes_a_better_threshold(
            n_first in 0..20u64,
            samples in prop::collection::vec(0..=32u8, 0..24),
            (a, b) in (0..=100u8, 0..=100u8),
        ) {
            prop_assume!(n_first > 0 || !samples.is_empty());
            let samples: Vec<f32> = samples.into_iter().map(|s| f32::from(s) / 32.0).collect();
            let (a, b) = (f64::from(a.min(b)) / 100.0, f64::from(a.max(b)) / 100.0);
            let target = Shares::new(a, b - a, 1.0 - b).unwrap();
            let Fit { thresholds, shares } = fit(n_first, samples.clone(), target).unwrap();
            prop_assert_eq!(Thresholds::new(thresholds.t1, thresholds.t2), Ok(thresholds));
            let reached = Shares::reached(thresholds, n_first, &samples);
            prop_assert!(reached.distance(shares) < 1e-12, "reported {:?}, reached {:?}", shares, reached);
            prop_assert!(shares.distance(target) <= best_distance(n_first, &samples, target) + 1e-12);
        }
    }
}
