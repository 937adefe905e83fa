//! Configuration of a replay.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use smart_default::SmartDefault;

use super::SimError;
use super::budget::Budget;
use super::link::LinkModel;
use super::recording::Recording;
use crate::cache::Allocation;
use crate::cache::policy::{PolicyKind, Weights};
use crate::expert::Version;
use crate::load::prefetch::PrefetchRule;
use crate::named::UnknownName;
use crate::options::{self, PrecisionMode, PrecisionOptions, RoutingOptions};
use crate::predict::{PathTable, PredictorKind};
use crate::route::Thresholds;
use crate::trace::Settings;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    Policy(PolicyKind),
    /// The optimum, which knows the future: no policy has fewer misses if all misses cost the same and no layer needs
    /// more experts at once than it has slots. Otherwise it is near the optimum.
    Belady,
    /// Least frequently used over the whole run: counts outlive sequences (HOBBIT's baseline "model level", section
    /// 5.5.3).
    LfuOfModel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slots {
    /// Each layer has its own, as in the engine.
    Layers(Allocation),
    /// Layers with equally large experts compete for the slots of all of them.
    Global,
}

impl Slots {
    /// The allocation that divides slots before any competition.
    pub(super) fn allocation(self) -> Allocation {
        match self {
            Self::Layers(allocation) => allocation,
            Self::Global => Allocation::Even,
        }
    }
}

impl Default for Slots {
    fn default() -> Self {
        Self::Layers(Allocation::default())
    }
}

impl FromStr for Slots {
    type Err = UnknownName;

    /// Values of the engine's `--slots`, or `global`.
    fn from_str(word: &str) -> Result<Self, UnknownName> {
        match word {
            "global" => Ok(Self::Global),
            _ => word
                .parse()
                .map(Self::Layers)
                .map_err(|error: UnknownName| UnknownName { expected: error.expected + ", global", ..error }),
        }
    }
}

impl fmt::Display for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layers(allocation) => allocation.fmt(f),
            Self::Global => f.pad("global"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredictedBy {
    /// One of the engine's predictors. Predictors that need scores of later layers use the recorded ones.
    Predictor(PredictorKind),
    Oracle,
    /// The future, known in part: each expert is found with this probability in percent; for one that is not found,
    /// another is named (`trace::foretell`).
    Partly(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, SmartDefault)]
pub struct Prefetch {
    /// Layers to look ahead, from 1: up to the first one that lacks an expert (HOBBIT's p).
    #[default(2)]
    pub distance_max: u8,
    /// Which predicted experts that are missing are read.
    pub rule: PrefetchRule,
    /// Whether trials decide when it is on, by virtual time. Predictions take none.
    pub tries: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compute {
    /// Times of the recorded run, without waits; a layer's expert products are divided among its experts.
    Recorded,
    Given {
        /// Seconds of a layer beside its expert products.
        layer_seconds: f64,
        expert_seconds: f64,
    },
}

/// A device that multiplies the experts it has; the CPU multiplies the others, which the device then keeps. It evicts
/// by [`Config::eviction`], apart from the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Slots for high versions, by layer of the header.
    pub slots: Vec<u32>,
    /// Residents before the first batch, least recently used first.
    pub residents: Vec<Version>,
    pub expert_seconds: f64,
}

/// The memory for experts, and its division.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memory {
    pub budget: Budget,
    pub slots: Slots,
    /// Part of the budget for low versions.
    pub low_percent: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub eviction: Eviction,
    pub weights: Weights,
    pub memory: Memory,
    /// The table of [`PredictorKind::PathTable`], which predicts nothing without it.
    pub path_table: Option<Arc<PathTable>>,
    pub precision: PrecisionOptions,
    /// Rules for experts in memory to replace missing ones. The recorded tokens stay, although rerouting would have
    /// changed them. A trace has no norms of the inputs of virtual experts: all count alike.
    pub routing: RoutingOptions,
    /// Norms of the experts' weights by layer, for virtual experts; empty: all count alike.
    pub norms: Vec<(u16, Vec<f32>)>,
    pub predictor: PredictedBy,
    /// Prefetching; `None` turns it off.
    pub prefetch: Option<Prefetch>,
    /// Products of a layer begin before all of its reads have ended.
    pub overlap: bool,
    pub link: LinkModel,
    pub compute: Compute,
    /// `None`: all products run on the host's slots.
    pub device: Option<Device>,
}

