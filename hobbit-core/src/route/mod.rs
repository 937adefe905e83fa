//! Who is routed where, and in what precision an expert is used: HOBBIT's scorer, what is resident, and Fate's rule for
//! prompts. Pure.
//!
//! ```text
//! router weights -> score (what a token asks for) -> batch (what an expert is asked for) -> resolve (what it gets)
//! ```
//!
//! [`Routing`] regroups the router's ids by expert. [`Thresholds`] says of each expert of a token whether it is worth high precision, low precision or nothing.
//! [`merge`] and [`lower_least_popular`] turn the tokens of a batch into one [`Demand`] per expert, and [`resolve()`]
//! answers it with what is in memory. Before all of that, [`reroute()`] may send a token to experts that are in memory. [`renormalise()`] makes up for what was skipped; [`fit()`] chooses the thresholds.

mod batch;
mod fit;
mod renormalise;
mod reroute;
mod resolve;
mod routing;
mod score;

pub use batch::{DECODE_TOKENS_MAX, Phase, lower_least_popular, merge};
pub use fit::{Fit, NoUses, Shares, SharesError, fit};
pub use renormalise::renormalise;
pub use reroute::{Choice, Rerouted, Rerouting, TokenScores, Weighing, reroute};
pub use resolve::resolve;
pub use routing::{Pair, Routing, rounded};
pub use score::{Demand, ThresholdError, Thresholds, unimportance};
