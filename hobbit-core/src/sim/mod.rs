//! Replays traces through the engine's own policies, predictors and precision rules, with a virtual clock.
//!
//! ```text
//! trace -> Recording -> replay(Config) -> Outcome
//!                          |  residency::Residency, with the engine's policies and predictors
//!                          |  Link: the file, as bytes per second, latency, reads in flight
//! ```
//!
//! A replay drives the engine's own [`crate::residency`] with the recording in place of the router and a virtual link
//! in place of the store. With the recording's own policy and slots it reproduces the recorded hit or miss of every
//! expert if nothing depended on the speed of reads, and comes near otherwise. Simplifications: staging slots are
//! unlimited and not used by prefetches, experts move as a whole, and a device ([`Config::device`]) gets copies at
//! once. Traces record no device.
//!
//! Tokens may be rerouted ([`Config::routing`]) by the recorded scores. Such a replay is *open-loop*: another
//! expert's output would have changed everything after it, but the recorded tokens stay the same. Experts without a
//! recorded score count as the lowest of all, and their weight is computed from that score.
//!
//! [`Eviction::Belady`] is the optimum, [`Slots::Global`] a cache that layers compete for. [`fit()`] fits HOBBIT's
//! weights and thresholds.

mod budget;
mod config;
mod device;
mod fit;
mod link;
mod outcome;
mod recall;
mod recording;
mod replay;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub use budget::{Budget, LayerSlots, slots};
pub use config::{Compute, Config, Device, Eviction, Memory, PredictedBy, Prefetch, Slots};
pub use fit::{FitGoal, Fitted, fit};
pub use link::{Link, LinkModel};
pub use outcome::{LayerOutcome, Outcome, PhaseOutcome, PrefetchOutcome, Shares};
pub use recall::{path_recall, path_table, recall};
pub use recording::{Batch, Event, Recording};
pub use replay::replay;

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
