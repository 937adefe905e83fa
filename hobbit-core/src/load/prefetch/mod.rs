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
//! # The rule
//!
//! A guess is read if its expert is more likely used than not, and if at least a quarter of its read (on a device
//! half, or all, of its copy) can end before its layer begins, after the reads before it. The best guesses of the
//! nearest layer go first. So nearly all loads of a plan fit into the available time, as in Fate's budget `n = T /
//! t_expert` (section 4.3), and the router's choice withdraws what it does not use. The predicted weight chooses the
//! precision. Prefetches start only while no product waits for the link, and few at a time
//! ([`crate::load::LoadClass::Prefetch`]).
//!
//! Probabilities are learned by predicted weight, separately for resident and missing experts ([`Odds`]): where nearly
//! all used experts are in the cache, most predictions of missing ones are wrong. Without them the rule decoded up to
//! 10 % slower in replays of recorded routes; an estimate of what each read saves and of what its eviction costs
//! gained at most 4 % over it, and 0.2 % in the mean (benches/results/policies.md).
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
