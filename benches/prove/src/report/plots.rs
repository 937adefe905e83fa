//! What there is to see of each study.

use super::figures::{
    Measure, decode_ts, hit_rate, hits_per_token, in_memory, misses_per_token, of_model, prompt_ts, roofline_ts,
    stall_ms, token_ms, whole_s,
};
use super::group::{BASELINE, CONTENDED, Case, FITS, HOBBIT, LONG, Place, Study, distinct, grouped};
use super::number::{self, digits, percent, shown};
use super::read::Entry;
use hobbit::units::{GIB, MIB};
use hobbit_programs::bench::case::Test;
use hobbit_programs::plot::{Bar, Line, bars, plot};

/// A plot and what it shows.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What is shown, of what.
    pub title: String,
    /// The plot.
    pub html: String,
    /// What its axes are, and how to read it.
    pub note: String,
}

/// The plots of a table's study.
pub fn of(table: &str, entries: &[Entry]) -> Vec<Figure> {
    let groups = match table {
        "peers" => vec![speeds(entries, "peers"), memory(entries, &["peers"])],
        "papers" => vec![stalls(entries, "papers")],
        "fits" => vec![fits(entries)],
        "contended" => vec![contended(entries)],
        "curve" => vec![curve(entries), stalls(entries, "curve")],
        "ablation" => vec![speeds(entries, "ablation"), stalls(entries, "ablation")],
        "context" => vec![context(entries)],
        "experts" => vec![experts(entries)],
        "long" => vec![memory(entries, &LONG), speed(entries, &LONG)],
        _ => vec![],
    };
    groups.into_iter().flatten().collect()
}

/// Bars with something to see.
fn of_bars(title: String, label: &str, parts: &[&str], rows: &[Bar], note: &str) -> Option<Figure> {
    let is_seen = rows.iter().any(|row| !row.values.is_empty());
    is_seen.then(|| Figure { title, html: bars(label, parts, rows), note: note.to_owned() })
}

/// Lines with something to see; what is above `y_max` is cut off.
fn of_lines(title: String, labels: [&str; 2], mut lines: Vec<Line>, y_max: f64, note: &str) -> Option<Figure> {
    lines.retain(|line| !line.points.is_empty());
    lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a[0].total_cmp(&b[0])));
    let is_seen = lines.iter().any(|line| !line.bound);
    is_seen.then(|| Figure { title, html: plot(labels[0], labels[1], &lines, y_max), note: note.to_owned() })
}

const SPEEDS: &str = "Length of a bar: tokens per second while decoding, longer is better; of several runs the median, and in \
                      brackets the least and the most.";
const PROMPTS: &str = "Length of a bar: tokens per second of the prompt, longer is better.";

/// Speeds alone and beside busy processes.
fn contended(entries: &[Entry]) -> Vec<Figure> {
    let of_place = |(place, cases): (Place, Vec<&Case>)| {
        [("Decode", decode_ts as Measure, SPEEDS), ("Prompt", prompt_ts, PROMPTS)].map(|(part, figure, note)| {
            let row = |case: &&Case| {
                let others = match case.place.busy {
                    0 => "alone".to_owned(),
                    1 => "beside a busy process".to_owned(),
                    n => format!("beside {n} busy processes"),
                };
                let spread = case.spread(figure)?;
                let note = format!("{} t/s", number::spread(Some(spread), digits));
                Some(Bar { name: format!("{}, {others}", case.name()), values: vec![spread.median], note })
            };
            let rows: Vec<Bar> = cases.iter().filter_map(row).collect();
            let title = format!("{part} speed beside others: {}", place.words());
            of_bars(title, "tokens per second", &[part], &rows, note)
        })
    };
    Study::of(entries, &[CONTENDED]).by_place().into_iter().flat_map(of_place).flatten().collect()
}

/// Decode speed of every case of a place.
fn speeds(entries: &[Entry], label: &str) -> Vec<Figure> {
    let is_ablation = label == "ablation";
    let of_place = |(place, cases): (Place, Vec<&Case>)| {
        // In an ablation the baseline comes along with every variant.
        let baseline = cases.iter().position(|case| case.engine == BASELINE);
        let is_shown = |(at, case): &(usize, &&Case)| !is_ablation || case.engine != BASELINE || Some(*at) == baseline;
        let row = |(_, case): (usize, &&Case)| {
            let spread = case.spread(decode_ts);
            let speed = || format!("{} t/s", number::spread(spread, digits));
            Bar {
                name: if is_ablation { case.variant_name().to_owned() } else { case.name() },
                values: spread.iter().map(|spread| spread.median).collect(),
                note: if spread.is_some() { speed() } else { case.outcome() },
            }
        };
        let rows: Vec<Bar> = cases.iter().enumerate().filter(is_shown).map(row).collect();
        let title = format!("Decode speed: {}", place.words());
        of_bars(title, "tokens per second", &["decode"], &rows, SPEEDS)
    };
    Study::of(entries, &[label]).by_place().into_iter().filter_map(of_place).collect()
}

