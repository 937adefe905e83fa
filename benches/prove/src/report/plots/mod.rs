//! What there is to see of each study.

mod bars;
mod lines;
mod over_time;

use super::group::LONG;
use super::read::Entry;

/// A plot and what it shows.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What is shown, of what.
    pub title: String,
    /// The plot.
    pub svg: String,
    /// What its axes are, and how to read it.
    pub note: &'static str,
}

/// The plots of a table's study.
pub fn of(table: &str, entries: &[Entry]) -> Vec<Figure> {
    let groups = match table {
        "peers" => vec![bars::speeds(entries, "peers"), over_time::memory(entries, &["peers"])],
        "papers" => vec![bars::stalls(entries, "papers")],
        "fits" => vec![lines::fits(entries)],
        "contended" => vec![bars::contended(entries)],
        "curve" => vec![lines::curve(entries), bars::stalls(entries, "curve")],
        "ablation" => vec![bars::speeds(entries, "ablation"), bars::stalls(entries, "ablation")],
        "context" => vec![lines::context(entries)],
        "experts" => vec![lines::experts(entries)],
        "long" => {
            vec![over_time::memory(entries, &LONG), over_time::speed(entries, &LONG)]
        }
        _ => vec![],
    };
    groups.into_iter().flatten().collect()
}

/// The model and its memory, in words.
fn room(model: &str, limit: Option<u64>) -> String {
    match limit {
        Some(limit) => format!("{model} in {}", super::number::bytes(limit as f64)),
        None => format!("{model} without a limit"),
    }
}
