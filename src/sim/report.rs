//! `hobbit-sim report`: what traces say, in one self-contained page.

use std::fmt::Write as _;
use std::io::Write;

use anyhow::Result;

use super::args::ReportArgs;
use super::compare::{Row, compare};
use crate::output::write_whole;
use crate::plot::{self, Line, escape, heat_map};
use hobbit::files::Kind;
use hobbit::predict::PredictorKind;
use hobbit::sim::{PredictedBy, Recording, Widths, hit_curves, recall, widths, widths_by_distance};
use hobbit::units::Percent;

/// Distances at which predictions are judged.
const DISTANCES: [u8; 3] = [1, 2, 3];

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}\
table{border-collapse:collapse;font-size:13px}td,th{padding:.15rem .6rem;text-align:right}\
td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}tr:nth-child(even){background:#f4f4f4}";

pub fn run(args: &ReportArgs, out: &mut dyn Write) -> Result<()> {
    super::check_output(&args.output, Kind::Page, &args.files)?;
    let mut page = format!(
        "<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>hobbit-sim report</title>\n<style>{STYLE}{}</style>\n\
         <h1>What the traces say</h1>\n",
        plot::STYLE
    );
    for file in &args.files {
        let recording = super::open(file, args.world.low_bytes)?;
        let blind = PredictedBy::Predictor(PredictorKind::None);
        let rows = compare(&recording, &args.world, &args.budget, &[blind], &args.policy.0)?;
        section(&mut page, &recording, &rows);
    }
    page.push_str("</html>\n");
    write_whole(&args.output, &page)?;
    writeln!(out, "written to {}", args.output.display())?;
    Ok(())
}

fn section(page: &mut String, recording: &Recording, rows: &[Row]) {
    let model = &recording.header.model;
    let _ = write!(
        page,
        "<h2>{}</h2>\n<p>{} ({}), {} layers with experts, {} tokens.</p>\n",
        escape(&recording.path.display().to_string()),
        escape(&model.name),
        escape(&model.architecture),
        model.layers.len(),
        recording.n_tokens(),
    );
    let slots = |row: &Row| {
        let of_layers: u32 = row.outcome.layers.iter().map(|layer| layer.slots).sum();
        f64::from(of_layers) / row.outcome.layers.len().max(1) as f64
    };
    let hits = |row: &Row| row.outcome.total().hit_rate().map_or(f64::NAN, |rate| 100.0 * rate);
    let penalty = |row: &Row| row.outcome.total().penalty / row.outcome.total().tokens.max(1) as f64;
    let all: f64 = model.layers.iter().map(|layer| f64::from(layer.n_expert)).sum();
    let percent = |row: &Row| 100.0 * slots(row) * model.layers.len() as f64 / all.max(1.0);
    let _ = write!(
        page,
        "<h3>Hit rate by slots</h3>\n{}<h3>Miss penalty by budget</h3>\n{}",
        lines("slots per layer", "hits, %", &by_policy(rows, slots, hits)),
        lines("experts with a slot, %", "penalty per token", &by_policy(rows, percent, penalty)),
    );
    let _ = write!(page, "<h3>LRU in each layer</h3>\n{}", lines("slots", "hits, %", &curves(recording)));
    let _ = write!(page, "<h3>Numbers</h3>\n{}", numbers(rows));
    recalls(page, recording);
    let _ = write!(
        page,
        "<h3>Who is used</h3>\n<p>Uses of each expert (left to right) in each layer (top to bottom), against the most used \
         of its layer.</p>\n{}",
        uses(recording)
    );
}

/// A plot in which nothing is cut off.
fn lines(x_label: &str, y_label: &str, lines: &[Line]) -> String {
    plot::plot(x_label, y_label, lines, f64::INFINITY)
}

/// One line per policy, by x.
fn by_policy(rows: &[Row], x: impl Fn(&Row) -> f64, y: impl Fn(&Row) -> f64) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for row in rows {
        let point = [x(row), y(row)];
        match lines.iter_mut().find(|line| line.name == row.policy) {
            Some(line) => line.points.push(point),
            None => lines.push(Line { name: row.policy.clone(), points: vec![point], ..Line::default() }),
        }
    }
    lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a[0].total_cmp(&b[0])));
    lines
}

