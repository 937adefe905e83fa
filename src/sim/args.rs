//! Command line of `hobbit-sim`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::args::{bytes, number, percent, strength};
use crate::argv::Switch;
use crate::manuals::PagesArgs;
use hobbit::options::{self, PrecisionMode, PrecisionOptions, RoutingOptions, VirtualExperts, VirtualUpdate};
use hobbit_core::cache::policy::{PolicyKind, Weights};
use hobbit_core::predict::PredictorKind;
use hobbit_core::profile::read_norms;
use hobbit_core::route::{Rerouting, Shares, Thresholds};
use hobbit_core::sim::{Budget, Compute, Config, Eviction, PredictedBy, Prefetch, Recording, Slots, path_table};
use hobbit_core::trace::Layer;

const EXAMPLES: &str = "\
Examples:
  hobbit-cli -m mixtral.gguf -p 'Once upon a time' -n 500 --trace prose.trace
      Record a run.
  hobbit-sim import qwen.route.csv -o qwen.trace
      Take another program's recording of routes, for replay and --routes.
  hobbit-sim replay prose.trace --policy lru,hobbit --budget 10%,25%,50% --predictor none,stacked-gate,oracle
      A table of hits, penalty and simulated speed for each combination.
  hobbit-sim replay prose.trace --cache-bias 0.2 --policy lru --budget 25%,50%
      Reads if routing prefers experts in memory.
  hobbit-sim calibrate prose.trace chat.trace
      HOBBIT's weights and thresholds for this model, as flags of hobbit-cli.
  hobbit-sim recall prose.trace --calibration chat.trace
      How good predictors are.

Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted.";

/// Replay recorded runs under other policies, predictors and budgets, with a virtual clock.
#[derive(Debug, Parser)]
#[command(name = "hobbit-sim", version = env!("HOBBIT_VERSION"), max_term_width = 110, after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    pages: PagesArgs,
    #[command(subcommand)]
    pub command: Command,
}

/// An operation on traces.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print a trace as JSON, one record per line, the header first
    Show(ShowArgs),
    /// Make a trace of another program's recording of routes (route_trace v1)
    Import(ImportArgs),
    /// Simulate policies, budgets and predictors on traces; table on standard output
    Replay(Box<ReplayArgs>),
    /// Find HOBBIT's four weights and T1/T2 for the least miss penalty on traces
    Calibrate(TuneArgs),
    /// Recall of predictors by layer and distance, whatever was in memory
    Recall(RecallArgs),
}

#[derive(clap::Args, Debug)]
pub struct ShowArgs {
    /// Trace
    pub file: PathBuf,
    /// Only the header
    #[arg(long)]
    pub header: bool,
}

