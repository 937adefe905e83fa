//! The tables, each of one study: what its rows are, and a cell under each heading.

mod overlap;

use super::claims;
use super::figures::{
    FIRST, LAST, MIDDLE, Measure, bytes_per_token, cgroup_peak, decode_ts, first_token_s, hit_rate, in_memory, load_s,
    mean_ms, median_ms, of_model, peak_rss, prefill_s, prompt_ts, roofline_share, roofline_ts, stall_share, tenth_ts,
    warm_and_end, whole_s,
};
use super::group::{BASELINE, CONTENDED, Case, FITS, HOBBIT, LONG, Place, Spread, Study, distinct, grouped};
use super::number::{self, UNKNOWN, bytes, change, digits, percent, shown};
use super::read::Entry;
use super::table::{Cell, Table, bold};
use hobbit_programs::bench::case::Test;
use hobbit_programs::bench::record::Record;

/// Makes a table; without rows where no record belongs to it.
type Make = fn(&[Entry]) -> Table;

/// Names and makers, in the order of the page.
const ALL: [(&str, Make); 14] = [
    ("claims", claims::table),
    ("peers", peers),
    ("papers", papers),
    ("fits", fits),
    ("curve", curve),
    ("routes", overlap::routes),
    ("efficiency", overlap::overlap),
    ("ablation", ablation),
    ("context", context),
    ("experts", experts),
    ("resident", resident),
    ("contended", contended),
    ("startup", startup),
    ("long", long),
];

/// What `--table` and markers may name.
pub fn names() -> [&'static str; ALL.len()] {
    ALL.map(|(name, _)| name)
}

/// A table by its name; `None` for an unknown one.
pub fn by_name(name: &str, entries: &[Entry]) -> Option<Table> {
    let (name, make) = ALL.iter().find(|(known, _)| *known == name)?;
    Some(Table { name, ..make(entries) })
}

/// Cells under their headings.
type Row = Vec<(String, Cell)>;

fn cell(heading: &str, cell: impl Into<Cell>) -> Row {
    vec![(heading.to_owned(), cell.into())]
}

/// What a study says of itself, and rows that all have the same headings.
fn of_study(study: &Study, rows: impl IntoIterator<Item = Row>) -> Table {
    let rows: Vec<Row> = rows.into_iter().collect();
    let heading = rows.first().map(|row| row.iter().map(|(name, _)| name.clone()).collect());
    Table {
        threads: study.threads(),
        files: study.files(),
        heading: heading.unwrap_or_default(),
        rows: rows.into_iter().map(|row| row.into_iter().map(|(_, cell)| cell).collect()).collect(),
        ..Table::default()
    }
}

/// The words that most rows begin with.
fn place(place: &Place) -> Row {
    let test = place.test.name();
    [cell("model", place.model.as_str()), cell("limit", limit(place.limit)), cell("test", test)].concat()
}

fn limit(limit: Option<u64>) -> String {
    limit.map_or("none".into(), |bytes| number::bytes(bytes as f64))
}

/// hobbit's stands out.
fn own_bold(case: &Case, text: String) -> Cell {
    Cell { text, bold: case.engine == HOBBIT }
}

/// What a case has of a figure; what happened to it where it has nothing because of that.
fn found(case: &Case, spread: Option<Spread>) -> String {
    match case.outcome() {
        outcome if spread.is_none() && outcome != "ok" => outcome,
        _ => number::spread(spread, digits),
    }
}

/// Likewise of a case that may not exist.
fn found_of(case: Option<&Case>, figure: Measure) -> String {
    case.map_or(UNKNOWN.into(), |case| found(case, case.spread(figure)))
}

/// A figure of one case divided by another's.
fn ratio_of(case: Option<&Case>, by: Option<&Case>, figure: Measure) -> Option<f64> {
    Some(case?.median(figure)? / by?.median(figure)?)
}

/// hobbit's case and llama.cpp's.
type Pair<'a> = (Option<&'a Case<'a>>, Option<&'a Case<'a>>);

