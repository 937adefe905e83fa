//! What a row of logits says about one token.

use crate::options::Token;

/// A row's maximum and the sum of the exponentials above it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normaliser {
    /// The largest logit.
    pub max: f32,
    /// Position of the first logit that is largest.
    pub argmax: usize,
    /// Sum of `exp(logit - max)`.
    pub sum_exp: f64,
}

impl Normaliser {
    /// Of a row of logits, `[n_vocab]`. An empty row sums to 0.
    pub fn of(logits: &[f32]) -> Self {
        let mut max = logits.first().copied().unwrap_or(f32::NEG_INFINITY);
        let mut argmax = 0;
        for (i, &logit) in logits.iter().enumerate() {
            if logit > max {
                (max, argmax) = (logit, i);
            }
        }
        let sum_exp = logits.iter().map(|&logit| f64::from((logit - max).exp())).sum();
        Self { max, argmax, sum_exp }
    }

    /// Log-probability of a token with this logit, in nats.
    pub fn log_prob(&self, logit: f32) -> f64 {
        f64::from(logit - self.max) - self.sum_exp.ln()
    }
}

/// Negative log-likelihood of `token`, in nats. NaN for a token outside of the row.
pub fn nll(logits: &[f32], token: Token) -> f64 {
    logit(logits, token).map_or(f64::NAN, |logit| -Normaliser::of(logits).log_prob(logit))
}

/// Log-probability of `token` with the precision of llama.cpp's task scores. NaN for a token outside of the row.
pub fn log_prob_f32(logits: &[f32], token: Token) -> f32 {
    let Some(logit) = logit(logits, token) else { return f32::NAN };
    let max = Normaliser::of(logits).max;
    let sum: f32 = logits.iter().map(|&logit| (logit - max).exp()).sum();
    logit - max - sum.ln()
}

/// Probability of `token`, 0..=1. NaN for a token outside of the row.
pub fn probability(logits: &[f32], token: Token) -> f32 {
    let Some(logit) = logit(logits, token) else { return f32::NAN };
    let row = Normaliser::of(logits);
    (f64::from((logit - row.max).exp()) / row.sum_exp) as f32
}

/// The logit of `token`, if the row has it.
pub fn logit(logits: &[f32], token: Token) -> Option<f32> {
    usize::try_from(token).ok().and_then(|i| logits.get(i)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_equal_logits_are_a_quarter_each() {
        for shift in [-1e4, 0.0, 1e4] {
            let row = [shift; 4];
            assert!((nll(&row, 3) - 4f64.ln()).abs() < 1e-12);
            assert!((log_prob_f32(&row, 0) + 4f32.ln()).abs() < 1e-6);
            assert_eq!(probability(&row, 2), 0.25);
        }
    }

    #[test]
    fn log_odds_are_differences_of_logits() {
        let row = [1.0, 3.5, -2.0];
        assert!((nll(&row, 0) - nll(&row, 1) - 2.5).abs() < 1e-9);
        let sum: f32 = (0..3).map(|token| probability(&row, token)).sum();
        assert!((sum - 1.0).abs() < 1e-6);
        assert_eq!(Normaliser::of(&row).argmax, 1);
        assert_eq!(Normaliser::of(&[2.0, 2.0]).argmax, 0, "the first of equals");
    }

    #[test]
    fn a_token_outside_of_the_row_has_no_probability() {
        assert!(nll(&[0.0], 1).is_nan() && nll(&[0.0], -1).is_nan() && nll(&[], 0).is_nan());
        assert!(log_prob_f32(&[0.0], 1).is_nan() && probability(&[0.0], -1).is_nan());
    }
}
