//! Records of a trace.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::expert::{Precision, Version};
use crate::route::{Demand, Phase};

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "record", rename_all = "lowercase")]
pub enum Record {
    Sequence,
    /// One layer of the batch that the next [`Record::Batch`] ends.
    Layer(LayerRecord),
    /// A read without a waiting product has started.
    Load {
        #[serde(flatten)]
        version: Version,
        /// Reason; never [`ReadClass::OnDemand`], which [`Needed`] records.
        class: ReadClass,
        bytes: u64,
    },
    /// A batch has been evaluated: its layers are the layer records since the last one.
    Batch {
        phase: Phase,
        n_tokens: u32,
        seconds: f32,
    },
    /// Residents before the first batch.
    Residents(ResidentsRecord),
    /// A read of an earlier [`Record::Load`] was withdrawn before it started.
    Withdrawn {
        #[serde(flatten)]
        version: Version,
        /// Bytes that were not read.
        bytes: u64,
    },
    /// Current measurements of the machine; they replace those of an earlier record or of the header.
    Measured {
        /// `link_bytes_per_second` and others, as in [`super::Header::host`]; finite.
        host: BTreeMap<String, f64>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReadClass {
    /// A product needed them.
    OnDemand,
    Prefetch,
    /// An upgrade of a resident low version to its high version.
    Upgrade,
}

/// Initial content of the host's cache at a warm start ([`crate::cache::CacheState`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ResidentsRecord {
    /// Resident versions, least recently used first.
    pub versions: Vec<Version>,
    /// Learned state of the policy, in its own format ([`crate::cache::Policy::save`]).
    #[serde(rename = "statistics_bytes", serialize_with = "only_length")]
    pub statistics: Vec<u8>,
}

/// Serialises the length only, because the content is private to the policy.
fn only_length<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(bytes.len() as u64)
}

/// Meanings of a trace's numbers, by position: the used precision (or none), demands, and the reason of a read.
pub(super) const PRECISIONS: [Option<Precision>; 3] = [Some(Precision::High), Some(Precision::Low), None];
pub(super) const DEMANDS: [Demand; 3] = [Demand::High, Demand::Low, Demand::Skip];
pub(super) const CLASSES: [Option<ReadClass>; 4] =
    [None, Some(ReadClass::OnDemand), Some(ReadClass::Prefetch), Some(ReadClass::Upgrade)];

/// Meanings of a batch's phase numbers, by position.
pub(super) const PHASES: [Phase; 2] = [Phase::Prompt, Phase::Decode];

/// An expert predicted for a later layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Token of the batch that the prediction is for; 0 also for a prediction for the whole batch.
    #[serde(skip_serializing_if = "is_first")]
    pub token: u16,
    /// Distance in MoE layers, from 1.
    pub distance: u8,
    pub expert: u16,
    pub score: f32,
}

fn is_first(token: &u16) -> bool {
    *token == 0
}

/// A distinct expert that a layer needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Needed {
    pub expert: u16,
    /// Demand by its tokens' weights.
    pub demand: Demand,
    /// Precision used; `None` if the expert was skipped.
    pub used: Option<Precision>,
    /// Whether all of that version was resident when the router chose it.
    pub hit: bool,
    /// Reason of the read of this version since its last use; `None` if it stayed resident.
    pub class: Option<ReadClass>,
    /// Bytes read for this use; 0 without a class.
    pub bytes: u64,
}

/// One layer of one batch. Lists are flat so that a recorder can reuse one with [`LayerRecord::clear`] and allocate
/// nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerRecord {
    pub layer: u16,
    pub n_tokens: u32,
    /// Experts per token.
    pub n_used: u16,
    /// The router's choice, in its order: `[n_tokens, n_used]`.
    pub chosen: Vec<u16>,
    /// Executed experts, `[n_tokens, n_used]`; empty if they are the router's choice.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub executed: Vec<u16>,
    /// Router weights of the chosen experts, `[n_tokens, n_used]`.
    pub weights: Vec<f32>,
    /// Router scores of the chosen experts, `[n_tokens, n_used]`; empty if scores were not recorded.
    pub scores: Vec<f32>,
    /// Unselected experts with the highest scores, best first, `[n_tokens, n]` with the same n for every token.
    pub unselected: Vec<(u16, f32)>,
    /// Predictions made while this layer ran, token by token if the batch decodes.
    pub predictions: Vec<Prediction>,
    /// Distinct experts in the order in which they were asked for.
    pub needed: Vec<Needed>,
    /// Wall time in which the layer waited for reads.
    pub wait_seconds: f32,
    /// Wall time of its expert products, without waits.
    pub compute_seconds: f32,
}

impl LayerRecord {
    /// A record without tokens.
    pub fn new(layer: u16, n_used: u16) -> Self {
        Self { layer, n_used, ..Self::default() }
    }

    /// Resets the record and keeps its memory.
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

    /// Adds a token: `chosen` and `weights` `[n_used]` in the router's order, and, if known, the router's `scores`
    /// `[n_expert]`. Keeps the scores of the chosen experts and of the best `n_unselected` others. Either all tokens of
    /// a record have scores, with the same `n_unselected`, or none.
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
            // Only few of many are kept: insertion needs no extra memory.
            let n_kept = self.unselected.len() - start;
            let at = self.unselected[start..].partition_point(|other| other.1.total_cmp(&score).is_ge());
            if at < wanted {
                self.unselected.truncate(start + n_kept.min(wanted - 1));
                self.unselected.insert(start + at, (index, score));
            }
        }
    }

    /// Unselected experts kept for each token.
    pub(crate) fn n_unselected(&self) -> usize {
        self.unselected.len() / (self.n_tokens as usize).max(1)
    }

    /// A token's chosen experts and their weights, in the router's order.
    pub fn token(&self, token: usize) -> impl Iterator<Item = (u16, f32)> {
        let n = usize::from(self.n_used);
        let range = token * n..(token + 1) * n;
        self.chosen[range.clone()].iter().copied().zip(self.weights[range].iter().copied())
    }

    /// Fills `out` with a token's recorded scores by expert index, `[n_expert]`, 0 for others; false if none were
    /// recorded.
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
