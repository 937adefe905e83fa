//! The papers' workload: short and long prompts, short and long answers.

use super::super::figures::{Measure, decode_ts, prefill_s};
use super::super::group::{BASELINE, Case, HOBBIT, Study, Test};
use super::super::number::{self, UNKNOWN};
use super::super::read::Entry;
use super::super::table::{Cell, Table, bold};
use super::{found_of, limit, of_study, ratio_of};

/// A figure, what it is called, and whether less of it is better.
const FIGURES: [(&str, Measure, bool); 2] = [("prefill, s", prefill_s, true), ("decode, t/s", decode_ts, false)];

pub fn table(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["papers"]);
    let mut tests: Vec<Test> = study.distinct(|case| case.test);
    tests.retain(|test| test.n_prompt > 0 && test.n_gen > 0);
    tests.sort_unstable();
    let workloads: Vec<String> = tests
        .iter()
        .map(|test| match test.n_depth {
            0 => format!("[{}, {}]", test.n_prompt, test.n_gen),
            depth => format!("[{}, {}] @ d{depth}", test.n_prompt, test.n_gen),
        })
        .collect();
    let heading = ["model", "limit", "figure", "engine"].into_iter().chain(workloads.iter().map(String::as_str));
    let mut table =
        of_study(&study, "papers", "The papers' workload, [tokens in, tokens out]", &heading.collect::<Vec<_>>(), 4);
    table.note = "Ratios say how many times as fast as llama.cpp hobbit is.";
    let rooms = study.distinct(|case| (case.model.clone(), case.limit));
    for (model, room) in &rooms {
        let of_room: Vec<&Case> = study
            .cases
            .iter()
            .filter(|case| (&case.model, &case.limit) == (model, room) && tests.contains(&case.test))
            .collect();
        let mut contestants: Vec<(&str, &str, &str)> = Vec::new();
        for case in &of_room {
            let contestant = (case.engine, case.variant, case.flags);
            // One baseline, whatever it was measured with.
            let is_known =
                |known: &&(&str, &str, &str)| **known == contestant || (case.engine, known.0) == (BASELINE, BASELINE);
            if contestants.iter().find(is_known).is_none() {
                contestants.push(contestant);
            }
        }
        for (name, figure, less_is_better) in FIGURES {
            let start = |engine: String| -> Vec<Cell> {
                vec![model.clone().into(), limit(*room).into(), name.into(), engine.into()]
            };
            let mut of_ratios = Vec::new();
            for contestant in &contestants {
                let case = |test: &Test| {
                    let is_it = |case: &&&Case| {
                        case.test == *test
                            && ((case.engine, case.variant, case.flags) == *contestant
                                || (case.engine, contestant.0) == (BASELINE, BASELINE))
                    };
                    of_room.iter().copied().find(|case| is_it(&case))
                };
                let Some(any) = tests.iter().find_map(case) else { continue };
                let mut row = start(any.name());
                row.extend(tests.iter().map(|test| Cell::from(found_of(case(test), figure))));
                if contestant.0 != HOBBIT {
                    table.rows.push(row);
                    continue;
                }
                row[3].bold = true;
                table.rows.push(row);
                let ratio = |test: &Test| {
                    let own = case(test)?;
                    let ratio = ratio_of(Some(own), study.baseline(own), figure)?;
                    Some(if less_is_better { 1.0 / ratio } else { ratio })
                };
                let ratios: Vec<Option<f64>> = tests.iter().map(ratio).collect();
                if ratios.iter().any(Option::is_some) {
                    let mut row = start(format!("{}, ratio", any.name()));
                    row.extend(ratios.iter().map(|ratio| bold(ratio.map_or(UNKNOWN.into(), number::ratio))));
                    of_ratios.push(row);
                }
            }
            table.rows.extend(of_ratios);
        }
    }
    table
}
