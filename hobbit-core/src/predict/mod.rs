//! Which experts the next layers will use, guessed before their routers have spoken. Pure: no ggml, no I/O, no clock.
//!
//! ```text
//! gating input x gates of later layers ─► scores ─┐   (GateStack)
//! router's choice ──────────────────────► observe ┴► Predictor ─► ahead (what to shield, what to load) ─► load::prefetch
//! ```
//!
//! | kind | paper | looks at | distances |
//! |---|---|---|---|
//! | [`Gates::stacked`] | HOBBIT, 3.3 | scores: the k best | 1..=p |
//! | [`Gates::cross_layer`] | Fate, 4.2 | scores: all above the 75th percentile | 1 |
//! | [`PathPredictor`] | EdgeMoE, III-C1 | the experts of the two layers before, in a [`PathTable`] | 1 |
//! | [`Previous`] | | the same layer at the token before | any |
//! | [`Oracle`] | | the future (simulator only) | any |
//!
//! Each token of a decode batch has a predictor of its own ([`Lanes`]). Of a prompt's tokens, of which none is shown to a
//! predictor, [`Popularity`] says what many of them will use.
//!
//! A distance counts layers with experts: 1 is the next one, wherever dense blocks lie between. Nobody looks beyond the
//! last layer of a token.

mod ahead;
mod gate_stack;
mod gates;
mod kind;
mod lanes;
mod path_table;
mod popularity;
mod recall;
mod scores;
mod shape;
mod tokens;

#[cfg(test)]
mod tests;

pub use ahead::{Ahead, ahead};
pub use gate_stack::{Gate, GateRows, GateStack, Gating, Groups, RouterScores};
pub use gates::Gates;
pub use kind::{PredictorKind, build};
pub use lanes::Lanes;
pub use path_table::{PathBatches, PathLimits, PathPredictor, PathTable, PathTableBuilder, PathTableError};
pub use popularity::{Popularity, sample};
pub use recall::{Recall, RecallCounts};
pub use scores::{softmax, top_k};
pub use shape::PredictShape;
pub use tokens::{FutureToken, Oracle, Previous};

use crate::expert::ExpertId;

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
    /// Which token of a decode batch is expected to use it; 0 for a single one.
    pub token: u16,
}

/// Predictions for layer `target` of what `chosen` says: an expert and its score, as far as it lies in `0.0..=1.0`.
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

/// Guesses what later layers will use. It decides and remembers; it neither loads nor evicts.
///
/// The caller guarantees that
/// - for each token, [`Predictor::begin_token`] comes first, then layers in the order in which they run: for each of
///   them [`Predictor::observe`] and, for predictors that ask for them, [`Predictor::scores`], before
///   [`Predictor::predict`];
/// - it is shown one token at a time: a batch that decodes has a predictor for each of its tokens ([`Lanes`]).
///
/// A predictor guarantees that
/// - predictions of one call, for one token, are distinct experts of one layer, in range, in falling order of score, with scores in
///   `0.0..=1.0`;
/// - equal calls give equal answers: no randomness, no iteration in hash order;
/// - layers it does not know, and scores that have not one entry per expert, lead to no prediction and to no panic.
pub trait Predictor: Send {
    /// The router of `layer` chose these for the running token: expert and router weight, by falling weight; weights sum
    /// to 1.
    fn observe(&mut self, layer: u16, chosen: &[(u16, f32)]) {
        let _ = (layer, chosen);
    }

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

    /// A predictor like this one that has seen no token yet, for another token of a batch; `None` where one predictor knows
    /// all of them.
    fn fork(&self) -> Option<Box<dyn Predictor>> {
        None
    }
}
