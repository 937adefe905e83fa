//! Tuned policies: JSON files that `hobbit-sim calibrate` makes from traces of a model, and the engine loads
//! (`--profile FILE`, or from a pack).
//!
//! A tuned policy describes how the model's experts are best cached. Tolerance for lower precision is in another file,
//! the [`crate::profile::Profile`].

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cache::policy::{PolicyKind, Weights};
use crate::files::{self, JSON_BYTES_MAX};
use crate::profile::read_versioned;
use crate::route::{Shares, Thresholds};

pub const TUNED_FORMAT: &str = "hobbit-policy";
/// Counts up when a reader of the last version would misunderstand. 2: penalties by layer.
pub const TUNED_VERSION: u64 = 2;

const LAYERS_MAX: usize = 4096;

#[derive(Debug, thiserror::Error)]
#[error("{file}: {reason}; make one from traces of the model with hobbit-sim calibrate")]
pub struct TunedError {
    file: String,
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedPolicy {
    pub format: String,
    pub version: u64,
    pub policy: String,
    /// lru, lfu, lhu, fld; they sum to 1.
    pub weights: [f32; 4],
    /// Highest unimportance that is loaded in high precision; `None` without low versions.
    pub t1: Option<f32>,
    /// Highest unimportance that is loaded at all.
    pub t2: Option<f32>,
    /// Shares of the uses at these thresholds if no expert were resident.
    pub shares: Option<Shares>,
    #[serde(rename = "fitted_on")]
    pub tuned_on: TunedOn,
    /// Miss penalty per token with it: high 1, low B_l / B_h.
    pub penalty: f64,
    /// The same under LRU.
    pub penalty_lru: f64,
    pub replays: u64,
    /// Layers with experts, ascending.
    pub layers: Vec<LayerPenalty>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedOn {
    pub traces: Vec<String>,
    pub model: String,
    pub architecture: String,
    pub tokens: u64,
    pub budget: String,
}

/// Cost of a layer's misses by its number of slots, under the tuned policy. With few tokens it leans towards the mean
/// of all layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerPenalty {
    pub layer: u16,
    pub n_expert: u16,
    /// High slots, ascending from 0 to `n_expert`; empty if fitting was ended before it was measured.
    pub slots: Vec<u32>,
    /// Miss penalty of the layer per token with so many: high 1, low B_l / B_h.
    pub penalty: Vec<f64>,
}

impl LayerPenalty {
    /// Penalty per token with this many slots of the layer, on a straight line between measured numbers. `None` if
    /// nothing was measured.
    pub fn at(&self, n_slots: f64) -> Option<f64> {
        let last = self.slots.len().min(self.penalty.len()).checked_sub(1)?;
        let next = self.slots[..last].partition_point(|slots| f64::from(*slots) < n_slots);
        let before = next.saturating_sub(1);
        let (from, to) = (f64::from(self.slots[before]), f64::from(self.slots[next]));
        let part = if to > from { ((n_slots - from) / (to - from)).clamp(0.0, 1.0) } else { 0.0 };
        Some(self.penalty[before] + part * (self.penalty[next] - self.penalty[before]))
    }
}

impl TunedPolicy {
    pub fn read(path: &Path) -> Result<Self, TunedError> {
        let file = path.display().to_string();
        match files::read_text(path, JSON_BYTES_MAX) {
            Ok(text) => Self::parse(&text, &file),
            Err(error) => Err(TunedError { file, reason: format!("cannot read this tuned policy: {error}") }),
        }
    }

    /// Reads a file's text; `file` is for messages.
    pub fn parse(text: &str, file: &str) -> Result<Self, TunedError> {
        let tuned = read_versioned(text, TUNED_FORMAT, TUNED_VERSION);
        let checked = tuned.and_then(|tuned: Self| tuned.check().map(|()| tuned));
        checked.map_err(|reason| TunedError { file: file.to_owned(), reason })
    }

