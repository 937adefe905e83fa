//! Scores of a router, the best of them, and how many tokens of a prompt are expected to use an expert.

/// Probabilities from a router's logits `[n_expert]`; `out` is replaced. They sum to 1.
///
/// NaN and negative infinity get 0, even if all logits are such. Infinite logits share the whole.
pub fn softmax(logits: &[f32], out: &mut Vec<f32>) {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    out.clear();
    out.extend(logits.iter().map(|&logit| {
        if best.is_finite() { (logit - best).exp() } else { f32::from(u8::from(best > 0.0 && logit == best)) }
    }));
    out.iter_mut().filter(|share| share.is_nan()).for_each(|share| *share = 0.0);
    let sum: f32 = out.iter().sum();
    if sum > 0.0 {
        out.iter_mut().for_each(|share| *share /= sum);
    }
}

/// Positions of the `k` highest scores, highest first, equal ones by position; `out` is replaced. NaN is never among
/// them, so there may be fewer.
pub fn top_k(scores: &[f32], k: usize, out: &mut Vec<u16>) {
    out.clear();
    out.extend(scores.iter().zip(0..=u16::MAX).filter_map(|(score, index)| (!score.is_nan()).then_some(index)));
    let better = |a: &u16, b: &u16| {
        let [of_a, of_b] = [a, b].map(|&index| scores[usize::from(index)]);
        of_b.partial_cmp(&of_a).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(b))
    };
    if k < out.len() {
        if k > 0 {
            out.select_nth_unstable_by(k - 1, better);
        }
        out.truncate(k);
    }
    out.sort_unstable_by(better);
}

/// Maximum tokens of a prompt to predict: enough to tell popular experts from others. More tokens cost more time than
/// they save.
const SAMPLE_TOKENS_MAX: usize = 32;

/// Positions of the tokens to predict: all of `n_tokens` if they are few, else some at equal distances.
pub fn sample(n_tokens: usize) -> impl Iterator<Item = usize> {
    let n = n_tokens.min(SAMPLE_TOKENS_MAX);
    (0..n).map(move |at| at * n_tokens / n)
}

/// Expected uses by several tokens together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Popularity {
    /// By expert index; 0 beyond the end.
    n_tokens: Vec<u32>,
}

impl Popularity {
    /// Adds a token that is expected to use these.
    pub fn add(&mut self, experts: impl IntoIterator<Item = u16>) {
        for expert in experts {
            let index = usize::from(expert);
            if self.n_tokens.len() <= index {
                self.n_tokens.resize(index + 1, 0);
            }
            self.n_tokens[index] += 1;
        }
    }

    pub fn clear(&mut self) {
        self.n_tokens.clear();
    }

    /// Whether nothing is expected, for example because the router is not known.
    pub fn is_empty(&self) -> bool {
        self.n_tokens.is_empty()
    }

    /// Tokens that are expected to use an expert.
    pub fn of(&self, expert: u16) -> u32 {
        self.n_tokens.get(usize::from(expert)).copied().unwrap_or(0)
    }

    /// Stable sort by falling popularity.
    pub fn sort<T>(&self, things: &mut [T], expert: impl Fn(&T) -> u16) {
        things.sort_by_key(|thing| std::cmp::Reverse(self.of(expert(thing))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn softmax_of(logits: &[f32]) -> Vec<f32> {
        let mut out = vec![9.0];
        softmax(logits, &mut out);
        out
    }

    fn best(scores: &[f32], k: usize) -> Vec<u16> {
        let mut out = vec![9];
        top_k(scores, k, &mut out);
        out
    }

    #[test]
    fn odd_logits() {
        assert_eq!(softmax_of(&[0.0, 0.0]), [0.5, 0.5]);
        assert_eq!(softmax_of(&[1e30, -1e30]), [1.0, 0.0]);
        assert_eq!(softmax_of(&[f32::NAN, 0.0, f32::NEG_INFINITY]), [0.0, 1.0, 0.0]);
        assert_eq!(softmax_of(&[f32::INFINITY, 3.0, f32::INFINITY]), [0.5, 0.0, 0.5]);
        assert_eq!(softmax_of(&[f32::NEG_INFINITY, f32::NAN]), [0.0, 0.0]);
        assert!(softmax_of(&[]).is_empty());
    }

    #[test]
    fn the_best_in_order() {
        let scores = [0.1, f32::NAN, 0.5, 0.1, 0.3];
        assert_eq!(best(&scores, 3), [2, 4, 0], "of equal ones the first");
        assert_eq!(best(&scores, 9), [2, 4, 0, 3]);
        assert!(best(&scores, 0).is_empty());
        assert!(best(&[], 2).is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn selecting_is_sorting_and_cutting(scores in prop::collection::vec(-4i8..4, 0..80), k in 0..90usize) {
            let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
            let mut order: Vec<u16> = (0..scores.len() as u16).collect();
            order.sort_by(|&a, &b| scores[usize::from(b)].total_cmp(&scores[usize::from(a)]));
            order.truncate(k);
            prop_assert_eq!(best(&scores, k), order);
        }
    }

    #[test]
    fn popular_experts_come_first() {
        let mut popularity = Popularity::default();
        for token in [[3, 1], [3, 0], [5, 3], [0, 5]] {
            popularity.add(token);
        }
        assert_eq!([0, 1, 2, 3, 5, 9].map(|expert| popularity.of(expert)), [2, 1, 0, 3, 2, 0]);
        let mut order: Vec<u16> = (0..7).collect();
        popularity.sort(&mut order, |index| *index);
        assert_eq!(order, [3, 0, 5, 1, 2, 4, 6], "equal ones by index");
    }

    #[test]
    fn long_prompts_are_sampled() {
        assert_eq!(sample(3).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(sample(0).count(), 0);
        let of_many: Vec<usize> = sample(512).collect();
        assert_eq!((of_many.len(), of_many[0], of_many[1], of_many[31]), (32, 0, 16, 496));
        assert!(sample(33).collect::<Vec<_>>().windows(2).all(|pair| pair[0] < pair[1]));
    }
}
