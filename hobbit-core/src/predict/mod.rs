//! Predicts the experts of later layers before their routers have chosen. Pure: no ggml, no I/O, no clock.
//!
//! ```text
//! input x gates of later layers (GateStack) -> scores --+-> Predictor -> ahead (shield, load) -> load::prefetch
//! router's choice ---------------------------> observe -+
//! ```
//!
//! | kind | paper | looks at | distances |
//! |---|---|---|---|
//! | [`Gates::stacked`] | HOBBIT, 3.3 | scores: the k best | 1..=p |
//! | [`Gates::cross_layer`] | Fate, 4.2 | scores: all above the 75th percentile | 1 |
//! | `PathPredictor` | EdgeMoE, III-C1 | the experts of the two layers before, in a [`PathTable`] | 1 |
//! | [`Oracle`] | | the future (simulator only) | any |
//!
//! Each token of a decode batch has a predictor of its own ([`Lanes`]). Predictors do not see a prompt's tokens:
//! [`Popularity`] counts the experts that many of them will use.
//!
//! A distance counts layers with experts: 1 is the next one, wherever dense blocks lie between. Predictions end at the
//! last layer of a token.

mod gate_stack;
mod gates;
mod path_table;
mod recall;
mod scores;

#[cfg(test)]
mod tests;

pub use gate_stack::{Gate, GateRows, GateStack, Gating, Groups, RouterScores};
pub use gates::Gates;
pub(crate) use path_table::PathPredictor;
pub use path_table::{PathBatches, PathTable, PathTableBuilder, PathTableError};
pub use recall::{Recall, RecallCounts};
pub use scores::{Popularity, sample, softmax, top_k};

use std::sync::Arc;

use crate::expert::ExpertId;
use crate::gguf::{ExpertMap, Gguf};
use crate::named::named;

/// An expert that a later layer is expected to use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predicted {
    pub expert: ExpertId,
    /// `0.0..=1.0`: an estimate of its probability or of its router weight; each predictor says which. Only the order
    /// and the ratios within one prediction can be compared.
    pub score: f32,
    /// MoE layers between the layer that predicted and the expert's; at least 1.
    pub distance: u8,
    /// Which token of a decode batch is expected to use it; 0 for a single one.
    pub token: u16,
}

/// Predictions for layer `target`; `says` returns an expert and its score, which is clamped to `0.0..=1.0`.
fn predicted<T>(
    target: u16,
    distance: u8,
    chosen: impl IntoIterator<Item = T>,
    says: impl Fn(T) -> (u16, f32),
) -> impl Iterator<Item = Predicted> {
    chosen.into_iter().map(says).map(move |(index, score)| Predicted {
        expert: ExpertId { layer: target, index },
        score: score.clamp(0.0, 1.0),
        distance,
        token: 0,
    })
}

/// Predicts the experts of later layers. It decides and remembers; it neither loads nor evicts.
///
/// The caller guarantees that
/// - for each token, [`Predictor::begin_token`] comes first, then layers in the order in which they run: for each of
///   them [`Predictor::observe`] and, for predictors that ask for them, [`Predictor::scores`], before
///   [`Predictor::predict`];
/// - it is shown one token at a time: a batch that decodes has a predictor for each of its tokens ([`Lanes`]).
///
/// A predictor guarantees that
/// - predictions of one call, for one token, are distinct experts of one layer, in range, by falling score within
///   `0.0..=1.0`;
/// - equal calls give equal answers: no randomness, no iteration in hash order;
/// - unknown layers, and scores without one entry per expert, lead to no prediction and to no panic.
pub trait Predictor: Send {
    /// The router of `layer` chose these for the running token: expert and router weight, by falling weight; weights
    /// sum to 1.
    fn observe(&mut self, layer: u16, chosen: &[(u16, f32)]) {
        let _ = (layer, chosen);
    }

    /// Router probabilities of the layer at `distance` from `layer`, computed from the gating input of `layer`:
    /// `[n_expert]`, index is expert. Only predictors that say [`Predictor::needs_scores`] get them.
    fn scores(&mut self, layer: u16, distance: u8, scores: &[f32]) {
        let _ = (layer, distance, scores);
    }

    fn needs_scores(&self) -> bool {
        false
    }

