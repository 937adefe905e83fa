//! Which experts are worth reading before their layer's router has chosen. Pure: no clock, no I/O.
//!
//! ```text
//! predict -> Prefetcher::look_ahead -> Ahead -> Prefetcher::plan -> loads of class Prefetch
//!                                                    ^                     | landed
//!            Estimates (seconds per layer and byte) -+                     v
//!            Odds (how often such a score is right) -+------ Prefetcher::settle <- the router's choice
//!                                                                          | saved, delayed
//!            seconds that each token waited -------------------------> Governor -> prefetch at all?
//! ```
//!
//! # Value of a load
//!
//! `load` are the seconds that a version's read takes, `slack` the seconds until its layer begins, less the reads
//! before it. For each precision `d` that the router may ask for, `p(d)` is the probability and `wait(d)` the seconds
//! of reading that [`crate::route`] would then cause:
//!
//! ```text
//! left  = max(0, load - slack)                 not read yet when the layer begins
//! stuck = min(left, in flight)                 part of a wrong guess that cannot be withdrawn any more
//! saved = sum over d that it serves of p(d) * (wait(d) - left)
//!         - (1 - sum of these p(d)) * stuck
//!         - (1 - sum of all p(d)) * regret * load
//! ```
//!
//! The last line is the cost of evicting a resident. `regret`, the probability that it is missed before the layer's
//! next read would have evicted it anyway, is counted. The hit rate is its prior, and a free slot costs nothing.
//! Prefetches start only while no product waits for the link, and few at a time
//! ([`crate::load::LoadClass::Prefetch`]). None is planned without slack, or if it saves less than a tenth of its
//! read. So all loads of a plan but the last fit into the available time, as in Fate's budget `n = T / t_expert`
//! (section 4.3). The load that saves most goes first.
//!
//! The same sum chooses the version: a high version of an expert that is likely asked for in low precision saves a
//! short read only, and a low one cannot serve high precision. The version that saves more for its bytes is read.
//! Probabilities are learned by predicted weight, separately for resident and missing experts ([`Odds`]): where nearly
//! all used experts are in the cache, most predictions of missing ones are wrong.
//!
//! The papers judge no guess: with [`PrefetchRule::All`], [`PrefetchRule::First`] and [`PrefetchRule::Budget`] it is
//! read if there is a slot or staging for it.
//!
//! The [`Governor`] measures the costs that no estimate knows, for example a disk that slows down the computation.

mod estimates;
mod governor;
mod planner;

#[cfg(test)]
mod tests;

pub use estimates::{Estimates, Guess, MissRate, Odds, Presence};
pub use governor::{Governor, GovernorReason, GovernorReport};
pub use planner::{Holdings, Link, Load, PrefetchCounters, PrefetchOptions, PrefetchRule, Prefetcher};
