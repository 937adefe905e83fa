//! The header of a trace: model, settings and machine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

use crate::files;
use crate::options::{PrecisionMode, Prefetch, RoutingOptions};

pub const MAGIC: [u8; 8] = files::TRACE_MAGIC;
/// Format version; it increases when older readers would misread the file.
pub const VERSION: u16 = 1;
pub(crate) const HEADER_BYTES_MAX: u32 = 4 << 20;

const LAYERS_MAX: usize = 4096;
/// Maximum bytes of an expert, so that sums over all experts of all layers fit in 64 bits.
const EXPERT_BYTES_MAX: u64 = 1 << 35;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    pub model: ModelDescription,
    #[serde(default)]
    pub settings: Settings,
    /// Measurements of the machine, if known: `link_bytes_per_second`, `read_latency_seconds` and others.
    #[serde(default)]
    pub host: BTreeMap<String, f64>,
}

/// The part of a model that a replay needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelDescription {
    pub name: String,
    pub architecture: String,
    /// Layers with experts, ascending.
    pub layers: Vec<Layer>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Block number.
    pub layer: u16,
    pub n_expert: u16,
    /// Experts per token (k).
    pub n_used: u16,
    /// Bytes of an expert's high version, all slices; the largest where they differ.
    pub bytes_high: u64,
    /// Bytes of an expert's low version, all slices; 0 if there are none.
    pub bytes_low: u64,
    /// Bytes of the high version that a low version lacks, if its bits are part of the high one; 0: all bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_rest: u64,
    /// Slots that the layer had for high versions when the trace was recorded.
    pub slots_high: u32,
    /// Slots that the layer had for low versions.
    pub slots_low: u32,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, SmartDefault)]
#[serde(default)]
pub struct Settings {
    /// `--policy`, as typed.
    #[default("lru".into())]
    pub policy: String,
    /// Predictor of prefetches; `none` without.
    #[default("none".into())]
    pub predictor: String,
    /// `--prefetch`: whether predicted experts were read ahead (`on`, `auto`) or not (`off`).
    #[default(Prefetch::Off.to_string())]
    pub prefetch: String,
    /// Maximum layers ahead that were predicted.
    pub distance: u8,
    /// `exact` or `dynamic`.
    #[default(PrecisionMode::Exact.to_string())]
    pub mode: String,
    /// Highest unimportance loaded in high precision.
    #[default(1.0)]
    pub t1: f32,
    /// Highest unimportance loaded at all.
    #[default(1.0)]
    pub t2: f32,
    /// Maximum share of a batch's experts in low precision, `0.0..=1.0`.
    pub prefill_low: f32,
    /// Whether low versions were replaced by high ones in the background.
    pub upgrade: bool,
    /// Whether nothing depended on the speed of reads.
    pub deterministic: bool,
    /// Rules for experts in memory to replace missing ones.
    #[serde(skip_serializing_if = "RoutingOptions::is_off")]
    pub routing: RoutingOptions,
    pub cache_bytes: u64,
    /// Other information: flags, weights of the policy, the text.
    pub more: BTreeMap<String, String>,
}

impl Header {
    /// Checks that a replay can rely on the header. The error has the value found and the expected value.
    pub(super) fn check(&self) -> Result<(), String> {
        let layers = &self.model.layers;
        if layers.len() > LAYERS_MAX {
            return Err(format!("the model has {} layers, expected at most {LAYERS_MAX}", layers.len()));
        }
        if let Some(pair) = layers.windows(2).find(|pair| pair[0].layer >= pair[1].layer) {
            return Err(format!("layer {} follows layer {}, expected ascending numbers", pair[1].layer, pair[0].layer));
        }
        for &Layer { layer, n_expert, n_used, bytes_high, bytes_low, bytes_rest, .. } in layers {
            if n_used == 0 || n_used > n_expert {
                return Err(format!(
                    "layer {layer} uses {n_used} of {n_expert} experts, expected at least one of them"
                ));
            }
            if bytes_high == 0 || bytes_high > EXPERT_BYTES_MAX || bytes_low > bytes_high {
                return Err(format!(
                    "layer {layer}'s experts have {bytes_high} bytes high and {bytes_low} low, expected a size and at \
                     most the same"
                ));
            }
            if bytes_rest > bytes_high {
                return Err(format!(
                    "a low version of layer {layer}'s experts lacks {bytes_rest} bytes, expected at most the high \
                     one's {bytes_high}"
                ));
            }
        }
        self.settings.mode.parse::<PrecisionMode>().map_err(|error| error.to_string())?;
        self.settings.prefetch.parse::<Prefetch>().map_err(|error| error.to_string())?;
        let Settings { t1, t2, prefill_low, routing, .. } = &self.settings;
        let shares = [("t1", *t1), ("t2", *t2), ("prefill_low", *prefill_low)];
        let shares = shares.map(|(name, share)| (name, share, 1.0, "from 0 to 1"));
        let strengths = routing.strengths().map(|(name, strength)| (name, strength, f32::MAX, "from 0 on"));
        for (name, value, most, expected) in strengths.into_iter().chain(shares) {
            if !(0.0..=most).contains(&value) {
                return Err(format!("{name} is {value}, expected a number {expected}"));
            }
        }
        Ok(())
    }

    pub fn layer(&self, number: u16) -> Option<&Layer> {
        let layers = &self.model.layers;
        layers.binary_search_by_key(&number, |layer| layer.layer).ok().map(|at| &layers[at])
    }
}
