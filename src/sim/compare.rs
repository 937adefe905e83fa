//! Replays one recording under many settings, on all processors, with results in a fixed order.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use serde::Serialize;

use super::args::WorldArgs;
use hobbit::options::{RoutingOptions, VirtualExperts};
use hobbit_core::predict::PredictorKind;
use hobbit_core::route::Rerouting;
use hobbit_core::sim::{Budget, Config, Eviction, Outcome, PredictedBy, Recording, Shares, SimError, replay};

/// One replay, compared with LRU and the optimum.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Eviction policy.
    pub policy: String,
    /// Memory for experts.
    pub budget: String,
    /// Predictor.
    pub predictor: String,
    /// What routing gives up, in words; `None` for nothing. The replay is then open-loop: the recorded tokens stay
    /// the same.
    pub routing: Option<String>,
    /// Shares of hits, misses and substitutions among the experts that decoded tokens needed.
    pub shares: Option<Shares>,
    /// Penalty divided by LRU's with the same budget and predictor; `None` if LRU has none.
    pub penalty_to_lru: Option<f64>,
    /// Penalty divided by the optimum's without prefetch; `None` if the optimum has none.
    pub penalty_to_belady: Option<f64>,
    /// Measurements of the replay.
    pub outcome: Outcome,
}

/// Every combination, ordered by budget, predictor and policy; LRU and the optimum are always included.
///
/// # Errors
/// A combination that cannot be replayed.
pub fn compare(
    recording: &Recording,
    world: &WorldArgs,
    budgets: &[Budget],
    predictors: &[PredictedBy],
    evictions: &[Eviction],
) -> Result<Vec<Row>> {
    let base = world.config(recording)?;
    let lru: Eviction = "lru".parse()?;
    let blind = PredictedBy::Predictor(PredictorKind::None);
    let mut configs = Vec::new();
    for &budget in budgets {
        for &predictor in predictors {
            let mut all = evictions.to_vec();
            all.retain(|eviction| *eviction != Eviction::Belady);
            if !all.contains(&lru) {
                all.insert(0, lru);
            }
            for eviction in all {
                configs.push(world.with_predictor(&Config { eviction, budget, ..base.clone() }, predictor));
            }
        }
        configs.push(world.with_predictor(&Config { eviction: Eviction::Belady, budget, ..base.clone() }, blind));
    }
    let outcomes = on_all_processors(&configs, |config| replay(recording, config, &mut |_, _, _| {}))?;
    let penalty = |eviction, predictor, budget| {
        let is_it =
            |config: &Config| (config.eviction, config.predictor, config.budget) == (eviction, predictor, budget);
        let at = configs.iter().position(is_it)?;
        Some(outcomes[at].total().penalty).filter(|penalty| *penalty > 0.0)
    };
    let rows = configs.iter().zip(&outcomes).map(|(config, outcome)| {
        let own = outcome.total().penalty;
        Row {
            policy: config.eviction.to_string(),
            budget: config.budget.to_string(),
            predictor: config.predictor.to_string(),
            routing: routing_words(config),
            shares: outcome.decode.shares(),
            penalty_to_lru: penalty(lru, config.predictor, config.budget).map(|lru| own / lru),
            penalty_to_belady: penalty(Eviction::Belady, blind, config.budget).map(|least| own / least),
            outcome: outcome.clone(),
        }
    });
    Ok(rows.collect())
}

/// The routing options that give something up, in words.
fn routing_words(config: &Config) -> Option<String> {
    let Rerouting { bias, keep_top, substitute, substitute_max, .. } = config.rerouting;
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let options = RoutingOptions {
        cache_bias: bias,
        keep_top: number(keep_top),
        substitute,
        substitute_max: substitute_max.map(number),
        drop: config.drop,
        virtual_experts: config.virtual_experts.map_or(VirtualExperts::Off, |_| VirtualExperts::Auto),
        ..RoutingOptions::default()
    };
    options.words()
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
