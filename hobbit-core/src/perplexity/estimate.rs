//! Means of many measurements, with the standard error of each.

/// A value and its standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Estimate {
    pub value: f64,
    /// Standard error; 0 for too few values.
    pub uncertainty: f64,
}

impl Estimate {
    /// Multiplies value and error.
    pub fn scaled(self, factor: f64) -> Self {
        Self { value: self.value * factor, uncertainty: self.uncertainty * factor }
    }

    /// e to the value, with the error propagated to first order.
    pub fn exp(self) -> Self {
        let value = self.value.exp();
        Self { value, uncertainty: value * self.uncertainty }
    }

    /// Share of `n` trials that succeeded, with the standard error of a proportion.
    pub fn share(successes: usize, n: usize) -> Self {
        let value = successes as f64 / n as f64;
        Self { value, uncertainty: (value * (1.0 - value) / (n as f64 - 1.0)).sqrt() }
    }
}

/// Sums of values, from which mean and spread follow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    sum: f64,
    sum_of_squares: f64,
    count: usize,
}

impl Sums {
    /// Adds a value, squared in double precision.
    pub fn add(&mut self, value: f64) {
        self.add_with_square(value, value * value);
    }

    /// Adds a value whose square was taken in another precision.
    pub(crate) fn add_with_square(&mut self, value: f64, square: f64) {
        self.sum += value;
        self.sum_of_squares += square;
        self.count += 1;
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// The mean; NaN of nothing.
    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    /// Standard error of the mean; `None` where rounding made the variance negative, or it is 0 or undefined.
    pub fn uncertainty(&self) -> Option<f64> {
        let mean = self.mean();
        let variance = self.sum_of_squares / self.count as f64 - mean * mean;
        (variance > 0.0).then(|| (variance / (self.count as f64 - 1.0)).sqrt())
    }

    /// Mean and standard error as `llama-perplexity --kl-divergence` gives them: no error for 10 values or fewer.
    pub fn estimate(&self) -> Estimate {
        if self.count == 0 {
            return Estimate::default();
        }
        let uncertainty = if self.count > 10 { self.uncertainty().unwrap_or(0.0) } else { 0.0 };
        Estimate { value: self.mean(), uncertainty }
    }

    /// Covariance of the means of two series of equal length, from the sum of their products; 0 for fewer than 10
    /// values.
    pub(crate) fn covariance(&self, other: &Self, sum_of_products: f64) -> f64 {
        if self.count < 10 {
            return 0.0;
        }
        let n = self.count as f64;
        (sum_of_products / n - self.mean() * other.mean()) / (n - 1.0)
    }
}

/// The value below which a share of `sorted` lies, interpolated linearly. NaN of nothing.
///
/// `sorted` ascends; `share` is 0..=1.
pub(crate) fn percentile(sorted: &[f32], share: f32) -> f32 {
    let (Some(&first), Some(&last)) = (sorted.first(), sorted.last()) else { return f32::NAN };
    if share <= 0.0 {
        return first;
    }
    if share >= 1.0 {
        return last;
    }
    let position = share * (sorted.len() - 1) as f32;
    let below = (position as usize).min(sorted.len() - 1);
    let part = position - below as f32;
    (1.0 - part) * sorted[below] + part * sorted[(below + 1).min(sorted.len() - 1)]
}

/// The middle value, or the mean of the two middle ones. NaN of nothing.
pub fn median(sorted: &[f32]) -> f32 {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f32::NAN,
        n if n % 2 == 0 => 0.5 * (sorted[middle] + sorted[middle - 1]),
        _ => sorted[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(values: &[f64]) -> Sums {
        let mut sums = Sums::default();
        values.iter().for_each(|&value| sums.add(value));
        sums
    }

    #[test]
    fn mean_and_standard_error() {
        let some = sums(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!((some.count(), some.mean()), (4, 2.5));
        // Variance 1.25 over n - 1 = 3.
        assert!((some.uncertainty().unwrap() - (1.25f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!(some.estimate().uncertainty, 0.0, "ten values or fewer");
        let more = sums(&[[1.0, 3.0]; 6].concat());
        assert!((more.estimate().uncertainty - (1.0f64 / 11.0).sqrt()).abs() < 1e-12);
        assert_eq!(sums(&[2.0; 20]).uncertainty(), None);
        assert_eq!(Sums::default().estimate(), Estimate::default());
    }

    #[test]
    fn a_series_covaries_with_itself_as_it_varies() {
        let values: Vec<f64> = (0..20).map(f64::from).collect();
        let products = values.iter().map(|v| v * v).sum();
        let series = sums(&values);
        let covariance = series.covariance(&series, products);
        assert!((covariance - series.uncertainty().unwrap().powi(2)).abs() < 1e-9);
        assert_eq!(sums(&values[..9]).covariance(&series, 1.0), 0.0);
    }

    #[test]
    fn percentiles_interpolate() {
        let values = [0.0, 10.0, 20.0, 30.0, 40.0];
        for (share, expected) in [(0.0, 0.0), (0.25, 10.0), (0.5, 20.0), (0.9, 36.0), (1.0, 40.0), (2.0, 40.0)] {
            assert!((percentile(&values, share) - expected).abs() < 1e-4, "{share}");
        }
        assert_eq!(percentile(&[7.0], 0.3), 7.0);
        assert!(percentile(&[], 0.5).is_nan() && median(&[]).is_nan());
        assert_eq!((median(&values), median(&values[..4])), (20.0, 15.0));
    }
}
