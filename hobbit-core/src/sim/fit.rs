//! Fits HOBBIT's weights and thresholds to a model from its traces (section 3.4; thresholds 3.2).

use super::SimError;
use super::config::{Config, Eviction, Memory, PredictedBy};
use super::recording::Recording;
use super::replay::replay;
use crate::cache::policy::{PolicyKind, Weights};
use crate::options::{PrecisionMode, PrecisionOptions};
use crate::predict::PredictorKind;
use crate::profile::Uses;
use crate::route::{self, Shares, Thresholds};

/// Steps of the first grid: weights are quarters.
const GRID: u8 = 4;
/// Number of times that the step is halved.
const REFINEMENTS: u32 = 3;

#[derive(Clone, Debug, PartialEq)]
pub struct FitGoal {
    pub memory: Memory,
    /// Target shares of the experts' uses, to which thresholds are fitted. Minimal penalty alone would skip everything.
    pub shares: Shares,
    /// Fixed thresholds, in place of fitted ones.
    pub thresholds: Option<Thresholds>,
}

/// HOBBIT's weights and thresholds for the recordings of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Fitted {
    pub weights: Weights,
    /// `None` without low versions.
    pub thresholds: Option<Thresholds>,
    /// Miss penalty per token with them: high 1, low B_l / B_h.
    pub penalty: f64,
    /// Miss penalty per token under LRU.
    pub penalty_lru: f64,
    pub tokens: u64,
}

/// Fits weights to the least miss penalty over all recordings together: a grid on the simplex, then ever smaller steps
/// from its best point. Deterministic.
///
/// # Panics
/// If there are no recordings.
pub fn fit(recordings: &[Recording], goal: &FitGoal) -> Result<Fitted, SimError> {
    let first = &recordings[0];
    if let Some(other) = recordings.iter().find(|other| other.header.model.layers != first.header.model.layers) {
        return Err(SimError::OtherModel { first: first.path.clone(), other: other.path.clone() });
    }
    let has_low = first.header.model.layers.iter().any(|layer| layer.bytes_low > 0);
    let thresholds = match goal.thresholds {
        _ if !has_low => None,
        Some(thresholds) => Some(thresholds),
        None => {
            let fit = fit_thresholds(recordings, goal.shares);
            Some(fit.map_err(|error| SimError::NoUses { path: first.path.clone(), error })?.thresholds)
        }
    };
    let mut config = Config::recorded(first)?;
    config.eviction = Eviction::Policy(PolicyKind::Hobbit);
    config.memory = goal.memory;
    (config.predictor, config.prefetch) = (PredictedBy::Predictor(PredictorKind::None), None);
    let mode = if has_low { PrecisionMode::Dynamic } else { PrecisionMode::Exact };
    let Thresholds { t1, t2 } = thresholds.unwrap_or(Thresholds { t1: 1.0, t2: 1.0 });
    config.precision =
        PrecisionOptions { mode: Some(mode), t1: Some(t1), t2: Some(t2), upgrade: false, ..config.precision };

    let tokens: u64 = recordings.iter().map(Recording::n_tokens).sum();
    let penalty = |config: &Config| -> Result<f64, SimError> {
        let of = |recording| Ok(replay(recording, config, &mut |_, _, _| {})?.total().penalty);
        let sum: f64 = recordings.iter().map(of).sum::<Result<_, SimError>>()?;
        Ok(sum / tokens.max(1) as f64)
    };
    let whole = GRID << REFINEMENTS;
    let of_point = |point| penalty(&Config { weights: weights_of(point, whole), ..config.clone() });
    let mut best = (f64::INFINITY, [whole, 0, 0, 0]);
    for point in grid(GRID).into_iter().map(|point| point.map(|part| part << REFINEMENTS)) {
        let found = of_point(point)?;
        if found < best.0 {
            best = (found, point);
        }
    }
    for step in (0..REFINEMENTS).rev().map(|refinement| 1u8 << refinement) {
        let mut from = None;
        while from != Some(best.1) {
            from = Some(best.1);
            for point in neighbours(best.1, step) {
                let found = of_point(point)?;
                if found < best.0 {
                    best = (found, point);
                }
            }
        }
    }
    let weights = weights_of(best.1, whole);
    let penalty_lru = penalty(&Config { eviction: Eviction::Policy(PolicyKind::Lru), ..config.clone() })?;
    Ok(Fitted { weights, thresholds, penalty: best.0, penalty_lru, tokens })
}

fn weights_of(point: [u8; 4], whole: u8) -> Weights {
    let [lru, lfu, lhu, fld] = point.map(|part| f32::from(part) / f32::from(whole));
    Weights { lru, lfu, lhu, fld }
}

/// Every way to divide `whole` into four.
fn grid(whole: u8) -> Vec<[u8; 4]> {
    let mut points = Vec::new();
    for lru in 0..=whole {
        for lfu in 0..=whole - lru {
            for lhu in 0..=whole - lru - lfu {
                points.push([lru, lfu, lhu, whole - lru - lfu - lhu]);
            }
        }
    }
    points
}

/// Every point at which one step moves from one weight to another.
fn neighbours(from: [u8; 4], step: u8) -> impl Iterator<Item = [u8; 4]> {
    let pairs = (0..4).flat_map(|giver| (0..4).map(move |taker| (giver, taker)));
    pairs.filter(move |&(giver, taker)| giver != taker && from[giver] >= step).map(move |(giver, taker)| {
        let mut point = from;
        point[giver] -= step;
        point[taker] += step;
        point
    })
}

fn fit_thresholds(recordings: &[Recording], shares: Shares) -> Result<route::Fit, route::NoUses> {
    let mut uses = Uses::default();
    for record in recordings.iter().flat_map(Recording::batches).flat_map(|batch| &batch.layers) {
        let ids: Vec<i32> = record.chosen.iter().map(|&index| index.into()).collect();
        uses.observe(record.layer, record.n_used.into(), &ids, &record.weights);
    }
    route::fit(uses.n_first, uses.samples, shares)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_covers_the_simplex_once() {
        let points = grid(4);
        assert_eq!(points.len(), 35);
        assert!(points.iter().all(|point| point.iter().sum::<u8>() == 4));
        assert!(points.contains(&[4, 0, 0, 0]) && points.contains(&[1, 1, 1, 1]));
        let around: Vec<_> = neighbours([4, 4, 0, 0], 4).collect();
        assert_eq!(around.len(), 6);
        assert!(around.contains(&[0, 8, 0, 0]) && around.contains(&[4, 0, 0, 4]));
    }
}
