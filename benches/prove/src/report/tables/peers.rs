//! Every engine, the same model, the same memory.

use super::super::figures::{cgroup_peak, decode_ts, peak_rss, prompt_ts};
use super::super::group::{Case, HOBBIT, Study};
use super::super::number::{self, UNKNOWN, digits};
use super::super::read::Entry;
use super::super::table::{Cell, Table, bold};
use super::{limit, logits, of_study};

pub fn table(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["peers"]);
    let heading = [
        "model",
        "limit",
        "test",
        "engine",
        "prompt, t/s",
        "decode, t/s",
        "decode, to the best other",
        "peak RSS",
        "control group's peak",
        "equal to the baseline",
        "outcome",
    ];
    let mut table = of_study(&study, "peers", "Every engine with the same model in the same memory", &heading, 4);
    table.note =
        "Limits are those of a memory control group; its peak counts the page cache too. The baseline is llama.cpp.";
    for place in study.distinct(|case| (case.model.clone(), case.limit, case.test)) {
        let here: Vec<&Case> = study
            .cases
            .iter()
            .filter(|case| (&case.model, case.limit, case.test) == (&place.0, place.1, place.2))
            .collect();
        for case in &here {
            let best_other = here
                .iter()
                .filter(|other| other.engine != case.engine)
                .filter_map(|other| other.median(decode_ts))
                .max_by(f64::total_cmp);
            let ratio = case.median(decode_ts).zip(best_other).map(|(own, best)| own / best);
            let ratio = ratio.map_or(UNKNOWN.into(), number::ratio);
            let name = case.name();
            let with_weight = |text: String| -> Cell { if case.engine == HOBBIT { bold(text) } else { text.into() } };
            table.rows.push(vec![
                case.model.clone().into(),
                limit(case.limit).into(),
                case.test.to_string().into(),
                with_weight(name),
                number::spread(case.spread(prompt_ts), digits).into(),
                with_weight(number::spread(case.spread(decode_ts), digits)),
                with_weight(ratio),
                peak(case, case.most(peak_rss)).into(),
                case.most(cgroup_peak).map_or(UNKNOWN.into(), number::bytes).into(),
                equality(case).into(),
                outcome(case),
            ]);
        }
    }
    table
}

fn outcome(case: &Case) -> Cell {
    match case.outcome() {
        outcome if outcome == "ok" => outcome.into(),
        outcome => bold(outcome),
    }
}

fn peak(case: &Case, peak: Option<f64>) -> String {
    match (peak, case.limit) {
        (None, _) => UNKNOWN.into(),
        (Some(peak), None) => number::bytes(peak),
        (Some(peak), Some(limit)) => number::of_bytes(peak, limit as f64),
    }
}

/// The least of what the runs have in common with the baseline.
fn equality(case: &Case) -> String {
    if let Some((equal, compared)) = logits(case) {
        return format!("bit-identical logits {equal} of {compared}");
    }
    let texts = case.runs.iter().filter_map(|run| run.record.hobbit_text_equal.zip(run.record.hobbit_text_chars));
    let worst = texts.min_by(|a, b| (u128::from(a.0) * u128::from(b.1)).cmp(&(u128::from(b.0) * u128::from(a.1))));
    worst.map_or(UNKNOWN.into(), |(equal, of)| format!("{equal} of {of} characters"))
}
