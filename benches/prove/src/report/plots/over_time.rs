//! Memory and speed while a process runs.

use super::super::group::{Case, Study};
use super::super::number;
use super::super::read::Entry;
use super::{Figure, room};
use hobbit::units::{GIB, MIB};
use hobbit_programs::svg::{Line, Plot};

/// Points of a speed's line.
const POINTS: usize = 60;

/// Cases that shared model, memory and test, in one plot.
fn by_place<'a>(study: &Study<'a>) -> Vec<(String, Option<u64>, Vec<Case<'a>>)> {
    let places = study.distinct(|case| (case.model.clone(), case.limit, case.test));
    let of_place = |(model, limit, test): (String, Option<u64>, _)| {
        let is_here = |case: &&Case| (&case.model, case.limit, case.test) == (&model, limit, test);
        let cases = study.cases.iter().filter(is_here).cloned().collect();
        (format!("{}, {test}", room(&model, limit)), limit, cases)
    };
    places.into_iter().map(of_place).collect()
}

/// A line for each case, of its first run that has points.
fn lines(cases: &[Case], points: impl Fn(&Entry) -> Vec<(f64, f64)>) -> Vec<Line> {
    let line = |case: &Case| {
        let points = case.runs.iter().map(|run| points(run)).find(|points| points.len() > 1)?;
        let killed = if case.outcome() == "ok" { String::new() } else { format!(" ({})", case.outcome()) };
        Some(Line { name: format!("{}{killed}", case.name()), points, ..Line::default() })
    };
    cases.iter().filter_map(line).collect()
}

/// The resident set of every engine, and the limit.
pub fn memory(entries: &[Entry], labels: &[&str]) -> Vec<Figure> {
    let study = Study::of(entries, labels);
    let mut figures = Vec::new();
    for (place, limit, cases) in by_place(&study) {
        let series = |run: &Entry| {
            let moments = run.record.more.hobbit_series.iter();
            moments.map(|moment| (moment.t_ns as f64 / 1e9, moment.rss as f64)).collect()
        };
        let mut lines = lines(&cases, series);
        if lines.is_empty() {
            continue;
        }
        let ends = lines.iter().flat_map(|line| &line.points).map(|point| point.0).fold(0.0, f64::max);
        if let Some(limit) = limit {
            let points = vec![(0.0, limit as f64), (ends, limit as f64)];
            lines.push(Line {
                name: format!("limit, {}", number::bytes(limit as f64)),
                points,
                bound: true,
                ..Line::default()
            });
        }
        let most = lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max);
        let (unit, name) = if most >= GIB as f64 { (GIB as f64, "GiB") } else { (MIB as f64, "MiB") };
        lines.iter_mut().flat_map(|line| &mut line.points).for_each(|point| point.1 /= unit);
        let plot = Plot {
            x_label: "seconds since the process started".into(),
            y_label: format!("resident set, {name}"),
            lines,
            from_zero: true,
            y_max: None,
        };
        figures.push(Figure {
            title: format!("Memory over time: {place}"),
            svg: plot.draw(),
            note: "Across: time. Up: memory of the process; below the dashed limit is better. Of repeated runs the first. The resident set counts mapped pages of the model's file, which the kernel may drop.",
        });
    }
    figures
}

/// Tokens per second while decoding.
pub fn speed(entries: &[Entry], labels: &[&str]) -> Vec<Figure> {
    let study = Study::of(entries, labels);
    let mut figures = Vec::new();
    for (place, _, cases) in by_place(&study) {
        let lines = lines(&cases, |run| speeds(&run.record.more.hobbit_steps_ns));
        if lines.is_empty() {
            continue;
        }
        let plot = Plot {
            x_label: "seconds of decoding".into(),
            y_label: "decode, tokens per second".into(),
            lines,
            from_zero: true,
            y_max: None,
        };
        let title = format!("Decode speed over time: {place}");
        figures.push(Figure {
            title,
            svg: plot.draw(),
            note: "Across: time. Up: tokens per second, more is better: means of a sixtieth of the tokens each; of repeated runs the first.",
        });
    }
    figures
}

/// (seconds in the middle, tokens per second) of steps taken together.
fn speeds(steps_ns: &[u64]) -> Vec<(f64, f64)> {
    let mut before = 0.0;
    let of_chunk = |steps: &[u64]| {
        let seconds = steps.iter().map(|ns| *ns as f64 / 1e9).sum::<f64>();
        let middle = before + seconds / 2.0;
        before += seconds;
        (seconds > 0.0).then(|| (middle, steps.len() as f64 / seconds))
    };
    steps_ns.chunks(steps_ns.len().div_ceil(POINTS).max(1)).filter_map(of_chunk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_means_of_steps_in_their_order() {
        assert_eq!(speeds(&[]), []);
        assert_eq!(speeds(&[0, 0]), []);
        assert_eq!(speeds(&[500_000_000, 250_000_000]), [(0.25, 2.0), (0.625, 4.0)]);
        let many = speeds(&[1_000_000; 601]);
        assert_eq!(many.len(), 55, "eleven at a time");
        assert!(many.iter().all(|(_, speed)| (speed - 1000.0).abs() < 1e-6));
    }
}
