//! What hobbit promises, and whether it holds.

use super::figures::{
    self, FIRST, LAST, Measure, decode_ts, first_token_s, mean_ms, median_ms, of_model, prefill_s, tenth_ts,
    warm_and_end, whole_s,
};
use super::group::{CONTENDED, Case, FITS, HOBBIT, LONG, Study, distinct};
use super::number::{bytes, change, digits, percent, ratio};
use super::read::{Entry, files};
use super::table::{Cell, Table, bold};
use hobbit_programs::bench::record::{Moment, Record};

/// What was found.
struct Finding {
    found: String,
    kept: bool,
}

impl Finding {
    /// Of the worst of places, each with how bad it is, of equal ones the first, and of what failed; `None` of neither.
    fn of(places: Vec<(f64, String)>, failures: Vec<String>, holds: impl Fn(f64) -> bool) -> Option<Self> {
        let worst = places.into_iter().reduce(|worst, place| if place.0 > worst.0 { place } else { worst });
        let kept = failures.is_empty() && worst.as_ref().is_none_or(|(badness, _)| holds(*badness));
        let words: Vec<String> = worst.map(|(_, found)| found).into_iter().chain(failures).collect();
        (!words.is_empty()).then(|| Self { found: words.join("; "), kept })
    }
}

/// A promise, what it is judged by, and what a user has to bear where it is not kept.
struct Promise {
    text: &'static str,
    /// Names, where there are several, and what is found; all of them must hold.
    checks: &'static [(&'static str, Check)],
    /// Told where it is not kept.
    cost: &'static str,
}

/// Judges records; `None` without any that count.
type Check = fn(&[Entry]) -> Option<Finding>;

/// Shares are of llama.cpp's figure in the same place.
const ALL: [Promise; 8] = [
    Promise {
        text: "decodes faster than every other engine in the same memory",
        checks: &[("", fastest)],
        cost: "where the ratio is below 1x, that part of the best other engine's speed: give more memory (a model that fits is left \
               to llama.cpp), or take that engine there",
    },
    Promise {
        text: "overhead with everything in memory below 2 % of the median token and of the mean",
        checks: &[
            // A median hides what is rare and long, a mean what is usual: both count.
            ("median", |entries| cost_resident(entries, median_ms)),
            ("mean", |entries| cost_resident(entries, mean_ms)),
        ],
        cost: "so much slower tokens if you have hobbit keep the experts of a model that fits (--expert-cache 100%)",
    },
    Promise {
        text: "where the model fits, the whole command within 2 % of llama.cpp's; with more memory never slower by 5 %",
        checks: &[("whole command", where_it_fits), ("dip", no_dip)],
        cost: "so much more time for a short command on a model that fits, or with the memory that is named",
    },
    Promise {
        text: "beside busy processes not slower than llama.cpp by 2 %",
        checks: &[
            ("prompt", |entries| beside_others(entries, prefill_s)),
            ("decode", |entries| beside_others(entries, mean_ms)),
        ],
        cost: "where the ratio is below 1x, that part of llama.cpp's speed while other programs compute",
    },
    Promise {
        text: "first token before llama.cpp's under the limit",
        checks: &[("", sooner)],
        cost: "a longer wait for the first word",
    },
    Promise {
        text: "peak RSS within the budget in every run",
        checks: &[("", within_budget)],
        cost: "leave head-room above --mem-budget: a control group of that size would end the run",
    },
    Promise {
        text: "logits bit-identical to llama.cpp's in exact precision",
        checks: &[("", identical)],
        cost: "at a near tie another word than llama.cpp's",
    },
    Promise {
        text: "2,000 tokens: RSS and heap within 2 %, no more open files, last tenth not 5 % slower than the first",
        checks: &[
            ("RSS", |entries| flat(entries, |moment| Some(moment.rss), bytes_more, 0.02)),
            ("heap", |entries| flat(entries, |moment| moment.heap, bytes_more, 0.02)),
            ("open files", |entries| {
                flat(entries, |moment| Some(moment.fds.into()), |warm, end| format!("{warm} to {end}"), 0.0)
            }),
            ("speed", steady),
        ],
        cost: "so much of the speed, or so much memory, at the end of a long answer (under pressure: beside a program that keeps \
               taking memory)",
    },
];

