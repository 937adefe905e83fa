//! For each expert of a later layer, how many of a prompt's tokens are expected to use it.

/// Maximum of a prompt's tokens to predict: enough to tell popular experts from others. More cost more time than they
/// save.
const SAMPLE_TOKENS_MAX: usize = 32;

/// Positions of the tokens to predict, of `n_tokens`: all of a few, else some at equal distances.
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
