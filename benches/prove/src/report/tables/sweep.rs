//! Both engines against one quantity.

use super::super::figures::{decode_ts, prompt_ts};
use super::super::group::{BASELINE, Case, HOBBIT, Study};
use super::super::number::{self, UNKNOWN};
use super::super::read::Entry;
use super::super::table::{Table, bold};
use super::{found_of, limit, of_study, ratio_of};

/// By tokens in the context.
pub fn context(entries: &[Entry]) -> Table {
    let title = "Speed by tokens in the context";
    sweep(&Study::of(entries, &["context"]), "context", title, "tokens in the context", |case| Some(case.test.n_depth))
}

/// By experts of a layer.
pub fn experts(entries: &[Entry]) -> Table {
    let title = "Speed by number of experts";
    let n_expert = |case: &Case| case.runs.iter().find_map(|run| run.record.hobbit_n_expert);
    sweep(&Study::of(entries, &["experts"]), "experts", title, "experts of a layer", n_expert)
}

fn sweep(
    study: &Study,
    name: &'static str,
    title: &'static str,
    quantity: &'static str,
    of: fn(&Case) -> Option<u32>,
) -> Table {
    let heading = [
        "model",
        "limit",
        "test",
        "variant",
        quantity,
        "prompt, hobbit, t/s",
        "llama.cpp, t/s",
        "ratio",
        "decode, hobbit, t/s",
        "llama.cpp, t/s",
        "ratio",
    ];
    let mut table = of_study(study, name, title, &heading, 4);
    let is_hobbit = |case: &&Case| case.engine == HOBBIT;
    // Where hobbit has no row, llama.cpp's stands alone.
    let stands_alone =
        |case: &&Case| case.engine == BASELINE && !study.hobbit().any(|other| other.place() == case.place());
    let mut cases: Vec<&Case> = study.cases.iter().filter(|case| is_hobbit(case) || stands_alone(case)).collect();
    cases.sort_by_key(|case| of(case).unwrap_or(u32::MAX));
    for case in cases {
        let (own, baseline) = match case.engine {
            HOBBIT => (Some(case), study.baseline(case)),
            _ => (None, Some(case)),
        };
        let test = super::super::group::Test { n_depth: 0, ..case.test };
        let ratio = |figure| bold(ratio_of(own, baseline, figure).map_or(UNKNOWN.into(), number::ratio));
        table.rows.push(vec![
            case.model.clone().into(),
            limit(case.limit).into(),
            test.to_string().into(),
            case.variant.into(),
            of(case).map_or(UNKNOWN.into(), |value| value.to_string()).into(),
            found_of(own, prompt_ts).into(),
            found_of(baseline, prompt_ts).into(),
            ratio(prompt_ts),
            found_of(own, decode_ts).into(),
            found_of(baseline, decode_ts).into(),
            ratio(decode_ts),
        ]);
    }
    table
}