/// The promises as rows.
pub fn table(entries: &[Entry]) -> Table {
    // Without any record there is no table to show.
    let promises = ALL.iter().filter(|_| !entries.is_empty());
    Table {
        title: "What is promised, and what was found",
        note: "Judged from the records alone; where several count, the worst is named.",
        heading: ["promise", "found", "kept", "what a \"no\" costs you"].map(str::to_owned).to_vec(),
        n_words: 4,
        rows: promises.map(|promise| row(promise, entries)).collect(),
        files: files(entries),
        ..Table::default()
    }
}

fn row(promise: &Promise, entries: &[Entry]) -> Vec<Cell> {
    let findings: Vec<_> = promise.checks.iter().map(|(name, judge)| (name, judge(entries))).collect();
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
    let busy = if case.place.busy == 0 { String::new() } else { format!(", beside {}", case.place.busy) };
    format!("{}{busy}", case.place.words())
}

/// The slowest of hobbit's variants against the fastest of the others, in every place.
fn fastest(entries: &[Entry]) -> Option<Finding> {
    let study = Study::of(entries, &["peers"]);
    let (mut ratios, mut failures, mut without) = (Vec::<(f64, String)>::new(), Vec::new(), Vec::new());
    for own in study.hobbit().filter(|case| case.place.limit.is_some() && case.place.test.n_gen > 0) {
        let others = || study.cases.iter().filter(|other| other.engine != HOBBIT && other.place == own.place);
        without.extend(others().filter(|other| other.median(decode_ts).is_none()).map(|other| other.engine));
        let best = others().filter_map(|other| Some((other.median(decode_ts)?, other.name())));
        let best = best.max_by(|a, b| a.0.total_cmp(&b.0));
        match (own.median(decode_ts), best) {
            (Some(speed), Some((best, name))) => {
                ratios.push((speed / best, format!("{} ({name}, {})", ratio(speed / best), where_(own))));
            }
            (None, _) if others().next().is_some() => {
                failures.push(format!("{} has no speed for {} ({})", own.name(), where_(own), own.outcome()));
            }
            _ => {}
        }
    }
    ratios.sort_by(|a, b| b.0.total_cmp(&a.0));
    let kept = failures.is_empty() && ratios.iter().all(|(ratio, _)| *ratio > 1.0);
    let list = |heading: &str, all: Vec<&str>| (!all.is_empty()).then(|| format!("{heading}: {}", all.join(", ")));
    let ratios = list("to the best other", ratios.iter().map(|(_, words)| words.as_str()).collect());
    let without = list("no speed somewhere (failed or killed)", distinct(without));
    let words: Vec<String> = ratios.into_iter().chain(without).chain(failures).collect();
    (!words.is_empty()).then(|| Finding { found: words.join("; "), kept })
}

/// The largest share of llama.cpp's figure that hobbit has, of cases in which both have it.
fn against(
    study: &Study,
    figure: Measure,
    show: impl Fn(f64) -> String,
    holds: impl Fn(f64) -> bool,
) -> Option<Finding> {
    let (mut shares, mut failures) = (Vec::new(), Vec::new());
    for own in study.hobbit() {
        let Some(of_baseline) = study.baseline(own).and_then(|baseline| baseline.median(figure)) else { continue };
        match own.median(figure).map(|found| found / of_baseline) {
            Some(share) => shares.push((share, format!("{} ({})", show(share), where_(own)))),
            None => failures.push(format!("none for {} ({})", where_(own), own.outcome())),
        }
    }
    Finding::of(shares, failures, holds)
}