/// How two figures are compared: a heading, and what their ratio says.
type Comparison = (&'static str, fn(f64) -> Cell);

const MORE_IS_FASTER: Comparison = ("ratio", |ratio| bold(number::ratio(ratio)));
const LESS_IS_FASTER: Comparison = ("ratio", |ratio| bold(number::ratio(1.0 / ratio)));

/// A figure of both, whose unit stands behind the comma of the heading, and how they compare.
fn versus(heading: &str, (own, baseline): Pair, figure: Measure, (compared, show): Comparison) -> Row {
    let unit = heading.rsplit(", ").next().unwrap_or_default();
    let ratio = ratio_of(own, baseline, figure).unwrap_or(f64::NAN);
    let baseline = cell(&format!("llama.cpp, {unit}"), found_of(baseline, figure));
    [cell(heading, found_of(own, figure)), baseline, cell(compared, show(ratio))].concat()
}

/// `27 of 27` logits of all runs; `None` where none were compared.
fn logits(case: &Case) -> Option<String> {
    let sum = |own: fn(&Record) -> Option<u64>| {
        case.runs.iter().filter_map(|run| own(&run.record)).fold(0u64, u64::saturating_add)
    };
    let compared = sum(|record| record.hobbit_logits_compared);
    (compared > 0).then(|| format!("{} of {compared}", sum(|record| record.hobbit_logits_equal)))
}

/// Bytes in use, and of how many.
fn peak(peak: Option<f64>, limit: Option<u64>) -> String {
    match (peak, limit) {
        (Some(peak), Some(limit)) => number::of_bytes(peak, limit as f64),
        _ => shown(peak, bytes),
    }
}

/// Every engine, the same model, the same memory.
fn peers(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["peers"]);
    let of_place = |(_, here): (Place, Vec<&Case>)| {
        let row = |case: &&Case| {
            let others = here.iter().filter(|other| other.engine != case.engine);
            let best_other = others.filter_map(|other| other.median(decode_ts)).max_by(f64::total_cmp);
            let ratio = case.median(decode_ts).zip(best_other).map(|(own, best)| own / best);
            let outcome = case.outcome();
            [
                place(&case.place),
                cell("engine", own_bold(case, case.name())),
                cell("prompt, t/s", number::spread(case.spread(prompt_ts), digits)),
                cell("decode, t/s", own_bold(case, number::spread(case.spread(decode_ts), digits))),
                cell("decode, to the best other", own_bold(case, shown(ratio, number::ratio))),
                cell("peak RSS", peak(case.most(peak_rss), case.place.limit)),
                cell("control group's peak", shown(case.most(cgroup_peak), bytes)),
                cell("equal to the baseline", equality(case)),
                cell("outcome", Cell { bold: outcome != "ok", text: outcome }),
            ]
            .concat()
        };
        here.iter().map(row).collect::<Vec<_>>()
    };
    Table {
        title: "Every engine with the same model in the same memory",
        note: "Limits are those of a memory control group; its peak counts the page cache too. The baseline is llama.cpp.",
        n_words: 4,
        ..of_study(&study, study.by_place().into_iter().flat_map(of_place))
    }
}

/// The least of what the runs have in common with the baseline.
fn equality(case: &Case) -> String {
    if let Some(equal) = logits(case) {
        return format!("bit-identical logits {equal}");
    }
    let texts = case.runs.iter().filter_map(|run| run.record.hobbit_text_equal.zip(run.record.hobbit_text_chars));
    let worst = texts.min_by(|a, b| (u128::from(a.0) * u128::from(b.1)).cmp(&(u128::from(b.0) * u128::from(a.1))));
    worst.map_or(UNKNOWN.into(), |(equal, of)| format!("{equal} of {of} characters"))
}

