//! `hobbit-sim recall`: the share of used experts that predictors name, and how many experts that takes. `hobbit-sim
//! curve`: hit rates by the share of a layer's experts that have slots.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
use serde::Serialize;

use super::args::{CurveArgs, RecallArgs};
use super::table;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::forecast::{Locality, SHARES};
use hobbit_core::predict::{Gates, PathTable, PredictorKind, Recall, RecallCounts};
use hobbit_core::sim::{
    Eviction, PredictedBy, Recording, Widths, path_recall, path_table, recall, widths, widths_by_distance,
};
use hobbit_core::trace::Layer;
use hobbit_core::units::Percent;

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

/// Coverage by the n best scores of later routers.
#[derive(Serialize)]
struct Width {
    distance: u8,
    /// Share of tokens whose first expert has the best score.
    top_1: Option<f64>,
    /// Fewest experts that reach the target recall; `None` if all that were recorded do not.
    experts_for_aim: Option<usize>,
    layers: Vec<WidthOfLayer>,
    curve: Vec<Found>,
}

#[derive(Serialize)]
struct WidthOfLayer {
    layer: u16,
    experts_for_aim: Option<usize>,
}

pub fn run(args: &RecallArgs, out: &mut dyn Write) -> Result<()> {
    let aim = args.aim / 100.0;
    let judged = |recording: &Recording| -> Result<_> {
        let table = path_table(&super::others(&args.calibration, recording)?);
        let widths = widths(recording, args.distance);
        Ok((rows(recording, &table, args.distance), priced(recording, &widths, aim)))
    };
    let fields = |recording: &Recording| {
        let (rows, priced) = judged(recording)?;
        Ok(serde_json::json!({
            "file": recording.path,
            "model": recording.header.model.name,
            "settings": recording.header.settings,
            "tokens": recording.n_tokens(),
            "aim": aim,
            "predictors": rows,
            "best_of_later_routers": priced,
        }))
    };
    let text = |recording: &Recording| {
        let (rows, priced) = judged(recording)?;
        Ok(lines(recording, &rows, &priced, args.aim))
    };
    super::each((&args.files, None), args.json, out, fields, text)
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

fn priced(recording: &Recording, widths: &BTreeMap<(u16, u8), Widths>, aim: f64) -> Vec<Width> {
    let of_distance = |(distance, all): (u8, Widths)| {
        let of_layer = |layer: &Layer| {
            let own = widths.get(&(layer.layer, distance))?;
            Some(WidthOfLayer { layer: layer.layer, experts_for_aim: own.fewest(aim) })
        };
        let found = |n| Some(Found { recall: all.recall(n)?, precision: all.precision(n)?, experts: n as f64 });
        Width {
            distance,
            top_1: all.top_1(),
            experts_for_aim: all.fewest(aim),
            layers: recording.header.model.layers.iter().filter_map(of_layer).collect(),
            curve: (1..=all.n_max()).filter_map(found).collect(),
        }
    };
    widths_by_distance(widths).into_iter().map(of_distance).collect()
}

fn lines(recording: &Recording, rows: &[Row], widths: &[Width], aim: f64) -> String {
    let layers = &recording.header.model.layers;
    let numbers: String = layers.iter().map(|layer| format!(",{}", layer.layer)).collect();
    let heading = format!("predictor,distance,experts,precision,recall{numbers}");
    let percent = |share: f64| format!("{:.1}", 100.0 * share);
    let cells = rows.iter().map(|row| {
        let all = row.all;
        let mut cells = vec![row.predictor.clone(), row.distance.to_string(), format!("{:.2}", all.experts)];
        cells.extend([percent(all.precision), percent(all.recall)]);
        cells.extend(layers.iter().map(|layer| {
            let own = row.layers.iter().find(|own| own.layer == layer.layer);
            own.map_or("-".into(), |own| percent(own.found.recall))
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
    for width in widths {
        if let Some(top_1) = width.top_1 {
            text += &format!(
                "distance {}: the best score is the first expert's for {} %\n",
                width.distance,
                percent(top_1)
            );
        }
        text += &match width.experts_for_aim {
            Some(n) => {
                let precision = percent(width.curve[n - 1].precision);
                format!("distance {}: {aim} % takes the best {n} experts; precision {precision} %\n", width.distance)
            }
            None => {
                let reached = width.curve.last().map_or("-".into(), |found| percent(found.recall));
                let n = width.curve.len();
                format!(
                    "distance {}: {aim} % takes more than the {n} that were recorded, which hold {reached} %\n",
                    width.distance
                )
            }
        };
    }
    text
}

/// Prints hit rates under LRU, the default policy and the optimum.
pub fn curve(args: &CurveArgs, out: &mut dyn Write) -> Result<()> {
    let policies = [Eviction::Policy(PolicyKind::Lru), Eviction::Policy(PolicyKind::default()), Eviction::Belady];
    let points = |recording: &Recording| -> Result<_> {
        let [lru, own, optimum] = policies.map(|policy| Locality::of(recording, policy));
        let curves = [lru?, own?, optimum?];
        Ok(SHARES.map(|share| (share, curves.each_ref().map(|curve| curve.hit(share)))))
    };
    let fields = |recording: &Recording| {
        let point = |(share, hits): (f64, [f64; 3])| {
            let mut row = serde_json::json!({});
            policies.iter().zip(hits).for_each(|(policy, hit)| row[policy.to_string()] = hit.into());
            row["share"] = share.into();
            row
        };
        Ok(serde_json::json!({ "file": recording.path, "points": points(recording)?.map(point).to_vec() }))
    };
    let text = |recording: &Recording| {
        let row = |(share, hits): (f64, [f64; 3])| {
            let cells = std::iter::once(format!("{:.0}", Percent(share)));
            cells.chain(hits.iter().map(|hit| format!("{hit:.4}"))).collect()
        };
        let heading: String = policies.iter().map(|policy| format!(",{policy}")).collect();
        Ok(table(&format!("slots{heading}"), &points(recording)?.map(row), 1))
    };
    super::each((&args.files, None), args.json, out, fields, text)
}
