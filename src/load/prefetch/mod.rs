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
//! A read that has started cannot be taken back, so a wrong guess may stand before a read that a product waits for. With
//! `p` the probability that the version is used, `load` the seconds that its read takes, and `slack` the seconds until
//! its layer begins, less what is read before it:
//!
//! ```text
//! saved   = p * min(load, slack)                  the wait that does not happen
//! delayed = (1 - p) * max(0, load - slack)        the wait that would not have happened
//! ```
//!
//! Nothing is issued while a product waits for the link, without slack, or where `saved <= delayed`. So all loads of a
//! plan but the last fit into the time there is: Fate's budget `n = T / t_expert` (section 4.3), and one more where part
//! of a read is worth its risk. What saves most goes first.
//!
//! Which version is read follows the predicted router weights as [`crate::route`] follows real ones.
//!
//! What no estimate knows (residents that had to leave, a disk that slows down the computation) the [`Governor`]
//! measures.

mod counters;
mod estimates;
mod governor;
mod odds;
mod planner;

#[cfg(test)]
mod tests;

pub use counters::PrefetchCounters;
pub use estimates::Estimates;
pub use governor::{Governor, GovernorOptions, GovernorReason, GovernorReport};
pub use odds::Odds;
pub use planner::{Holdings, Link, Load, Pace, PrefetchOptions, Prefetcher, Settled};
