//! Flags that say which experts stay in memory.

use std::path::PathBuf;

use clap::Args;

use crate::cache::policy::{PolicyKind, Weights};
use crate::options::CachingOptions;

#[derive(Args, Debug)]
#[command(next_help_heading = "Expert caches (hobbit's own)")]
pub struct CachingArgs {
    /// Who leaves a cache when room is needed: lru, lfu, lhu, fld, hobbit, edgemoe, smoe, arc, s3fifo, sieve or foresight
    #[arg(long, value_name = "NAME", default_value_t, env = "HOBBIT_ARG_POLICY")]
    pub policy: PolicyKind,
    /// Weights of --policy hobbit: recency, uses, high-precision uses and distance of the layer, four numbers with commas
    #[arg(long, value_name = "LRU,LFU,LHU,FLD", default_value_t, env = "HOBBIT_ARG_POLICY_WEIGHTS")]
    pub policy_weights: Weights,
    /// Write who was routed where, and what was read for it: for hobbit-sim
    #[arg(long, value_name = "FILE", env = "HOBBIT_ARG_TRACE")]
    pub trace: Option<PathBuf>,
}

impl CachingArgs {
    /// How the caches evict.
    pub fn options(&self) -> CachingOptions {
        CachingOptions { policy: self.policy, weights: self.policy_weights }
    }
}
