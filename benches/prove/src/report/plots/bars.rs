//! Speeds beside each other, and where a token's time goes.

use super::super::figures::{
    Measure, decode_ts, hit_rate, hits_per_token, in_memory, misses_per_token, prompt_ts, stall_ms, token_ms,
};
use super::super::group::{BASELINE, CONTENDED, Case, HOBBIT, Study};
use super::super::number::{self, digits, percent};
use super::super::read::Entry;
use super::{Figure, room};
use hobbit_programs::svg::{Bar, bars};

const SPEEDS: &str = "Length of a bar: tokens per second while decoding, longer is better; of several runs the median, and in \
                      brackets the least and the most.";

/// Speeds alone and beside busy processes.
pub fn contended(entries: &[Entry]) -> Vec<Figure> {
    let study = Study::of(entries, &[CONTENDED]);
    let mut figures = Vec::new();
    for (model, limit, test) in study.distinct(|case| (case.model.clone(), case.limit, case.test)) {
        let here = |case: &&Case| (&case.model, case.limit, case.test) == (&model, limit, test);
        let parts: [(&str, Measure, &'static str); 2] = [("Decode", decode_ts, SPEEDS), ("Prompt", prompt_ts, PROMPTS)];
        for (part, figure, note) in parts {
            let row = |case: &Case| {
                let others = match case.busy {
                    0 => "alone".to_owned(),
                    1 => "beside a busy process".to_owned(),
                    n => format!("beside {n} busy processes"),
                };
                let spread = case.spread(figure)?;
                let note = format!("{} t/s", number::spread(Some(spread), digits));
                Some(Bar { name: format!("{}, {others}", case.name()), values: vec![spread.median], note })
            };
            let rows: Vec<Bar> = study.cases.iter().filter(here).filter_map(row).collect();
            if !rows.is_empty() {
                let title = format!("{part} speed beside others: {}, {test}", room(&model, limit));
                figures.push(Figure { title, svg: bars("tokens per second", &[part], &rows), note });
            }
        }
    }
    figures
}

const PROMPTS: &str = "Length of a bar: tokens per second of the prompt, longer is better.";

/// Decode speed of every case of a place.
pub fn speeds(entries: &[Entry], label: &str) -> Vec<Figure> {
    let study = Study::of(entries, &[label]);
    let mut figures = Vec::new();
    for place in study.distinct(|case| (case.model.clone(), case.limit, case.test)) {
        let mut rows = Vec::new();
        let mut has_baseline = false;
        for case in
            study.cases.iter().filter(|case| (&case.model, case.limit, case.test) == (&place.0, place.1, place.2))
        {
            // In an ablation the baseline comes along with every variant.
            if label == "ablation" && case.engine == BASELINE && std::mem::replace(&mut has_baseline, true) {
                continue;
            }
            let spread = case.spread(decode_ts);
            let note = match spread {
                None => case.outcome(),
                Some(_) => format!("{} t/s", number::spread(spread, digits)),
            };
            let name = if label == "ablation" { variant(case) } else { case.name() };
            rows.push(Bar { name, values: spread.iter().map(|spread| spread.median).collect(), note });
        }
        if rows.iter().any(|row| !row.values.is_empty()) {
            let title = format!("Decode speed: {}, {}", room(&place.0, place.1), place.2);
            figures.push(Figure { title, svg: bars("tokens per second", &["decode"], &rows), note: SPEEDS });
        }
    }
    figures
}

fn variant(case: &Case) -> String {
    match case.variant {
        _ if case.engine != HOBBIT => case.engine.into(),
        "" => HOBBIT.into(),
        variant => variant.into(),
    }
}

/// Waiting and everything else, per token.
pub fn stalls(entries: &[Entry], label: &str) -> Vec<Figure> {
    let study = Study::of(entries, &[label]);
    let mut figures = Vec::new();
    // Along a curve the memory changes from row to row.
    let split_by_limit = |case: &Case| if label == "curve" { None } else { case.limit };
    for (model, limit) in study.distinct(|case| (case.model.clone(), split_by_limit(case))) {
        let cases = study.hobbit().filter(|case| case.model == model && split_by_limit(case) == limit);
        let mut cases: Vec<&Case> = cases.filter(|case| case.test.n_gen > 0).collect();
        if label == "curve" {
            let share = |case: &Case| case.median(in_memory).unwrap_or(f64::INFINITY);
            cases.sort_by(|a, b| share(a).total_cmp(&share(b)));
        }
        let rows: Vec<Bar> = cases.into_iter().filter_map(|case| stall(case, label)).collect();
        if !rows.is_empty() {
            let place = if label == "curve" { model } else { room(&model, limit) };
            let parts = ["waiting for reads", "everything else (computing)"];
            figures.push(Figure {
                title: format!("Where a token's time goes: {place}"),
                svg: bars("ms per token", &parts, &rows),
                note: "Length of a bar: milliseconds that a token takes, less is better; its first part, those in which it waits \
                       for reads. Single tokens where they were counted apart, all tokens of the test elsewhere.",
            });
        }
    }
    figures
}

fn stall(case: &Case, label: &str) -> Option<Bar> {
    let (stall, token) = (case.median(stall_ms)?, case.median(token_ms)?);
    let mut words = match label {
        "curve" => {
            vec![format!("{} of experts in memory", case.median(in_memory).map_or(number::UNKNOWN.into(), percent))]
        }
        "ablation" => vec![variant(case)],
        _ => vec![case.test.to_string()],
    };
    if label != "ablation" && !case.variant.is_empty() {
        words.push(case.variant.into());
    }
    let mut note = format!("{} of {} ms", digits(stall), digits(token));
    if let (Some(hits), Some(misses), Some(rate)) =
        (case.median(hits_per_token), case.median(misses_per_token), case.median(hit_rate))
    {
        note.push_str(&format!("; {} hits, {} misses ({})", digits(hits), digits(misses), percent(rate)));
    }
    Some(Bar { name: words.join(", "), values: vec![stall, (token - stall).max(0.0)], note })
}
