//! The profile file: JSON, so that other tools can read it.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Digest;

use super::{Mixes, ProfileError, SliceTypes};
use crate::files::{self, JSON_BYTES_MAX};
use crate::gguf::{ExpertMap, GgmlType, Gguf};
use crate::pack;
use crate::route::{Shares, Thresholds};

pub const FORMAT: &str = "hobbit-profile";
/// Format version; it increases when older readers would misread the file.
pub const VERSION: u64 = 1;

/// Result of `gguf-tools profile` for a model on a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    pub format: String,
    pub version: u64,
    pub model: ModelId,
    pub text: TextId,
    /// T1 and T2, if requested.
    pub thresholds: Option<ChosenThresholds>,
    /// The cheapest ways to give up a little quality, by expert cache, if requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixes: Vec<Mixes>,
    /// Sensitivities, one entry per width, widest first; empty if not requested.
    pub widths: Vec<Width>,
    /// EdgeMoE's mixed models, if requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bounded: Vec<Bounded>,
    /// ‖E‖ of every expert, for virtual experts: packs carry it. Empty in older profiles.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub norms: Vec<LayerNorms>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelId {
    pub file: String,
    pub architecture: String,
    pub n_layers: u32,
    pub n_experts: u32,
    pub n_expert_used: u32,
    /// SHA-256 of the (first) file's header without padding, hexadecimal: metadata, names, types and shapes of tensors.
    /// The plain header in a pack of the model has the same value.
    pub header_sha256: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextId {
    pub file: String,
    pub tokens: u64,
    /// Tokens of each independent piece.
    pub context: u32,
    /// Perplexity of the exact model.
    pub perplexity: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChosenThresholds {
    /// Highest unimportance loaded in high precision.
    pub t1: f32,
    /// Highest unimportance loaded at all.
    pub t2: f32,
    /// The goal: `shares 67/30/3` or `max loss 1%`.
    pub goal: String,
    /// Demands of the experts' uses at these thresholds, if none were resident.
    pub shares: Shares,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Width {
    /// The type that slices are lowered to.
    #[serde(rename = "type")]
    pub dtype: GgmlType,
    /// Mean KL divergence from the exact predictions with every expert lowered, nats.
    pub kl: f64,
    /// Relative increase of perplexity in the same run.
    pub perplexity_increase: f64,
    /// Nats of perplexity per nat of summed KL: the loss of lowering everything (the larger of KL and logarithm of the
    /// perplexities' ratio), divided by the sum of all experts' losses.
    #[serde(rename = "calibration")]
    pub scale: f64,
    pub layers: Vec<LayerWidth>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerWidth {
    pub layer: u16,
    /// Types of an expert's slices: the width's; the nearest that the row length allows; or the model's own if the
    /// width is not smaller.
    pub types: SliceTypes,
    /// Mean KL divergence with all experts of the layer lowered, nats.
    pub kl: f64,
    /// Mean KL divergence with each expert lowered alone, nats: measured, or predicted from `kl`.
    pub experts: Vec<f64>,
    /// The experts whose loss was measured, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<u16>,
}

/// A model of two neighbouring widths that was run with several numbers of lowered experts (EdgeMoE, section III-B).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bounded {
    /// Greatest relative increase of perplexity; 0.02 is two percent.
    pub max_loss: f64,
    /// Number of experts at the narrower width, the most robust ones, at which the increase is within `max_loss`.
    pub lowered: u64,
    /// Measured relative increase of perplexity with that number.
    pub perplexity_increase: f64,
    /// All numbers that were tried, with their measured increases.
    pub runs: Vec<(u64, f64)>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorms {
    pub layer: u16,
    /// By expert: the Frobenius norm of all of its matrices together.
    pub norms: Vec<f32>,
}

pub fn norms_to_json(norms: &[LayerNorms]) -> String {
    serde_json::to_string(norms).expect("numbers can always be written")
}

pub fn norms_of_json(text: &str) -> Result<Vec<LayerNorms>, String> {
    let norms: Vec<_> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    check_norms(&norms).map(|()| norms)
}

/// Checks that norms are numbers from 0 on: JSON's 1e39 becomes an infinite `f32`, which cannot be written again.
pub(super) fn check_norms(norms: &[LayerNorms]) -> Result<(), String> {
    let wrong = norms.iter().flat_map(|layer| &layer.norms).find(|norm| !(0.0..=f32::MAX).contains(*norm));
    wrong.map_or(Ok(()), |norm| Err(format!("the norm of an expert is {norm}, expected a number from 0 on")))
}

/// Reads JSON with these values of `format` and `version`. They are checked first: the fields of another version may
/// differ.
pub(super) fn read_versioned<T: DeserializeOwned>(
    text: &str,
    expected: &'static str,
    version: u64,
) -> Result<T, String> {
    #[derive(Deserialize)]
    struct Head {
        format: String,
        version: u64,
    }
    let read = |error: serde_json::Error| error.to_string();
    let head: Head = serde_json::from_str(text).map_err(read)?;
    match head {
        Head { format: found, .. } if found != expected => Err(format!("format is '{found}', expected '{expected}'")),
        Head { version: found, .. } if found != version => {
            Err(format!("version {found} of the format, expected {version}"))
        }
        _ => serde_json::from_str(text).map_err(read),
    }
}

impl ModelId {
    pub fn of(gguf: &Gguf, experts: &ExpertMap) -> Self {
        let header_sha256 = pack::Sha256(sha2::Sha256::digest(&gguf.header_bytes).into()).to_string();
        let architecture = gguf.architecture().to_owned();
        Self {
            file: gguf.files[0].path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            architecture,
            n_layers: experts.layers.len() as u32,
            n_experts: experts.layers.iter().map(|layer| layer.n_expert).sum(),
            n_expert_used: gguf.n_expert_used_max(),
            header_sha256,
        }
    }
}

impl Profile {
    pub fn read(path: &Path) -> Result<Self, ProfileError> {
        let io = |error| ProfileError::Io { path: path.to_owned(), action: "read", error };
        Self::parse(&files::read_text(path, JSON_BYTES_MAX).map_err(io)?, path)
    }

    /// Reads a profile's text; `path` is for messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ProfileError> {
        let malformed = |reason: String| ProfileError::Malformed { path: path.to_owned(), reason };
        let profile: Self = read_versioned(text, FORMAT, VERSION).map_err(malformed)?;
        profile.mixes.iter().try_for_each(Mixes::check).map_err(malformed)?;
        check_norms(&profile.norms).map_err(malformed)?;
        if let Some(ChosenThresholds { t1, t2, .. }) = profile.thresholds
            && Thresholds::new(t1, t2).is_err()
        {
            return Err(malformed(format!("the thresholds are {t1} and {t2}, expected T1 at most T2 from 0 to 1")));
        }
        for width in &profile.widths {
            let of_layers = width.layers.iter().flat_map(|layer| layer.experts.iter().chain([&layer.kl]));
            let mut losses = of_layers.chain([&width.kl, &width.scale]);
            if let Some(loss) = losses.find(|loss| !(0.0..=f64::MAX).contains(*loss)) {
                return Err(malformed(format!("a sensitivity is {loss}, not a number from 0 on")));
            }
        }
        Ok(profile)
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("names and numbers can always be written") + "\n"
    }

    /// Checks that the profile was made from this model.
    pub fn check_model(&self, gguf: &Gguf, experts: &ExpertMap) -> Result<(), ProfileError> {
        let (ours, theirs) = (ModelId::of(gguf, experts), &self.model);
        let parts = [
            ("general.architecture", ours.architecture, &theirs.architecture),
            ("number of layers with experts", ours.n_layers.to_string(), &theirs.n_layers.to_string()),
            ("number of experts", ours.n_experts.to_string(), &theirs.n_experts.to_string()),
            ("SHA-256 of the header", ours.header_sha256, &theirs.header_sha256),
        ];
        match parts.into_iter().find(|(_, ours, theirs)| ours != *theirs) {
            None => Ok(()),
            Some((what, found, expected)) => Err(ProfileError::OtherModel {
                profiled: theirs.file.clone(),
                model: gguf.files[0].path.clone(),
                what,
                found,
                expected: expected.clone(),
            }),
        }
    }
}

#[cfg(test)]
mod tests;
