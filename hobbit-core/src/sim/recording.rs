//! A whole trace in memory, as batches of layers, and the recorded data of a layer in the form that a replay needs.

use std::io::Read;
use std::ops::AddAssign;
use std::path::{Path, PathBuf};

use super::SimError;
use crate::predict::PredictorKind;
use crate::trace::{Header, LayerRecord, Phase, Record, ResidentsRecord, TraceReader};

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Sequence,
    Batch(Batch),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    pub phase: Phase,
    pub n_tokens: u32,
    pub seconds: f64,
    /// One record per layer with experts, in the order in which they ran.
    pub layers: Vec<LayerRecord>,
}

impl Batch {
    /// Recorded seconds beside expert products and waits, for each layer.
    pub(crate) fn other_seconds_per_layer(&self) -> f64 {
        let experts: f64 = self.layers.iter().map(|l| f64::from(l.wait_seconds) + f64::from(l.compute_seconds)).sum();
        (self.seconds - experts).max(0.0) / self.layers.len().max(1) as f64
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    pub path: PathBuf,
    /// Header of the trace, with later measurements of the host in place of earlier ones.
    pub header: Header,
    /// Residents before the first batch; empty unless it was a warm start.
    pub start: ResidentsRecord,
    /// Events; incomplete batches are left out.
    pub events: Vec<Event>,
    /// Offset of the truncated record, if the file does not end with a whole record.
    pub truncated: Option<u64>,
}

impl Recording {
    pub fn open(path: &Path) -> Result<Self, SimError> {
        Self::read(TraceReader::open(path)?, path)
    }

    pub fn read<R: Read>(mut reader: TraceReader<R>, path: &Path) -> Result<Self, SimError> {
        let (mut header, mut start) = (reader.header().clone(), ResidentsRecord::default());
        let (mut events, mut layers, mut has_batches) = (Vec::new(), Vec::new(), false);
        for record in &mut reader {
            match record? {
                Record::Sequence => events.push(Event::Sequence),
                Record::Layer(layer) => layers.push(layer),
                Record::Batch { phase, n_tokens, seconds } => {
                    let (seconds, layers) = (f64::from(seconds), std::mem::take(&mut layers));
                    events.push(Event::Batch(Batch { phase, n_tokens, seconds, layers }));
                    has_batches = true;
                }
                Record::Residents(residents) => start = residents,
                Record::Measured { host } => header.host.extend(host),
                Record::Load { .. } | Record::Withdrawn { .. } => {}
            }
        }
        let path = path.to_owned();
        if has_batches {
            Ok(Self { path, header, start, events, truncated: reader.truncated() })
        } else {
            Err(SimError::NoBatches { path })
        }
    }

    /// Assumes low versions of `percent` of an expert's bytes, in layers without any.
    pub fn assume_low(&mut self, percent: f64) {
        for layer in self.header.model.layers.iter_mut().filter(|layer| layer.bytes_low == 0) {
            layer.bytes_low = ((layer.bytes_high as f64 * percent / 100.0) as u64).clamp(1, layer.bytes_high);
        }
    }

    /// Whether it has scores of experts that the router did not choose.
    pub(crate) fn has_unselected_scores(&self) -> bool {
        self.batches().flat_map(|batch| &batch.layers).any(|record| record.n_unselected() > 0)
    }

    pub fn n_tokens(&self) -> u64 {
        self.batches().map(|batch| u64::from(batch.n_tokens)).sum()
    }

    pub fn batches(&self) -> impl Iterator<Item = &Batch> {
        self.events.iter().filter_map(|event| match event {
            Event::Batch(batch) => Some(batch),
            Event::Sequence => None,
        })
    }
}

/// The distinct experts that a layer's router chose, in the order in which the engine asks for them: the recorded
/// order, if any; otherwise the router's order for a single token, falling popularity for a batch.
pub(super) fn need_order(record: &LayerRecord, order: &mut Vec<u16>) {
    order.clear();
    // The recorded order is that of the executed experts; it is not the order of the router's choice if the two differ.
    let needed = if record.executed.is_empty() { &record.needed[..] } else { &[] };
    if !needed.is_empty() || record.n_tokens == 1 {
        // A file may list an expert twice.
        let push = |expert| {
            if !order.contains(&expert) {
                order.push(expert);
            }
        };
        if needed.is_empty() {
            record.chosen.iter().copied().for_each(push)
        } else {
            needed.iter().map(|needed| needed.expert).for_each(push)
        }
        return;
    }
    order.extend_from_slice(&record.chosen);
    order.sort_unstable();
    order.dedup();
    let uses = summed(record, std::iter::repeat(1u32));
    order.sort_by_key(|index| std::cmp::Reverse(uses[usize::from(*index)]));
}

/// The router weight of each expert, summed over the batch's tokens in their order, by index.
pub(super) fn summed_weights(record: &LayerRecord) -> Vec<f32> {
    summed(record, record.weights.iter().copied())
}

fn summed<T: Clone + Default + AddAssign>(record: &LayerRecord, amounts: impl Iterator<Item = T>) -> Vec<T> {
    let mut sums = vec![T::default(); record.chosen.iter().max().map_or(0, |most| usize::from(*most) + 1)];
    record.chosen.iter().zip(amounts).for_each(|(&index, amount)| sums[usize::from(index)] += amount);
    sums
}

/// The router's choice for a token, best first; weights sum to 1.
pub(super) fn chosen(record: &LayerRecord, token: usize) -> Vec<(u16, f32)> {
    let mut chosen: Vec<(u16, f32)> = record.token(token).collect();
    let total: f32 = chosen.iter().map(|(_, weight)| weight.abs()).sum();
    if total > 0.0 {
        chosen.iter_mut().for_each(|(_, weight)| *weight = weight.abs() / total);
    }
    chosen.sort_by(|a, b| b.1.total_cmp(&a.1));
    chosen
}

/// Scores, by the router `distance` layers further on, for a token's input of this layer, `[n_expert]`; 0 for experts
/// without a recorded score. `None` without any recorded score.
pub(super) fn scores_at(record: &LayerRecord, token: usize, distance: u8, header: &Header) -> Option<Vec<f32>> {
    let of_distance =
        || record.predictions.iter().filter(|seen| seen.distance == distance && usize::from(seen.token) == token);
    if !has_router_scores(header) || of_distance().next().is_none() {
        return None;
    }
    let layers = &header.model.layers;
    let at = layers.iter().position(|layer| layer.layer == record.layer)?;
    let mut scores = vec![0.0; usize::from(layers.get(at + usize::from(distance))?.n_expert)];
    for prediction in of_distance() {
        if let Some(place) = scores.get_mut(usize::from(prediction.expert)) {
            *place = prediction.score;
        }
    }
    Some(scores)
}

/// Whether a recording's predictions are scores of later routers: its predictor used them.
fn has_router_scores(header: &Header) -> bool {
    let gates = [PredictorKind::StackedGate, PredictorKind::CrossLayer];
    header.settings.predictor.parse().is_ok_and(|kind: PredictorKind| gates.contains(&kind))
}
