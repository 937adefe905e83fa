//! Why a fitted policy cannot be read or used.

use std::io;
use std::path::PathBuf;

/// Why a fitted policy cannot be read, or does not belong here.
#[derive(Debug, thiserror::Error)]
pub enum FittedError {
    /// The operating system refused.
    #[error("{file}: cannot read this profile: {error}; hobbit-sim calibrate makes one of traces")]
    Io { file: String, error: io::Error },
    /// Not a fitted policy.
    #[error("{file}: {reason}; expected what hobbit-sim calibrate -o writes, make it again")]
    Malformed { file: String, reason: String },
    /// The other kind of profile.
    #[error(
        "{file}: a profile by gguf-tools profile, expected one by hobbit-sim calibrate; what it found out goes into a pack \
         (gguf-tools pack --profile)"
    )]
    OfTheModel { file: String },
    /// Written by another version.
    #[error("{file}: version {found} of the format, expected {expected}; make it again with this hobbit-sim calibrate")]
    Version { file: String, found: u64, expected: u64 },
    /// Fitted on another model.
    #[error(
        "{file}: this profile was fitted on {fitted_on}, not on {}: {what} is {found}, expected {expected}; make one of \
         traces of this model with hobbit-sim calibrate", model.display()
    )]
    OtherModel {
        file: Box<str>,
        fitted_on: Box<str>,
        model: PathBuf,
        what: &'static str,
        found: Box<str>,
        expected: Box<str>,
    },
}