/// Slower by less than a share; `figure` is a time.
fn slower_by(study: &Study, figure: Measure, share: f64) -> Option<Finding> {
    against(study, figure, |found| change(found - 1.0), |found| found < 1.0 + share)
}

/// As fast, at least in part; `figure` is a time.
fn as_fast(study: &Study, figure: Measure, holds: impl Fn(f64) -> bool) -> Option<Finding> {
    against(study, figure, |share| format!("{} as fast", ratio(1.0 / share)), holds)
}

fn cost_resident(entries: &[Entry], figure: Measure) -> Option<Finding> {
    slower_by(&Study::of(entries, &["resident"]), figure, 0.02)
}

/// Of commands in as much memory as the model's bytes, in more, or without a limit.
fn where_it_fits(entries: &[Entry]) -> Option<Finding> {
    let mut study = Study::of(entries, &[FITS]);
    // Of runs that failed as well.
    study
        .cases
        .retain(|case| case.place.limit.is_none() || case.any(|run| of_model(run).filter(|of| *of >= 1.0)).is_some());
    slower_by(&study, whole_s, 0.02)
}

fn beside_others(entries: &[Entry], figure: Measure) -> Option<Finding> {
    let mut study = Study::of(entries, &[CONTENDED]);
    study.cases.retain(|case| case.place.busy > 0);
    as_fast(&study, figure, |share| 1.0 / share >= 0.98)
}

fn sooner(entries: &[Entry]) -> Option<Finding> {
    let mut study = Study::of(entries, &["startup"]);
    study.cases.retain(|case| case.place.limit.is_some());
    as_fast(&study, first_token_s, |share| share < 1.0)
}

/// The whole command and decoding with each budget, against the best that any smaller one reached.
fn no_dip(entries: &[Entry]) -> Option<Finding> {
    let study = Study::of(entries, &[FITS]);
    let (mut dips, mut broken) = (Vec::new(), Vec::new());
    let commands_per_second: Measure = |record| whole_s(record).map(|seconds| 1.0 / seconds);
    for (name, speed) in [("the whole command", commands_per_second), ("decode", decode_ts)] {
        for cases in study.hobbit_by(Case::room_bytes) {
            let mut best = None::<f64>;
            for case in cases {
                let found = case.median(speed);
                match (found, best) {
                    (Some(found), Some(most)) => {
                        let (share, place) = (found / most, where_(case));
                        let words = format!("{} to the best with less ({name} of {place})", change(share - 1.0));
                        dips.push((-share, words));
                    }
                    // Too little memory is no dip; failing with more than enough before is.
                    (None, Some(_)) => broken.push(format!("{}: {}", case.outcome(), where_(case))),
                    (_, None) => {}
                }
                best = found.into_iter().chain(best).reduce(f64::max);
            }
        }
    }
    Finding::of(dips, broken, |dip| -dip >= 0.95)
}

fn hobbit(entries: &[Entry]) -> impl Iterator<Item = &Record> {
    entries.iter().map(|entry| &entry.record).filter(|record| record.hobbit_engine == HOBBIT)
}

/// Against the budget where it is known, else against the limit.
fn within_budget(entries: &[Entry]) -> Option<Finding> {
    let (mut peaks, mut n_killed, mut n_unknown) = (Vec::new(), 0, 0);
    for record in hobbit(entries) {
        let Some(limit) = record.hobbit_limit else { continue };
        match record.hobbit_peak_rss {
            _ if record.hobbit_outcome.starts_with("killed") => n_killed += 1,
            None => n_unknown += 1,
            Some(peak) => peaks.push((peak, record.hobbit_budget.unwrap_or(limit), record)),
        }
    }
    let (n, n_within) = (peaks.len() + n_killed, peaks.iter().filter(|(peak, budget, _)| peak <= budget).count());
    let shares = peaks.into_iter().map(|(peak, budget, record)| {
        let place = format!("{} in {}", figures::model(record, entries), bytes(budget as f64));
        (peak as f64 / (budget as f64).max(1.0), place)
    });
    let closest = shares.reduce(|closest, other| if other.0 > closest.0 { other } else { closest });
    let mut words = vec![format!("{n_within} of {n}")];
    words.extend(closest.map(|(share, place)| format!("at most {} ({place})", percent(share))));
    words.extend((n_killed > 0).then(|| format!("{n_killed} killed")));
    words.extend((n_unknown > 0).then(|| format!("{n_unknown} failed without a figure")));
    (n > 0).then(|| Finding { found: words.join("; "), kept: n_within == n })
}