/// The papers' workload: short and long prompts, short and long answers.
fn papers(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["papers"]);
    let mut tests = distinct(study.cases.iter().map(|case| case.place.test));
    tests.retain(|test| test.n_prompt > 0 && test.n_gen > 0);
    tests.sort_unstable();
    let workload = |test: &Test| match test.n_depth {
        0 => format!("[{}, {}]", test.n_prompt, test.n_gen),
        depth => format!("[{}, {}] @ d{depth}", test.n_prompt, test.n_gen),
    };
    let mut rows = Vec::new();
    let judged = study.cases.iter().filter(|case| tests.contains(&case.place.test));
    for ((model, room), cases) in grouped(judged, |case| (&case.place.model, case.place.limit)) {
        // One baseline, whatever it was measured with.
        let engines = grouped(cases, |case| if case.engine == BASELINE { (BASELINE, "", "") } else { case.who() });
        for (name, figure, (_, compared)) in
            [("prefill, s", prefill_s as Measure, LESS_IS_FASTER), ("decode, t/s", decode_ts, MORE_IS_FASTER)]
        {
            let mut of_ratios = Vec::new();
            for (_, cases) in &engines {
                let at = |test: &Test| cases.iter().copied().find(|case| case.place.test == *test);
                let Some(any) = tests.iter().find_map(at) else { continue };
                let row = |engine: Cell, of_test: &dyn Fn(&Test) -> Cell| {
                    let words = [cell("model", model.as_str()), cell("limit", limit(room)), cell("figure", name)];
                    let figures = tests.iter().map(|test| (workload(test), of_test(test)));
                    words.concat().into_iter().chain(cell("engine", engine)).chain(figures).collect::<Row>()
                };
                rows.push(row(own_bold(any, any.name()), &|test| found_of(at(test), figure).into()));
                let ratio = |test: &Test| ratio_of(at(test), study.baseline(at(test)?), figure);
                if any.engine == HOBBIT && tests.iter().any(|test| ratio(test).is_some()) {
                    let ratios = |test: &Test| compared(ratio(test).unwrap_or(f64::NAN));
                    of_ratios.push(row(format!("{}, ratio", any.name()).into(), &ratios));
                }
            }
            rows.extend(of_ratios);
        }
    }
    Table {
        title: "The papers' workload, [tokens in, tokens out]",
        note: "Ratios say how many times as fast as llama.cpp hobbit is.",
        n_words: 4,
        ..of_study(&study, rows)
    }
}

/// The whole command by memory, from too little for the model to more than enough.
fn fits(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &[FITS]);
    let row = |case: &Case| {
        let (own, baseline) = (Some(case), study.baseline(case));
        // How a run failed is said once.
        let speeds = |heading, figure| {
            let known = |case: &&Case| case.spread(figure).is_some();
            versus(heading, (own.filter(known), baseline.filter(known)), figure, MORE_IS_FASTER)
        };
        [
            cell("model", case.place.model.as_str()),
            cell("test", case.place.test.name()),
            cell("variant", case.variant),
            cell("budget", limit(case.place.limit)),
            cell("of the model", shown(case.any(of_model), percent)),
            versus("whole command, hobbit, s", (own, baseline), whole_s, LESS_IS_FASTER),
            speeds("prompt, hobbit, t/s", prompt_ts),
            speeds("decode, hobbit, t/s", decode_ts),
        ]
        .concat()
    };
    Table {
        title: "Where the model begins to fit: the whole command",
        note: "The whole command lasts from the start of the process to its end; each follows an equal one in the same memory \
               and finds what that has left in the page cache. Ratios say how many times as fast as llama.cpp hobbit is.",
        n_words: 3,
        ..of_study(&study, study.hobbit_by(Case::room_bytes).concat().into_iter().map(row))
    }
}

/// Speed against the share of experts in memory.
fn curve(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["curve"]);
    let share = |case: &Case| case.median(in_memory).unwrap_or(f64::INFINITY);
    let row = |case: &Case| {
        let baseline = study.baseline(case);
        let speed = ratio_of(Some(case), baseline, decode_ts);
        [
            cell("model", case.place.model.as_str()),
            cell("engine", case.name()),
            cell("test", case.place.test.name()),
            cell("experts in memory", shown(case.median(in_memory), percent)),
            cell("limit", limit(case.place.limit)),
            cell("decode, t/s", bold(found_of(Some(case), decode_ts))),
            cell("llama.cpp, t/s", found_of(baseline, decode_ts)),
            cell("ratio", shown(speed, number::ratio)),
            cell("hits", shown(case.median(hit_rate), percent)),
            cell("read per token", shown(case.median(bytes_per_token), bytes)),
            cell("roofline, t/s", shown(case.median(roofline_ts), digits)),
            cell("of the roofline", shown(case.median(roofline_share), percent)),
        ]
        .concat()
    };
    Table {
        title: "Decode speed by the share of experts in memory",
        note: "llama.cpp has the same limit as hobbit in the same row. The roofline is the speed if only reading took time.",
        n_words: 3,
        ..of_study(&study, study.hobbit_by(share).concat().into_iter().map(row))
    }
}

