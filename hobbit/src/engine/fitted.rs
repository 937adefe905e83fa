//! How a model's experts are kept: by its options, else by the profile that it is opened with, from a file or from its pack.

use std::path::Path;

use super::error::Error;
use crate::cache::Allocation;
use crate::fitted::{FittedError, FittedPolicy};

/// A profile and where it comes from.
#[derive(Clone, Debug)]
pub(super) struct Fitted {
    pub(super) policy: FittedPolicy,
    /// For messages.
    pub(super) file: String,
    /// From the model's own pack.
    pub(super) is_packed: bool,
}

impl Fitted {
    /// The file that was given, else what the pack at a path carries.
    pub(super) fn open(given: Option<&Path>, packed: Option<(&Path, &str)>) -> Result<Option<Self>, FittedError> {
        let (policy, file, is_packed) = match (given, packed) {
            (Some(path), _) => (FittedPolicy::read(path)?, path.display().to_string(), false),
            (None, Some((path, text))) => {
                let file = format!("{} (key {})", path.display(), crate::pack::POLICY_KEY);
                (FittedPolicy::parse(text, &file)?, file, true)
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(Self { policy, file, is_packed }))
    }
}

/// That slots can be divided as asked for.
///
/// # Errors
/// [`Error::NoPenalties`].
pub(super) fn check_penalties(allocation: Allocation, fitted: Option<&Fitted>) -> Result<(), Error> {
    match (allocation, fitted) {
        (Allocation::ByPenalty, None) => Err(Error::NoPenalties { found: "there is no profile".to_owned() }),
        (Allocation::ByPenalty, Some(fitted)) if !fitted.policy.has_penalties() => {
            Err(Error::NoPenalties { found: format!("{} does not say", fitted.file) })
        }
        _ => Ok(()),
    }
}