/// Dynamic precision is meant to differ, so its records do not count.
fn identical(entries: &[Entry]) -> Option<Finding> {
    let exact = hobbit(entries).filter(|record| record.hobbit_precision.as_deref() != Some("dynamic"));
    let pairs =
        exact.filter_map(|record| Some((record.hobbit_logits_equal.unwrap_or(0), record.hobbit_logits_compared?)));
    let pairs: Vec<(u64, u64)> = pairs.filter(|(_, compared)| *compared > 0).collect();
    let sum = |part: fn(&(u64, u64)) -> u64| pairs.iter().map(part).fold(0, u64::saturating_add);
    let found = format!("{} of {} evaluations", sum(|pair| pair.0), sum(|pair| pair.1));
    let kept = pairs.iter().all(|(equal, compared)| equal == compared);
    (!pairs.is_empty()).then_some(Finding { found, kept })
}

/// The worst of hobbit's long runs; a run that says nothing and failed is one that did not hold.
fn of_long_runs(
    entries: &[Entry],
    judge: impl Fn(&Record) -> Option<(f64, String)>,
    holds: impl Fn(f64) -> bool,
) -> Option<Finding> {
    let (mut judged, mut broken) = (Vec::new(), Vec::new());
    for record in hobbit(entries).filter(|record| LONG.contains(&record.hobbit_label.as_str())) {
        let model = figures::model(record, entries);
        let name = match record.hobbit_variant.as_str() {
            "" => model,
            variant => format!("{model}, {variant}"),
        };
        match judge(record) {
            Some((badness, found)) => judged.push((badness, format!("{found} ({name})"))),
            None if !figures::is_ok(record) => broken.push(format!("{}: {name}", record.hobbit_outcome)),
            None => {}
        }
    }
    // Of equal ones the last.
    judged.reverse();
    Finding::of(judged, broken, holds)
}

/// The end differs from what was after a tenth of the tokens by a share at most.
fn flat(
    entries: &[Entry],
    of: fn(&Moment) -> Option<u64>,
    show: fn(f64, f64) -> String,
    within: f64,
) -> Option<Finding> {
    let judge = |record: &Record| {
        let (warm, end) = warm_and_end(record)?;
        let (warm, end) = (of(&warm)? as f64, of(&end)? as f64);
        Some(((end / warm.max(1.0) - 1.0).abs(), show(warm, end)))
    };
    of_long_runs(entries, judge, |share| share <= within)
}

fn bytes_more(warm: f64, end: f64) -> String {
    let sign = if end < warm { "-" } else { "+" };
    format!("{sign}{}, {}", bytes((end - warm).abs()), change(end / warm.max(1.0) - 1.0))
}

/// The last tenth of the tokens is hardly slower than the first.
fn steady(entries: &[Entry]) -> Option<Finding> {
    let judge = |record: &Record| {
        let (first, last) = (tenth_ts(record, FIRST)?, tenth_ts(record, LAST)?);
        let slower = 1.0 - last / first;
        Some((slower, format!("{} to {} t/s, {}", digits(first), digits(last), change(-slower))))
    };
    of_long_runs(entries, judge, |slower| slower <= 0.05)
}

#[cfg(test)]
#[path = "claims/tests.rs"]
mod tests;