    /// Checks that the numbers make sense; the error says what was found and what was expected.
    fn check(&self) -> Result<(), String> {
        if Weights::new(self.weights).is_err() {
            return Err(format!("weights are {:?}, expected four numbers from 0 up, not all 0", self.weights));
        }
        let are_thresholds = match (self.t1, self.t2) {
            (Some(t1), Some(t2)) => Thresholds::new(t1, t2).is_ok(),
            (None, None) => true,
            _ => false,
        };
        if !are_thresholds {
            let (t1, t2) = (self.t1, self.t2);
            return Err(format!("t1 is {t1:?} and t2 {t2:?}, expected numbers from 0 to 1, t1 at most t2, or neither"));
        }
        if self.layers.len() > LAYERS_MAX {
            return Err(format!("{} layers, expected at most {LAYERS_MAX}", self.layers.len()));
        }
        if let Some(pair) = self.layers.windows(2).find(|pair| pair[0].layer >= pair[1].layer) {
            return Err(format!("layer {} follows layer {}, expected ascending numbers", pair[1].layer, pair[0].layer));
        }
        self.layers.iter().try_for_each(LayerPenalty::check)
    }

    /// Checks that it was tuned on a model of this architecture with these layers, by block number and number of
    /// experts, ascending. `file` and `model` are for messages.
    pub fn check_model(
        &self,
        architecture: &str,
        layers: &[(u16, u16)],
        file: &str,
        model: &Path,
    ) -> Result<(), TunedError> {
        let experts = |layers: &[(u16, u16)]| layers.iter().map(|(_, n)| u64::from(*n)).sum::<u64>().to_string();
        let theirs: Vec<(u16, u16)> = self.layers.iter().map(|own| (own.layer, own.n_expert)).collect();
        let first = layers.iter().zip(&theirs).find(|(ours, theirs)| ours != theirs);
        let layer = |layer: &(u16, u16)| format!("layer {} of {} experts", layer.0, layer.1);
        let parts = [
            ("general.architecture", self.tuned_on.architecture.clone(), architecture.to_owned()),
            ("number of layers with experts", theirs.len().to_string(), layers.len().to_string()),
            ("number of experts", experts(&theirs), experts(layers)),
            ("a layer", first.map_or_else(String::new, |f| layer(f.1)), first.map_or_else(String::new, |f| layer(f.0))),
        ];
        match parts.into_iter().find(|(_, found, expected)| found != expected) {
            None => Ok(()),
            Some((what, found, expected)) => {
                let (tuned_on, model) = (&self.tuned_on.model, model.display());
                let reason = format!(
                    "this policy was tuned on {tuned_on}, not on {model}: {what} is {found}, expected {expected}"
                );
                Err(TunedError { file: file.to_owned(), reason })
            }
        }
    }

    pub fn hobbit_weights(&self) -> Option<Weights> {
        Weights::new(self.weights).ok().filter(|_| self.policy == PolicyKind::Hobbit.name())
    }

    /// T1 and T2; `None` where there were no low versions.
    pub fn thresholds(&self) -> Option<(f32, f32)> {
        self.t1.zip(self.t2)
    }

    /// Cost of a layer's misses; `None` if it was not measured.
    pub fn penalty_of(&self, layer: u16) -> Option<&LayerPenalty> {
        let at = self.layers.binary_search_by_key(&layer, |own| own.layer).ok()?;
        Some(&self.layers[at]).filter(|own| !own.slots.is_empty())
    }

    pub fn has_penalties(&self) -> bool {
        !self.layers.is_empty() && self.layers.iter().all(|layer| !layer.slots.is_empty())
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("names and numbers can always be written") + "\n"
    }
}

impl LayerPenalty {
    fn check(&self) -> Result<(), String> {
        let Self { layer, n_expert, slots, penalty } = self;
        if slots.len() != penalty.len() {
            return Err(format!(
                "layer {layer} has penalties for {} numbers of slots, expected {}",
                penalty.len(),
                slots.len()
            ));
        }
        let ends = (slots.first().copied(), slots.last().copied());
        let is_curve = ends == (Some(0), Some(u32::from(*n_expert))) && slots.is_sorted_by(|a, b| a < b);
        if !is_curve && !slots.is_empty() {
            return Err(format!("layer {layer}'s numbers of slots are not ascending from 0 to {n_expert}"));
        }
        match penalty.iter().find(|penalty| !(0.0..=f64::MAX).contains(*penalty)) {
            Some(wrong) => Err(format!("a penalty of layer {layer} is {wrong}, expected a number from 0 on")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
