//! Flags that say which experts stay in memory.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser as _};

use super::percent;
use crate::argv::Switch;
use hobbit::options::{CachingOptions, Prefetch, RouteOptions};
use hobbit_core::cache::Allocation;
use hobbit_core::cache::policy::{PolicyKind, Weights};
use hobbit_core::predict::PredictorKind;

/// The default of --routes-recall.
const ROUTES_RECALL: f64 = 80.0;

#[derive(Args, Debug)]
#[command(next_help_heading = "Expert caches (hobbit's own)")]
pub struct CachingArgs {
    /// Eviction policy
    #[arg(
        long,
        value_name = "lru|lfu|hobbit|edgemoe|smoe|arc|classlru|learned",
        default_value_t,
        env = "HOBBIT_ARG_POLICY"
    )]
    pub policy: PolicyKind,
    /// Weights of --policy hobbit: recency, uses, high-precision uses and distance of the layer, four numbers with
    /// commas; hobbit-sim calibrate finds them for a model
    #[arg(long, value_name = "LRU,LFU,LHU,FLD", default_value_t, env = "HOBBIT_ARG_POLICY_WEIGHTS")]
    pub policy_weights: Weights,
    /// How layers share the slots: even, or shallow-first:N (the first N layers whole first; others may have none)
    #[arg(long = "expert-slots", value_name = "even|shallow-first[:N]", default_value_t, env = "HOBBIT_ARG_SLOTS")]
    pub slots: Allocation,
    /// Predictor of the experts that the next layers will use (default: stacked-gate in trials, see --prefetch auto;
    /// none on devices, with --deterministic, --target-latency, --trace or --routes)
    #[arg(long, value_name = "none|stacked-gate|cross-layer|path-table", env = "HOBBIT_ARG_PREDICTOR")]
    pub predictor: Option<PredictorKind>,
    /// Table of --predictor path-table, made by gguf-tools profile --path-table
    #[arg(long, value_name = "FILE", env = "HOBBIT_ARG_PATH_TABLE")]
    pub path_table: Option<PathBuf>,
    /// Read predicted experts before they are needed: while tokens are faster with it, as measured in short trials
    /// (auto), always those that are worth their read (on), without judging them every one (all), as many as a layer
    /// has time for (budget) or the three likeliest (top-3), or never
    #[arg(long, value_name = "auto|on|all|budget|top-3|off", default_value_t, env = "HOBBIT_ARG_PREFETCH")]
    pub prefetch: Prefetch,
    /// How many layers ahead to look at most
    #[arg(long, value_name = "N", default_value_t = CachingOptions::DISTANCE,
          value_parser = clap::value_parser!(u8).range(1..=8), env = "HOBBIT_ARG_PREFETCH_DISTANCE")]
    pub prefetch_distance: u8,
    /// Compute with the experts of a layer that are in memory while others are read or copied. Off measures the gain
    #[arg(long, default_value = "on", env = "HOBBIT_ARG_OVERLAP")]
    pub overlap: Switch,
    /// Fill free slots while no computation waits for a read: before the first prompt, and while a message is typed
    #[arg(long, default_value = "on", env = "HOBBIT_ARG_FILL")]
    pub fill: Switch,
    /// Send tokens along the routes of a trace (--trace, hobbit-sim import) instead of the model's routers: to
    /// measure with a real model's locality. The generated text is meaningless
    #[arg(long, value_name = "FILE", env = "HOBBIT_ARG_ROUTES")]
    pub routes: Option<PathBuf>,
    /// With --routes: share of the experts of later layers that gate predictors are given
    #[arg(long, value_name = "N%", default_value = "80%", value_parser = percent, env = "HOBBIT_ARG_ROUTES_RECALL")]
    pub routes_recall: f64,
    /// Record routes and reads in a file, for hobbit-sim
    #[arg(long, value_name = "FILE", env = "HOBBIT_ARG_TRACE")]
    pub trace: Option<PathBuf>,
    /// Save the list of experts in memory at the end of a run, and begin with them in the next one. A FILE's are read
    /// before the first token. auto keeps a file for each model in $XDG_CACHE_HOME/hobbit/experts or
    /// ~/.cache/hobbit/experts, and reads its experts in pauses and between tokens (hobbit-cli and hobbit-server)
    #[arg(long, value_name = "FILE|auto|off", default_value = "auto", env = "HOBBIT_ARG_CACHE_STATE",
          value_parser = OsStringValueParser::new().map(CacheState::from), value_hint = clap::ValueHint::AnyPath)]
    pub cache_state: CacheState,
}

/// Where the list of experts in memory is kept between runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheState {
    /// In a file of the user's cache directory, for programs whose runs are not measured.
    Auto,
    Off,
    File(PathBuf),
}

impl From<OsString> for CacheState {
    fn from(word: OsString) -> Self {
        match word.to_str() {
            Some("auto") => Self::Auto,
            Some("off") => Self::Off,
            _ => Self::File(word.into()),
        }
    }
}

impl CacheState {
    /// The file that was given.
    pub fn file(&self) -> Option<&Path> {
        if let Self::File(path) = self { Some(path) } else { None }
    }

    /// The directory of all models' files.
    pub fn directory(&self, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        let path = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let caches = || {
            path("XDG_CACHE_HOME")
                .or_else(|| path("LOCALAPPDATA").filter(|_| cfg!(windows)))
                .or_else(|| Some(path("HOME")?.join(".cache")))
        };
        if *self == Self::Auto { Some(caches()?.join("hobbit").join("experts")) } else { None }
    }
}

impl CachingArgs {
    /// How the caches evict.
    pub fn options(&self) -> CachingOptions {
        CachingOptions {
            policy: self.policy,
            weights: self.policy_weights,
            slots: self.slots,
            predictor: self.predictor,
            prefetch: self.prefetch,
            distance: self.prefetch_distance,
            overlap: self.overlap.0,
            fill: self.fill.0,
        }
    }

    /// The routes to follow.
    pub fn routes(&self) -> Result<Option<RouteOptions>> {
        ensure!(
            self.routes.is_some() || self.routes_recall == ROUTES_RECALL,
            "--routes-recall is for --routes; give that too, or leave it out"
        );
        Ok(self.routes.clone().map(|trace| RouteOptions { trace, recall: self.routes_recall / 100.0 }))
    }

    /// The file of the path table.
    pub fn path_table(&self) -> Result<Option<PathBuf>> {
        ensure!(
            self.path_table.is_none() || self.predictor == Some(PredictorKind::PathTable),
            "--path-table is for --predictor path-table, found {}; give that too, or leave the table away",
            self.predictor.map_or("none".into(), |kind| format!("--predictor {kind}"))
        );
        Ok(self.path_table.clone())
    }
}
