//! Distance of a model's predictions from a base's: Kullback-Leibler divergence, changed probabilities, equal
//! favourites.

use super::estimate::{Estimate, Sums, median, percentile};
use super::logits::{Normaliser, Row, logit};
use crate::options::Token;

/// Fewest tokens for which `llama-perplexity` prints statistics.
pub const TOKENS_MIN: usize = 100;

/// One token, predicted by the model and by the base.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Negative log-likelihood of the token that came, in nats.
    pub nll: f32,
    pub nll_base: f32,
    /// Divergence of the model from the base over the whole vocabulary, in nats.
    pub kld: f64,
    /// Probability of the token that came, minus that by the base.
    pub p_diff: f32,
    /// Whether both think the same token most probable.
    pub same_top: bool,
}

/// Compares the logits of a token's predecessor, `[n_vocab]`, with the base's row; `None` if either has no `token`.
pub fn compare(logits: &[f32], base: Row<'_>, token: Token) -> Option<Comparison> {
    let Normaliser { max, argmax, sum_exp } = Normaliser::of(logits);
    let log_sum_exp = sum_exp.ln() as f32;
    let nll = max + log_sum_exp - logit(logits, token)?;
    let nll_base = -base.log_prob(token)?;
    let normaliser = max + log_sum_exp;
    let mut kld = 0.0;
    let mut top_base = (0, f32::NEG_INFINITY);
    for (i, (log_prob, &logit)) in base.log_probs().zip(logits).enumerate() {
        if i == 0 || log_prob > top_base.1 {
            top_base = (i, log_prob);
        }
        // A row has no lower values.
        if log_prob > -super::logits::DEPTH {
            kld += f64::from(log_prob.exp() * (log_prob - logit + normaliser));
        }
    }
    let p_diff = (-nll).exp() - (-nll_base).exp();
    Some(Comparison { nll, nll_base, kld, p_diff, same_top: argmax == top_base.0 })
}

#[derive(Clone, Debug, Default)]
pub struct Divergence {
    nll: Sums,
    nll_base: Sums,
    sum_nll_products: f64,
    kld: Sums,
    p_diff: Sums,
    p_diff_squared: Sums,
    n_same_top: usize,
    klds: Vec<f32>,
    p_diffs: Vec<f32>,
}

/// Means so far: a line for each chunk.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Means {
    pub ppl: Estimate,
    pub ppl_base: Estimate,
    /// Correlation of both log-perplexities, -1..=1.
    pub ln_ppl_correlation: f64,
    pub ln_ppl_ratio: Estimate,
    pub ppl_ratio: Estimate,
    pub ppl_difference: Estimate,
    /// Divergence in nats.
    pub kld: Estimate,
    /// Change of the right token's probability, -1..=1.
    pub p_diff: Estimate,
    /// Root of its mean square.
    pub p_diff_rms: Estimate,
    /// Share of tokens with the same favourite, 0..=1.
    pub same_top: Estimate,
}

#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Distribution {
    pub minimum: f32,
    /// Share of the values, 0..=1, and the value below which they lie, descending.
    pub percentiles: Vec<(f32, f32)>,
    pub median: f32,
    pub maximum: f32,
}

impl Distribution {
    pub fn of(mut values: Vec<f32>, shares: &[f32]) -> Self {
        values.sort_by(f32::total_cmp);
        Self {
            minimum: percentile(&values, 0.0),
            percentiles: shares.iter().map(|&share| (share, percentile(&values, share))).collect(),
            median: median(&values),
            maximum: percentile(&values, 1.0),
        }
    }
}

impl Divergence {
    pub fn add(&mut self, one: &Comparison) {
        let Comparison { nll, nll_base, kld, p_diff, same_top } = *one;
        self.nll.add_with_square(nll.into(), (nll * nll).into());
        self.nll_base.add_with_square(nll_base.into(), (nll_base * nll_base).into());
        self.sum_nll_products += f64::from(nll * nll_base);
        self.kld.add(kld);
        let square = f64::from(p_diff * p_diff);
        self.p_diff.add_with_square(p_diff.into(), square);
        self.p_diff_squared.add(square);
        self.n_same_top += usize::from(same_top);
        self.klds.push(kld as f32);
        self.p_diffs.push(p_diff);
    }

    pub fn count(&self) -> usize {
        self.kld.count()
    }

