//! What a replay is to try.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use smart_default::SmartDefault;

use super::budget::Budget;
use super::error::SimError;
use super::link::LinkModel;
use super::recording::Recording;
use crate::cache::Allocation;
use crate::cache::policy::{PolicyKind, Weights};
use crate::options::{PrecisionMode, VirtualExperts, VirtualUpdate};
use crate::predict::{PathTable, PredictorKind};
use crate::route::{Rerouting, Thresholds};
use crate::tuned::LayerPenalty;
use crate::words::UnknownWord;

/// Who leaves when a slot is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// One of the engine's policies.
    Policy(PolicyKind),
    /// The optimum, which knows the future: no policy has fewer misses where these cost the same and no layer needs more
    /// experts at once than it has slots. Elsewhere it is near it.
    Belady,
    /// One that knows what the next so many tokens use, and goes by the engine's own policy beyond.
    Near(u8),
    /// The least frequently used of the whole run: counts outlive sequences (HOBBIT's baseline "model level", section 5.5.3).
    LfuOfModel,
}

/// How slots are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slots {
    /// Each layer has its own, as in the engine.
    Layers(Allocation),
    /// Layers of equally large experts compete for all slots that they have together.
    Global,
}

impl Slots {
    /// By which a number of slots is divided before anything competes.
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
    type Err = UnknownWord;

    /// As the engine's `--slots`, or `global`.
    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        match word {
            "global" => Ok(Self::Global),
            _ => word
                .parse()
                .map(Self::Layers)
                .map_err(|error: UnknownWord| UnknownWord { expected: error.expected + ", global", ..error }),
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

/// Who guesses what later layers need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredictedBy {
    /// One of the engine's predictors. Those that need scores of later layers take what was recorded.
    Predictor(PredictorKind),
    /// The future.
    Oracle,
    /// The future, of which each expert is found with a probability of so many percent; in place of one that is not,
    /// another is named ([`crate::trace::foretell`]).
    Partly(u8),
}

/// Loading what later layers are expected to need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, SmartDefault)]
pub struct Prefetch {
    /// Layers to look ahead, from 1: up to the first that lacks an expert (HOBBIT's p).
    #[default(2)]
    pub distance_max: u8,
    /// Predicted experts are kept from eviction until the layer that they were predicted for has run.
    #[default(true)]
    pub shield: bool,
    /// Only what [`crate::load::prefetch`] finds worth its risk in the time there is; otherwise all that is predicted and
    /// missing.
    #[default(true)]
    pub in_time: bool,
}

/// What computing takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compute {
    /// What it took in the recorded run, waits aside; a layer's expert products divided among its experts.
    Recorded,
    /// As given.
    Given {
        /// Seconds of a layer beside its expert products.
        layer_seconds: f64,
        /// Seconds of one expert's products.
        expert_seconds: f64,
    },
}

/// What a replay is to try.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Who leaves when a slot is needed.
    pub eviction: Eviction,
    /// Of the weighted policies.
    pub weights: Weights,
    /// Room for experts.
    pub budget: Budget,
    /// How the layers share it.
    pub slots: Slots,
    /// What misses cost each layer, for [`Allocation::ByPenalty`]; `None`: as this very recording says.
    pub penalties: Option<Vec<LayerPenalty>>,
    /// What [`PredictorKind::PathTable`] looks at; without it that predicts nothing.
    pub path_table: Option<Arc<PathTable>>,
    /// Percent of the bytes that low versions get.
    pub low_percent: f64,
    /// Whether low versions may stand in.
    pub mode: PrecisionMode,
    /// When they do.
    pub thresholds: Thresholds,
    /// Share of a batch's experts that come in low precision at most, `0.0..=1.0`.
    pub prefill_low: f32,
    /// Replace low versions by high ones while nothing else is read.
    pub upgrade: bool,
    /// As `--deterministic`.
    pub deterministic: bool,
    /// Where tokens go in place of experts that are missing. The tokens themselves stay those of the recording, which these would
    /// have changed.
    pub rerouting: Rerouting,
    /// SwapMoE's virtual experts: how often they change, where decoded tokens use what is in memory only. Experts weigh by their
    /// router weights alone: a trace has neither the norms of their inputs nor of their weights.
    pub virtual_experts: Option<VirtualUpdate>,
    /// A missing expert with less than so many times the uniform share of a token's weight is left out of decoding.
    pub drop: f32,
    /// Who predicts, for prefetches.
    pub foresight: PredictedBy,
    /// `None`: nothing is loaded on a guess.
    pub prefetch: Option<Prefetch>,
    /// The file.
    pub link: LinkModel,
    /// The processor.
    pub compute: Compute,
}

