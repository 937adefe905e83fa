//! Whether long runs stay as they begin.

use super::super::figures::{FIRST, LAST, MIDDLE, n_steps, peak_rss, tenth_ts, warm_and_end};
use super::super::group::{LONG, Study};
use super::super::number::{self, UNKNOWN, bytes, digits};
use super::super::read::Entry;
use super::super::table::Table;
use super::{found, limit, of_study};

pub fn table(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &LONG);
    let heading = [
        "model",
        "limit",
        "engine",
        "tokens",
        "first tenth, t/s",
        "middle tenth, t/s",
        "last tenth, t/s",
        "RSS at 10 %",
        "RSS at the end",
        "largest RSS",
        "heap at 10 %",
        "heap at the end",
        "files at 10 %",
        "files at the end",
    ];
    let mut table = of_study(&study, "long", "Long runs", &heading, 3);
    table.note = "RSS, heap in use and open files when a tenth of the tokens was evaluated and when all were.";
    for case in &study.cases {
        for run in &case.runs {
            let record = &run.record;
            let ends = warm_and_end(record);
            let tenth = |nth| found(case, super::Spread::of(tenth_ts(record, nth).into_iter()), digits);
            let size = |size: Option<u64>| size.map_or(UNKNOWN.into(), |size| bytes(size as f64));
            let count = |count: Option<u32>| count.map_or(UNKNOWN.into(), |count| count.to_string());
            let (warm, end) = (ends.map(|(warm, _)| warm), ends.map(|(_, end)| end));
            let largest = record.more.hobbit_series.iter().map(|moment| moment.rss as f64).chain(peak_rss(record));
            let largest = largest.max_by(f64::total_cmp);
            let largest = match (largest, case.limit) {
                (Some(most), Some(limit)) => number::of_bytes(most, limit as f64),
                (Some(most), None) => bytes(most),
                (None, _) => UNKNOWN.into(),
            };
            table.rows.push(vec![
                case.model.clone().into(),
                limit(case.limit).into(),
                case.name().into(),
                n_steps(record).to_string().into(),
                tenth(FIRST).into(),
                tenth(MIDDLE).into(),
                tenth(LAST).into(),
                size(warm.map(|moment| moment.rss)).into(),
                size(end.map(|moment| moment.rss)).into(),
                largest.into(),
                size(warm.and_then(|moment| moment.heap)).into(),
                size(end.and_then(|moment| moment.heap)).into(),
                count(warm.map(|moment| moment.fds)).into(),
                count(end.map(|moment| moment.fds)).into(),
            ]);
        }
    }
    table
}
