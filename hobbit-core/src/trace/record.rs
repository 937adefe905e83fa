//! What a trace says again and again.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::expert::{Precision, Version};
use crate::route::{Demand, Phase};

/// One record.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "record", rename_all = "lowercase")]
pub enum Record {
    /// A new sequence begins.
    Sequence,
    /// One layer of the batch that the next [`Record::Batch`] ends.
    Layer(LayerRecord),
    /// A read that no product waited for was started.
    Load {
        /// Whose bytes.
        #[serde(flatten)]
        version: Version,
        /// Why; never [`ReadClass::OnDemand`], which [`Needed`] tells.
        class: ReadClass,
        /// Bytes asked for.
        bytes: u64,
    },
    /// A batch has been evaluated: its layers are the layer records since the last one.
    Batch {
        /// What for.
        phase: Phase,
        /// Tokens in it.
        n_tokens: u32,
        /// Wall time.
        seconds: f32,
    },
    /// What was resident before the first batch.
    Residents(ResidentsRecord),
    /// A read of an earlier [`Record::Load`] was taken back before it started.
    Withdrawn {
        /// Whose bytes.
        #[serde(flatten)]
        version: Version,
        /// Bytes that were not read after all.
        bytes: u64,
    },
    /// What has been measured of the machine so far; replaces what an earlier record, or the header, says.
    Measured {
        /// `link_bytes_per_second` and others, as in [`super::Header::host`]; finite.
        host: BTreeMap<String, f64>,
    },
}

/// Why an expert's bytes were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReadClass {
    /// A product needed them.
    OnDemand,
    /// A guess.
    Prefetch,
    /// The high version of a resident low one.
    Upgrade,
}

/// What the host's cache began with: a warm start ([`crate::cache::CacheState`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ResidentsRecord {
    /// Versions that were there, least recently used first.
    pub versions: Vec<Version>,
    /// What the policy of the settings had learned, in its own format ([`crate::cache::Policy::save`]).
    #[serde(rename = "statistics_bytes", serialize_with = "only_length")]
    pub statistics: Vec<u8>,
}

/// Nobody but the policy can read them.
fn only_length<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(bytes.len() as u64)
}

/// What the numbers of a trace stand for, by position: the precision that was used (or none), demands, and what brought a
/// version.
pub(super) const PRECISIONS: [Option<Precision>; 3] = [Some(Precision::High), Some(Precision::Low), None];
pub(super) const DEMANDS: [Demand; 3] = [Demand::High, Demand::Low, Demand::Skip];
pub(super) const CLASSES: [Option<ReadClass>; 4] =
    [None, Some(ReadClass::OnDemand), Some(ReadClass::Prefetch), Some(ReadClass::Upgrade)];

/// What the numbers of a batch's phase stand for, by position.
pub(super) const PHASES: [Phase; 2] = [Phase::Prompt, Phase::Decode];

/// An expert that a layer further on was predicted to need.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Which token of the batch it was predicted for: 0 also where one stands for all.
    #[serde(skip_serializing_if = "is_first")]
    pub token: u16,
    /// How many MoE layers further on, from 1.
    pub distance: u8,
    /// Expert of that layer.
    pub expert: u16,
    /// Its score there.
    pub score: f32,
}

fn is_first(token: &u16) -> bool {
    *token == 0
}

/// A distinct expert that a layer needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Needed {
    /// Expert of the layer.
    pub expert: u16,
    /// What its tokens' weights asked for.
    pub demand: Demand,
    /// In which precision it was used; `None` if it was skipped.
    pub used: Option<Precision>,
    /// Whether all of that version was there when the router chose it.
    pub hit: bool,
    /// What brought the version since its last use; `None` if it has been there all along.
    pub class: Option<ReadClass>,
    /// Bytes that were read for this use; 0 without a class.
    pub bytes: u64,
}

