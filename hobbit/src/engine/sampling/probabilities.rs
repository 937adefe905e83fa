//! Probabilities of the chosen token and of its alternatives.

use ggml_sys::llama::llama_token_data;

use hobbit_core::options::Token;

/// Natural logarithms of probabilities.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Probabilities {
    /// The chosen token's; minus infinity if it is not a candidate.
    pub chosen: f32,
    /// The most probable tokens in descending order; of equals the lower id is first.
    pub top: Vec<(Token, f32)>,
}

/// The softmax of `logits`, `[n_vocab]`.
pub(super) fn of_logits(logits: &[f32], chosen: Token, n: usize) -> Probabilities {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    let log_sum = sum.ln();
    let log_of = |logit: f32| (f64::from(logit - max) - log_sum) as f32;
    let of_chosen = usize::try_from(chosen).ok().and_then(|chosen| logits.get(chosen));
    Probabilities {
        chosen: of_chosen.map_or(f32::NEG_INFINITY, |logit| log_of(*logit)),
        top: largest((0..).zip(logits.iter().copied()).collect(), n)
            .into_iter()
            .map(|(token, logit)| (token, log_of(logit)))
            .collect(),
    }
}

/// The candidates left by the chain, except those with probability 0.
pub(super) fn of_candidates(candidates: &[llama_token_data], chosen: Token, n: usize) -> Probabilities {
    let of_chosen = candidates.iter().find(|candidate| candidate.id == chosen);
    let kept = candidates.iter().filter(|candidate| candidate.p > 0.0);
    Probabilities {
        chosen: of_chosen.map_or(f32::NEG_INFINITY, |candidate| candidate.p.ln()),
        top: largest(kept.map(|candidate| (candidate.id, candidate.p)).collect(), n)
            .into_iter()
            .map(|(token, p)| (token, p.ln()))
            .collect(),
    }
}

/// The `n` largest in descending order.
fn largest(mut all: Vec<(Token, f32)>, n: usize) -> Vec<(Token, f32)> {
    let order = |a: &(Token, f32), b: &(Token, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if n < all.len() {
        if n > 0 {
            all.select_nth_unstable_by(n - 1, order);
        }
        all.truncate(n);
    }
    all.sort_unstable_by(order);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softmax_of_logits() {
        let logits = [1.0_f32.ln(), 2.0_f32.ln(), f32::NEG_INFINITY, 1.0_f32.ln()];
        let found = of_logits(&logits, 3, 2);
        assert!((found.chosen - 0.25_f32.ln()).abs() < 1e-6);
        assert_eq!(found.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 0]);
        assert!((found.top[0].1 - 0.5_f32.ln()).abs() < 1e-6);
        assert_eq!(of_logits(&logits, 2, 0), Probabilities { chosen: f32::NEG_INFINITY, top: vec![] });
        assert_eq!(of_logits(&logits, 0, 99).top.len(), 4);
    }

    #[test]
    fn candidates_without_a_chance_are_left_out() {
        let candidates = [(7, 0.25), (3, 0.75), (1, 0.0)].map(|(id, p)| llama_token_data { id, logit: 0.0, p });
        let found = of_candidates(&candidates, 7, 5);
        assert_eq!(found, Probabilities { chosen: 0.25_f32.ln(), top: vec![(3, 0.75_f32.ln()), (7, 0.25_f32.ln())] });
        assert_eq!(of_candidates(&candidates, 9, 5).chosen, f32::NEG_INFINITY);
    }
}
