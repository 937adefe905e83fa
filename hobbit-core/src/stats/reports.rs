//! Reports of the parts of a session: devices, caches, prefetch, virtual experts, target latency.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::expert::Precision;
use crate::load::balance::HelperMode;
use crate::load::prefetch::{GovernorReport, PrefetchCounters};
use crate::options::Knob;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceReport {
    /// ggml's name, such as `CUDA0`.
    pub name: String,
    /// Description, such as `NVIDIA GeForce RTX 4090`.
    pub description: String,
    /// Layers whose ordinary weights are on the device.
    pub n_layers: u32,
    /// Bytes of its slots; 0 if the CPU computes the experts of its layers.
    pub cache_bytes: u64,
    /// Slots for high versions of experts.
    pub slots: u64,
    /// Experts of all layers that it computes; of the layers on it if it computes none.
    pub experts: u64,
    /// Slots for slices of experts without a slot.
    pub staging_slots: u32,
    /// Bytes of its memory that stay free.
    pub headroom_bytes: u64,
    /// Whether its slots take all that weights, context and head-room leave; else they were given a size.
    pub takes_all: bool,
    /// How far the CPU computes missing experts while the device computes others; `None` if it does not.
    pub helper: Option<HelperMode>,
    /// Whether experts are copied to it before their layer's router decides.
    pub copies_ahead: bool,
    /// Whether experts are copied to it from pinned host memory.
    pub pinned: bool,
    /// Whether it computes in host memory: experts are used in place and never copied.
    pub unified: bool,
}

impl DeviceReport {
    /// Whether `devices` have slots for all of a model's `n_experts` experts.
    pub fn hold_all<'a>(devices: impl IntoIterator<Item = &'a Self>, n_experts: u64) -> bool {
        n_experts > 0 && devices.into_iter().map(|device| device.slots).sum::<u64>() >= n_experts
    }
}

/// Counters of one device since the model was opened, for all of its sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DeviceCounters {
    /// Experts found in a slot of the device: one for each distinct expert that one of its layers needed in an
    /// evaluated ubatch.
    pub hits: u64,
    /// Missing experts, counted alike.
    pub misses: u64,
    /// Slices copied to the device.
    pub uploads: u64,
    pub uploaded_bytes: u64,
    /// Experts copied before their layer's router decided. They count in `uploads`, and as hits if they are used.
    pub ahead: u64,
    /// Copied ahead, and used by the layer that they were copied for.
    pub ahead_used: u64,
    /// Experts copied because they were of use, while the link was idle. They count in `uploads`.
    pub promoted: u64,
    /// Missing experts that the CPU computed in the meantime.
    pub helper_experts: u64,
    /// Wall time of these computations.
    pub helper_seconds: f64,
    /// Times that the slots were reduced because the device ran out of memory.
    pub cache_shrunk: u32,
}

super::field_by_field!(DeviceCounters: Sub::sub {
    hits, misses, uploads, uploaded_bytes, ahead, ahead_used, promoted, helper_experts, helper_seconds, cache_shrunk
});

impl DeviceCounters {
    /// Share of needed experts found on the device, 0..=1; `None` when none was needed.
    pub fn hit_rate(&self) -> Option<f64> {
        super::ratio(self.hits as f64, (self.hits + self.misses) as f64)
    }
}

/// Cache settings of a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CachingReport {
    pub policy: String,
    /// The weights of HOBBIT's policy in effect: lru,lfu,lhu,fld.
    pub policy_weights: String,
    /// How slots are divided among layers.
    pub slots: String,
    /// Slots by cache, the host's first.
    pub slots_by_layer: Vec<CacheSlots>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CacheSlots {
    /// `the host`, or a device's name.
    pub cache: String,
    /// High slots of the layer that has the fewest.
    pub least: u32,
    /// High slots of the layer that has the most.
    pub most: u32,
}

impl CacheSlots {
    /// Minimum and maximum of the layers' high slots in a cache; `None` if no layer has experts.
    pub fn of(name: &str, cache: &Cache, layers: impl Iterator<Item = u16>) -> Option<Self> {
        let slots: Vec<u32> = layers.map(|layer| cache.pools().capacity_of_layer(layer, Precision::High)).collect();
        let (least, most) = (slots.iter().min()?, slots.iter().max()?);
        Some(Self { cache: name.to_owned(), least: *least, most: *most })
    }
}