    pub fn means(&self) -> Means {
        let (ln_ppl, ln_base) = (self.nll.estimate(), self.nll_base.estimate());
        let covariance = self.nll.covariance(&self.nll_base, self.sum_nll_products);
        let (ppl, ppl_base) = (ln_ppl.exp(), ln_base.exp());
        // Errors of both are correlated: Gauss's law with the covariance.
        // For nearly equal series, rounding would make a square negative.
        let of_difference = |a: f64, b: f64, covariance: f64| (a * a + b * b - 2.0 * covariance).max(0.0).sqrt();
        let ln_ppl_ratio = Estimate {
            value: ln_ppl.value - ln_base.value,
            uncertainty: of_difference(ln_ppl.uncertainty, ln_base.uncertainty, covariance),
        };
        let mean_square = self.p_diff_squared.estimate();
        let rms = mean_square.value.sqrt();
        Means {
            ppl,
            ppl_base,
            ln_ppl_correlation: covariance / (ln_ppl.uncertainty * ln_base.uncertainty),
            ln_ppl_ratio,
            ppl_ratio: ln_ppl_ratio.exp(),
            ppl_difference: Estimate {
                value: ppl.value - ppl_base.value,
                uncertainty: of_difference(
                    ppl.uncertainty,
                    ppl_base.uncertainty,
                    ppl.value * ppl_base.value * covariance,
                ),
            },
            kld: self.kld.estimate(),
            p_diff: self.p_diff.estimate(),
            p_diff_rms: Estimate { value: rms, uncertainty: 0.5 / rms * mean_square.uncertainty },
            same_top: Estimate::share(self.n_same_top, self.count()),
        }
    }

    pub fn klds(&self) -> Distribution {
        Distribution::of(self.klds.clone(), &[0.999, 0.99, 0.95, 0.9, 0.1, 0.05, 0.01, 0.001])
    }

    /// Changes of the right token's probability.
    pub fn p_diffs(&self) -> Distribution {
        Distribution::of(self.p_diffs.clone(), &[0.999, 0.99, 0.95, 0.9, 0.75, 0.25, 0.1, 0.05, 0.01, 0.001])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perplexity::logits::{encode, row_words};

    fn row(logits: &[f32]) -> Vec<u16> {
        let mut row = vec![0; row_words(logits.len())];
        encode(logits, 0, &mut row);
        row
    }

    fn compared(logits: &[f32], base: &[f32], token: Token) -> Comparison {
        compare(logits, Row::new(&row(base), base.len()).unwrap(), token).unwrap()
    }

    #[test]
    fn divergence_of_two_coins() {
        // KL of a fair base from a model that says 3 : 1 is ln(2 / sqrt(3)).
        let one = compared(&[3f32.ln(), 0.0], &[0.0, 0.0], 1);
        assert!((one.kld - (2.0 / 3f64.sqrt()).ln()).abs() < 1e-6, "{one:?}");
        assert!((one.p_diff + 0.25).abs() < 1e-6 && (one.nll - 4f32.ln()).abs() < 1e-6);
        assert!(one.same_top, "of equals the first is the favourite");
        assert!(!compared(&[0.0, 1.0], &[1.0, 0.0], 1).same_top);
        assert_eq!(compare(&[0.0], Row::new(&row(&[0.0]), 1).unwrap(), 1), None);
    }

    #[test]
    fn means_of_many() {
        let mut all = Divergence::default();
        for token in 0..200 {
            let tilt = (token % 7) as f32 * 0.1;
            all.add(&compared(&[tilt, 0.0, 1.0], &[0.0, 0.0, 1.0 + tilt], token % 3));
        }
        let means = all.means();
        assert_eq!(all.count(), 200);
        assert!((means.ppl_ratio.value - means.ppl.value / means.ppl_base.value).abs() < 1e-9);
        assert!((means.ppl_difference.value - (means.ppl.value - means.ppl_base.value)).abs() < 1e-12);
        assert!((0.0..=1.0).contains(&means.same_top.value) && means.kld.value > 0.0);
        assert!((-1.0..=1.0).contains(&means.ln_ppl_correlation), "{means:?}");
        let spread = all.klds();
        assert!(spread.minimum <= spread.median && spread.median <= spread.maximum);
        assert!(spread.percentiles.windows(2).all(|pair| pair[0].1 >= pair[1].1 - 1e-6));
    }

    #[test]
    fn a_series_correlates_with_itself() {
        let mut all = Divergence::default();
        for i in 0..50 {
            let nll = 1.0 + (i % 5) as f32;
            all.add(&Comparison { nll, nll_base: nll, kld: 0.0, p_diff: 0.0, same_top: true });
        }
        let means = all.means();
        assert!((means.ln_ppl_correlation - 1.0).abs() < 1e-9, "{means:?}");
        assert_eq!((means.ln_ppl_ratio.value, means.same_top.value), (0.0, 1.0));
    }
}