/// Waiting and everything else, per token.
fn stalls(entries: &[Entry], label: &str) -> Vec<Figure> {
    let study = Study::of(entries, &[label]);
    // Along a curve the memory changes from row to row.
    let limit = |case: &Case| if label == "curve" { None } else { case.place.limit };
    let of_room = |(_, mut cases): (_, Vec<&Case>)| {
        let place = match label {
            "curve" => cases[0].place.model.clone(),
            _ => cases[0].place.room(),
        };
        cases.retain(|case| case.place.test.n_gen > 0);
        if label == "curve" {
            let share = |case: &Case| case.median(in_memory).unwrap_or(f64::INFINITY);
            cases.sort_by(|a, b| share(a).total_cmp(&share(b)));
        }
        let rows: Vec<Bar> = cases.into_iter().filter_map(|case| stall(case, label)).collect();
        let parts = ["waiting for reads", "everything else (computing)"];
        let note = "Length of a bar: milliseconds that a token takes, less is better; its first part, those in which it waits \
                    for reads. Single tokens where they were counted apart, all tokens of the test elsewhere.";
        of_bars(format!("Where a token's time goes: {place}"), "ms per token", &parts, &rows, note)
    };
    grouped(study.hobbit(), |case| (&case.place.model, limit(case))).into_iter().filter_map(of_room).collect()
}

fn stall(case: &Case, label: &str) -> Option<Bar> {
    let (stall, token) = (case.median(stall_ms)?, case.median(token_ms)?);
    let name = match label {
        "curve" => format!("{} of experts in memory", shown(case.median(in_memory), percent)),
        "ablation" => case.variant_name().to_owned(),
        _ => case.place.test.name(),
    };
    let variant = Some(case.variant).filter(|variant| label != "ablation" && !variant.is_empty());
    let mut note = format!("{} of {} ms", digits(stall), digits(token));
    if let (Some(hits), Some(misses), Some(rate)) =
        (case.median(hits_per_token), case.median(misses_per_token), case.median(hit_rate))
    {
        note.push_str(&format!("; {} hits, {} misses ({})", digits(hits), digits(misses), percent(rate)));
    }
    let name = variant.map_or(name.clone(), |variant| format!("{name}, {variant}"));
    Some(Bar { name, values: vec![stall, (token - stall).max(0.0)], note })
}

/// Lines by their names, from cases at their `x`; of several at one place the first counts.
fn by_name<'a>(cases: impl IntoIterator<Item = (String, f64, &'a Case<'a>)>, figure: Measure) -> Vec<Line> {
    let line = |(name, cases): (String, Vec<(String, f64, &Case)>)| {
        let mut line = Line { name, ..Line::default() };
        for (_, x, case) in cases {
            let Some(spread) = case.spread(figure) else { continue };
            if line.points.iter().any(|[known, _]| *known == x) {
                continue;
            }
            line.points.push([x, spread.median]);
            line.spreads.extend((spread.n > 1).then_some([x, spread.least, spread.most]));
        }
        line
    };
    grouped(cases, |(name, ..)| name.clone()).into_iter().map(line).collect()
}

/// The roofline may rise so far above what was measured before the axis ends.
const ROOFLINE_ROOM: f64 = 1.3;

