//! Which experts the next layers will use, guessed before their routers have spoken. Pure: no ggml, no I/O, no clock.
//!
//! ```text
//! gating input x gates of later layers ─► scores ─┐   (GateStack)
//! router's choice ──────────────────────► observe ┴► Predictor ─► ahead (what to shield, what to load) ─► load::prefetch
//! ```
//!
//! | kind | paper | looks at | distances |
//! |---|---|---|---|
//! | [`StackedGate`] | HOBBIT, 3.3 | scores: the k best | 1..=p |
//! | [`CrossLayer`] | Fate, 4.2 | scores: all above the 75th percentile | 1 |
//! | [`PathPredictor`] | EdgeMoE, III-C | the experts of the two layers before, in a [`PathTable`] | 1 |
//! | [`Previous`] | | the same layer at the token before | any |
//! | [`Oracle`] | | the future (simulator only) | any |
//!
//! A distance counts layers with experts: 1 is the next one, wherever dense blocks lie between. Nobody looks beyond the
//! last layer of a token.

mod ahead;
mod cross_layer;
mod gate;
mod gate_stack;
mod oracle;
mod path_table;
mod previous;
mod recall;
mod scores;
mod shape;
mod stacked_gate;

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use ahead::{Ahead, ahead, ahead_by};
pub use cross_layer::CrossLayer;
pub use gate_stack::{Gate, GateRows, GateStack, Gating};
pub use oracle::{FutureToken, Oracle};
pub use path_table::{PathBatches, PathLimits, PathPredictor, PathTable, PathTableBuilder, PathTableError};
pub use previous::Previous;
pub use recall::{Recall, RecallCounts};
pub use scores::{softmax, top_k};
pub use shape::PredictShape;
pub use stacked_gate::StackedGate;

use crate::expert::ExpertId;
use crate::options::UnknownWord;

/// An expert that a later layer is expected to use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predicted {
    /// Which.
    pub expert: ExpertId,
    /// `0.0..=1.0`: an estimate of its probability or of its router weight; each predictor says which. Only the order
    /// and the ratios within one prediction can be compared.
    pub score: f32,
    /// MoE layers between the layer that predicted and the expert's; at least 1.
    pub distance: u8,
}

/// Guesses what later layers will use. It decides and remembers; it neither loads nor evicts.
///
/// The caller guarantees that
/// - for each token, [`Predictor::begin_token`] comes first, then layers in the order in which they run: for each of
///   them [`Predictor::observe`] and, for predictors that ask for them, [`Predictor::scores`], before
///   [`Predictor::predict`];
/// - only single tokens are shown; batches are not.
///
/// A predictor guarantees that
/// - predictions of one call are distinct experts of one layer, in range, in falling order of score, with scores in
///   `0.0..=1.0`;
/// - equal calls give equal answers: no randomness, no iteration in hash order;
/// - layers it does not know, and scores that have not one entry per expert, lead to no prediction and to no panic.
pub trait Predictor: Send {
    /// The router of `layer` chose these for the running token: expert and router weight, by falling weight; weights sum
    /// to 1.
    fn observe(&mut self, layer: u16, chosen: &[(u16, f32)]);

    /// Router probabilities of the layer at `distance` from `layer`, computed from the gating input of `layer`:
    /// `[n_expert]`, index is expert. Only predictors that say [`Predictor::needs_scores`] get them.
    fn scores(&mut self, layer: u16, distance: u8, scores: &[f32]) {
        let _ = (layer, distance, scores);
    }

    /// Whether [`Predictor::scores`] is wanted.
    fn needs_scores(&self) -> bool {
        false
    }

    /// What the layer at `distance` from `layer` will use, best first, appended to `out`.
    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>);

    /// The next token begins.
    fn begin_token(&mut self) {}

    /// A new sequence begins.
    fn begin_sequence(&mut self) {}
}

/// Predicts nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Nothing;

impl Predictor for Nothing {
    fn observe(&mut self, _layer: u16, _chosen: &[(u16, f32)]) {}

    fn predict(&mut self, _layer: u16, _distance: u8, _out: &mut Vec<Predicted>) {}
}

/// How experts are predicted. [`Oracle`] is not among them: it needs the future.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PredictorKind {
    /// Not at all.
    #[default]
    None,
    /// [`StackedGate`].
    StackedGate,
    /// [`CrossLayer`].
    CrossLayer,
    /// [`PathPredictor`].
    PathTable,
    /// [`Previous`].
    Previous,
}

impl PredictorKind {
    /// Whether it asks the routers of later layers.
    pub const fn needs_scores(self) -> bool {
        matches!(self, Self::StackedGate | Self::CrossLayer)
    }

    /// Every kind.
    pub const ALL: [Self; 5] = [Self::None, Self::StackedGate, Self::CrossLayer, Self::PathTable, Self::Previous];

    /// The word on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::StackedGate => "stacked-gate",
            Self::CrossLayer => "cross-layer",
            Self::PathTable => "path-table",
            Self::Previous => "previous",
        }
    }
}

impl fmt::Display for PredictorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PredictorKind {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL.into_iter().find(|kind| kind.name() == word).ok_or_else(|| UnknownWord {
            what: "predictor",
            found: word.to_owned(),
            expected: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// A predictor with its paper's parameters.
///
/// [`PredictorKind::PathTable`] predicts nothing without a table, and nothing for layers that the table has not in the
/// model's shape: callers ask [`PathTable::check_shape`] first and tell the user.
pub fn build(kind: PredictorKind, shape: PredictShape, table: Option<Arc<PathTable>>) -> Box<dyn Predictor> {
    match kind {
        PredictorKind::None => Box::new(Nothing),
        PredictorKind::StackedGate => Box::new(StackedGate::new(shape, StackedGate::DISTANCE_MAX)),
        PredictorKind::CrossLayer => Box::new(CrossLayer::new(shape, CrossLayer::PERCENTILE)),
        PredictorKind::PathTable => Box::new(PathPredictor::new(shape, table.unwrap_or_default())),
        PredictorKind::Previous => Box::new(Previous::new(shape)),
    }
}
