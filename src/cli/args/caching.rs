//! Flags that say which experts stay in memory.

use std::path::PathBuf;

use clap::Args;

use crate::cache::policy::{PolicyKind, Weights};
use crate::options::{CachingOptions, Prefetch};
use crate::predict::PredictorKind;

#[derive(Args, Debug)]
#[command(next_help_heading = "Expert caches (hobbit's own)")]
pub struct CachingArgs {
    /// Who leaves a cache when room is needed: lru, lfu, lhu, fld, hobbit, edgemoe, smoe, arc, s3fifo, sieve or foresight
    #[arg(long, value_name = "NAME", default_value_t, env = "HOBBIT_ARG_POLICY")]
    pub policy: PolicyKind,
    /// Weights of --policy hobbit: recency, uses, high-precision uses and distance of the layer, four numbers with commas
    #[arg(long, value_name = "LRU,LFU,LHU,FLD", default_value_t, env = "HOBBIT_ARG_POLICY_WEIGHTS")]
    pub policy_weights: Weights,
    /// Who guesses what the next layers will use: none, stacked-gate, cross-layer or previous
    #[arg(long, value_name = "NAME", default_value_t, value_parser = predictor, env = "HOBBIT_ARG_PREDICTOR")]
    pub predictor: PredictorKind,
    /// Read what is predicted before it is needed: as long as that is measured to help (auto), always, or never
    #[arg(long, value_name = "auto|on|off", default_value_t, env = "HOBBIT_ARG_PREFETCH")]
    pub prefetch: Prefetch,
    /// How many layers ahead to look at most
    #[arg(long, value_name = "N", default_value_t = CachingOptions::DISTANCE,
          value_parser = clap::value_parser!(u8).range(1..=8), env = "HOBBIT_ARG_PREFETCH_DISTANCE")]
    pub prefetch_distance: u8,
    /// Write who was routed where, and what was read for it: for hobbit-sim
    #[arg(long, value_name = "FILE", env = "HOBBIT_ARG_TRACE")]
    pub trace: Option<PathBuf>,
}

impl CachingArgs {
    /// How the caches evict.
    pub fn options(&self) -> CachingOptions {
        CachingOptions {
            policy: self.policy,
            weights: self.policy_weights,
            predictor: self.predictor,
            prefetch: self.prefetch,
            distance: self.prefetch_distance,
        }
    }
}

fn predictor(word: &str) -> Result<PredictorKind, String> {
    match word.parse().map_err(|error: crate::options::UnknownWord| error.to_string())? {
        PredictorKind::PathTable => Err("a path table cannot be given yet; take stacked-gate".to_owned()),
        kind => Ok(kind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictors() {
        assert_eq!(predictor("cross-layer"), Ok(PredictorKind::CrossLayer));
        assert!(predictor("path-table").is_err() && predictor("gate").is_err());
    }
}
