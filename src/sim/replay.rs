//! `hobbit-sim replay`: one recording under many settings, on all processors, with results in a fixed order.

use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, ensure};
use serde::Serialize;

use super::args::{ReplayArgs, WorldArgs};
use super::table;
use hobbit_core::predict::PredictorKind;
use hobbit_core::sim::{Budget, Config, Eviction, Memory, Outcome, PredictedBy, Recording, Shares, SimError, replay};
use hobbit_core::units::{MIB, Percent};

pub fn run(args: &ReplayArgs, out: &mut dyn Write) -> Result<()> {
    let path_table = PredictedBy::Predictor(PredictorKind::PathTable);
    ensure!(
        !args.predictor.0.contains(&path_table) || !args.world.calibration.is_empty(),
        "--predictor path-table: there is no table; give other traces of the model with --calibration FILES"
    );
    let rows = |recording: &Recording| compare(recording, &args.world, &args.budget, &args.predictor.0, &args.policy.0);
    let fields = |recording: &Recording| {
        let rows = rows(recording)?;
        Ok(serde_json::json!({
            "file": recording.path,
            "model": recording.header.model.name,
            "settings": recording.header.settings,
            "tokens": recording.n_tokens(),
            "open_loop": rows.iter().any(|row| row.routing.is_some()),
            "replays": rows,
        }))
    };
    let text = |recording: &Recording| {
        let rows = rows(recording)?;
        let words = rows.first().and_then(|row| row.routing.as_deref());
        Ok(lines(&rows) + &words.map_or_else(String::new, |words| routing_lines(words, &rows)))
    };
    super::each((&args.files, args.world.precision.assumed.low_bytes), args.json.json, out, fields, text)
}

/// A table of how the experts that single tokens needed were served.
fn routing_lines(words: &str, rows: &[Row]) -> String {
    let heading = "budget,predictor,policy,hit,re-ranked,low,dropped,loaded,given up,refused,MiB/tok";
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
    let table = table(heading, &cells.collect::<Vec<_>>(), 3);
    format!(
        "\nSingle tokens with {words}. Open-loop: the tokens are the recorded ones, although these experts would \
         change them. Shares are of the needed experts; 'given up' is the mean loss of a token's weight by \
         re-routing.\n{table}"
    )
}

fn lines(rows: &[Row]) -> String {
    let heading = "budget,predictor,policy,hits,penalty/tok,vs lru,vs best,MiB/tok,stall ms/tok,tok/s,prefetch,useful";
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
    table(heading, &cells.collect::<Vec<_>>(), 3)
}

/// One replay, compared with LRU and the optimum.
#[derive(Clone, Debug, Serialize)]
struct Row {
    /// Eviction policy.
    policy: String,
    /// Memory for experts.
    budget: String,
    /// Predictor.
    predictor: String,
    /// Approximations of routing, in words; `None` for nothing. The replay is then open-loop: the recorded tokens stay
    /// the same.
    routing: Option<String>,
    /// Shares of hits, misses and substitutions among the experts that decoded tokens needed.
    shares: Option<Shares>,
    /// Penalty divided by LRU's with the same budget and predictor; `None` if LRU has none.
    penalty_to_lru: Option<f64>,
    /// Penalty divided by the optimum's without prefetch; `None` if the optimum has none.
    penalty_to_belady: Option<f64>,
    /// Measurements of the replay.
    outcome: Outcome,
}

/// Every combination, ordered by budget, predictor and policy; LRU and the optimum are always included.
fn compare(
    recording: &Recording,
    world: &WorldArgs,
    budgets: &[Budget],
    predictors: &[PredictedBy],
    evictions: &[Eviction],
) -> Result<Vec<Row>> {
    let (base, routing) = (world.config(recording)?, world.routing.options(recording).words());
    let lru: Eviction = "lru".parse()?;
    let blind = PredictedBy::Predictor(PredictorKind::None);
    let mut configs = Vec::new();
    for &budget in budgets {
        let memory = Memory { budget, ..base.memory };
        for &predictor in predictors {
            let mut all = evictions.to_vec();
            all.retain(|eviction| *eviction != Eviction::Belady);
            if !all.contains(&lru) {
                all.insert(0, lru);
            }
            for eviction in all {
                configs.push(world.with_predictor(&Config { eviction, memory, ..base.clone() }, predictor));
            }
        }
        configs.push(world.with_predictor(&Config { eviction: Eviction::Belady, memory, ..base.clone() }, blind));
    }
    let outcomes = on_all_processors(&configs, |config| replay(recording, config, &mut |_, _, _| {}))?;
    let penalty = |eviction, predictor, budget| {
        let is_it = |config: &Config| {
            (config.eviction, config.predictor, config.memory.budget) == (eviction, predictor, budget)
        };
        let at = configs.iter().position(is_it)?;
        Some(outcomes[at].total().penalty).filter(|penalty| *penalty > 0.0)
    };
    let rows = configs.iter().zip(&outcomes).map(|(config, outcome)| {
        let own = outcome.total().penalty;
        Row {
            policy: config.eviction.to_string(),
            budget: config.memory.budget.to_string(),
            predictor: config.predictor.to_string(),
            routing: routing.clone(),
            shares: outcome.decode.shares(),
            penalty_to_lru: penalty(lru, config.predictor, config.memory.budget).map(|lru| own / lru),
            penalty_to_belady: penalty(Eviction::Belady, blind, config.memory.budget).map(|least| own / least),
            outcome: outcome.clone(),
        }
    });
    Ok(rows.collect())
}

fn on_all_processors<T: Sync, R: Send>(
    work: &[T],
    run: impl Fn(&T) -> Result<R, SimError> + Sync,
) -> Result<Vec<R>, SimError> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    let n_threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(work.len());
    std::thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(|| {
                while let Some((at, item)) = work.iter().enumerate().nth(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = run(item);
                    done.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}
