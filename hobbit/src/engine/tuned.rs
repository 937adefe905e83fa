//! The tuned policy of a model, from a file or from its pack.

use std::path::Path;

use super::error::Error;
use hobbit_core::cache::Allocation;
use hobbit_core::tuned::{TunedError, TunedPolicy};

/// A tuned policy and its source.
#[derive(Clone, Debug)]
pub(super) struct Tuned {
    pub(super) policy: TunedPolicy,
    /// Its source, for messages.
    pub(super) file: String,
    /// Whether it is from the model's own pack.
    pub(super) is_packed: bool,
}

impl Tuned {
    /// Reads the given file, or else the policy in the pack at a path.
    pub(super) fn open(given: Option<&Path>, packed: Option<(&Path, &str)>) -> Result<Option<Self>, TunedError> {
        let (policy, file, is_packed) = match (given, packed) {
            (Some(path), _) => (TunedPolicy::read(path)?, path.display().to_string(), false),
            (None, Some((path, text))) => {
                let file = format!("{} (key {})", path.display(), hobbit_core::pack::POLICY_KEY);
                (TunedPolicy::parse(text, &file)?, file, true)
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(Self { policy, file, is_packed }))
    }
}

/// Checks that slots can be divided by penalty, if requested.
///
/// # Errors
/// [`Error::NoPenalties`].
pub(super) fn check_penalties(allocation: Allocation, tuned: Option<&Tuned>) -> Result<(), Error> {
    match (allocation, tuned) {
        (Allocation::ByPenalty, None) => Err(Error::NoPenalties { found: "there is no tuned policy".to_owned() }),
        (Allocation::ByPenalty, Some(tuned)) if !tuned.policy.has_penalties() => {
            Err(Error::NoPenalties { found: format!("{} does not say", tuned.file) })
        }
        _ => Ok(()),
    }
}
