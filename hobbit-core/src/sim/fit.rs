//! Fits HOBBIT's weights and thresholds to a model from its traces (section 3.4; thresholds 3.2).

use super::SimError;
use super::budget::Budget;
use super::config::{Config, Eviction, PredictedBy, Slots};
use super::recording::Recording;
use super::replay::replay;
use crate::cache::policy::{PolicyKind, Weights};
use crate::options::PrecisionMode;
use crate::predict::PredictorKind;
use crate::profile::Uses;
use crate::route::{self, Shares, Thresholds};
use crate::trace::Layer;
use crate::tuned::{LayerPenalty, TUNED_FORMAT, TUNED_VERSION, TunedOn, TunedPolicy};
use std::collections::BTreeMap;

/// Steps of the first grid: weights are quarters.
const GRID: u8 = 4;
/// Number of times that the step is halved.
const REFINEMENTS: u32 = 3;
/// Number of batches after which a layer's own penalties count as much as the mean of all layers.
const PRIOR_BATCHES: f64 = 64.0;
/// Maximum numbers of slots at which penalties are measured, beside 0.
const STEPS: u32 = 32;

#[derive(Clone, Debug, PartialEq)]
pub struct FitGoal {
    pub policy: PolicyKind,
    pub budget: Budget,
    pub slots: Slots,
    pub low_percent: f64,
    /// Target shares of the experts' uses, to which thresholds are fitted. Minimal penalty alone would skip everything.
    pub shares: Shares,
    /// Fixed thresholds, in place of fitted ones.
    pub thresholds: Option<Thresholds>,
}

