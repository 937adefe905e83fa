//! Speed against memory, context and experts.

use super::super::figures::{Measure, decode_ts, in_memory, of_model, prompt_ts, roofline_ts, whole_s};
use super::super::group::{BASELINE, Case, FITS, HOBBIT, Study};
use super::super::read::Entry;
use super::{Figure, room};
use hobbit_programs::svg::{Line, Plot};

/// The roofline may rise so far above what was measured before the axis ends.
const ROOFLINE_ROOM: f64 = 1.3;

/// Puts a case on a line at `x`.
fn push(line: &mut Line, x: f64, case: &Case, figure: Measure) {
    let Some(spread) = case.spread(figure) else { return };
    if line.points.iter().any(|(known, _)| *known == x) {
        return;
    }
    line.points.push((x, spread.median));
    if spread.n > 1 {
        line.spreads.push((x, spread.least, spread.most));
    }
}

fn sorted(mut lines: Vec<Line>) -> Vec<Line> {
    lines.retain(|line| !line.points.is_empty());
    lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    lines
}

/// Decode speed by the share of experts in memory, a line per engine, and the roofline.
pub fn curve(entries: &[Entry]) -> Vec<Figure> {
    let study = Study::of(entries, &["curve"]);
    let mut figures = Vec::new();
    for (model, test) in study.distinct(|case| (case.model.clone(), case.test)) {
        let mut lines: Vec<Line> = Vec::new();
        let mut baseline = Line { name: BASELINE.into(), ..Line::default() };
        let mut roofline = Line { name: "roofline: if only reading took time".into(), bound: true, ..Line::default() };
        let cases: Vec<&Case> = study.hobbit().filter(|case| (&case.model, case.test) == (&model, test)).collect();
        let first_variant = cases.first().map(|case| case.variant);
        for case in &cases {
            let Some(share) = case.median(in_memory) else { continue };
            let x = 100.0 * share;
            let name = case.name();
            if !lines.iter().any(|line| line.name == name) {
                lines.push(Line { name: name.clone(), ..Line::default() });
            }
            if let Some(line) = lines.iter_mut().find(|line| line.name == name) {
                push(line, x, case, decode_ts);
            }
            if Some(case.variant) == first_variant {
                push(&mut roofline, x, case, roofline_ts);
                if let Some(stock) = study.baseline(case) {
                    push(&mut baseline, x, stock, decode_ts);
                }
            }
        }
        roofline.spreads.clear();
        lines.push(baseline);
        let measured = lines.iter().flat_map(|line| line.points.iter().map(|point| point.1)).fold(0.0, f64::max);
        lines.push(roofline);
        let lines = sorted(lines);
        if measured > 0.0 {
            let plot = Plot {
                x_label: "experts in memory, %".into(),
                y_label: "decode, tokens per second".into(),
                lines,
                y_max: Some(ROOFLINE_ROOM * measured),
                from_zero: true,
            };
            figures.push(Figure {
                title: format!("Decode speed by memory: {model}, {test}"),
                svg: plot.draw(),
                note: "Across: how many of the model's experts have room in memory. Up: tokens per second, more is better. llama.cpp \
                       stands where hobbit stands with the same limit; dashed: what reading alone would allow.",
            });
        }
    }
    figures
}

