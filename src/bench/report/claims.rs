//! What hobbit promises, what was found, and whether it holds.

use super::figures::{
    FIRST, LAST, Measure, decode_ts, first_token_s, mean_ms, median_ms, of_model, prefill_s, tenth_ts, warm_and_end,
    whole_s,
};
use super::group::{Case, HOBBIT, Study};
use super::number::{bytes, change, digits, percent, ratio};
use super::read::Entry;
use super::table::{Cell, Table, bold};
use super::tables::{contended, fits, long};
use crate::bench::record::{Moment, Record};

/// Overhead with everything in memory stays below this share.
const OVERHEAD_MAX: f64 = 0.02;
/// Where the model fits, the whole command takes at most so much longer than llama.cpp's.
const WHOLE_MAX: f64 = 0.02;
/// With more memory a command is at most so much slower than with less.
const DIP_MAX: f64 = 0.05;
/// Beside busy processes hobbit is at most so much slower than llama.cpp.
const CONTENDED_MAX: f64 = 0.02;
/// Memory stays within this share of what it was.
const DRIFT_MAX: f64 = 0.02;
/// The end of a long run is at most so much slower than its beginning.
const SLOWDOWN_MAX: f64 = 0.05;

/// What was found for a promise.
struct Finding {
    found: String,
    kept: bool,
}

/// The promises as rows.
pub fn table(entries: &[Entry]) -> Table {
    let promises: [(&str, Option<Finding>); 12] = [
        ("decodes faster than every other engine in the same memory", ahead(entries)),
        ("overhead with everything in memory below 2 % of the median token and of the mean", overhead(entries)),
        ("where the model fits, the whole command within 2 % of llama.cpp's", whole(entries)),
        ("with more memory never slower by 5 %: no dip where the model begins to fit", dip(entries)),
        ("beside busy processes not slower than llama.cpp by 2 %", beside_others(entries)),
        ("first token before llama.cpp's under the limit", startup(entries)),
        ("peak RSS within the budget in every run", within_budget(entries)),
        ("logits bit-identical to llama.cpp's in exact precision", identical(entries)),
        ("long run: RSS at the end within 2 % of that after 10 %", drift(entries, |moment| Some(moment.rss))),
        ("long run: last tenth not more than 5 % slower than the first", steady(entries)),
        ("long run: as many open files at the end as after 10 %", files(entries)),
        ("long run: heap at the end within 2 % of that after 10 %", drift(entries, |moment| moment.heap)),
    ];
    let row = |(promise, finding): (&str, Option<Finding>)| -> Vec<Cell> {
        match finding {
            None => vec![promise.into(), "no records".into(), bold("not measured".into())],
            Some(Finding { found, kept: true }) => vec![promise.into(), found.into(), "yes".into()],
            Some(Finding { found, kept: false }) => vec![promise.into(), found.into(), bold("no".into())],
        }
    };
    let mut files: Vec<String> = entries.iter().map(|entry| entry.file.clone()).collect();
    files.sort();
    files.dedup();
    // Without any record there is no table to show.
    let promises = promises.into_iter().filter(|_| !entries.is_empty());
    Table {
        name: "claims",
        title: "What is promised, and what was found",
        note: "Judged from the records alone; where several count, the worst is named.",
        heading: ["promise", "found", "kept"].map(str::to_owned).to_vec(),
        n_words: 3,
        rows: promises.map(row).collect(),
        files,
        ..Table::default()
    }
}

fn where_(case: &Case) -> String {
    let limit = case.limit.map_or(String::new(), |limit| format!(" in {}", bytes(limit as f64)));
    let busy = if case.busy == 0 { String::new() } else { format!(", beside {}", case.busy) };
    format!("{}{limit}, {}{busy}", case.model, case.test)
}