    /// Appends the experts that the layer at `distance` from `layer` will use, best first.
    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>);

    fn begin_token(&mut self) {}

    fn begin_sequence(&mut self) {}

    /// A fresh predictor of this kind for another token of a batch; `None` where one predictor knows all tokens.
    fn fork(&self) -> Option<Box<dyn Predictor>> {
        None
    }
}

/// The layers with experts, in the order in which they run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PredictShape {
    /// Block number, experts, experts used per token; block numbers ascend.
    pub layers: Vec<(u16, u16, u16)>,
}

impl PredictShape {
    /// Layers by block number and experts; `n_used` experts per token, or all experts of a layer with fewer.
    pub fn new(layers: impl IntoIterator<Item = (u16, u16)>, n_used: impl Fn(u16) -> u32) -> Self {
        let used = |layer: u16| u16::try_from(n_used(layer)).unwrap_or(u16::MAX);
        let layers = layers.into_iter().map(|(layer, n_expert)| (layer, n_expert, used(layer).min(n_expert).max(1)));
        Self { layers: layers.collect() }
    }

    /// The layers of a model up to block `last_layer`, from its header alone: the blocks behind are for multi-token
    /// prediction and do not run. Without `last_layer`, every layer with experts.
    pub fn of_header(gguf: &Gguf, experts: &ExpertMap, last_layer: Option<u16>) -> Self {
        let layers = experts.layers.iter().filter(|layer| last_layer.is_none_or(|last| layer.layer <= last));
        let layers = layers.map(|layer| (layer.layer, u16::try_from(layer.n_expert).unwrap_or(u16::MAX)));
        Self::new(layers, |layer| gguf.n_expert_used(layer))
    }

    /// Number of layers with experts before this one; `None` for a layer without experts.
    pub fn position(&self, layer: u16) -> Option<usize> {
        self.layers.iter().position(|&(known, ..)| known == layer)
    }

    /// The entry of the layer at `distance` from `layer`; `None` beyond the last one, and at distance 0.
    pub fn target(&self, layer: u16, distance: u8) -> Option<(u16, u16, u16)> {
        if distance == 0 {
            return None;
        }
        self.layers.get(self.position(layer)? + usize::from(distance)).copied()
    }
}

impl Predictor for () {
    fn predict(&mut self, _layer: u16, _distance: u8, _out: &mut Vec<Predicted>) {}
}

/// Predictors by name; [`Oracle`] needs the future and has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PredictorKind {
    #[default]
    None,
    StackedGate,
    CrossLayer,
    PathTable,
}

named! { PredictorKind, "predictor":
    None = "none", StackedGate = "stacked-gate", CrossLayer = "cross-layer", PathTable = "path-table",
}

impl PredictorKind {
    pub const fn needs_scores(self) -> bool {
        matches!(self, Self::StackedGate | Self::CrossLayer)
    }
}

/// A predictor with its paper's parameters.
///
/// [`PredictorKind::PathTable`] predicts nothing without a table, and nothing for layers whose shape differs from the
/// table's: callers check with [`PathTable::check_shape`].
/// A path table names `at_least` experts, even if a token uses fewer.
pub fn build(
    kind: PredictorKind,
    shape: PredictShape,
    table: Option<Arc<PathTable>>,
    at_least: usize,
) -> Box<dyn Predictor> {
    match kind {
        PredictorKind::None => Box::new(()),
        PredictorKind::StackedGate => Box::new(Gates::stacked(shape, Gates::DISTANCE_MAX)),
        PredictorKind::CrossLayer => Box::new(Gates::cross_layer(shape, 1, Gates::PERCENTILE)),
        PredictorKind::PathTable => Box::new(PathPredictor::new(shape, table.unwrap_or_default(), at_least)),
    }
}

/// Predictions for the next layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ahead {
    /// All experts predicted for the layers looked at, nearest layer first: not to be evicted meanwhile.
    pub predicted: Vec<Predicted>,
    /// Missing experts of the last layer looked at, best first: to be loaded. Layers before it have no misses.
    pub wanted: Vec<Predicted>,
    pub depth: u8,
}

impl Ahead {
    /// The predictions for one layer, best first.
    pub fn of_layer(&self, layer: u16) -> impl Iterator<Item = &Predicted> {
        self.predicted.iter().filter(move |predicted| predicted.expert.layer == layer)
    }
}

