//! Rows of logits: probabilities of their tokens, and their form in base files.
//!
//! A quantised row is `4 + n_vocab` words of 16 bits, rounded up to an even number: the bits of two `f32`, `scale` and
//! `minimum`, low word first, then one word for each token of the vocabulary, its log-probability being
//! `scale * word + minimum`. Logits more than `DEPTH` nats below the largest are all kept as the minimum.

use crate::options::Token;

/// Range of a row below its largest logit, in nats.
pub(crate) const DEPTH: f32 = 16.0;

const HEAD_WORDS: usize = 4;

/// A row's maximum and the sum of the exponentials above it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Normaliser {
    pub max: f32,
    /// Position of the first largest logit.
    pub argmax: usize,
    pub sum_exp: f64,
}

impl Normaliser {
    /// Reads a row of logits, `[n_vocab]`. An empty row sums to 0.
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
    pub(crate) fn log_prob(&self, logit: f32) -> f64 {
        f64::from(logit - self.max) - self.sum_exp.ln()
    }
}

/// Negative log-likelihood of `token`, in nats. NaN for a token outside of the row.
pub fn nll(logits: &[f32], token: Token) -> f64 {
    logit(logits, token).map_or(f64::NAN, |logit| -Normaliser::of(logits).log_prob(logit))
}

/// The logit of `token`, if the row has it.
pub fn logit(logits: &[f32], token: Token) -> Option<f32> {
    usize::try_from(token).ok().and_then(|i| logits.get(i)).copied()
}

/// Words in a row for a vocabulary of `n_vocab` tokens.
pub const fn row_words(n_vocab: usize) -> usize {
    n_vocab.div_ceil(2) * 2 + HEAD_WORDS
}

/// Writes the log-probabilities of `logits`, `[n_vocab]`, to `row`. Returns the negative log-likelihood of `token` in
/// nats (NaN for a token outside of the row).
///
/// # Panics
/// If `row` is not [`row_words`] long.
pub fn encode(logits: &[f32], token: Token, row: &mut [u16]) -> f32 {
    assert_eq!(row.len(), row_words(logits.len()));
    let Normaliser { max, sum_exp, .. } = Normaliser::of(logits);
    let lowest = logits.iter().copied().fold(f32::INFINITY, f32::min).max(max - DEPTH);
    let log_sum_exp = sum_exp.ln() as f32;
    let minimum = lowest - max - log_sum_exp;
    let scale = (max - lowest) / f32::from(u16::MAX);
    let (head, words) = row.split_at_mut(HEAD_WORDS);
    for (pair, value) in head.chunks_exact_mut(2).zip([scale, minimum]) {
        let bits = value.to_bits();
        (pair[0], pair[1]) = (bits as u16, (bits >> 16) as u16);
    }
    words.fill(0);
    if scale != 0.0 {
        let per_nat = 1.0 / scale;
        for (word, &logit) in words.iter_mut().zip(logits) {
            if logit > lowest {
                *word = (per_nat * (logit - lowest)).round_ties_even() as u16;
            }
        }
    }
    logit(logits, token).map_or(f32::NAN, |logit| max + log_sum_exp - logit)
}

#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    scale: f32,
    minimum: f32,
    words: &'a [u16],
}

impl<'a> Row<'a> {
    /// Reads a row; `None` if it is too short for `n_vocab` tokens.
    pub fn new(words: &'a [u16], n_vocab: usize) -> Option<Self> {
        let (head, rest) = words.split_at_checked(HEAD_WORDS)?;
        let value = |low: u16, high: u16| f32::from_bits(u32::from(low) | u32::from(high) << 16);
        let words = rest.get(..n_vocab)?;
        Some(Self { scale: value(head[0], head[1]), minimum: value(head[2], head[3]), words })
    }

    /// Log-probabilities in nats, one for each token.
    pub(crate) fn log_probs(self) -> impl Iterator<Item = f32> + 'a {
        self.words.iter().map(move |&word| self.scale * f32::from(word) + self.minimum)
    }

    /// Log-probability of one token in nats.
    pub(crate) fn log_prob(self, token: Token) -> Option<f32> {
        let word = usize::try_from(token).ok().and_then(|i| self.words.get(i))?;
        Some(self.scale * f32::from(*word) + self.minimum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn four_equal_logits_are_a_quarter_each() {
        for shift in [-1e4, 0.0, 1e4] {
            let row = [shift; 4];
            assert!((nll(&row, 3) - 4f64.ln()).abs() < 1e-12);
        }
    }

    #[test]
    fn a_token_outside_of_the_row_has_no_probability() {
        assert!(nll(&[0.0], 1).is_nan() && nll(&[0.0], -1).is_nan() && nll(&[], 0).is_nan());
    }

    fn encoded(logits: &[f32]) -> Vec<u16> {
        let mut row = vec![0xdead; row_words(logits.len())];
        encode(logits, 0, &mut row);
        row
    }

    #[test]
    fn the_layout_is_llama_cpps() {
        // Scale and minimum low word first, then the words; the odd vocabulary is padded.
        let row = encoded(&[0.0, 1.0, 0.5]);
        let float = |low: usize| f32::from_bits(u32::from(row[low]) | u32::from(row[low + 1]) << 16);
        let log_sum = (1.0 + (-1f64).exp() + (-0.5f64).exp()).ln() as f32;
        assert_eq!((float(0), float(2)), (1.0 / 65535.0, -1.0 - log_sum));
        assert_eq!(row[4..], [0, 65535, 32768, 0]);
    }

    #[test]
    fn improbable_tokens_are_all_alike() {
        let row = encoded(&[0.0, -100.0, -17.0, -15.9]);
        assert_eq!(row[4..8], [65535, 0, 0, 410]);
        assert!(Row::new(&row[..7], 4).is_none() && Row::new(&row[..3], 0).is_none());
        assert_eq!(Row::new(&row, 4).unwrap().log_prob(4), None);
    }

    proptest! {
        #[test]
        fn rows_round_trip_within_half_a_step(logits in prop::collection::vec(-10f32..5.0, 1..40)) {
            let mut row = vec![0; row_words(logits.len())];
            let loss = encode(&logits, 0, &mut row);
            prop_assert!((f64::from(loss) - nll(&logits, 0)).abs() < 1e-5);
            let read = Row::new(&row, logits.len()).unwrap();
            for (i, log_prob) in read.log_probs().enumerate() {
                let exact = -nll(&logits, i as Token);
                prop_assert!((f64::from(log_prob) - exact).abs() < 16.0 / 65535.0 * 0.51 + 1e-5);
                prop_assert_eq!(read.log_prob(i as Token), Some(log_prob));
            }
        }
    }
}
