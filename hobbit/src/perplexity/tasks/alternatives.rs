//! Texts that begin alike, and what is asked of their logits.

use std::ops::Range;

use super::TaskError;
use crate::options::Token;

/// The texts of a task as tokens. At least one of each text is not part of the common beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alternatives {
    /// The texts.
    pub sequences: Vec<Vec<Token>>,
    /// Tokens that all begin with, at least 1 and fewer than any has.
    pub common_prefix: usize,
}

/// A row of logits in an evaluated task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowAt {
    /// After the common beginning.
    Prefix,
    /// After the token at `position` of a sequence, beyond the common beginning.
    Ending {
        /// Number of the text.
        sequence: usize,
        /// Position in it.
        position: usize,
    },
}

/// Asks for the log-probability of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Whose logits.
    pub row: RowAt,
    /// The token.
    pub token: Token,
}

impl Alternatives {
    /// The texts of task number `task` (from 1), tokenised.
    ///
    /// # Errors
    /// [`TaskError::NoCommonBeginning`].
    pub fn new(task: usize, sequences: Vec<Vec<Token>>) -> Result<Self, TaskError> {
        let shortest = sequences.iter().map(Vec::len).min().unwrap_or(0);
        let alike = |&i: &usize| sequences.iter().all(|sequence| sequence[i] == sequences[0][i]);
        // Of equal texts the last token counts as the ending.
        let common_prefix = (0..shortest.saturating_sub(1)).take_while(alike).count();
        match common_prefix {
            0 => Err(TaskError::NoCommonBeginning { task }),
            _ => Ok(Self { sequences, common_prefix }),
        }
    }

    /// Tokens to evaluate, the common beginning once.
    pub fn required_tokens(&self) -> usize {
        self.common_prefix + self.sequences.iter().map(|sequence| sequence.len() - self.common_prefix).sum::<usize>()
    }

    /// Tokens of the longest text.
    pub fn longest(&self) -> usize {
        self.sequences.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// The row that predicts position `position` of a text, which must lie beyond the common beginning.
    pub fn row_before(&self, sequence: usize, position: usize) -> RowAt {
        match position > self.common_prefix {
            true => RowAt::Ending { sequence, position: position - 1 },
            false => RowAt::Prefix,
        }
    }

    /// Questions for every token of every ending, text after text.
    pub fn whole_endings(&self) -> Vec<Question> {
        let ending = |(s, sequence): (usize, &Vec<Token>)| {
            let tokens: Vec<(usize, Token)> = sequence.iter().copied().enumerate().skip(self.common_prefix).collect();
            tokens.into_iter().map(move |(position, token)| Question { row: self.row_before(s, position), token })
        };
        self.sequences.iter().enumerate().flat_map(ending).collect()
    }

    /// Mean log-probability of each ending, from the answers to [`Alternatives::whole_endings`].
    pub fn mean_log_probs(&self, answers: &[f32]) -> Vec<f64> {
        let mut answers = answers.iter();
        let ending = |sequence: &Vec<Token>| {
            let n = sequence.len() - self.common_prefix;
            answers.by_ref().take(n).map(|&log_prob| f64::from(log_prob)).sum::<f64>() / n as f64
        };
        self.sequences.iter().map(ending).collect()
    }
}

/// Tasks that are evaluated together, in order: as many as need at most `n_ctx` tokens and `n_seq_max` sequences.
///
/// # Errors
/// The number of the first task that needs more than that alone.
pub fn groups(tasks: &[&Alternatives], n_ctx: usize, n_seq_max: usize) -> Result<Vec<Range<usize>>, usize> {
    let mut groups = Vec::new();
    let (mut start, mut n_tokens, mut n_sequences) = (0, 0, 0);
    for (i, task) in tasks.iter().enumerate() {
        let (tokens, sequences) = (task.required_tokens(), task.sequences.len());
        if tokens > n_ctx || sequences > n_seq_max {
            return Err(i);
        }
        if n_tokens + tokens > n_ctx || n_sequences + sequences > n_seq_max {
            groups.push(start..i);
            (start, n_tokens, n_sequences) = (i, 0, 0);
        }
        (n_tokens, n_sequences) = (n_tokens + tokens, n_sequences + sequences);
    }
    if start < tasks.len() {
        groups.push(start..tasks.len());
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(sequences: &[&[Token]]) -> Alternatives {
        Alternatives::new(1, sequences.iter().map(|sequence| sequence.to_vec()).collect()).unwrap()
    }

    #[test]
    fn the_common_beginning_counts_once() {
        let task = task(&[&[1, 2, 3], &[1, 2, 4, 5, 6]]);
        assert_eq!((task.common_prefix, task.required_tokens(), task.longest()), (2, 6, 5));
        let last_of = |sequence, position| RowAt::Ending { sequence, position };
        assert_eq!(
            task.whole_endings(),
            [
                Question { row: RowAt::Prefix, token: 3 },
                Question { row: RowAt::Prefix, token: 4 },
                Question { row: last_of(1, 2), token: 5 },
                Question { row: last_of(1, 3), token: 6 },
            ]
        );
        assert_eq!(task.mean_log_probs(&[-1.0, -2.0, -3.0, -7.0]), [-1.0, -4.0]);
    }

    #[test]
    fn an_ending_is_never_empty() {
        assert_eq!(task(&[&[1, 2], &[1, 2]]).common_prefix, 1);
        assert_eq!(task(&[&[1, 2], &[1, 2, 3]]).common_prefix, 1);
        for bad in [&[vec![1], vec![1]][..], &[vec![1, 2], vec![2, 2]], &[]] {
            assert_eq!(Alternatives::new(7, bad.to_vec()), Err(TaskError::NoCommonBeginning { task: 7 }));
        }
    }

    #[test]
    fn tasks_are_grouped_by_tokens_and_sequences() {
        let small = task(&[&[1, 2], &[1, 3]]);
        let large = task(&[&[1, 2, 3, 4, 5], &[1, 3]]);
        let tasks = [&small, &small, &large, &small];
        assert_eq!(groups(&tasks, 9, 8), Ok(vec![0..2, 2..4]));
        assert_eq!(groups(&tasks, 100, 2), Ok(vec![0..1, 1..2, 2..3, 3..4]));
        assert_eq!(groups(&tasks, 5, 8), Err(2));
        assert_eq!(groups(&tasks, 100, 1), Err(0));
        assert_eq!(groups(&[], 1, 1), Ok(vec![]));
    }
}