/// What each part of hobbit is worth.
fn ablation(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["ablation"]);
    let of_place = |(_, here): (Place, Vec<&Case>)| {
        let variants = || here.iter().filter(|case| case.engine == HOBBIT);
        // Beside every variant it was the same llama.cpp.
        let baseline = here.iter().find(|case| case.engine == BASELINE);
        let row = |case: &&Case| {
            let ratio = ratio_of(Some(case), variants().next().copied(), decode_ts);
            [
                place(&case.place),
                cell("variant", case.variant_name()),
                cell("decode, t/s", found_of(Some(case), decode_ts)),
                cell("to the first", bold(shown(ratio, number::ratio))),
                cell("read per token", shown(case.median(bytes_per_token), bytes)),
                cell("waiting for reads", shown(case.median(stall_share), percent)),
                cell("hits", shown(case.median(hit_rate), percent)),
            ]
            .concat()
        };
        variants().chain(baseline).map(row).collect::<Vec<_>>()
    };
    Table {
        title: "What each part is worth",
        note: "Variants in the order in which they were measured, against the first of them.",
        n_words: 4,
        ..of_study(&study, study.by_place().into_iter().flat_map(of_place))
    }
}

/// By tokens in the context.
fn context(entries: &[Entry]) -> Table {
    let depth = |case: &Case| Some(case.place.test.n_depth);
    let study = Study::of(entries, &["context"]);
    Table { title: "Speed by tokens in the context", ..sweep(&study, "tokens in the context", depth) }
}

/// By experts of a layer.
fn experts(entries: &[Entry]) -> Table {
    let n_expert = |case: &Case| case.runs.iter().find_map(|run| run.record.hobbit_n_expert);
    let study = Study::of(entries, &["experts"]);
    Table { title: "Speed by number of experts", ..sweep(&study, "experts of a layer", n_expert) }
}

/// Both engines against one quantity.
fn sweep(study: &Study, quantity: &str, of: fn(&Case) -> Option<u32>) -> Table {
    // Where hobbit has no row, llama.cpp's stands alone.
    let stands_alone = |case: &&Case| case.engine == BASELINE && !study.hobbit().any(|own| own.place == case.place);
    let own = |case: &&Case| case.engine == HOBBIT || stands_alone(case);
    let mut cases: Vec<&Case> = study.cases.iter().filter(own).collect();
    cases.sort_by_key(|case| of(case).unwrap_or(u32::MAX));
    let row = |case: &Case| {
        let pair = if case.engine == HOBBIT { (Some(case), study.baseline(case)) } else { (None, Some(case)) };
        let test = Test { n_depth: 0, ..case.place.test };
        [
            place(&Place { test, ..case.place.clone() }),
            cell("variant", case.variant),
            cell(quantity, of(case).map_or(UNKNOWN.into(), |value| value.to_string())),
            versus("prompt, hobbit, t/s", pair, prompt_ts, MORE_IS_FASTER),
            versus("decode, hobbit, t/s", pair, decode_ts, MORE_IS_FASTER),
        ]
        .concat()
    };
    Table { n_words: 4, ..of_study(study, cases.into_iter().map(row)) }
}

/// What hobbit costs where everything fits.
fn resident(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["resident"]);
    let row = |case: &Case| {
        let pair = (Some(case), study.baseline(case));
        [
            place(&case.place),
            cell("engine", case.name()),
            versus("median token, ms", pair, median_ms, ("overhead", |ratio| bold(change(ratio - 1.0)))),
            versus("mean token, ms", pair, mean_ms, ("overhead", |ratio| change(ratio - 1.0).into())),
            cell("logits with the same bits", logits(case).unwrap_or(UNKNOWN.into())),
        ]
        .concat()
    };
    Table {
        title: "What hobbit costs with everything in memory",
        note: "Less is better; below zero hobbit is faster.",
        n_words: 4,
        ..of_study(&study, study.hobbit().map(row))
    }
}

