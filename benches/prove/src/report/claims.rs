//! Whether promises hold: rules, and what was found by them.

use super::figures::{FIRST, LAST, Measure, decode_ts, of_model, tenth_ts, warm_and_end, whole_s};
use super::group::{Case, HOBBIT, LONG, Study};
use super::number::{bytes, change, digits, percent, ratio};
use super::promises::{self, Promise, Rule, Series};
use super::read::Entry;
use super::table::{Cell, Table, bold};
use hobbit_programs::bench::record::{Moment, Record};

/// What was found.
struct Finding {
    found: String,
    kept: bool,
}

impl Finding {
    /// Of the worst place and what failed; `None` of neither.
    fn of(worst: Option<(f64, String)>, failures: Vec<String>, kept: bool) -> Option<Self> {
        let words: Vec<String> = worst.map(|(_, found)| found).into_iter().chain(failures).collect();
        (!words.is_empty()).then(|| Self { found: words.join("; "), kept })
    }
}

/// What is found by a rule; `None` without records.
fn judge(rule: &Rule, entries: &[Entry]) -> Option<Finding> {
    let as_change = |share: f64| change(share - 1.0);
    let as_speed = |share: f64| format!("{} as fast", ratio(1.0 / share));
    match *rule {
        Rule::Fastest { study } => fastest(&Study::of(entries, &[study])),
        Rule::Against { study, figure, below } => {
            against(&Study::of(entries, &[study]), figure, as_change, |share| share < below)
        }
        Rule::WhereItFits { study, figure, below } => {
            let mut study = Study::of(entries, &[study]);
            // Of runs that failed as well.
            let fits = |case: &Case| case.runs.iter().any(|run| of_model(&run.record).is_some_and(|of| of >= 1.0));
            study.cases.retain(|case| case.limit.is_none() || fits(case));
            against(&study, figure, as_change, |share| share < below)
        }
        Rule::Sooner { study, figure } => {
            let mut study = Study::of(entries, &[study]);
            study.cases.retain(|case| case.limit.is_some());
            against(&study, figure, as_speed, |share| share < 1.0)
        }
        Rule::BesideOthers { study, figure, at_least } => {
            let mut study = Study::of(entries, &[study]);
            study.cases.retain(|case| case.busy > 0);
            against(&study, figure, as_speed, |share| 1.0 / share >= at_least)
        }
        Rule::NoDip { study, at_least } => no_dip(&Study::of(entries, &[study]), at_least),
        Rule::WithinBudget => within_budget(entries),
        Rule::Flat { series, within } => flat(entries, series, within),
        Rule::Steady { slower_by } => steady(entries, slower_by),
        Rule::Identical => identical(entries),
    }
}

/// The promises as rows.
pub fn table(entries: &[Entry]) -> Table {
    let mut files: Vec<String> = entries.iter().map(|entry| entry.file.clone()).collect();
    files.sort();
    files.dedup();
    // Without any record there is no table to show.
    let promises = promises::ALL.iter().filter(|_| !entries.is_empty());
    Table {
        name: "claims",
        title: "What is promised, and what was found",
        note: "Judged from the records alone; where several count, the worst is named.",
        heading: ["promise", "found", "kept", "what a \"no\" costs you"].map(str::to_owned).to_vec(),
        n_words: 4,
        rows: promises.map(|promise| row(promise, entries)).collect(),
        files,
        ..Table::default()
    }
}

fn row(promise: &Promise, entries: &[Entry]) -> Vec<Cell> {
    let findings: Vec<_> = promise.checks.iter().map(|check| (check.name, judge(&check.rule, entries))).collect();
    let has_broken = findings.iter().any(|(_, finding)| finding.as_ref().is_some_and(|finding| !finding.kept));
    let lacks_records = findings.iter().any(|(_, finding)| finding.is_none());
    let words = findings.into_iter().map(|(name, finding)| {
        let found = finding.map_or_else(|| "no records".to_owned(), |finding| finding.found);
        if name.is_empty() { found } else { format!("{name} {found}") }
    });
    let found = words.collect::<Vec<_>>().join("; ");
    let (kept, cost) = match (has_broken, lacks_records) {
        (true, _) => (bold("no".into()), promise.cost),
        (false, true) => (bold("not measured".into()), "not known"),
        (false, false) => ("yes".into(), ""),
    };
    vec![promise.text.into(), found.into(), kept, cost.into()]
}

fn where_(case: &Case) -> String {
    let limit = case.limit.map_or(" without a limit".to_owned(), |limit| format!(" in {}", bytes(limit as f64)));
    let busy = if case.busy == 0 { String::new() } else { format!(", beside {}", case.busy) };
    format!("{}{limit}, {}{busy}", case.model, case.test)
}

