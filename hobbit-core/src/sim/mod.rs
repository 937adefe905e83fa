//! Replays traces through the engine's own policies, predictors and precision rules, with a virtual clock.
//!
//! ```text
//! trace -> Recording -> replay(Config) -> Outcome
//!                          |  residency::Residency, with the engine's policies and predictors
//!                          |  Link: the file, as bytes per second, latency, reads in flight
//! ```
//!
//! A replay drives the engine's own [`crate::residency`]: what was recorded takes the place of the router, a virtual
//! link that of the store. So a replay with the recording's own policy and slots reproduces the recorded hit or miss of
//! every expert where nothing depended on how fast reads were, and comes near elsewhere. What it leaves out: staging
//! slots are without limit and not for reads ahead, experts move as a whole, and tiers on devices are not seen.
//!
//! Tokens may be sent elsewhere ([`Config::rerouting`]), by the scores that were recorded. Such a replay is *open-loop*: what a token
//! computed with another expert would have changed everything after it, and the recorded tokens do not know of it. Experts whose
//! score was not kept count as the lowest of all, and their score is what their weight is made of.
//!
//! [`Eviction::Belady`] is the optimum, [`Slots::Global`] a cache that layers compete for; [`fit()`] fits HOBBIT's weights and thresholds, and measures
//! what each layer's misses cost.

mod budget;
mod config;
mod curves;
mod error;
mod fit;
mod link;
mod outcome;
mod recall;
mod recording;
mod replay;
#[cfg(test)]
mod tests;

pub use budget::{Budget, BudgetError, LayerSlots, slots};
pub use config::{Compute, Config, Eviction, PredictedBy, Prefetch, Slots};
pub use curves::{HitCurve, hit_curves};
pub use error::SimError;
pub use fit::{FitGoal, fit};
pub use link::LinkModel;
pub use outcome::{LayerOutcome, Outcome, PhaseOutcome, PrefetchOutcome, Shares};
pub use recall::{Widths, path_recall, path_table, recall, widths, widths_by_distance};
pub use recording::{Batch, Event, Recording};
pub use replay::replay;
