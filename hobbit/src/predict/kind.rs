//! Predictors by name.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

#[cfg(doc)]
use super::Oracle;
use super::{Gates, PathPredictor, PathTable, PredictShape, Predicted, Predictor, Previous};
use crate::words::UnknownWord;

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
    /// [`Gates::stacked`].
    StackedGate,
    /// [`Gates::cross_layer`].
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
        PredictorKind::StackedGate => Box::new(Gates::stacked(shape, Gates::DISTANCE_MAX)),
        PredictorKind::CrossLayer => Box::new(Gates::cross_layer(shape, 1, Gates::PERCENTILE)),
        PredictorKind::PathTable => Box::new(PathPredictor::new(shape, table.unwrap_or_default())),
        PredictorKind::Previous => Box::new(Previous::new(shape)),
    }
}