#[derive(clap::Args, Debug)]
pub struct ImportArgs {
    /// Recording: route_trace v1, a line for every chosen expert
    #[arg(value_name = "FILE.csv")]
    pub file: PathBuf,
    /// Where the trace goes
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

#[derive(clap::Args, Debug)]
pub struct ReplayArgs {
    /// Traces
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Policies, separated by commas: names, 'all' (all of the engine's) or 'lfu-model', of the simulator only (it
    /// counts uses over the whole run, lfu over a sequence). LRU and the optimum (belady) are always added
    #[arg(long, value_name = "NAMES", default_value = "all", value_parser = policies)]
    pub policy: Names<Eviction>,
    /// Rooms for experts: 'recorded', a share of all of them (25%), high slots per layer (12slots) or a size (2GiB)
    #[arg(long, value_name = "SIZES", default_value = "recorded", value_delimiter = ',')]
    pub budget: Vec<Budget>,
    /// Predictors of prefetches, separated by commas: a name (path-table with --calibration), 'none', 'oracle' (knows
    /// the future), 'oracle:80%' (right that often, else it names other experts) or 'all' (without path-table)
    #[arg(long, value_name = "NAMES", default_value = "none", value_parser = predictors)]
    pub predictor: Names<PredictedBy>,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub world: WorldArgs,
}

#[derive(clap::Args, Debug)]
pub struct TuneArgs {
    /// Traces of one model; keep others back to see whether the result holds there
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Room for experts, as in replay
    #[arg(long, value_name = "SIZE", default_value = "recorded")]
    pub budget: Budget,
    /// How layers share it: even, shallow-first:N (the first N whole first) or global (layers compete for all of them)
    #[arg(long, value_name = "HOW", default_value_t, alias = "allocation")]
    pub slots: Slots,
    /// Percent of the room that low versions get
    #[arg(long, value_name = "N%", default_value = "0%", value_parser = percent)]
    pub low_share: f64,
    #[command(flatten)]
    pub assumed: AssumedArgs,
    /// Percent of uses that ask for high, low and no version; T1 and T2 follow from it
    #[arg(long, value_name = "H/L/S", default_value = "67/30/3")]
    pub shares: Shares,
    /// Fixed T1 instead, with --t2
    #[arg(long, value_name = "N", requires = "t2")]
    pub t1: Option<f32>,
    /// Fixed T2 instead, with --t1
    #[arg(long, value_name = "N", requires = "t1")]
    pub t2: Option<f32>,
}

#[derive(clap::Args, Debug)]
pub struct RecallArgs {
    /// Traces. Those recorded with --predictor stacked-gate or cross-layer also hold scores of later routers, up to
    /// --prefetch-distance layers ahead
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Layers ahead, at the most
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub distance: u8,
    /// Other traces of the model, to make EdgeMoE's path table; without them it is left out
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub calibration: Vec<PathBuf>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// The flag for results as JSON.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct JsonArgs {
    /// Print everything as JSON
    #[arg(long)]
    pub json: bool,
}

/// The flag for low versions that the recorded model did not have.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct AssumedArgs {
    /// Assume low versions of this percentage of the bytes, where the model had none
    #[arg(long, value_name = "N%", value_parser = percent)]
    pub low_bytes: Option<f64>,
}

/// Differences from the recorded machine and model.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "What is simulated (default: as recorded)")]
pub struct WorldArgs {
    /// How layers share the room: even, shallow-first:N (the first N whole first) or global (layers with experts of one
    /// size compete for slots; of the simulator only)
    #[arg(long, value_name = "HOW", alias = "allocation")]
    pub slots: Option<Slots>,
    /// Other traces of the model, to make EdgeMoE's path table for --predictor path-table
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub calibration: Vec<PathBuf>,
    #[command(flatten)]
    pub precision: PrecisionArgs,
    #[command(flatten)]
    pub routing: RoutingArgs,
    /// Weights of the weighted policies: lru,lfu,lhu,fld
    #[arg(long, value_name = "W,W,W,W")]
    pub policy_weights: Option<Weights>,
    /// Layers to look ahead, at the most
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub distance: u8,
    /// Guesses to read, as in the programs: those worth it (on), the same if trials show that it saves virtual time
    /// (auto), or, without judging them, every one (all), as many as a layer has time for (budget) or three (top-3)
    #[arg(long, value_name = "auto|on|all|budget|top-3", default_value = "on")]
    pub prefetch: options::Prefetch,
    /// Compute with the experts of a layer that are in memory while others are read, as hobbit-cli --overlap
    #[arg(long, value_name = Switch::NAME)]
    pub overlap: Option<Switch>,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// The precision of experts, where it is not the recorded one.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct PrecisionArgs {
    /// exact or dynamic
    #[arg(long, value_name = "MODE")]
    pub precision: Option<PrecisionMode>,
    /// Highest unimportance that is loaded in high precision, 0 to 1
    #[arg(long, value_name = "N")]
    pub t1: Option<f32>,
    /// Highest unimportance that is loaded at all, 0 to 1
    #[arg(long, value_name = "N")]
    pub t2: Option<f32>,
    /// Percent of the room that low versions get
    #[arg(long, value_name = "N%", value_parser = percent)]
    pub low_share: Option<f64>,
    #[command(flatten)]
    pub assumed: AssumedArgs,
    /// Replace low versions by high ones while nothing else is read
    #[arg(long, value_name = Switch::NAME)]
    pub upgrade: Option<Switch>,
}

/// Rules of routing that replace the recorded ones.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct RoutingArgs {
    /// Prefer experts in memory by N times the range of a token's scores, as hobbit-cli --cache-bias. This and
    /// --substitute need a trace with scores (--trace of hobbit-cli, without --routes). Open-loop: the recorded tokens
    /// stay, although another expert's results would change them
    #[arg(long, value_name = "N", value_parser = strength)]
    pub cache_bias: Option<f32>,
    /// A token's best N experts stay whatever is in memory, as hobbit-cli --keep-top
    #[arg(long, value_name = "N")]
    pub keep_top: Option<u16>,
    /// Exchange experts of scores within N (SMoE's alpha), as hobbit-cli --substitute
    #[arg(long, value_name = "N", value_parser = strength)]
    pub substitute: Option<f32>,
    /// At most N experts of a token by --substitute
    #[arg(long, value_name = "N")]
    pub substitute_max: Option<u16>,
    /// Leave out a missing expert with less than N times the uniform share of a token's weight, as hobbit-cli --drop
    #[arg(long, value_name = "N", value_parser = strength)]
    pub drop: Option<f32>,
    /// Single tokens only use experts in memory, which are exchanged in the background (SwapMoE), as hobbit-cli
    /// --virtual-experts auto
    #[arg(long, value_name = Switch::NAME)]
    pub virtual_experts: Option<Switch>,
    /// One of a layer's experts may change in N tokens; auto: as often as does not slow tokens
    #[arg(long, value_name = "auto|N")]
    pub virtual_update: Option<VirtualUpdate>,
    /// Norms of the experts' weights for --virtual-experts: MODEL.norms.json, a profile, or a plan. Without, all count
    /// alike
    #[arg(long, value_name = "FILE")]
    pub norms: Option<PathBuf>,
}