fn curves(recording: &Recording) -> Vec<Line> {
    let layers = &recording.header.model.layers;
    let curves = hit_curves(recording);
    // More than a few lines cannot be told apart: first, last and some between.
    let wanted = 8.min(layers.len());
    let chosen = (0..wanted).map(|i| if wanted > 1 { i * (layers.len() - 1) / (wanted - 1) } else { 0 });
    let line = |at: usize| {
        let of_layer = recording.batches().flat_map(|batch| &batch.layers).filter(|own| own.layer == layers[at].layer);
        let needed: usize = of_layer.map(|own| own.needed.len().max(usize::from(own.n_used))).sum();
        let rate = |n| 100.0 * curves[at].hits(n) as f64 / needed.max(1) as f64;
        let points = (0..=u32::from(layers[at].n_expert)).map(|n| [f64::from(n), rate(n)]).collect();
        Line { name: format!("layer {}", layers[at].layer), points, ..Line::default() }
    };
    chosen.map(line).collect()
}

fn numbers(rows: &[Row]) -> String {
    let mut html =
        "<table><tr><th>budget<th>policy<th>hits<th>penalty / token<th>vs LRU<th>vs best<th>tokens / s\n".to_owned();
    for row in rows {
        let total = row.outcome.total();
        let ratio = |ratio: Option<f64>| ratio.map_or("-".into(), |ratio| format!("{ratio:.3}"));
        let _ = writeln!(
            html,
            "<tr><td>{}<td>{}<td>{}<td>{:.3}<td>{}<td>{}<td>{}",
            row.budget,
            row.policy,
            total.hit_rate().map_or("-".into(), |rate| Percent(rate).to_string()),
            total.penalty / total.tokens.max(1) as f64,
            ratio(row.penalty_to_lru),
            ratio(row.penalty_to_belady),
            row.outcome.decode.tokens_per_second().map_or("-".into(), |speed| format!("{speed:.2}")),
        );
    }
    html.push_str("</table>\n");
    html
}

/// Recall by layer for every predictor that says anything, a line per distance.
fn recalls(page: &mut String, recording: &Recording) {
    let layers = &recording.header.model.layers;
    for kind in PredictorKind::ALL {
        let recall = recall(recording, PredictedBy::Predictor(kind), DISTANCES[DISTANCES.len() - 1]);
        let line = |&distance: &u8| {
            let points = layers.iter().filter_map(|layer| {
                let counts = recall.get(layer.layer, distance);
                (counts.predicted > 0).then(|| [f64::from(layer.layer), 100.0 * counts.recall().unwrap_or(0.0)])
            });
            let total = recall.total(distance);
            let mean = total.recall().map_or(String::new(), |mean| format!(" ({})", Percent(mean)));
            Line { name: format!("distance {distance}{mean}"), points: points.collect(), ..Line::default() }
        };
        let lines: Vec<Line> = DISTANCES.iter().map(line).filter(|line| !line.points.is_empty()).collect();
        if !lines.is_empty() {
            let _ = write!(
                page,
                "<h3>Recall of {kind}</h3>\n{}",
                self::lines("layer", "chosen experts that were predicted, %", &lines)
            );
        }
    }
    let by_distance = widths_by_distance(&widths(recording, DISTANCES[DISTANCES.len() - 1]));
    let line = |(distance, widths): (&u8, &Widths)| {
        let point = |n: usize| widths.recall(n).map(|recall| [n as f64, 100.0 * recall]);
        Line {
            name: format!("distance {distance}"),
            points: (1..=widths.n_max()).filter_map(point).collect(),
            ..Line::default()
        }
    };
    let lines: Vec<Line> = by_distance.iter().map(line).collect();
    if !lines.is_empty() {
        let x = "experts predicted for each layer, best scores first";
        let _ = write!(
            page,
            "<h3>Recall by experts predicted</h3>\n{}",
            self::lines(x, "chosen experts among them, %", &lines)
        );
    }
}

fn uses(recording: &Recording) -> String {
    let layers = &recording.header.model.layers;
    let mut rows: Vec<Vec<f64>> = layers.iter().map(|layer| vec![0.0; usize::from(layer.n_expert)]).collect();
    for record in recording.batches().flat_map(|batch| &batch.layers) {
        let Ok(at) = layers.binary_search_by_key(&record.layer, |layer| layer.layer) else { continue };
        record.chosen.iter().for_each(|&index| rows[at][usize::from(index)] += 1.0);
    }
    for row in &mut rows {
        let most = row.iter().copied().fold(1.0, f64::max);
        row.iter_mut().for_each(|uses| *uses /= most);
    }
    let rows: Vec<_> = layers.iter().map(|layer| layer.layer.to_string()).zip(rows).collect();
    heat_map("layer", "expert", "as often as the most used of the layer", &rows)
}
