//! `hobbit-sim replay`: a table of simulated outcomes.

use std::io::Write;

use anyhow::{Result, ensure};

use super::args::{ReplayArgs, WorldArgs};
use super::compare::{Row, compare};
use super::table;
use hobbit_core::predict::{PredictorKind, RecallCounts};
use hobbit_core::sim::{PredictedBy, Recording, recall};
use hobbit_core::trace::Layer;
use hobbit_core::units::{MIB, Percent};

/// Prediction distances, in layers, for which recall is printed.
const RECALL_DISTANCES: [u8; 3] = [1, 2, 3];

pub fn run(args: &ReplayArgs, out: &mut dyn Write) -> Result<()> {
    let path_table = PredictedBy::Predictor(PredictorKind::PathTable);
    ensure!(
        !args.predictor.0.contains(&path_table) || !args.world.calibration.is_empty(),
        "--predictor path-table: there is no table; give other traces of the model with --calibration FILES"
    );
    let mut all = Vec::new();
    for (file, n_before) in args.files.iter().zip(0..) {
        let recording = super::open(file, args.world.low_bytes)?;
        let of_world = |world: &WorldArgs| compare(&recording, world, &args.budget, &args.predictor.0, &args.policy.0);
        let by_strength: Vec<Vec<Row>> = args.world.each().iter().map(of_world).collect::<Result<_>>()?;
        if args.json {
            all.push(serde_json::json!({
                "file": file,
                "model": recording.header.model.name,
                "settings": recording.header.settings,
                "tokens": recording.n_tokens(),
                "recall": recalls(&recording),
                "open_loop": by_strength.iter().flatten().any(|row| row.routing.is_some()),
                "replays": by_strength.concat(),
            }));
        } else {
            let gap = if n_before > 0 { "\n" } else { "" };
            writeln!(out, "{gap}{}", about(&recording))?;
            for rows in &by_strength {
                let words = rows.first().and_then(|row| row.routing.as_deref());
                if by_strength.len() > 1 {
                    writeln!(out, "\nWith {}:", words.unwrap_or("what routers chose"))?;
                }
                write!(out, "{}", lines(rows))?;
                if let Some(words) = words {
                    write!(out, "{}", routing_lines(words, rows))?;
                }
            }
        }
    }
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
    }
    Ok(())
}

/// Recall of every predictor that the recording supports, independent of residency.
fn recalls(recording: &Recording) -> Vec<serde_json::Value> {
    let mut all = Vec::new();
    for kind in PredictorKind::ALL {
        let recall = recall(recording, PredictedBy::Predictor(kind), RECALL_DISTANCES[RECALL_DISTANCES.len() - 1]);
        for distance in RECALL_DISTANCES {
            let total = recall.total(distance);
            if total.predicted == 0 {
                continue;
            }
            let part = |counts: RecallCounts| counts.recall().unwrap_or(0.0);
            let of_layer = |layer: &Layer| {
                let recall = part(recall.get(layer.layer, distance));
                serde_json::json!({ "layer": layer.layer, "recall": recall })
            };
            all.push(serde_json::json!({
                "predictor": kind.to_string(),
                "distance": distance,
                "recall": part(total),
                "layers": recording.header.model.layers.iter().map(of_layer).collect::<Vec<_>>(),
            }));
        }
    }
    all
}

pub fn about(recording: &Recording) -> String {
    let header = &recording.header;
    let experts: u32 = header.model.layers.iter().map(|layer| u32::from(layer.n_expert)).sum();
    format!(
        "{}: {}, {} layers, {experts} experts; {} tokens, recorded with {} and {} MiB of experts",
        recording.path.display(),
        header.model.name,
        header.model.layers.len(),
        recording.n_tokens(),
        header.settings.policy,
        header.settings.cache_bytes >> 20,
    )
}

/// A table of how the experts that single tokens needed were served.
fn routing_lines(words: &str, rows: &[Row]) -> String {
    let heading = [
        "budget",
        "predictor",
        "policy",
        "hit",
        "re-ranked",
        "low",
        "dropped",
        "loaded",
        "given up",
        "refused",
        "MiB/tok",
    ];
    let cells = rows.iter().filter_map(|row| {
        let (decode, shares) = (row.outcome.decode, row.shares?);
        let percent = |share: f64| Percent(share).to_string();
        let given_up = decode.rerouted.mean_given_up();
        let of_parts = [shares.hit, shares.reranked, shares.low, shares.dropped, shares.loaded].map(percent);
        let mut cells = vec![row.budget.clone(), row.predictor.clone(), row.policy.clone()];
        cells.extend(of_parts);
        cells.push(given_up.map_or("-".into(), percent));
        cells.push(decode.rerouted.refused.to_string());
        cells.push(format!("{:.2}", decode.bytes as f64 / decode.tokens.max(1) as f64 / MIB as f64));
        Some(cells)
    });
    let table = table(&heading, &cells.collect::<Vec<_>>(), 3);
    format!(
        "\nSingle tokens with {words}. Open-loop: the tokens are the recorded ones, which these experts would have changed. Shares \
         are of the needed experts; 'given up' is the mean share of a token's weight that going elsewhere cost.\n{table}"
    )
}

fn lines(rows: &[Row]) -> String {
    let heading = [
        "budget",
        "predictor",
        "policy",
        "hits",
        "penalty/tok",
        "vs lru",
        "vs best",
        "MiB/tok",
        "stall ms/tok",
        "tok/s",
        "prefetch",
        "useful",
    ];
    let cells = rows.iter().map(|row| {
        let (total, decode) = (row.outcome.total(), row.outcome.decode);
        let per_token = |amount: f64| amount / total.tokens.max(1) as f64;
        let ratio = |ratio: Option<f64>| ratio.map_or("-".into(), |ratio| format!("{ratio:.3}"));
        let speed = decode.tokens_per_second().or(total.tokens_per_second());
        let (issued, useful) = (row.outcome.prefetch.issued, row.outcome.prefetch.useful);
        vec![
            row.budget.clone(),
            row.predictor.clone(),
            row.policy.clone(),
            total.hit_rate().map_or("-".into(), |rate| Percent(rate).to_string()),
            format!("{:.3}", per_token(total.penalty)),
            ratio(row.penalty_to_lru),
            ratio(row.penalty_to_belady),
            format!("{:.2}", per_token(row.outcome.bytes_read as f64) / MIB as f64),
            format!("{:.2}", 1e3 * per_token(total.stall_seconds)),
            speed.map_or("-".into(), |speed| format!("{speed:.2}")),
            if issued > 0 { issued.to_string() } else { "-".into() },
            if issued > 0 { format!("{:.0}", Percent(useful as f64 / issued as f64)) } else { "-".into() },
        ]
    });
    table(&heading, &cells.collect::<Vec<_>>(), 3)
}