/// Looks at the layers behind `layer`, one after the other and at most `p_max`, until one has misses or nothing is
/// predicted. `missing` gets the predictions for one layer, best first, and appends those to load, in the same order.
pub fn ahead(
    predictor: &mut dyn Predictor,
    layer: u16,
    p_max: u8,
    missing: &mut dyn FnMut(&[Predicted], &mut Vec<Predicted>),
) -> Ahead {
    let mut ahead = Ahead::default();
    for distance in 1..=p_max {
        let before = ahead.predicted.len();
        predictor.predict(layer, distance, &mut ahead.predicted);
        if ahead.predicted.len() == before {
            break;
        }
        ahead.depth = distance;
        missing(&ahead.predicted[before..], &mut ahead.wanted);
        if !ahead.wanted.is_empty() {
            break;
        }
    }
    ahead
}

/// One predictor per position of a decode batch, made as batches become wider. While sequences keep their positions,
/// each predictor sees the tokens of one sequence. As a [`Predictor`] it lists the predictions of all tokens, one
/// token after the other.
pub struct Lanes {
    lanes: Vec<Box<dyn Predictor>>,
    n_tokens: usize,
}

impl Lanes {
    /// For batches of any width; `first` predicts for the first token.
    pub fn new(first: Box<dyn Predictor>) -> Self {
        Self { lanes: vec![first], n_tokens: 1 }
    }

    pub fn begin_batch(&mut self, n_tokens: usize) {
        self.set_width(n_tokens);
        self.running().for_each(|lane| lane.begin_token());
    }

    /// Sets the running layer's number of tokens: a batch may come in parts.
    pub(crate) fn set_width(&mut self, n_tokens: usize) {
        self.n_tokens = n_tokens.max(1);
        while self.lanes.len() < self.n_tokens {
            let Some(lane) = self.lanes[0].fork() else { return };
            self.lanes.push(lane);
        }
    }

    /// The predictor of a token of the batch; `None` where the first one knows all of them.
    pub fn of_token(&mut self, token: usize) -> Option<&mut dyn Predictor> {
        match self.lanes.get_mut(token) {
            Some(lane) => Some(&mut **lane),
            None => None,
        }
    }

    fn running(&mut self) -> impl Iterator<Item = &mut Box<dyn Predictor>> {
        self.lanes.iter_mut().take(self.n_tokens)
    }
}

impl Predictor for Lanes {
    fn needs_scores(&self) -> bool {
        self.lanes[0].needs_scores()
    }

    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        for (token, lane) in (0..).zip(self.running()) {
            let before = out.len();
            lane.predict(layer, distance, out);
            if token > 0 {
                out[before..].iter_mut().for_each(|predicted| predicted.token = token);
            }
        }
    }

    fn begin_sequence(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.begin_sequence());
    }
}

/// Uses of one token: by layer, experts and their router weights in falling order.
pub(crate) type FutureToken = Vec<(u16, Vec<(u16, f32)>)>;

/// Predicts a trace's own uses, to measure the worth of a perfect predictor. [`Predictor::begin_token`] takes the next
/// batch of tokens.
#[derive(Clone, Debug)]
pub struct Oracle {
    shape: PredictShape,
    future: std::vec::IntoIter<Vec<FutureToken>>,
    tokens: Vec<FutureToken>,
}

impl Oracle {
    /// `future` has the tokens of each batch in order; after its end nothing is predicted.
    pub fn new(shape: PredictShape, future: Vec<Vec<FutureToken>>) -> Self {
        Self { shape, future: future.into_iter(), tokens: Vec::new() }
    }
}

impl Predictor for Oracle {
    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        let Some((target, n_expert, _)) = self.shape.target(layer, distance) else { return };
        for (token, layers) in (0..).zip(&self.tokens) {
            let Some((_, chosen)) = layers.iter().find(|(layer, _)| *layer == target) else { continue };
            let chosen = chosen.iter().filter(|(index, _)| *index < n_expert);
            let of_token = predicted(target, distance, chosen, |chosen| *chosen);
            out.extend(of_token.map(|predicted| Predicted { token, ..predicted }));
        }
    }

    fn begin_token(&mut self) {
        self.tokens = self.future.next().unwrap_or_default();
    }
}