/// The slowest of hobbit's variants against the fastest of the others.
fn ahead(entries: &[Entry]) -> Option<Finding> {
    let study = Study::of(entries, &["peers"]);
    let (mut closest, mut failures, mut without) = (None::<(f64, String)>, Vec::new(), Vec::new());
    for own in study.hobbit().filter(|case| case.limit.is_some() && case.test.n_gen > 0) {
        let others = || study.cases.iter().filter(|other| other.engine != HOBBIT && other.place() == own.place());
        if others().next().is_none() {
            continue;
        }
        for other in others().filter(|other| other.median(decode_ts).is_none()) {
            if !without.contains(&other.engine) {
                without.push(other.engine);
            }
        }
        let Some(speed) = own.median(decode_ts) else {
            failures.push(format!("{} has no speed for {} ({})", own.name(), where_(own), own.outcome()));
            continue;
        };
        for other in others() {
            let Some(factor) = other.median(decode_ts).map(|others| speed / others) else { continue };
            if closest.as_ref().is_none_or(|(least, _)| factor < *least) {
                closest = Some((factor, format!("{}, {}", other.name(), where_(own))));
            }
        }
    }
    let ran_alone = closest.is_none() && !without.is_empty();
    if closest.is_none() && failures.is_empty() && !ran_alone {
        return None;
    }
    let kept = failures.is_empty() && closest.as_ref().is_none_or(|(least, _)| *least > 1.0);
    let mut words: Vec<String> =
        closest.iter().map(|(least, who)| format!("{} the closest ({who})", ratio(*least))).collect();
    if !without.is_empty() {
        words.push(format!("no speed somewhere: {}", without.join(", ")));
    }
    words.extend(failures);
    Some(Finding { found: words.join("; "), kept })
}

/// The worst of what hobbit's cases have against the baseline's, where both have the figure.
fn worst(study: &Study, with_limit: bool, figure: Measure) -> (Option<(f64, String)>, Vec<String>) {
    let (mut worst, mut failures) = (None::<(f64, String)>, Vec::new());
    for own in study.hobbit().filter(|case| !with_limit || case.limit.is_some()) {
        let Some(baseline) = study.baseline(own) else { continue };
        match (own.median(figure), baseline.median(figure)) {
            (Some(found), Some(of_baseline)) => {
                let share = found / of_baseline;
                if worst.as_ref().is_none_or(|(most, _)| share > *most) {
                    worst = Some((share, where_(own)));
                }
            }
            (None, Some(_)) => failures.push(format!("none for {} ({})", where_(own), own.outcome())),
            (_, None) => {}
        }
    }
    (worst, failures)
}

/// A median hides what is rare and long, a mean what is usual: both count.
fn overhead(entries: &[Entry]) -> Option<Finding> {
    let study = Study::of(entries, &["resident"]);
    let (mut words, mut kept) = (Vec::new(), true);
    for (name, figure) in [("median", median_ms as Measure), ("mean", mean_ms)] {
        let (worst, failures) = worst(&study, false, figure);
        kept &= failures.is_empty() && worst.as_ref().is_some_and(|(share, _)| share - 1.0 < OVERHEAD_MAX);
        words.extend(worst.map(|(share, place)| format!("{name} {} ({place})", change(share - 1.0))));
        words.extend(failures.into_iter().map(|failure| format!("{name}: {failure}")));
    }
    (!words.is_empty()).then(|| Finding { found: words.join("; "), kept })
}

/// Commands in as much memory as the model's bytes, in more, or without a limit.
fn whole(entries: &[Entry]) -> Option<Finding> {
    let mut study = Study::of(entries, &[fits::LABEL]);
    // Of runs that failed as well.
    let fits = |case: &Case| case.runs.iter().any(|run| of_model(&run.record).is_some_and(|share| share >= 1.0));
    study.cases.retain(|case| case.limit.is_none() || fits(case));
    let (worst, failures) = worst(&study, false, whole_s);
    if worst.is_none() && failures.is_empty() {
        return None;
    }
    let kept = failures.is_empty() && worst.as_ref().is_some_and(|(share, _)| share - 1.0 <= WHOLE_MAX);
    let found = worst.map(|(share, place)| format!("{} ({place})", change(share - 1.0)));
    Some(Finding { found: found.into_iter().chain(failures).collect::<Vec<_>>().join("; "), kept })
}

