//! Errors of the simulator.

use std::path::PathBuf;

use crate::trace::TraceError;

#[derive(Debug, thiserror::Error)]
pub enum SimError {
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error("{}: the trace has no complete batch; record a longer run", path.display())]
    NoBatches { path: PathBuf },
    #[error(
        "{}: the traced model had no low-precision experts, so dynamic precision has nothing to choose",
        path.display()
    )]
    NoLow { path: PathBuf },
    #[error(
        "{}: the trace has no scores of experts that were not chosen, so where tokens could go is unknown (imported \
         and followed routes have none)",
        path.display()
    )]
    NoScores { path: PathBuf },
    #[error("{}: the trace was recorded with {what} '{found}', which this hobbit-sim does not know", path.display())]
    Unknown { path: PathBuf, what: &'static str, found: String },
    #[error(
        "{} and {} are traces of different models: their layers differ; give traces of one model",
        first.display(), other.display()
    )]
    OtherModel { first: PathBuf, other: PathBuf },
    #[error("{}: {error}", path.display())]
    NoUses { path: PathBuf, error: crate::route::NoUses },
}