/// Speeds that replace those of the recorded machine.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct MachineArgs {
    /// Bytes per second of the file
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub link: Option<u64>,
    /// Microseconds until a read brings its first byte
    #[arg(long, value_name = "N", value_parser = not_negative)]
    pub latency_us: Option<f64>,
    /// Reads under way at a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub reads: Option<u16>,
    /// Milliseconds of a layer beside its expert products, with --expert-ms
    #[arg(long, value_name = "N", requires = "expert_ms", value_parser = not_negative)]
    pub layer_ms: Option<f64>,
    /// Milliseconds of one expert's products, with --layer-ms
    #[arg(long, value_name = "N", requires = "layer_ms", value_parser = not_negative)]
    pub expert_ms: Option<f64>,
}

impl WorldArgs {
    /// The recorded settings, changed by the flags.
    pub fn config(&self, recording: &Recording) -> Result<Config> {
        let mut config = Config::recorded(recording)?;
        config.memory.slots = self.slots.unwrap_or(config.memory.slots);
        if !self.calibration.is_empty() {
            config.path_table = Some(Arc::new(path_table(&super::others(&self.calibration, recording)?)));
        }
        let PrecisionArgs { precision, t1, t2, low_share, upgrade, .. } = self.precision;
        if t1.is_some() || t2.is_some() || precision == Some(PrecisionMode::Dynamic) {
            let default = if config.is_dynamic() { config.thresholds() } else { Thresholds::default() };
            let Thresholds { t1, t2 } = Thresholds::new(t1.unwrap_or(default.t1), t2.unwrap_or(default.t2))?;
            let mode = Some(PrecisionMode::Dynamic);
            config.precision = PrecisionOptions { mode, t1: Some(t1), t2: Some(t2), ..config.precision };
        }
        config.precision.mode = precision.or(config.precision.mode);
        config.memory.low_percent = low_share.unwrap_or(0.0);
        config.precision.upgrade = upgrade.map_or(config.precision.upgrade, |switch| switch.0);
        config.routing = self.routing.options(recording);
        anyhow::ensure!(
            self.routing.virtual_update.is_none() || config.routing.virtual_experts != VirtualExperts::Off,
            "--virtual-update is of no use without --virtual-experts on"
        );
        config.norms = self.routing.norms(recording, &config.routing)?;
        config.weights = self.policy_weights.unwrap_or(config.weights);
        config.overlap = self.overlap.map_or(config.overlap, |switch| switch.0);
        let MachineArgs { link, latency_us, reads, layer_ms, expert_ms } = self.machine;
        let recorded = &mut config.link;
        recorded.bytes_per_second = link.map_or(recorded.bytes_per_second, |bytes| bytes as f64);
        recorded.latency_seconds = latency_us.map_or(recorded.latency_seconds, |us| us / 1e6);
        recorded.in_flight = reads.map_or(recorded.in_flight, usize::from);
        if let (Some(layer_ms), Some(expert_ms)) = (layer_ms, expert_ms) {
            config.compute = Compute::Given { layer_seconds: layer_ms / 1e3, expert_seconds: expert_ms / 1e3 };
        }
        Ok(config)
    }

