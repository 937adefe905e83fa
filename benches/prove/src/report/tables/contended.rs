//! Speed beside programs that compute as well.

use super::super::figures::{Measure, decode_ts, prompt_ts};
use super::super::group::{BASELINE, CONTENDED, Case, HOBBIT, Study};
use super::super::number::{UNKNOWN, percent};
use super::super::read::Entry;
use super::super::table::{Cell, Table, bold};
use super::{found_of, limit, of_study, ratio_of};

pub fn table(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &[CONTENDED]);
    let heading = [
        "model",
        "limit",
        "test",
        "engine",
        "busy processes",
        "prompt alone, t/s",
        "beside them, t/s",
        "kept",
        "decode alone, t/s",
        "beside them, t/s",
        "kept",
    ];
    let mut table = of_study(&study, CONTENDED, "Speed beside processes that compute without end", &heading, 4);
    table.note =
        "Each of the busy processes keeps one core. What is kept is the speed beside them as a share of that alone.";
    for case in study.cases.iter().filter(|case| case.busy > 0 && [HOBBIT, BASELINE].contains(&case.engine)) {
        let alone = alone(&study, case);
        let kept = |figure: Measure| bold(ratio_of(Some(case), alone, figure).map_or(UNKNOWN.into(), percent));
        let name: Cell = if case.engine == HOBBIT { bold(case.name()) } else { case.name().into() };
        table.rows.push(vec![
            case.model.clone().into(),
            limit(case.limit).into(),
            case.test.to_string().into(),
            name,
            case.busy.to_string().into(),
            found_of(alone, prompt_ts).into(),
            found_of(Some(case), prompt_ts).into(),
            kept(prompt_ts),
            found_of(alone, decode_ts).into(),
            found_of(Some(case), decode_ts).into(),
            kept(decode_ts),
        ]);
    }
    table
}

/// The same without anybody else.
pub fn alone<'a, 'b>(study: &'b Study<'a>, case: &Case) -> Option<&'b Case<'a>> {
    let place = super::super::group::Place { busy: 0, ..case.place() };
    let own = (case.engine, case.variant, case.flags);
    study.cases.iter().find(|other| other.place() == place && (other.engine, other.variant, other.flags) == own)
}
