//! Distance of a changed model's predictions from the exact ones.

/// Log-probabilities of `logits` `[n_vocab]`, natural logarithm; overwrites `out`.
pub fn log_softmax(logits: &[f32], out: &mut Vec<f32>) {
    let shift = log_sum(logits);
    out.clear();
    out.extend(logits.iter().map(|logit| (f64::from(*logit) - shift) as f32));
}

/// Negative logarithm of the probability of `next`, an index below `n_vocab`, in nats.
pub fn nll(logits: &[f32], next: usize) -> f64 {
    log_sum(logits) - f64::from(logits[next])
}

fn log_sum(logits: &[f32]) -> f64 {
    let top = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    top + logits.iter().map(|logit| (f64::from(*logit) - top).exp()).sum::<f64>().ln()
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    n: u64,
    kl: f64,
    /// Sum of the differences of negative log-likelihoods.
    increase: f64,
}

impl Loss {
    /// Adds one prediction: exact log-probabilities `[n_vocab]`, the changed model's logits `[n_vocab]`, and the actual
    /// next token, an index below `n_vocab`.
    pub fn add(&mut self, exact: &[f32], logits: &[f32], next: usize) {
        let shift = log_sum(logits);
        let divergence = |(p, logit): (&f32, &f32)| {
            let p = f64::from(*p);
            p.exp() * (p - (f64::from(*logit) - shift))
        };
        self.kl += exact.iter().zip(logits).map(divergence).sum::<f64>();
        self.increase += f64::from(exact[next]) - (f64::from(logits[next]) - shift);
        self.n += 1;
    }

    /// Mean Kullback-Leibler divergence of the changed predictions from the exact ones, in nats; not below 0.
    pub fn kl(&self) -> f64 {
        (self.kl / self.n.max(1) as f64).max(0.0)
    }

    /// Logarithm of the ratio of perplexities, in nats: about the relative increase.
    pub fn log_increase(&self) -> f64 {
        self.increase / self.n.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_predictions_lose_nothing() {
        let logits = [3.0f32, -1.0, 800.0, 799.0];
        let mut exact = Vec::new();
        log_softmax(&logits, &mut exact);
        assert!((exact.iter().map(|p| f64::from(*p).exp()).sum::<f64>() - 1.0).abs() < 1e-6);
        let mut loss = Loss::default();
        loss.add(&exact, &logits, 3);
        assert!(loss.kl() < 1e-6 && loss.log_increase().abs() < 1e-6, "{loss:?}");
    }

    #[test]
    fn divergence_and_perplexity_are_those_of_the_textbook() {
        let mut exact = Vec::new();
        log_softmax(&[0.0, 0.0], &mut exact);
        let mut loss = Loss::default();
        // A changed model that predicts 3/4 and 1/4.
        loss.add(&exact, &[3f32.ln(), 0.0], 0);
        loss.add(&exact, &[3f32.ln(), 0.0], 1);
        let expected = 0.5 * (0.5f64 / 0.75).ln() + 0.5 * (0.5f64 / 0.25).ln();
        assert!((loss.kl() - expected).abs() < 1e-6);
        assert!((loss.log_increase() - ((16f64 / 3.0).sqrt() / 2.0).ln()).abs() < 1e-6);
    }

    #[test]
    fn nothing_measured_is_no_loss() {
        assert_eq!((Loss::default().kl(), Loss::default().log_increase()), (0.0, 0.0));
    }
}
