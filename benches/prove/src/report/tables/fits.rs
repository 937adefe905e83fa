//! The whole command by memory, from too little for the model to more than enough.

use super::super::figures::{Measure, decode_ts, of_model, prompt_ts, whole_s};
use super::super::group::{Case, FITS, Study};
use super::super::number::{self, UNKNOWN, percent};
use super::super::read::Entry;
use super::super::table::{Table, bold};
use super::{found_of, limit, of_study, ratio_of};

pub fn table(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &[FITS]);
    let heading = [
        "model",
        "test",
        "variant",
        "budget",
        "of the model",
        "whole command, hobbit, s",
        "llama.cpp, s",
        "ratio",
        "prompt, hobbit, t/s",
        "llama.cpp, t/s",
        "ratio",
        "decode, hobbit, t/s",
        "llama.cpp, t/s",
        "ratio",
    ];
    let mut table = of_study(&study, FITS, "Where the model begins to fit: the whole command", &heading, 3);
    table.note = "The whole command lasts from the start of the process to its end; each follows an equal one in the same memory \
                  and finds what that has left in the page cache. Ratios say how many times as fast as llama.cpp hobbit is.";
    let mut cases: Vec<_> = study.hobbit().collect();
    let order = study.distinct(|case| (case.model.clone(), case.variant, case.test));
    let nth = |case: &Case| {
        let own = (&case.model, case.variant, case.test);
        order.iter().position(|(model, variant, test)| (model, *variant, *test) == own)
    };
    cases.sort_by_key(|case| (nth(case), case.limit.unwrap_or(u64::MAX)));
    for case in cases {
        let baseline = study.baseline(case);
        let share = case.runs.iter().find_map(|run| of_model(&run.record));
        // How a run failed is said once.
        let speed = |case: Option<&Case>, figure: Measure| {
            number::spread(case.and_then(|case: &Case| case.spread(figure)), number::digits)
        };
        let times = |figure| bold(ratio_of(baseline, Some(case), figure).map_or(UNKNOWN.into(), number::ratio));
        let speeds = |figure| bold(ratio_of(Some(case), baseline, figure).map_or(UNKNOWN.into(), number::ratio));
        table.rows.push(vec![
            case.model.clone().into(),
            case.test.to_string().into(),
            case.variant.into(),
            limit(case.limit).into(),
            share.map_or(UNKNOWN.into(), percent).into(),
            found_of(Some(case), whole_s).into(),
            found_of(baseline, whole_s).into(),
            times(whole_s),
            speed(Some(case), prompt_ts).into(),
            speed(baseline, prompt_ts).into(),
            speeds(prompt_ts),
            speed(Some(case), decode_ts).into(),
            speed(baseline, decode_ts).into(),
            speeds(decode_ts),
        ]);
    }
    table
}