/// One layer of one batch. Lists are flat so that a recorder that keeps one and [`LayerRecord::clear`]s it allocates
/// nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerRecord {
    /// Block number.
    pub layer: u16,
    /// Tokens.
    pub n_tokens: u32,
    /// Experts per token.
    pub n_used: u16,
    /// What the router chose, in its order: `[n_tokens, n_used]`.
    pub chosen: Vec<u16>,
    /// What the tokens used in its place, `[n_tokens, n_used]`; empty where that is what the router chose.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub executed: Vec<u16>,
    /// Router weights of those, `[n_tokens, n_used]`.
    pub weights: Vec<f32>,
    /// Router scores of those, `[n_tokens, n_used]`; empty where scores were not recorded.
    pub scores: Vec<f32>,
    /// The unselected experts of highest score with it, best first, `[n_tokens, n]` with the same n for every token.
    pub unselected: Vec<(u16, f32)>,
    /// Made when this layer ran, token by token where the batch decodes.
    pub predictions: Vec<Prediction>,
    /// Distinct experts in the order in which they were asked for.
    pub needed: Vec<Needed>,
    /// Wall time in which the layer stood still for reads.
    pub wait_seconds: f32,
    /// Wall time of its expert products, without waits.
    pub compute_seconds: f32,
}

impl LayerRecord {
    /// Without tokens yet.
    pub fn new(layer: u16, n_used: u16) -> Self {
        Self { layer, n_used, ..Self::default() }
    }

    /// As new, but for the memory.
    pub fn clear(&mut self, layer: u16, n_used: u16) {
        [&mut self.weights, &mut self.scores].into_iter().for_each(Vec::clear);
        self.chosen.clear();
        self.executed.clear();
        self.unselected.clear();
        self.predictions.clear();
        self.needed.clear();
        (self.layer, self.n_used, self.n_tokens) = (layer, n_used, 0);
        (self.wait_seconds, self.compute_seconds) = (0.0, 0.0);
    }

    /// Adds a token: `chosen` and `weights` `[n_used]` in the router's order, and, if they are known, the router's
    /// `scores` `[n_expert]`, of which those of the chosen and of the best `n_unselected` others are kept. All tokens of
    /// a record are given scores, or none, and as many.
    pub fn push_token(&mut self, chosen: &[u16], weights: &[f32], scores: Option<&[f32]>, n_unselected: usize) {
        self.n_tokens += 1;
        self.chosen.extend_from_slice(chosen);
        self.weights.extend_from_slice(weights);
        let Some(scores) = scores else { return };
        self.scores.extend(chosen.iter().map(|&index| scores.get(usize::from(index)).copied().unwrap_or(0.0)));
        let wanted = n_unselected.min(scores.len().saturating_sub(chosen.len()));
        let start = self.unselected.len();
        for (index, &score) in (0u16..).zip(scores) {
            if chosen.contains(&index) {
                continue;
            }
            // Few are kept of many: insertion needs no memory of its own.
            let n_kept = self.unselected.len() - start;
            let at = self.unselected[start..].partition_point(|other| other.1.total_cmp(&score).is_ge());
            if at < wanted {
                self.unselected.truncate(start + n_kept.min(wanted - 1));
                self.unselected.insert(start + at, (index, score));
            }
        }
    }

    /// Unselected experts that are kept for each token.
    pub fn n_unselected(&self) -> usize {
        self.unselected.len() / (self.n_tokens as usize).max(1)
    }

    /// Experts that a token chose and their weights, in the router's order.
    pub fn token(&self, token: usize) -> impl Iterator<Item = (u16, f32)> {
        let n = usize::from(self.n_used);
        let range = token * n..(token + 1) * n;
        self.chosen[range.clone()].iter().copied().zip(self.weights[range].iter().copied())
    }

    /// The scores of a token by expert index, `[n_expert]`, as far as they were kept, 0 for others; false where none were.
    pub fn scores_of(&self, token: usize, n_expert: usize, out: &mut Vec<f32>) -> bool {
        out.clear();
        out.resize(n_expert, 0.0);
        if self.scores.is_empty() {
            return false;
        }
        let (n, m) = (usize::from(self.n_used), self.n_unselected());
        let (chosen, scores) = (&self.chosen[token * n..(token + 1) * n], &self.scores[token * n..(token + 1) * n]);
        let selected = chosen.iter().copied().zip(scores.iter().copied());
        for (index, score) in selected.chain(self.unselected[token * m..(token + 1) * m].iter().copied()) {
            if let Some(place) = out.get_mut(usize::from(index)) {
                *place = score;
            }
        }
        true
    }
}