/// Speed beside programs that compute as well.
fn contended(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &[CONTENDED]);
    let row = |case: &Case| {
        let place_alone = Place { busy: 0, ..case.place.clone() };
        let alone = study.cases.iter().find(|other| other.place == place_alone && other.who() == case.who());
        let kept = |what: &str, figure: Measure| {
            let share = ratio_of(Some(case), alone, figure);
            [
                cell(&format!("{what} alone, t/s"), found_of(alone, figure)),
                cell("beside them, t/s", found_of(Some(case), figure)),
                cell("kept", bold(shown(share, percent))),
            ]
            .concat()
        };
        [
            place(&case.place),
            cell("engine", own_bold(case, case.name())),
            cell("busy processes", case.place.busy.to_string()),
            kept("prompt", prompt_ts),
            kept("decode", decode_ts),
        ]
        .concat()
    };
    let beside = |case: &&Case| case.place.busy > 0 && [HOBBIT, BASELINE].contains(&case.engine);
    Table {
        title: "Speed beside processes that compute without end",
        note: "Each of the busy processes keeps one core. What is kept is the speed beside them as a share of that alone.",
        n_words: 4,
        ..of_study(&study, study.cases.iter().filter(beside).map(row))
    }
}

/// How long it takes to begin.
fn startup(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &["startup"]);
    let row = |case: &Case| {
        let pair = (Some(case), study.baseline(case));
        [
            place(&case.place),
            cell("engine", case.name()),
            versus("load, s", pair, load_s, LESS_IS_FASTER),
            versus("first token, s", pair, first_token_s, LESS_IS_FASTER),
        ]
        .concat()
    };
    Table {
        title: "Time from the start of the process",
        note: "Until the context is open, and until the logits of the first evaluation. Ratios say how many times as fast as \
               llama.cpp hobbit is.",
        n_words: 4,
        ..of_study(&study, study.hobbit().map(row))
    }
}

/// Whether long runs stay as they begin.
fn long(entries: &[Entry]) -> Table {
    let study = Study::of(entries, &LONG);
    let row = |(case, record): (&Case, &Record)| {
        let ends = warm_and_end(record);
        let (warm, end) = (ends.map(|(warm, _)| warm), ends.map(|(_, end)| end));
        let tenth = |nth| found(case, Spread::of(tenth_ts(record, nth).into_iter()));
        let size = |size: Option<u64>| shown(size.map(|size| size as f64), bytes);
        let count = |count: Option<u32>| count.map_or(UNKNOWN.into(), |count| count.to_string());
        let sizes = record.more.hobbit_series.iter().map(|moment| moment.rss as f64).chain(peak_rss(record));
        [
            cell("model", case.place.model.as_str()),
            cell("limit", limit(case.place.limit)),
            cell("engine", case.name()),
            cell("tokens", record.more.hobbit_steps_ns.len().to_string()),
            cell("first tenth, t/s", tenth(FIRST)),
            cell("middle tenth, t/s", tenth(MIDDLE)),
            cell("last tenth, t/s", tenth(LAST)),
            cell("RSS at 10 %", size(warm.map(|moment| moment.rss))),
            cell("RSS at the end", size(end.map(|moment| moment.rss))),
            cell("largest RSS", peak(sizes.max_by(f64::total_cmp), case.place.limit)),
            cell("heap at 10 %", size(warm.and_then(|moment| moment.heap))),
            cell("heap at the end", size(end.and_then(|moment| moment.heap))),
            cell("files at 10 %", count(warm.map(|moment| moment.fds))),
            cell("files at the end", count(end.map(|moment| moment.fds))),
        ]
        .concat()
    };
    let runs = study.cases.iter().flat_map(|case| case.runs.iter().map(move |run| (case, &run.record)));
    Table {
        title: "Long runs",
        note: "RSS, heap in use and open files when a tenth of the tokens was evaluated and when all were.",
        n_words: 3,
        ..of_study(&study, runs.map(row))
    }
}

#[cfg(test)]
mod tests;
