//! Errors of the simulator.

use std::path::PathBuf;

use crate::trace::TraceError;

/// Why a replay is impossible.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A trace without a complete batch.
    #[error("{}: the trace has no complete batch; record a longer run", path.display())]
    NoBatches {
        /// File.
        path: PathBuf,
    },
    /// Dynamic precision without low versions.
    #[error("{}: the traced model had no low-precision experts, so dynamic precision has nothing to choose", path.display())]
    NoLow {
        /// File.
        path: PathBuf,
    },
    /// Rerouting without recorded scores of the experts that were not chosen.
    #[error("{}: the trace has no scores of experts that were not chosen, so where tokens could go is unknown (imported and followed routes have none)", path.display())]
    NoScores {
        /// File.
        path: PathBuf,
    },
    /// A setting of the recorded run that this version does not support.
    #[error("{}: the trace was recorded with {what} '{found}', which this hobbit-sim does not know", path.display())]
    Unknown {
        /// File.
        path: PathBuf,
        /// Name of the setting.
        what: &'static str,
        /// Value in the trace.
        found: String,
    },
    /// Traces of different models.
    #[error("{} and {} are traces of different models: their layers differ; give traces of one model", first.display(), other.display())]
    OtherModel {
        /// File.
        first: PathBuf,
        /// Another file.
        other: PathBuf,
    },
    /// No thresholds can be fitted.
    #[error("{}: {error}", path.display())]
    NoUses {
        /// File.
        path: PathBuf,
        /// The reason.
        error: crate::route::NoUses,
    },
}
