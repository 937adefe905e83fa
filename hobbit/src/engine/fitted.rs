//! The profile that a model is opened with: from a file, or from the model's pack.

use std::path::Path;

use super::error::Error;
use crate::cache::Allocation;
use crate::fitted::{FittedError, FittedPolicy};
use crate::stats::FittedReport;

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
        match (given, packed) {
            (Some(path), _) => {
                let policy = FittedPolicy::read(path)?;
                Ok(Some(Self { policy, file: path.display().to_string(), is_packed: false }))
            }
            (None, Some((path, text))) => {
                let file = format!("{} (key {})", path.display(), crate::pack::POLICY_KEY);
                Ok(Some(Self { policy: FittedPolicy::parse(text, &file)?, file, is_packed: true }))
            }
            (None, None) => Ok(None),
        }
    }

    pub(super) fn report(&self) -> FittedReport {
        FittedReport {
            file: self.file.clone(),
            policy: self.policy.policy.clone(),
            thresholds: self.policy.thresholds().is_some(),
            penalties: self.policy.has_penalties(),
        }
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