/// The whole command and decoding with each budget, against the best that any smaller one reached.
fn dip(entries: &[Entry]) -> Option<Finding> {
    let study = Study::of(entries, &[fits::LABEL]);
    let (mut worst, mut broken) = (None::<(f64, String)>, Vec::new());
    for (name, speed) in [("the whole command", per_second as Measure), ("decode", decode_ts)] {
        for (model, variant, test) in study.distinct(|case| (case.model.clone(), case.variant, case.test)) {
            let own = |case: &&Case| (&case.model, case.variant, case.test) == (&model, variant, test);
            let mut cases: Vec<&Case> = study.hobbit().filter(own).collect();
            cases.sort_by_key(|case| case.limit.unwrap_or(u64::MAX));
            let mut best = None::<f64>;
            for case in cases {
                match (case.median(speed), best) {
                    (Some(found), Some(most)) if worst.as_ref().is_none_or(|(least, _)| found / most < *least) => {
                        worst = Some((found / most, format!("{name} of {}", where_(case))));
                    }
                    // Too little memory is no dip; failing with more than enough before is.
                    (None, Some(_)) => broken.push(format!("{}: {}", case.outcome(), where_(case))),
                    _ => {}
                }
                best = case.median(speed).into_iter().chain(best).reduce(f64::max);
            }
        }
    }
    if worst.is_none() && broken.is_empty() {
        return None;
    }
    let kept = broken.is_empty() && worst.as_ref().is_some_and(|(least, _)| *least >= 1.0 - DIP_MAX);
    let found = worst.map(|(least, place)| format!("{} to the best with less ({place})", change(least - 1.0)));
    Some(Finding { found: found.into_iter().chain(broken).collect::<Vec<_>>().join("; "), kept })
}

/// Commands in a second.
fn per_second(record: &Record) -> Option<f64> {
    whole_s(record).map(|seconds| 1.0 / seconds)
}

fn beside_others(entries: &[Entry]) -> Option<Finding> {
    let mut study = Study::of(entries, &[contended::LABEL]);
    study.cases.retain(|case| case.busy > 0);
    let (mut slowest, mut failures) = (None::<(f64, String)>, Vec::new());
    for (name, figure) in [("prompt", prefill_s as Measure), ("decode", mean_ms)] {
        let (worst, failed) = worst(&study, false, figure);
        failures.extend(failed);
        if let Some((share, place)) = worst
            && slowest.as_ref().is_none_or(|(most, _)| share > *most)
        {
            slowest = Some((share, format!("{name} of {place}")));
        }
    }
    if slowest.is_none() && failures.is_empty() {
        return None;
    }
    let kept = failures.is_empty() && slowest.as_ref().is_some_and(|(share, _)| 1.0 / share >= 1.0 - CONTENDED_MAX);
    let found = slowest.map(|(share, place)| format!("{} as fast ({place})", ratio(1.0 / share)));
    Some(Finding { found: found.into_iter().chain(failures).collect::<Vec<_>>().join("; "), kept })
}

fn startup(entries: &[Entry]) -> Option<Finding> {
    let (worst, failures) = worst(&Study::of(entries, &["startup"]), true, first_token_s);
    if worst.is_none() && failures.is_empty() {
        return None;
    }
    let kept = failures.is_empty() && worst.as_ref().is_some_and(|(share, _)| *share < 1.0);
    let found = worst.map(|(share, place)| format!("{} as fast ({place})", ratio(1.0 / share)));
    Some(Finding { found: found.into_iter().chain(failures).collect::<Vec<_>>().join("; "), kept })
}

fn hobbit(entries: &[Entry]) -> impl Iterator<Item = &Record> {
    entries.iter().map(|entry| &entry.record).filter(|record| record.hobbit_engine == HOBBIT)
}

/// Against the budget where it is known, else against the limit.
fn within_budget(entries: &[Entry]) -> Option<Finding> {
    let (mut n, mut n_within, mut n_killed, mut n_unknown) = (0, 0, 0, 0);
    let mut closest = None::<(f64, String)>;
    for record in hobbit(entries) {
        let Some(limit) = record.hobbit_limit else { continue };
        let budget = record.hobbit_budget.unwrap_or(limit);
        let killed = record.hobbit_outcome.starts_with("killed");
        match record.hobbit_peak_rss {
            _ if killed => n_killed += 1,
            None => {
                n_unknown += 1;
                continue;
            }
            Some(peak) => {
                n_within += usize::from(peak <= budget);
                let share = peak as f64 / (budget as f64).max(1.0);
                if closest.as_ref().is_none_or(|(most, _)| share > *most) {
                    let place = format!("{} in {}", super::figures::model(record, entries), bytes(budget as f64));
                    closest = Some((share, place));
                }
            }
        }
        n += 1;
    }
    if n == 0 {
        return None;
    }
    let mut words = vec![format!("{n_within} of {n}")];
    words.extend(closest.map(|(share, place)| format!("at most {} ({place})", percent(share))));
    words.extend((n_killed > 0).then(|| format!("{n_killed} killed")));
    words.extend((n_unknown > 0).then(|| format!("{n_unknown} failed without a figure")));
    Some(Finding { found: words.join("; "), kept: n_within == n })
}

