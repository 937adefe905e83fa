//! Benchmarks that ask which of several texts is the most probable one: HellaSwag, Winogrande, multiple choice in general,
//! and continuations of any text.
//!
//! A task's texts begin alike. The common beginning is evaluated once, each ending after it; then [`Question`]s ask for
//! the log-probabilities that the task's score is made of.

mod alternatives;
mod continuations;
mod hellaswag;
mod multiple_choice;
mod winogrande;

pub use alternatives::{Alternatives, Question, RowAt, groups};
pub use continuations::{CONTEXT_TOKENS, CONTINUATION_TOKENS, Continuation, N_CONTINUATIONS, continuations};
pub use hellaswag::{HellaSwag, Interval, parse_hellaswag, wilson_interval};
pub use multiple_choice::{MultipleChoice, MultipleChoiceFile};
pub use winogrande::{WinoBases, Winogrande, parse_winogrande};

/// Why a task file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TaskError {
    /// Nothing in it.
    #[error("no tasks in this file")]
    NoTasks,
    /// Lines of a HellaSwag file.
    #[error("{found} lines, not a multiple of 6 (context, number of the right ending, four endings)")]
    NotSixLines {
        /// Number of lines.
        found: usize,
    },
    /// The number of a HellaSwag task's right ending.
    #[error("task {task}: the number of the right ending is '{found}', expected 0 to 3")]
    Gold {
        /// Number of the task, from 1.
        task: usize,
        /// What was found.
        found: String,
    },
    /// A multiple-choice file that ends too early.
    #[error("cut off, or not a multiple-choice file: {what} does not lie inside the file")]
    CutOff {
        /// What was to be read.
        what: String,
    },
    /// A multiple-choice task that cannot be asked.
    #[error("task {task} is malformed: {why}")]
    Malformed {
        /// Number of the task in the file, from 1.
        task: usize,
        /// What is wrong.
        why: &'static str,
    },
    /// Texts without a common beginning.
    #[error(
        "the texts of task {task} have no token in common at their beginning; this needs a model that begins a text with BOS, \
         or tasks that begin alike"
    )]
    NoCommonBeginning {
        /// Number of the task, from 1.
        task: usize,
    },
}

/// Index of the largest value, the first of equals; 0 of nothing.
pub fn best<T: PartialOrd + Copy>(values: &[T]) -> usize {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::best;

    #[test]
    fn the_first_of_equals_is_best() {
        assert_eq!(best(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(best::<f64>(&[]), 0);
        assert_eq!(best(&[f64::NAN, 1.0]), 0);
    }
}
