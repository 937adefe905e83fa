//! How long it takes to begin.

use super::super::figures::{first_token_s, load_s};
use super::super::group::Study;
use super::super::number::{self, UNKNOWN};
use super::super::read::Entry;
use super::super::table::{Table, bold};
use super::{found_of, limit, of_study, ratio_of};

pub fn table(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["startup"]);
    let heading = [
        "model",
        "limit",
        "test",
        "engine",
        "load, s",
        "llama.cpp, s",
        "ratio",
        "first token, s",
        "llama.cpp, s",
        "ratio",
    ];
    let mut table = of_study(&study, "startup", "Time from the start of the process", &heading, 4);
    table.note = "Until the context is open, and until the logits of the first evaluation. Ratios say how many times as fast as llama.cpp hobbit is.";
    for case in study.hobbit() {
        let baseline = study.baseline(case);
        let ratio = |figure| bold(ratio_of(baseline, Some(case), figure).map_or(UNKNOWN.into(), number::ratio));
        table.rows.push(vec![
            case.model.clone().into(),
            limit(case.limit).into(),
            case.test.to_string().into(),
            case.name().into(),
            found_of(Some(case), load_s).into(),
            found_of(baseline, load_s).into(),
            ratio(load_s),
            found_of(Some(case), first_token_s).into(),
            found_of(baseline, first_token_s).into(),
            ratio(first_token_s),
        ]);
    }
    table
}