/// Decode speed by the share of experts in memory, a line per engine, and the roofline.
fn curve(entries: &[Entry]) -> Vec<Figure> {
    let study = Study::of(entries, &["curve"]);
    let of_test = |((model, test), cases): ((&String, Test), Vec<&Case>)| {
        let at = || cases.iter().filter_map(|case| Some((*case, 100.0 * case.median(in_memory)?)));
        // What all variants share.
        let first = || at().filter(|(case, _)| case.variant == cases[0].variant);
        let baselines = first().filter_map(|(case, x)| Some((BASELINE.to_owned(), x, study.baseline(case)?)));
        let mut lines = by_name(at().map(|(case, x)| (case.name(), x, case)), decode_ts);
        lines.extend(by_name(baselines, decode_ts));
        let measured = lines.iter().flat_map(|line| &line.points).map(|point| point[1]).fold(0.0, f64::max);
        let bound = first().map(|(case, x)| ("roofline: if only reading took time".to_owned(), x, case));
        let bound = by_name(bound, roofline_ts).into_iter();
        lines.extend(bound.map(|line| Line { bound: true, spreads: Vec::new(), ..line }));
        let note = "Across: how many of the model's experts have room in memory. Up: tokens per second, more is better. llama.cpp \
                    stands where hobbit stands with the same limit; dashed: what reading alone would allow.";
        let labels = ["experts in memory, %", "decode, tokens per second"];
        of_lines(
            format!("Decode speed by memory: {model}, {}", test.name()),
            labels,
            lines,
            ROOFLINE_ROOM * measured,
            note,
        )
    };
    grouped(study.hobbit(), |case| (&case.place.model, case.place.test)).into_iter().filter_map(of_test).collect()
}

/// The whole command, prompts and decoding by the budget's share of the model.
fn fits(entries: &[Entry]) -> Vec<Figure> {
    const PARTS: [(&str, Measure, &str, &str); 3] = [
        ("Whole command", whole_s, "seconds", "seconds from the start of the process to its end, less is better."),
        ("Prompt", prompt_ts, "prompt, tokens per second", "tokens per second of the prompt, more is better."),
        ("Decode", decode_ts, "decode, tokens per second", "tokens per second while decoding, more is better."),
    ];
    let study = Study::of(entries, &[FITS]);
    let of_test = |((model, test), cases): ((&String, Test), Vec<&Case>)| {
        PARTS.map(|(part, figure, y_label, up)| {
            let at = cases.iter().filter_map(|case| Some((case.name(), 100.0 * case.any(of_model)?, *case)));
            let note = format!("Across: memory of the control group, in percent of the model's bytes. Up: {up}");
            let title = format!("{part} by memory: {model}, {}", test.name());
            of_lines(title, ["budget, % of the model", y_label], by_name(at, figure), f64::INFINITY, &note)
        })
    };
    let tests = grouped(&study.cases, |case| (&case.place.model, case.place.test)).into_iter();
    tests.flat_map(of_test).flatten().collect()
}

/// By tokens in the context.
fn context(entries: &[Entry]) -> Vec<Figure> {
    let study = Study::of(entries, &["context"]);
    let depth = |case: &Case| Some(f64::from(case.place.test.n_depth));
    let across = ["tokens in the context", "tokens that are in the context before"];
    let rooms = grouped(&study.cases, |case| (&case.place.model, case.place.limit)).into_iter();
    rooms.flat_map(|(_, cases)| sweep(&study, &cases, depth, across, &cases[0].place.room())).collect()
}

/// By experts of a layer: over several models.
fn experts(entries: &[Entry]) -> Vec<Figure> {
    let study = Study::of(entries, &["experts"]);
    let n_expert = |case: &Case| case.runs.iter().find_map(|run| run.record.hobbit_n_expert).map(f64::from);
    let across = ["experts of a layer", "experts of a layer, the larger their number the smaller each"];
    sweep(&study, &study.cases.iter().collect::<Vec<_>>(), n_expert, across, "the models of the table")
}

fn sweep(
    study: &Study,
    cases: &[&Case],
    x: impl Fn(&Case) -> Option<f64>,
    [x_label, across]: [&str; 2],
    place: &str,
) -> Vec<Figure> {
    // Where the tests differ in more than the context, they are lines of their own.
    let without_depth = |case: &Case| Test { n_depth: 0, ..case.place.test };
    let n_tests = distinct(study.cases.iter().map(without_depth)).len();
    let at = |case: &&Case| {
        // The baseline does not know how many experts a layer has.
        let same = || study.cases.iter().filter(|other| other.place == case.place);
        let at = x(case).or_else(|| same().find_map(&x))?;
        let name = if n_tests > 1 { format!("{}, {}", case.name(), without_depth(case).name()) } else { case.name() };
        [HOBBIT, BASELINE].contains(&case.engine).then_some((name, at))
    };
    let of_part = |(part, figure): (&str, Measure)| {
        let lines = by_name(cases.iter().filter_map(|case| at(case).map(|(name, at)| (name, at, *case))), figure);
        let y_label = format!("{}, tokens per second", part.to_lowercase());
        let note = format!("Across: {across}. Up: tokens per second, more is better.");
        of_lines(format!("{part} speed by {x_label}: {place}"), [x_label, &y_label], lines, f64::INFINITY, &note)
    };
    [("Decode", decode_ts as Measure), ("Prompt", prompt_ts)].into_iter().filter_map(of_part).collect()
}

