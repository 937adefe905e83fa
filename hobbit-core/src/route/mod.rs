//! The experts that a token uses, and their precision: HOBBIT's scorer, residents, and Fate's rule for prompts. Pure.
//!
//! ```text
//! router weights -> score (a token's demands) -> batch (an expert's demand) -> resolve (the version that is used)
//! ```
//!
//! [`Routing`] regroups the router's ids by expert. [`Thresholds`] demand high precision, low precision or nothing of
//! each expert of a token. [`merge`] and [`lower_least_popular`] turn the demands of a batch's tokens into one
//! [`Demand`] per expert, and [`resolve()`] answers it with what is in memory; [`Rates`] give the cost of what is not.
//! [`renormalise()`] makes up for skipped experts, and [`fit()`] chooses the thresholds. Before all of that,
//! [`reroute()`] may replace experts by others that are in memory.

mod demand;
mod fit;
mod location;
mod reroute;
mod routing;

pub use demand::{
    DECODE_TOKENS_MAX, Demand, Phase, ThresholdError, Thresholds, lower_least_popular, merge, renormalise, resolve,
    unimportance,
};
pub use fit::{Fit, NoUses, Shares, SharesError, fit};
pub use location::{Location, Rates};
pub use reroute::{Choice, Rerouted, Rerouting, TokenScores, Weighing, reroute};
pub use routing::{Pair, Routing, rounded};