/// Fits weights to the least miss penalty over all recordings together: a grid on the simplex, then ever smaller steps
/// from its best point. Then measures the cost of each layer's misses with every number of slots. Deterministic.
/// `progress` receives the number of replays and may end the fit by returning false: the result is the best so far.
///
/// # Panics
/// If there are no recordings.
pub fn fit(
    recordings: &[Recording],
    goal: &FitGoal,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<TunedPolicy, SimError> {
    let first = &recordings[0];
    if let Some(other) = recordings.iter().find(|other| other.header.model.layers != first.header.model.layers) {
        return Err(SimError::OtherModel { first: first.path.clone(), other: other.path.clone() });
    }
    let has_low = first.header.model.layers.iter().any(|layer| layer.bytes_low > 0);
    let thresholds = match goal.thresholds {
        _ if !has_low => None,
        Some(thresholds) => Some((thresholds, None)),
        None => {
            let fit = fit_thresholds(recordings, goal.shares)
                .map_err(|error| SimError::NoUses { path: first.path.clone(), error })?;
            Some((fit.thresholds, Some(fit.shares)))
        }
    };
    let mut config = Config::recorded(first)?;
    config.eviction = Eviction::Policy(goal.policy);
    (config.budget, config.slots, config.low_percent) = (goal.budget, goal.slots, goal.low_percent);
    (config.predictor, config.prefetch) = (PredictedBy::Predictor(PredictorKind::None), None);
    config.upgrade = false;
    config.mode = if has_low { PrecisionMode::Dynamic } else { PrecisionMode::Exact };
    config.thresholds = thresholds.map_or(Thresholds { t1: 1.0, t2: 1.0 }, |(thresholds, _)| thresholds);

    let tokens: u64 = recordings.iter().map(Recording::n_tokens).sum();
    let mut replays = 0;
    let mut penalty = |config: &Config| -> Result<f64, SimError> {
        let mut sum = 0.0;
        for recording in recordings {
            sum += replay(recording, config, &mut |_, _, _| {})?.total().penalty;
        }
        replays += 1;
        Ok(sum / tokens.max(1) as f64)
    };
    let mut is_wanted = true;
    let mut best: Option<(f64, [u8; 4])> = None;
    let whole = GRID << REFINEMENTS;
    let mut try_point = |point: [u8; 4], best: &mut Option<(f64, [u8; 4])>| -> Result<bool, SimError> {
        config.weights = weights_of(point, whole);
        let found = penalty(&config)?;
        let is_better = best.is_none_or(|(least, _)| found < least);
        if is_better {
            *best = Some((found, point));
        }
        Ok(is_better)
    };
    let mut n_tried = 0;
    for point in grid(GRID) {
        if is_wanted {
            try_point(point.map(|part| part << REFINEMENTS), &mut best)?;
            n_tried += 1;
            is_wanted = progress(n_tried);
        }
    }
    for refinement in (0..REFINEMENTS).rev() {
        let step = 1u8 << refinement;
        let mut improved = true;
        while improved && is_wanted {
            improved = false;
            let from = best.map_or([whole, 0, 0, 0], |(_, point)| point);
            for point in neighbours(from, step) {
                if is_wanted {
                    improved |= try_point(point, &mut best)?;
                    n_tried += 1;
                    is_wanted = progress(n_tried);
                }
            }
        }
    }
    let (least, point) = best.unwrap_or((0.0, [whole, 0, 0, 0]));
    let Weights { lru, lfu, lhu, fld } = weights_of(point, whole);
    config.weights = weights_of(point, whole);
    let (layers, n_measured) = penalties(recordings, &config, &mut || {
        n_tried += 1;
        is_wanted = is_wanted && progress(n_tried);
        is_wanted
    })?;
    config.eviction = Eviction::Policy(PolicyKind::Lru);
    let penalty_lru = penalty(&config)?;
    let name = |recording: &Recording| recording.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(TunedPolicy {
        format: TUNED_FORMAT.into(),
        version: TUNED_VERSION,
        policy: goal.policy.to_string(),
        weights: [lru, lfu, lhu, fld],
        t1: thresholds.map(|(thresholds, _)| thresholds.t1),
        t2: thresholds.map(|(thresholds, _)| thresholds.t2),
        shares: thresholds.and_then(|(_, shares)| shares),
        tuned_on: TunedOn {
            traces: recordings.iter().map(name).collect(),
            model: first.header.model.name.clone(),
            architecture: first.header.model.architecture.clone(),
            tokens,
            budget: goal.budget.to_string(),
        },
        penalty: least,
        penalty_lru,
        replays: replays + n_measured,
        layers,
    })
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

/// Replays with 0, 1, ... slots in every layer, or with at most [`STEPS`] numbers of slots if there are more experts.
/// Layers do not compete for slots here, so one replay measures a point of each layer's curve.
///
/// Calls `go_on` before each number of slots. If it returns false, layers have no curves. Also returns the number of
/// replays of all recordings.
fn penalties(
    recordings: &[Recording],
    config: &Config,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<(Vec<LayerPenalty>, u64), SimError> {
    let layers = &recordings[0].header.model.layers;
    let empty =
        |layer: &Layer| LayerPenalty { layer: layer.layer, n_expert: layer.n_expert, ..LayerPenalty::default() };
    let mut curves: Vec<LayerPenalty> = layers.iter().map(empty).collect();
    let tokens: u64 = recordings.iter().map(Recording::n_tokens).sum();
    let n_expert = layers.iter().map(|layer| u32::from(layer.n_expert)).max().unwrap_or(0);
    let mut sizes: Vec<u32> = steps(n_expert).collect();
    // A layer with fewer experts ends with all of them.
    sizes.extend(layers.iter().map(|layer| u32::from(layer.n_expert)));
    sizes.sort_unstable();
    sizes.dedup();
    let mut n_replays = 0;
    for slots in sizes {
        if !go_on() {
            return Ok((layers.iter().map(empty).collect(), n_replays));
        }
        let config = Config { budget: Budget::Slots(slots), slots: Slots::default(), ..config.clone() };
        let mut penalty = vec![0.0; curves.len()];
        for recording in recordings {
            let outcome = replay(recording, &config, &mut |_, _, _| {})?;
            penalty.iter_mut().zip(&outcome.layers).for_each(|(sum, layer)| *sum += layer.penalty);
        }
        n_replays += 1;
        for (curve, penalty) in curves.iter_mut().zip(penalty).filter(|(curve, _)| slots <= curve.n_expert.into()) {
            curve.slots.push(slots);
            curve.penalty.push(penalty / tokens.max(1) as f64);
        }
    }
    let n_batches: usize = recordings.iter().map(|recording| recording.batches().count()).sum();
    draw_together(&mut curves, n_batches as f64 / (n_batches as f64 + PRIOR_BATCHES));
    Ok((curves, n_replays))
}

/// Shrinks each layer's curve to the mean of the layers with as many experts, keeping the share `own` (0 to 1): with
/// few tokens a layer's curve is mostly chance.
fn draw_together(curves: &mut [LayerPenalty], own: f64) {
    let mut sums: BTreeMap<u16, (f64, Vec<f64>)> = BTreeMap::new();
    for curve in &*curves {
        let (n, sum) = sums.entry(curve.n_expert).or_insert_with(|| (0.0, vec![0.0; curve.penalty.len()]));
        *n += 1.0;
        sum.iter_mut().zip(&curve.penalty).for_each(|(sum, penalty)| *sum += penalty);
    }
    for curve in curves {
        let (n, sum) = &sums[&curve.n_expert];
        curve.penalty.iter_mut().zip(sum).for_each(|(penalty, sum)| *penalty += (1.0 - own) * (sum / n - *penalty));
    }
}

/// At most [`STEPS`] numbers of slots from 1 to `n`, and 0.
fn steps(n: u32) -> impl Iterator<Item = u32> {
    let n_steps = n.min(STEPS);
    (0..=n_steps).map(move |step| (u64::from(n) * u64::from(step) / u64::from(n_steps.max(1))) as u32)
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

    #[test]
    fn what_few_tokens_say_counts_little() {
        let curve = |n_expert, penalty: &[f64]| {
            let slots = (0..penalty.len() as u32).collect();
            LayerPenalty { layer: 0, n_expert, slots, penalty: penalty.to_vec() }
        };
        let mut curves = [curve(2, &[2.0, 1.0, 0.0]), curve(1, &[5.0, 1.0]), curve(2, &[4.0, 4.0, 0.0])];
        draw_together(&mut curves, 0.25);
        let penalties = curves.map(|curve| curve.penalty);
        assert_eq!(penalties, [vec![2.75, 2.125, 0.0], vec![5.0, 1.0], vec![3.25, 2.875, 0.0]]);
    }

    #[test]
    fn every_number_up_to_32_then_32_of_them() {
        assert_eq!(steps(3).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(steps(0).collect::<Vec<_>>(), [0]);
        let many: Vec<u32> = steps(200).collect();
        assert_eq!((many.len(), many[1], many[32]), (33, 6, 200));
        assert!(many.is_sorted_by(|a, b| a < b));
    }
}
