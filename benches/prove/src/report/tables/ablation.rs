//! What each part of hobbit is worth.

use super::super::figures::{bytes_per_token, decode_ts, hit_rate, stall_share};
use super::super::group::{BASELINE, Case, HOBBIT, Study};
use super::super::number::{self, UNKNOWN, bytes, digits, percent};
use super::super::read::Entry;
use super::super::table::{Table, bold};
use super::{found, limit, of_study, ratio_of};

pub fn table(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["ablation"]);
    let heading = [
        "model",
        "limit",
        "test",
        "variant",
        "decode, t/s",
        "to the first",
        "read per token",
        "waiting for reads",
        "hits",
    ];
    let mut table = of_study(&study, "ablation", "What each part is worth", &heading, 4);
    table.note = "Variants in the order in which they were measured, against the first of them.";
    for place in study.distinct(|case| (case.model.clone(), case.limit, case.test)) {
        let here = |case: &&Case| (&case.model, case.limit, case.test) == (&place.0, place.1, place.2);
        let variants: Vec<&Case> = study.hobbit().filter(here).collect();
        let first = variants.first().copied();
        // Beside every variant it was the same llama.cpp.
        let baseline = study.cases.iter().filter(here).find(|case| case.engine == BASELINE);
        for case in variants.iter().copied().chain(baseline) {
            let name = match case.variant {
                _ if case.engine == BASELINE => BASELINE,
                "" => HOBBIT,
                variant => variant,
            };
            let show =
                |figure: fn(&_) -> Option<f64>, how: fn(f64) -> String| case.median(figure).map_or(UNKNOWN.into(), how);
            table.rows.push(vec![
                case.model.clone().into(),
                limit(case.limit).into(),
                case.test.to_string().into(),
                name.into(),
                found(case, case.spread(decode_ts), digits).into(),
                bold(ratio_of(Some(case), first, decode_ts).map_or(UNKNOWN.into(), number::ratio)),
                show(bytes_per_token, bytes).into(),
                show(stall_share, percent).into(),
                show(hit_rate, percent).into(),
            ]);
        }
    }
    table
}