impl Config {
    /// The recorded run's own settings. A replay with them should reproduce the recorded hits.
    pub fn recorded(recording: &Recording) -> Result<Self, SimError> {
        let settings = &recording.header.settings;
        let unknown =
            |what, found: &str| SimError::Unknown { path: recording.path.clone(), what, found: found.to_owned() };
        let policy = settings.policy.parse().map_err(|_| unknown("policy", &settings.policy))?;
        let predictor = settings.predictor.parse().map_err(|_| unknown("predictor", &settings.predictor))?;
        let host = |key: &str| recording.header.host.get(key).copied().filter(|value| *value >= 0.0);
        let is_read_ahead = predictor != PredictedBy::Predictor(PredictorKind::None) && settings.prefetch != "off";
        let distance_max = if settings.distance > 0 { settings.distance } else { Prefetch::default().distance_max };
        let recorded: options::Prefetch = settings.prefetch.parse().unwrap_or_default();
        let tries = recorded == options::Prefetch::Auto;
        let default = LinkModel::default();
        let link = LinkModel {
            bytes_per_second: host("link_bytes_per_second")
                .filter(|rate| *rate > 0.0)
                .unwrap_or(default.bytes_per_second),
            latency_seconds: host("read_latency_seconds").unwrap_or(default.latency_seconds),
            in_flight: host("reads_in_flight").map_or(default.in_flight, |n| (n as usize).max(1)),
        };
        Ok(Self {
            eviction: Eviction::Policy(policy),
            weights: recorded_weights(recording).unwrap_or_default(),
            memory: Memory {
                budget: Budget::Recorded,
                slots: Slots::Layers(recorded_allocation(recording).unwrap_or_default()),
                low_percent: 0.0,
            },
            path_table: None,
            norms: Vec::new(),
            precision: recorded_precision(settings),
            routing: settings.routing.clone(),
            prefetch: is_read_ahead.then_some(Prefetch { distance_max, rule: recorded.rule(), tries }),
            predictor,
            overlap: settings.more.get("overlap").is_none_or(|word| word != "off"),
            link,
            compute: Compute::Recorded,
            device: None,
        })
    }

    pub fn is_dynamic(&self) -> bool {
        self.precision.mode == Some(PrecisionMode::Dynamic)
    }

    pub fn thresholds(&self) -> Thresholds {
        let (t1, t2) = self.precision.thresholds(None);
        Thresholds { t1, t2 }
    }

    /// Whether tokens use other experts than the router's, or leave some out: then the replay is open-loop.
    pub(crate) fn gives_up(&self) -> bool {
        !self.routing.rerouting().is_off() || self.routing.drop > 0.0
    }

    /// Whether tokens ask for the same experts and precisions as in the recorded run.
    pub(super) fn asks_as_recorded(&self, recording: &Recording) -> bool {
        let settings = &recording.header.settings;
        let PrecisionOptions { upgrade, deterministic, .. } = self.precision;
        let recorded = PrecisionOptions { upgrade, deterministic, ..recorded_precision(settings) };
        self.precision == recorded && !self.gives_up() && settings.routing.is_off()
    }
}

fn recorded_precision(settings: &Settings) -> PrecisionOptions {
    PrecisionOptions {
        mode: Some(settings.mode.parse().unwrap_or(PrecisionMode::Exact)),
        t1: Some(settings.t1),
        t2: Some(settings.t2),
        renormalise: false,
        prefill_low: Some(settings.prefill_low),
        upgrade: settings.upgrade,
        deterministic: settings.deterministic,
    }
}

fn recorded_weights(recording: &Recording) -> Option<Weights> {
    recording.header.settings.more.get("policy_weights")?.parse().ok()
}

/// `slots` of the settings, for budgets other than the recorded one, whose slots the header lists layer by layer.
fn recorded_allocation(recording: &Recording) -> Option<Allocation> {
    recording.header.settings.more.get("slots")?.parse().ok()
}

impl FromStr for Eviction {
    type Err = UnknownName;

    fn from_str(word: &str) -> Result<Self, UnknownName> {
        match word {
            "belady" => Ok(Self::Belady),
            "lfu-model" => Ok(Self::LfuOfModel),
            _ => word.parse().map(Self::Policy).map_err(|error: UnknownName| UnknownName {
                what: "policy",
                expected: error.expected + ", lfu-model, belady",
                ..error
            }),
        }
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Belady => f.pad("belady"),
            Self::LfuOfModel => f.pad("lfu-model"),
            Self::Policy(kind) => f.pad(&kind.to_string()),
        }
    }
}

impl FromStr for PredictedBy {
    type Err = UnknownName;

    /// A predictor's name, `oracle`, or `oracle:N%` for one that finds N percent.
    fn from_str(word: &str) -> Result<Self, UnknownName> {
        let percent = word.strip_prefix("oracle:").and_then(|part| part.strip_suffix('%')?.parse().ok());
        match percent.filter(|percent| *percent <= 100) {
            Some(percent) => Ok(Self::Partly(percent)),
            None if word == "oracle" => Ok(Self::Oracle),
            None => word.parse().map(Self::Predictor).map_err(|error: UnknownName| UnknownName {
                what: "predictor",
                expected: error.expected + ", oracle, oracle:N%",
                ..error
            }),
        }
    }
}

impl fmt::Display for PredictedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Oracle => f.pad("oracle"),
            Self::Partly(percent) => f.pad(&format!("oracle:{percent}%")),
            Self::Predictor(kind) => f.pad(&kind.to_string()),
        }
    }
}
