//! The tables, each of one study.

mod ablation;
mod contended;
mod curve;
mod fits;
mod long;
mod papers;
mod peers;
mod resident;
mod startup;
mod sweep;
#[cfg(test)]
mod tests;

use super::claims;
use super::figures::Measure;
use super::group::{Case, Spread, Study};
use super::number;
use super::read::Entry;
use super::table::Table;

/// Makes a table; without rows where no record belongs to it.
type Make = fn(&[Entry]) -> Table;

/// Names and makers, in the order of the page.
const ALL: [(&str, Make); 12] = [
    ("claims", claims::table),
    ("peers", peers::table),
    ("papers", papers::table),
    ("fits", fits::table),
    ("curve", curve::table),
    ("ablation", ablation::table),
    ("context", sweep::context),
    ("experts", sweep::experts),
    ("resident", resident::table),
    ("contended", contended::table),
    ("startup", startup::table),
    ("long", long::table),
];

/// What `--table` and markers may name.
pub fn names() -> [&'static str; ALL.len()] {
    ALL.map(|(name, _)| name)
}

/// A table by its name; `None` for an unknown one.
pub fn by_name(name: &str, entries: &[Entry]) -> Option<Table> {
    let (_, make) = ALL.iter().find(|(known, _)| *known == name)?;
    Some(make(entries))
}

/// Of a limit.
fn limit(limit: Option<u64>) -> String {
    limit.map_or("none".into(), |bytes| number::bytes(bytes as f64))
}

/// What a case has of a figure; what happened to it where it has nothing because of that.
fn found(case: &Case, spread: Option<Spread>, show: impl Fn(f64) -> String) -> String {
    match case.outcome() {
        outcome if spread.is_none() && outcome != "ok" => outcome,
        _ => number::spread(spread, show),
    }
}

/// Likewise of a case that may not exist.
fn found_of(case: Option<&Case>, figure: Measure) -> String {
    case.map_or(number::UNKNOWN.into(), |case| found(case, case.spread(figure), number::digits))
}

/// A figure of one case divided by another's.
fn ratio_of(case: Option<&Case>, by: Option<&Case>, figure: Measure) -> Option<f64> {
    Some(case?.median(figure)? / by?.median(figure)?)
}

/// `27 of 27` logits of all runs; `None` where none were compared.
fn logits(case: &Case) -> Option<(u64, u64)> {
    let sum = |own: fn(&hobbit_programs::bench::record::Record) -> Option<u64>| {
        case.runs.iter().filter_map(|run| own(&run.record)).fold(0u64, u64::saturating_add)
    };
    let compared = sum(|record| record.hobbit_logits_compared);
    (compared > 0).then(|| (sum(|record| record.hobbit_logits_equal), compared))
}

/// An empty table of a study.
fn of_study(study: &Study, name: &'static str, title: &'static str, heading: &[&str], n_words: usize) -> Table {
    Table {
        name,
        title,
        heading: heading.iter().map(|&name| name.to_owned()).collect(),
        n_words,
        threads: study.threads(),
        files: study.files(),
        ..Table::default()
    }
}
