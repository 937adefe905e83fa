//! Predictors by name.

use std::sync::Arc;

#[cfg(doc)]
use super::Oracle;
use super::{Gates, PathPredictor, PathTable, PredictShape, Predicted, Predictor, Previous};
use crate::named::named;

/// Predicts nothing.
impl Predictor for () {
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

named! { PredictorKind, "predictor":
    None = "none", StackedGate = "stacked-gate", CrossLayer = "cross-layer", PathTable = "path-table",
    Previous = "previous",
}

impl PredictorKind {
    /// Whether it asks the routers of later layers.
    pub const fn needs_scores(self) -> bool {
        matches!(self, Self::StackedGate | Self::CrossLayer)
    }
}

/// A predictor with its paper's parameters.
///
/// [`PredictorKind::PathTable`] predicts nothing without a table, and nothing for layers that the table has not in the
/// model's shape: callers ask [`PathTable::check_shape`] first and tell the user.
pub fn build(kind: PredictorKind, shape: PredictShape, table: Option<Arc<PathTable>>) -> Box<dyn Predictor> {
    match kind {
        PredictorKind::None => Box::new(()),
        PredictorKind::StackedGate => Box::new(Gates::stacked(shape, Gates::DISTANCE_MAX)),
        PredictorKind::CrossLayer => Box::new(Gates::cross_layer(shape, 1, Gates::PERCENTILE)),
        PredictorKind::PathTable => Box::new(PathPredictor::new(shape, table.unwrap_or_default())),
        PredictorKind::Previous => Box::new(Previous::new(shape)),
    }
}