/// Prefetching of all sessions of a model since it was opened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrefetchReport {
    /// Versions read ahead, by outcome.
    pub counters: PrefetchCounters,
    /// State of the governor, which decides whether prefetching pays.
    pub governor: GovernorReport,
    /// Quality of predictions, by distance.
    pub recall: Vec<RecallReport>,
}

/// Quality of predictions at one distance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RecallReport {
    /// MoE layers ahead.
    pub distance: u8,
    /// Share of the used experts that were predicted.
    pub recall: Option<f64>,
    /// Share of the predicted experts that were used.
    pub precision: Option<f64>,
}

/// Virtual experts of all sessions of a model since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VirtualExpertsReport {
    /// Experts read in the background, most of them in place of less important ones.
    pub replacements: u64,
    /// Replacements whose reads failed: the old expert stayed.
    pub failed: u64,
    /// Tokens between two replacements in a layer.
    pub period_tokens: u32,
    /// Where the norms of the experts' weights come from.
    pub norms: NormsSource,
}

/// Where the norms of the experts' weights come from, which weigh their uses (SwapMoE 3.2, equation 2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NormsSource {
    /// Nowhere: all count as 1.
    #[default]
    None,
    /// The plan of virtual experts.
    Plan,
    /// The pack.
    Pack,
    /// A file of norms: the one beside the model, made in an earlier run.
    File,
    /// They are being computed: those of the other layers count as 1.
    Computing,
    /// They were computed in this run.
    Computed,
}

impl fmt::Display for NormsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Plan => "of the plan",
            Self::Pack => "of the pack",
            Self::File => "of the file beside the model",
            Self::Computing => "still being computed",
            Self::Computed => "computed in this run",
        })
    }
}

/// Target latency of all sessions of a model since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyReport {
    /// Target time of a token.
    pub target_seconds: f64,
    /// The strength that is set.
    pub knob: Knob,
    /// Its current value, for the next token except in a trial.
    pub strength: f32,
    /// Whether a trial of several values is running.
    pub is_trying: bool,
    /// Time of a token with it, if measured.
    pub seconds: Option<f64>,
    /// Whether any allowed value meets the target; `None` before the end of the first trial.
    pub is_reachable: Option<bool>,
    /// Time of a token with the highest allowed value, if measured.
    pub least_seconds: Option<f64>,
    pub trials: u64,
    /// Last measurements, ascending by strength.
    pub measured: Vec<LatencyStep>,
}

/// Tokens at one strength.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyStep {
    pub strength: f32,
    /// Mean time of a token.
    pub seconds: f64,
}

impl fmt::Display for LatencyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |seconds: f64| match seconds * 1e3 {
            ms if ms < 1.0 => format!("{ms:.3} ms"),
            ms => format!("{ms:.1} ms"),
        };
        let (target, Self { knob, strength, .. }) = (ms(self.target_seconds), self);
        match (self.is_reachable, self.seconds, self.least_seconds) {
            (Some(false), _, Some(least)) => {
                write!(f, "a token takes {} at least ({knob} {strength}), target {target}", ms(least))
            }
            (Some(_), Some(seconds), _) => {
                write!(f, "a token takes {} ({knob} {strength}), target {target}", ms(seconds))
            }
            _ => write!(f, "too few tokens for a trial, target {target}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_reports_are_described() {
        let found = LatencyReport {
            target_seconds: 0.05,
            strength: 0.15,
            seconds: Some(0.04),
            is_reachable: Some(true),
            least_seconds: Some(0.03),
            ..LatencyReport::default()
        };
        let text = found.to_string();
        assert_eq!(text, "a token takes 40.0 ms (cache bias 0.15), target 50.0 ms");
        let missed = LatencyReport { is_reachable: Some(false), strength: 0.3, ..found.clone() };
        assert_eq!(missed.to_string(), "a token takes 30.0 ms at least (cache bias 0.3), target 50.0 ms");
        let alpha = LatencyReport { knob: Knob::Substitute, ..found };
        assert_eq!(alpha.to_string(), "a token takes 40.0 ms (substitutes within 0.15), target 50.0 ms");
        assert!(LatencyReport::default().to_string().starts_with("too few tokens"));
    }
}