impl Config {
    /// The recorded run's own settings: replaying with them should give the recorded hits.
    ///
    /// # Errors
    /// [`SimError::Unknown`] for a policy of another version.
    pub fn recorded(recording: &Recording) -> Result<Self, SimError> {
        let settings = &recording.header.settings;
        let unknown =
            |what, found: &str| SimError::Unknown { path: recording.path.clone(), what, found: found.to_owned() };
        let policy = settings.policy.parse().map_err(|_| unknown("policy", &settings.policy))?;
        let foresight = settings.predictor.parse().map_err(|_| unknown("predictor", &settings.predictor))?;
        let host = |key: &str| recording.header.host.get(key).copied().filter(|value| *value >= 0.0);
        let is_read_ahead = foresight != PredictedBy::Predictor(PredictorKind::None) && settings.prefetch != "off";
        let distance_max = if settings.distance > 0 { settings.distance } else { Prefetch::default().distance_max };
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
            budget: Budget::Recorded,
            slots: Slots::Layers(recorded_allocation(recording).unwrap_or_default()),
            penalties: None,
            path_table: None,
            low_percent: 0.0,
            mode: settings.mode.parse().unwrap_or(PrecisionMode::Exact),
            thresholds: Thresholds { t1: settings.t1, t2: settings.t2 },
            prefill_low: settings.prefill_low,
            upgrade: settings.upgrade,
            deterministic: settings.deterministic,
            rerouting: settings.routing.rerouting(),
            virtual_experts: (settings.routing.virtual_experts != VirtualExperts::Off)
                .then_some(settings.routing.virtual_update),
            drop: settings.routing.drop,
            prefetch: is_read_ahead.then(|| Prefetch { distance_max, ..Prefetch::default() }),
            foresight,
            link,
            compute: Compute::Recorded,
        })
    }

    /// Whether tokens go elsewhere, or do without: then the replay is open-loop.
    pub fn gives_up(&self) -> bool {
        !self.rerouting.is_off() || self.virtual_experts.is_some() || self.drop > 0.0
    }

    /// Whether what tokens ask for is what the recorded run's did.
    pub(super) fn asks_as_recorded(&self, recording: &Recording) -> bool {
        let settings = &recording.header.settings;
        self.mode.to_string() == settings.mode
            && self.thresholds == Thresholds { t1: settings.t1, t2: settings.t2 }
            && self.prefill_low == settings.prefill_low
            && !self.gives_up()
            && settings.routing.is_off()
    }
}

/// `policy_weights` of the settings.
fn recorded_weights(recording: &Recording) -> Option<Weights> {
    recording.header.settings.more.get("policy_weights")?.parse().ok()
}

/// `slots` of the settings: for other budgets than the recorded one, whose slots the header has layer by layer.
fn recorded_allocation(recording: &Recording) -> Option<Allocation> {
    recording.header.settings.more.get("slots")?.parse().ok()
}

impl FromStr for Eviction {
    type Err = UnknownWord;

    /// A policy's name, or one of the simulator's own.
    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let near = || word.strip_prefix("belady:")?.parse().ok().map(Self::Near);
        match word {
            "belady" => Ok(Self::Belady),
            "lfu-model" => Ok(Self::LfuOfModel),
            _ => match near() {
                Some(own) => Ok(own),
                None => word.parse().map(Self::Policy).map_err(|error: UnknownWord| UnknownWord {
                    what: "policy",
                    expected: error.expected + ", lfu-model, belady, belady:TOKENS",
                    ..error
                }),
            },
        }
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Belady => f.pad("belady"),
            Self::Near(tokens) => f.pad(&format!("belady:{tokens}")),
            Self::LfuOfModel => f.pad("lfu-model"),
            Self::Policy(kind) => f.pad(&kind.to_string()),
        }
    }
}

impl FromStr for PredictedBy {
    type Err = UnknownWord;

    /// A predictor's name, `oracle`, or `oracle:N%` for one that finds so much.
    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let percent = word.strip_prefix("oracle:").and_then(|part| part.strip_suffix('%')?.parse().ok());
        match percent.filter(|percent| *percent <= 100) {
            Some(percent) => Ok(Self::Partly(percent)),
            None if word == "oracle" => Ok(Self::Oracle),
            None => word.parse().map(Self::Predictor).map_err(|error: UnknownWord| UnknownWord {
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
