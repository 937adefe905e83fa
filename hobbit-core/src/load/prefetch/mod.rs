//! Which experts are worth reading before their layer's router has spoken. Pure: no clock, no I/O.
//!
//! ```text
//! predict ─► Prefetcher::look_ahead ─► Ahead ─► Prefetcher::plan ─► loads of class Prefetch
//!                                                   ▲                      │ landed
//!            Estimates (seconds per layer and byte) ┤                      ▼
//!            Odds (how often such a score is right) ┴──────── Prefetcher::settle ◄─ the router's choice
//!                                                                          │ saved, delayed
//!            seconds that each token waited ─────────────────────────► Governor ─► prefetch at all?
//! ```
//!
//! # What a load is worth
//!
//! With `load` the seconds that a version's read takes, `slack` the seconds until its layer begins, less what is read before
//! it, and for each precision `d` that the router may ask the expert for `p(d)` the probability and `wait(d)` the seconds
//! that would be read then, as [`crate::route`] decides it:
//!
//! ```text
//! left  = max(0, load - slack)                 what is not read yet when the layer begins
//! stuck = min(left, in flight)                 of a wrong guess, what cannot be withdrawn any more
//! saved = sum over d that it serves of p(d) * (wait(d) - left)
//!         - (1 - sum of these p(d)) * stuck
//!         - (1 - sum of all p(d)) * regret * load
//! ```
//!
//! The last line is for the resident that had to leave: how likely it is asked for before it would have left anyway, for
//! what the layer reads next, is counted (`regret`); until something was, the hit rate stands for it, and where a slot is
//! free it costs nothing. Prefetches start
//! only while no product waits for the link, and few at a time ([`crate::load::LoadClass::Prefetch`]). None is planned
//! without slack, or where less than a tenth of its read is saved. So all loads of a plan but the last fit into the time
//! there is: Fate's budget `n = T / t_expert` (section 4.3), and one more of which a part is read in time. What saves most
//! goes first.
//!
//! Which version is read follows from the same sum: a high version of an expert that is likely asked for in low precision
//! saves a short read only, and a low one is of no use to who needs the high one. Of the two, the one that saves more for
//! its bytes is read. The probabilities are learned by predicted weight, and apart for experts that are there and for those
//! that are missing ([`Odds`]): a cache that finds nearly everything leaves to the predictor what it is wrong about.
//!
//! What no estimate knows (residents that had to leave, a disk that slows down the computation) the [`Governor`]
//! measures.

mod candidate;
mod estimates;
mod governor;
mod odds;
mod planner;
mod regret;

#[cfg(test)]
mod tests;

pub use estimates::Estimates;
pub use governor::{Governor, GovernorOptions, GovernorReason, GovernorReport};
pub use odds::{Chances, Guess, Odds, Scarcity, Standing};
pub use planner::{Holdings, Link, Load, Pace, PrefetchCounters, PrefetchOptions, Prefetcher, Settled};
