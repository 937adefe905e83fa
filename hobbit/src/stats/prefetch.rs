//! What reading ahead did.

use serde::Serialize;

use crate::load::prefetch::{GovernorReport, PrefetchCounters};

/// Of all sessions of a model, since it was opened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrefetchReport {
    /// Versions read ahead, and what became of them.
    pub counters: PrefetchCounters,
    /// Whether it pays.
    pub governor: GovernorReport,
    /// How good predictions were, by distance.
    pub recall: Vec<RecallReport>,
}

/// How good predictions of layers at one distance were.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RecallReport {
    /// MoE layers ahead.
    pub distance: u8,
    /// Of the experts that were used, the part that was predicted.
    pub recall: Option<f64>,
    /// Of the experts that were predicted, the part that was used.
    pub precision: Option<f64>,
}
