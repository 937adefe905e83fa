//! `hobbit-sim recall`: the share of used experts that predictors name.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;

use super::args::RecallArgs;
use super::table;
use hobbit_core::predict::{Gates, PathTable, PredictorKind, Recall, RecallCounts};
use hobbit_core::sim::{PredictedBy, Recording, path_recall, path_table, recall};

/// One predictor at one distance.
#[derive(Serialize)]
struct Row {
    predictor: String,
    distance: u8,
    #[serde(flatten)]
    all: Found,
    layers: Vec<OfLayer>,
}

#[derive(Serialize)]
struct OfLayer {
    layer: u16,
    #[serde(flatten)]
    found: Found,
}

/// Shares from 0 to 1, and the mean number of experts predicted per token and layer.
#[derive(Clone, Copy, Serialize)]
struct Found {
    recall: f64,
    precision: f64,
    experts: f64,
}

pub fn run(args: &RecallArgs, out: &mut dyn Write) -> Result<()> {
    let judged = |recording: &Recording| -> Result<_> {
        let table = path_table(&super::others(&args.calibration, recording)?);
        Ok(rows(recording, &table, args.distance))
    };
    let fields = |recording: &Recording| {
        Ok(serde_json::json!({
            "file": recording.path,
            "model": recording.header.model.name,
            "settings": recording.header.settings,
            "tokens": recording.n_tokens(),
            "predictors": judged(recording)?,
        }))
    };
    let text = |recording: &Recording| Ok(lines(recording, &judged(recording)?));
    super::each((&args.files, None), args.json.json, out, fields, text)
}

/// A row for every predictor that the recording supports.
fn rows(recording: &Recording, table: &PathTable, distance_max: u8) -> Vec<Row> {
    let mut rows = Vec::new();
    let kinds = PredictorKind::ALL.into_iter().map(PredictedBy::Predictor).chain([PredictedBy::Oracle]);
    for predictor in kinds {
        let found = match predictor {
            PredictedBy::Predictor(PredictorKind::PathTable) => path_recall(recording, table.clone(), distance_max),
            _ => recall(recording, predictor, distance_max),
        };
        rows.extend((1..=distance_max).filter_map(|distance| row(recording, predictor, distance, &found)));
    }
    rows
}

fn row(recording: &Recording, predictor: PredictedBy, distance: u8, recall: &Recall) -> Option<Row> {
    let mut layers = Vec::new();
    let mut n_judged = 0.0;
    for layer in &recording.header.model.layers {
        let counts = recall.get(layer.layer, distance);
        let judged = counts.used as f64 / f64::from(layer.n_used);
        n_judged += judged;
        layers.extend(found(counts, judged).map(|found| OfLayer { layer: layer.layer, found }));
    }
    let all = found(recall.total(distance), n_judged)?;
    Some(Row { predictor: predictor.to_string(), distance, all, layers })
}

/// `None` if nothing was predicted.
fn found(counts: RecallCounts, n_judged: f64) -> Option<Found> {
    let (recall, precision) = (counts.recall()?, counts.precision()?);
    Some(Found { recall, precision, experts: counts.predicted as f64 / n_judged })
}

fn lines(recording: &Recording, rows: &[Row]) -> String {
    let layers = &recording.header.model.layers;
    let numbers: String = layers.iter().map(|layer| format!(",{}", layer.layer)).collect();
    let heading = format!("predictor,distance,experts,precision,recall{numbers}");
    let percent = |share: f64| format!("{:.1}", 100.0 * share);
    let cells = rows.iter().map(|row| {
        let all = row.all;
        let mut cells = vec![row.predictor.clone(), row.distance.to_string(), format!("{:.2}", all.experts)];
        cells.extend([percent(all.precision), percent(all.recall)]);
        cells.extend(layers.iter().map(|layer| {
            let judged = row.layers.iter().find(|judged| judged.layer == layer.layer);
            judged.map_or("-".into(), |judged| percent(judged.found.recall))
        }));
        cells
    });
    let mut text = table(&heading, &cells.collect::<Vec<_>>(), 1);
    text += "experts: predicted for a token and layer; precision and recall in percent, recall also of each layer\n";
    if let Some(most) = layers.iter().map(|layer| layer.n_expert).max() {
        let quarter = 100.0 * f64::from(1.0 - Gates::PERCENTILE);
        text += &format!(
            "cross-layer takes the best {quarter} % of a layer's experts (here of {most}), and no fewer than are used\n"
        );
    }
    text
}
