//! Replays traces through the engine's own policies, predictors and precision rules, with a virtual clock.
//!
//! ```text
//! trace -> Recording -> replay(Config) -> Outcome
//!                          |  cache::Cache, route, predict: the engine's objects
//!                          |  Link: the file, as bytes per second, latency, reads in flight
//! ```
//!
//! A replay does what `engine::residency` does, in its order: every needed expert is touched and what is resident is
//! pinned; then misses get slots and are submitted; products of what is there run while the rest lands. So a replay with
//! the recording's own policy and slots reproduces the recorded hit or miss of every expert where nothing depended on how fast
//! reads were, and comes near elsewhere. What it leaves out: staging slots are without limit, a dense batch reads ahead into
//! empty slots only, and tiers on devices are not seen.
//!
//! [`Eviction::Belady`] is the optimum; [`fit()`] fits HOBBIT's weights and thresholds, and measures
//! what each layer's misses cost.

mod budget;
mod config;
mod curves;
mod error;
mod fit;
mod link;
mod outcome;
mod penalties;
mod recall;
mod recording;
mod replay;
mod step;
#[cfg(test)]
mod tests;
mod upgrades;

pub use budget::{Budget, BudgetError, LayerSlots, slots};
pub use config::{Compute, Config, Eviction, Foresight, Prefetch};
pub use curves::{HitCurve, hit_curves};
pub use error::SimError;
pub use fit::{FitGoal, fit};
pub use link::LinkModel;
pub use outcome::{LayerOutcome, Outcome, PhaseOutcome, PrefetchOutcome};
pub use recall::{Widths, path_recall, path_table, recall, widths, widths_by_distance};
pub use recording::{Batch, Event, Recording};
pub use replay::replay;