    /// Adds a predictor.
    pub fn with_predictor(&self, config: &Config, predictor: PredictedBy) -> Config {
        let tries = self.prefetch == options::Prefetch::Auto;
        let prefetch = Prefetch { distance_max: self.distance.max(1), rule: self.prefetch.rule(), tries };
        let is_on = predictor != PredictedBy::Predictor(PredictorKind::None) && self.prefetch != options::Prefetch::Off;
        Config { predictor, prefetch: is_on.then_some(prefetch), ..config.clone() }
    }
}

impl RoutingArgs {
    /// The recorded rules of routing, changed by the flags.
    pub fn options(&self, recording: &Recording) -> RoutingOptions {
        let recorded = &recording.header.settings.routing;
        let Rerouting { bias, substitute, .. } = recorded.rerouting();
        let was_virtual = recorded.virtual_experts != VirtualExperts::Off;
        let is_virtual = self.virtual_experts.map_or(was_virtual, |switch| switch.0);
        let update = if was_virtual { recorded.virtual_update } else { VirtualUpdate::Auto };
        RoutingOptions {
            cache_bias: self.cache_bias.unwrap_or(bias),
            keep_top: self.keep_top.map_or(recorded.keep_top, u32::from),
            substitute: self.substitute.unwrap_or(substitute),
            substitute_max: self.substitute_max.map(u32::from).or(recorded.substitute_max),
            drop: self.drop.unwrap_or(recorded.drop),
            virtual_experts: if is_virtual { VirtualExperts::Auto } else { VirtualExperts::Off },
            virtual_update: self.virtual_update.unwrap_or(update),
            ..RoutingOptions::default()
        }
    }

    /// The norms of the recorded model's experts by layer; none without a file.
    fn norms(&self, recording: &Recording, routing: &RoutingOptions) -> Result<Vec<(u16, Vec<f32>)>> {
        let Some(path) = &self.norms else { return Ok(Vec::new()) };
        anyhow::ensure!(
            routing.virtual_experts != VirtualExperts::Off,
            "--norms is of no use without --virtual-experts on"
        );
        let norms: Vec<(u16, Vec<f32>)> = read_norms(path)?.into_iter().map(|own| (own.layer, own.norms)).collect();
        let model = &recording.header.model;
        let shape = |layer: &Layer| (layer.layer, usize::from(layer.n_expert));
        anyhow::ensure!(
            norms.iter().map(|(layer, norms)| (*layer, norms.len())).eq(model.layers.iter().map(shape)),
            "--norms {}: these are of another model: expected those of {}, {} layers with experts",
            path.display(),
            model.name,
            model.layers.len()
        );
        Ok(norms)
    }
}

/// Several words in one argument.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names<T>(pub Vec<T>);

fn policies(text: &str) -> Result<Names<Eviction>, String> {
    let all = || PolicyKind::ALL.iter().map(|kind| Eviction::Policy(*kind)).collect();
    names(text, all)
}

fn predictors(text: &str) -> Result<Names<PredictedBy>, String> {
    let of_engine = || PredictorKind::ALL.into_iter().filter(|kind| *kind != PredictorKind::PathTable);
    names(text, || of_engine().map(PredictedBy::Predictor).chain([PredictedBy::Oracle]).collect())
}

fn names<T: std::str::FromStr<Err: std::fmt::Display> + PartialEq>(
    text: &str,
    all: impl Fn() -> Vec<T>,
) -> Result<Names<T>, String> {
    let mut found: Vec<T> = Vec::new();
    for word in text.split(',').map(str::trim) {
        let of_word =
            if word == "all" { all() } else { vec![word.parse().map_err(|error: T::Err| error.to_string())?] };
        for name in of_word {
            if !found.contains(&name) {
                found.push(name);
            }
        }
    }
    Ok(Names(found))
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(0.0..=1e12, "a number from 0 on")(text)
}