/// The whole command, prompts and decoding by the budget's share of the model.
pub fn fits(entries: &[Entry]) -> Vec<Figure> {
    let study = Study::of(entries, &[FITS]);
    let parts: [(&str, Measure, &str, &'static str); 3] = [
        (
            "Whole command",
            whole_s,
            "seconds",
            "Across: memory of the control group, in percent of the model's bytes. Up: seconds from the start of the process to its end, less is better.",
        ),
        (
            "Prompt",
            prompt_ts,
            "prompt, tokens per second",
            "Across: memory of the control group, in percent of the model's bytes. Up: tokens per second of the prompt, more is better.",
        ),
        (
            "Decode",
            decode_ts,
            "decode, tokens per second",
            "Across: memory of the control group, in percent of the model's bytes. Up: tokens per second while decoding, more is better.",
        ),
    ];
    let mut figures = Vec::new();
    for (model, test) in study.distinct(|case| (case.model.clone(), case.test)) {
        for (part, figure, y_label, up) in parts {
            let mut lines: Vec<Line> = Vec::new();
            for case in study.cases.iter().filter(|case| (&case.model, case.test) == (&model, test)) {
                let Some(share) = case.runs.iter().find_map(|run| of_model(&run.record)) else { continue };
                let name = case.name();
                if !lines.iter().any(|line| line.name == name) {
                    lines.push(Line { name: name.clone(), ..Line::default() });
                }
                if let Some(line) = lines.iter_mut().find(|line| line.name == name) {
                    push(line, 100.0 * share, case, figure);
                }
            }
            let lines = sorted(lines);
            if !lines.is_empty() {
                let x_label = "budget, % of the model".into();
                let plot = Plot { x_label, y_label: y_label.into(), lines, from_zero: true, y_max: None };
                let title = format!("{part} by memory: {model}, {test}");
                figures.push(Figure { title, svg: plot.draw(), note: up });
            }
        }
    }
    figures
}

/// By tokens in the context.
pub fn context(entries: &[Entry]) -> Vec<Figure> {
    let study = Study::of(entries, &["context"]);
    let note = "Across: tokens that are in the context before. Up: tokens per second, more is better.";
    let mut figures = Vec::new();
    for (model, limit) in study.distinct(|case| (case.model.clone(), case.limit)) {
        let is_here = |case: &Case| case.model == model && case.limit == limit;
        let depth = |case: &Case| Some(f64::from(case.test.n_depth));
        figures.extend(sweep(&study, is_here, depth, ("tokens in the context", note), &room(&model, limit)));
    }
    figures
}

/// By experts of a layer: over several models.
pub fn experts(entries: &[Entry]) -> Vec<Figure> {
    let study = Study::of(entries, &["experts"]);
    let n_expert = |case: &Case| case.runs.iter().find_map(|run| run.record.hobbit_n_expert).map(f64::from);
    let note =
        "Across: experts of a layer, the larger their number the smaller each. Up: tokens per second, more is better.";
    sweep(&study, |_| true, n_expert, ("experts of a layer", note), "the models of the table")
}

fn sweep(
    study: &Study,
    is_here: impl Fn(&Case) -> bool,
    x: impl Fn(&Case) -> Option<f64>,
    (x_label, note): (&str, &'static str),
    place: &str,
) -> Vec<Figure> {
    let mut figures = Vec::new();
    let parts: [(&str, Measure); 2] = [("Decode", decode_ts), ("Prompt", prompt_ts)];
    for (part, figure) in parts {
        let mut lines: Vec<Line> = Vec::new();
        let of_engines = study.cases.iter().filter(|case| [HOBBIT, BASELINE].contains(&case.engine));
        for case in of_engines.filter(|case| is_here(case)) {
            // Where the tests differ in more than the context, they are lines of their own.
            let tests = study.distinct(|case| (case.test.n_prompt, case.test.n_gen));
            let test = super::super::group::Test { n_depth: 0, ..case.test };
            let name = if tests.len() > 1 { format!("{}, {test}", case.name()) } else { case.name() };
            // The baseline does not know how many experts a layer has.
            let same = || study.cases.iter().filter(|other| other.place() == case.place());
            let Some(at) = x(case).or_else(|| same().find_map(&x)) else { continue };
            if !lines.iter().any(|line| line.name == name) {
                lines.push(Line { name: name.clone(), ..Line::default() });
            }
            if let Some(line) = lines.iter_mut().find(|line| line.name == name) {
                push(line, at, case, figure);
            }
        }
        let lines = sorted(lines);
        if !lines.is_empty() {
            let plot = Plot {
                x_label: x_label.into(),
                y_label: format!("{}, tokens per second", part.to_lowercase()),
                lines,
                from_zero: true,
                y_max: None,
            };
            let title = format!("{part} speed by {x_label}: {place}");
            figures.push(Figure { title, svg: plot.draw(), note });
        }
    }
    figures
}