/// A line for each case, of its first run that has points.
fn over_time(cases: &[&Case], points: impl Fn(&Entry) -> Vec<[f64; 2]>) -> Vec<Line> {
    let line = |case: &&Case| {
        let points = case.runs.iter().map(|run| points(run)).find(|points| points.len() > 1)?;
        let killed = if case.outcome() == "ok" { String::new() } else { format!(" ({})", case.outcome()) };
        Some(Line { name: format!("{}{killed}", case.name()), points, ..Line::default() })
    };
    cases.iter().filter_map(line).collect()
}

/// The resident set of every engine, and the limit.
fn memory(entries: &[Entry], labels: &[&str]) -> Vec<Figure> {
    let of_place = |(place, cases): (Place, Vec<&Case>)| {
        let mut lines = over_time(&cases, |run| {
            let moments = run.record.more.hobbit_series.iter();
            moments.map(|moment| [moment.t_ns as f64 / 1e9, moment.rss as f64]).collect()
        });
        let most = |lines: &[Line], axis: usize| {
            lines.iter().flat_map(|line| &line.points).map(|p| p[axis]).fold(0.0, f64::max)
        };
        if let Some(limit) = place.limit {
            let name = format!("limit, {}", number::bytes(limit as f64));
            let points = vec![[0.0, limit as f64], [most(&lines, 0), limit as f64]];
            lines.push(Line { name, points, bound: true, ..Line::default() });
        }
        let (unit, name) = if most(&lines, 1) >= GIB as f64 { (GIB as f64, "GiB") } else { (MIB as f64, "MiB") };
        lines.iter_mut().flat_map(|line| &mut line.points).for_each(|point| point[1] /= unit);
        let note = "Across: time. Up: memory of the process; below the dashed limit is better. Of repeated runs the first. The \
                    resident set counts mapped pages of the model's file, which the kernel may drop.";
        let labels = ["seconds since the process started", &format!("resident set, {name}")];
        let title = format!("Memory over time: {}", place.words());
        of_lines(title, labels, lines, f64::INFINITY, note)
    };
    Study::of(entries, labels).by_place().into_iter().filter_map(of_place).collect()
}

/// Tokens per second while decoding.
fn speed(entries: &[Entry], labels: &[&str]) -> Vec<Figure> {
    let of_place = |(place, cases): (Place, Vec<&Case>)| {
        let note = "Across: time. Up: tokens per second, more is better: means of a sixtieth of the tokens each; of repeated \
                    runs the first.";
        let title = format!("Decode speed over time: {}", place.words());
        let lines = over_time(&cases, |run| points_of_speed(&run.record.more.hobbit_steps_ns));
        of_lines(title, ["seconds of decoding", "decode, tokens per second"], lines, f64::INFINITY, note)
    };
    Study::of(entries, labels).by_place().into_iter().filter_map(of_place).collect()
}

/// Points of a speed's line.
const POINTS: usize = 60;

/// (seconds in the middle, tokens per second) of steps taken together.
fn points_of_speed(steps_ns: &[u64]) -> Vec<[f64; 2]> {
    let mut before = 0.0;
    let of_chunk = |steps: &[u64]| {
        let seconds = steps.iter().map(|ns| *ns as f64 / 1e9).sum::<f64>();
        let middle = before + seconds / 2.0;
        before += seconds;
        (seconds > 0.0).then(|| [middle, steps.len() as f64 / seconds])
    };
    steps_ns.chunks(steps_ns.len().div_ceil(POINTS).max(1)).filter_map(of_chunk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_means_of_steps_in_their_order() {
        assert!(points_of_speed(&[]).is_empty() && points_of_speed(&[0, 0]).is_empty());
        assert_eq!(points_of_speed(&[500_000_000, 250_000_000]), [[0.25, 2.0], [0.625, 4.0]]);
        let many = points_of_speed(&[1_000_000; 601]);
        assert_eq!(many.len(), 55, "eleven at a time");
        assert!(many.iter().all(|[_, speed]| (speed - 1000.0).abs() < 1e-6));
    }
}