/// The slowest of hobbit's variants against the fastest of the others, in every place.
fn fastest(study: &Study) -> Option<Finding> {
    let (mut ratios, mut failures, mut without) = (Vec::<(f64, String)>::new(), Vec::new(), Vec::new());
    for own in study.hobbit().filter(|case| case.limit.is_some() && case.test.n_gen > 0) {
        let others: Vec<&Case> =
            study.cases.iter().filter(|other| other.engine != HOBBIT && other.place() == own.place()).collect();
        for other in others.iter().filter(|other| other.median(decode_ts).is_none()) {
            if !without.contains(&other.engine) {
                without.push(other.engine);
            }
        }
        let best = others.iter().filter_map(|other| Some((other.median(decode_ts)?, other.name())));
        let best = best.max_by(|a, b| a.0.total_cmp(&b.0));
        match (own.median(decode_ts), best) {
            (Some(speed), Some((best, name))) => {
                ratios.push((speed / best, format!("{} ({name}, {})", ratio(speed / best), where_(own))));
            }
            (None, _) if !others.is_empty() => {
                failures.push(format!("{} has no speed for {} ({})", own.name(), where_(own), own.outcome()));
            }
            _ => {}
        }
    }
    if ratios.is_empty() && failures.is_empty() && without.is_empty() {
        return None;
    }
    ratios.sort_by(|a, b| b.0.total_cmp(&a.0));
    let kept = failures.is_empty() && ratios.iter().all(|(ratio, _)| *ratio > 1.0);
    let mut words = Vec::new();
    if !ratios.is_empty() {
        let all: Vec<&str> = ratios.iter().map(|(_, words)| words.as_str()).collect();
        words.push(format!("to the best other: {}", all.join(", ")));
    }
    if !without.is_empty() {
        words.push(format!("no speed somewhere (failed or killed): {}", without.join(", ")));
    }
    words.extend(failures);
    Some(Finding { found: words.join("; "), kept })
}

/// The largest share of llama.cpp's figure that hobbit has, of cases in which both have it.
fn against(
    study: &Study,
    figure: Measure,
    show: impl Fn(f64) -> String,
    holds: impl Fn(f64) -> bool,
) -> Option<Finding> {
    let (mut worst, mut failures) = (None::<(f64, String)>, Vec::new());
    for own in study.hobbit() {
        let Some(baseline) = study.baseline(own) else { continue };
        match (own.median(figure), baseline.median(figure)) {
            (Some(found), Some(of_baseline)) => {
                let share = found / of_baseline;
                if worst.as_ref().is_none_or(|(most, _)| share > *most) {
                    worst = Some((share, format!("{} ({})", show(share), where_(own))));
                }
            }
            (None, Some(_)) => failures.push(format!("none for {} ({})", where_(own), own.outcome())),
            (_, None) => {}
        }
    }
    let kept = failures.is_empty() && worst.as_ref().is_some_and(|(share, _)| holds(*share));
    Finding::of(worst, failures, kept)
}

/// The whole command and decoding with each budget, against the best that any smaller one reached.
fn no_dip(study: &Study, at_least: f64) -> Option<Finding> {
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
                        let (share, place) = (found / most, where_(case));
                        let words = format!("{} to the best with less ({name} of {place})", change(share - 1.0));
                        worst = Some((share, words));
                    }
                    // Too little memory is no dip; failing with more than enough before is.
                    (None, Some(_)) => broken.push(format!("{}: {}", case.outcome(), where_(case))),
                    _ => {}
                }
                best = case.median(speed).into_iter().chain(best).reduce(f64::max);
            }
        }
    }
    let kept = broken.is_empty() && worst.as_ref().is_some_and(|(least, _)| *least >= at_least);
    Finding::of(worst, broken, kept)
}

/// Commands in a second.
fn per_second(record: &Record) -> Option<f64> {
    whole_s(record).map(|seconds| 1.0 / seconds)
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
    let of_study = |record: &&Record| LONG.contains(&record.hobbit_label.as_str());
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
    Finding::of(worst.map(|(badness, found, _)| (badness, found)), broken, kept)
}

fn flat(entries: &[Entry], series: Series, within: f64) -> Option<Finding> {
    of_long_runs(entries, |record| {
        let (warm, end) = warm_and_end(record)?;
        let of = |moment: &Moment| match series {
            Series::Rss => Some(moment.rss),
            Series::Heap => moment.heap,
            Series::Files => Some(u64::from(moment.fds)),
        };
        let (warm, end) = (of(&warm)? as f64, of(&end)? as f64);
        let share = end / warm.max(1.0) - 1.0;
        let sign = if end < warm { "-" } else { "+" };
        let found = match series {
            Series::Files => format!("{warm} to {end}"),
            _ => format!("{sign}{}, {}", bytes((end - warm).abs()), change(share)),
        };
        Some((share.abs(), found, share.abs() <= within))
    })
}

fn steady(entries: &[Entry], slower_by: f64) -> Option<Finding> {
    of_long_runs(entries, |record| {
        let (first, last) = (tenth_ts(record, FIRST)?, tenth_ts(record, LAST)?);
        let slower = 1.0 - last / first;
        let found = format!("{} to {} t/s, {}", digits(first), digits(last), change(-slower));
        Some((slower, found, slower <= slower_by))
    })
}

#[cfg(test)]
#[path = "claims/tests.rs"]
mod tests;