/// Dynamic precision is meant to differ, so its records do not count.
fn identical(entries: &[Entry]) -> Option<Finding> {
    let (mut equal, mut compared, mut by_record) = (0u64, 0u64, true);
    for record in hobbit(entries).filter(|record| record.hobbit_precision.as_deref() != Some("dynamic")) {
        let Some(of) = record.hobbit_logits_compared.filter(|of| *of > 0) else { continue };
        let own = record.hobbit_logits_equal.unwrap_or(0);
        by_record &= own == of;
        equal = equal.saturating_add(own);
        compared = compared.saturating_add(of);
    }
    (compared > 0).then(|| Finding { found: format!("{equal} of {compared} evaluations"), kept: by_record })
}

/// hobbit's long runs, with their variants and how they ended.
fn long_runs(entries: &[Entry]) -> Vec<(String, &Record)> {
    let of_study = |record: &&Record| long::LABELS.contains(&record.hobbit_label.as_str());
    let name = |record: &Record| match record.hobbit_variant.as_str() {
        "" => super::figures::model(record, entries),
        variant => format!("{}, {variant}", super::figures::model(record, entries)),
    };
    hobbit(entries).filter(of_study).map(|record| (name(record), record)).collect()
}

/// The worst of the long runs; a run that says nothing is one that did not hold.
fn of_long_runs(entries: &[Entry], judge: impl Fn(&Record) -> Option<(f64, String, bool)>) -> Option<Finding> {
    let runs = long_runs(entries);
    let mut judged = Vec::new();
    let mut broken = Vec::new();
    for (name, record) in &runs {
        match judge(record) {
            Some((badness, found, kept)) => judged.push((badness, format!("{found} ({name})"), kept)),
            None if !super::figures::is_ok(record) => broken.push(format!("{}: {name}", record.hobbit_outcome)),
            None => {}
        }
    }
    let kept = broken.is_empty() && judged.iter().all(|(_, _, kept)| *kept);
    let worst = judged.into_iter().max_by(|a, b| a.2.cmp(&b.2).reverse().then(a.0.total_cmp(&b.0)));
    let words: Vec<String> = worst.map(|(_, found, _)| found).into_iter().chain(broken).collect();
    (!words.is_empty()).then(|| Finding { found: words.join("; "), kept })
}

fn drift(entries: &[Entry], of: impl Fn(&Moment) -> Option<u64>) -> Option<Finding> {
    of_long_runs(entries, |record| {
        let (warm, end) = warm_and_end(record)?;
        let (warm, end) = (of(&warm)? as f64, of(&end)? as f64);
        let share = end / warm.max(1.0) - 1.0;
        let sign = if end < warm { "-" } else { "+" };
        Some((share.abs(), format!("{sign}{}, {}", bytes((end - warm).abs()), change(share)), share.abs() <= DRIFT_MAX))
    })
}

fn steady(entries: &[Entry]) -> Option<Finding> {
    of_long_runs(entries, |record| {
        let (first, last) = (tenth_ts(record, FIRST)?, tenth_ts(record, LAST)?);
        let slower = 1.0 - last / first;
        let found = format!("{} to {} t/s, {}", digits(first), digits(last), change(-slower));
        Some((slower, found, slower <= SLOWDOWN_MAX))
    })
}

fn files(entries: &[Entry]) -> Option<Finding> {
    of_long_runs(entries, |record| {
        let (warm, end) = warm_and_end(record)?;
        let more = f64::from(end.fds) - f64::from(warm.fds);
        Some((more.abs(), format!("{} to {}", warm.fds, end.fds), warm.fds == end.fds))
    })
}

#[cfg(test)]
#[path = "claims/tests.rs"]
mod tests;
