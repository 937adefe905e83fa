//! What hobbit costs where everything fits.

use super::super::figures::{mean_ms, median_ms};
use super::super::group::Study;
use super::super::number::{self, UNKNOWN};
use super::super::read::Entry;
use super::super::table::{Table, bold};
use super::{found_of, limit, logits, of_study, ratio_of};

pub fn table(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["resident"]);
    let heading = [
        "model",
        "limit",
        "test",
        "engine",
        "median token, ms",
        "llama.cpp, ms",
        "overhead",
        "mean token, ms",
        "llama.cpp, ms",
        "overhead",
        "logits with the same bits",
    ];
    let mut table = of_study(&study, "resident", "What hobbit costs with everything in memory", &heading, 4);
    table.note = "Less is better; below zero hobbit is faster.";
    for case in study.hobbit() {
        let baseline = study.baseline(case);
        let overhead =
            |figure| ratio_of(Some(case), baseline, figure).map_or(UNKNOWN.into(), |ratio| number::change(ratio - 1.0));
        let logits = logits(case).map_or(UNKNOWN.into(), |(equal, of)| format!("{equal} of {of}"));
        table.rows.push(vec![
            case.model.clone().into(),
            limit(case.limit).into(),
            case.test.to_string().into(),
            case.name().into(),
            found_of(Some(case), median_ms).into(),
            found_of(baseline, median_ms).into(),
            bold(overhead(median_ms)),
            found_of(Some(case), mean_ms).into(),
            found_of(baseline, mean_ms).into(),
            overhead(mean_ms).into(),
            logits.into(),
        ]);
    }
    table
}
