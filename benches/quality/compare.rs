//! What rows say about each other.

use hobbit::stats::PhaseStats;
use serde::Serialize;

use super::case::{Case, Kind};
use super::measure::Measured;

/// A row of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub text: String,
    pub case: Case,
    pub perplexity: f64,
    /// Perplexity beyond the exact model's, as a share of it.
    pub cost: f64,
    /// Its standard error.
    pub cost_error: f64,
    /// Mean Kullback-Leibler divergence from the exact model, nats a token.
    pub kl: f64,
    pub kl_error: f64,
    /// Bytes of experts read per token.
    pub bytes_per_token: f64,
    pub stats: PhaseStats,
    /// For a dynamic row: what a uniformly smaller quant of equal bytes would reach.
    pub uniform: Option<Uniform>,
}

/// A uniformly smaller quant that does not exist: between its two neighbours, by bytes per token.
#[derive(Clone, Debug, Serialize)]
pub struct Uniform {
    pub perplexity: f64,
    pub kl: f64,
    /// The neighbours, the one of fewer bytes first; one only where there is nothing beyond it.
    pub between: Vec<String>,
}

impl Row {
    pub fn new(text: &str, case: Case, Measured { nll, difference, kl, stats }: &Measured) -> Self {
        let (cost, kl) = (difference.estimate().exp(), kl.estimate());
        Self {
            text: text.to_owned(),
            case,
            perplexity: nll.mean().exp(),
            cost: cost.value - 1.0,
            cost_error: cost.uncertainty,
            kl: kl.value,
            kl_error: kl.uncertainty,
            bytes_per_token: stats.bytes_read as f64 / stats.tokens.max(1) as f64,
            stats: *stats,
            uniform: None,
        }
    }

    /// Dynamic precision, token by token.
    pub fn is_judged(&self) -> bool {
        self.case.kind == Kind::Dynamic && self.case.prefill_low.is_none()
    }

    /// The same text, the same cache, in the same way.
    pub fn is_comparable(&self, other: &Row) -> bool {
        self.text == other.text
            && self.case.cache_percent == other.case.cache_percent
            && self.case.prefill_low.is_some() == other.case.prefill_low.is_some()
    }
}

/// Finds each dynamic row's uniform quant.
pub fn compare(rows: &mut [Row]) {
    for i in 0..rows.len() {
        let row = &rows[i];
        let is_uniform = |other: &&Row| matches!(other.case.kind, Kind::Exact | Kind::Uniform);
        let all: Vec<&Row> = rows.iter().filter(|other| row.is_comparable(other)).filter(is_uniform).collect();
        let has_uniform = all.iter().any(|other| other.case.kind == Kind::Uniform);
        if row.is_judged() && has_uniform {
            rows[i].uniform = interpolate(row.bytes_per_token, all);
        }
    }
}

/// Linear between the nearest quants of fewer and of more bytes. Of quants that are no better than one of fewer bytes
/// (once everything is resident, smaller ones gain nothing) none is considered.
fn interpolate(bytes: f64, mut all: Vec<&Row>) -> Option<Uniform> {
    all.sort_by(|a, b| a.bytes_per_token.total_cmp(&b.bytes_per_token).then(a.kl.total_cmp(&b.kl)));
    let mut frontier: Vec<&Row> = Vec::new();
    for row in all {
        if frontier.last().is_none_or(|last| row.kl < last.kl) {
            frontier.push(row);
        }
    }
    let beyond = frontier.partition_point(|row| row.bytes_per_token <= bytes);
    let label = |row: &Row| row.case.label.clone();
    let alone = |row: &Row| Uniform { perplexity: row.perplexity, kl: row.kl, between: vec![label(row)] };
    let (Some(&less), Some(&more)) = (beyond.checked_sub(1).and_then(|i| frontier.get(i)), frontier.get(beyond)) else {
        return if beyond == 0 { frontier.first() } else { frontier.last() }.map(|row| alone(row));
    };
    let part = (bytes - less.bytes_per_token) / (more.bytes_per_token - less.bytes_per_token);
    let mix = |less: f64, more: f64| less + part * (more - less);
    Some(Uniform {
        perplexity: mix(less.perplexity, more.perplexity),
        kl: mix(less.kl, more.kl),
        between: vec![label(less), label(more)],
    })
}
