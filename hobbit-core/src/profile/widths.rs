//! A width for each expert (EdgeMoE, section III-B): the most robust experts are lowered first.
//!
//! An expert can stay as it is or be lowered to any width of the profile. Steps are taken in the order of predicted
//! loss per byte saved until the goal is reached, so choices for a looser goal contain those for a stricter one.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use super::hull::{Choice, walk};
use super::{Profile, SliceTypes, Width, WidthsError};
use crate::expert::ExpertId;
use crate::gguf::{ExpertMap, GgmlType};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// Save as much as costs at most this relative increase of perplexity (predicted); 0.02 is two percent.
    MaxLoss(f64),
    /// `MaxLoss` with EdgeMoE's [`bounds`]: each expert gets one of two neighbouring widths. As many get the narrower
    /// one as the profile has measured to be within the loss, else as are predicted to be.
    Bounded(f64),
    /// As `Bounded`, with this number of experts at the narrower width.
    Lowered { max_loss: f64, n: u64 },
    /// Lose as little as a file of at most `bytes` allows; `other` of them are no high-precision expert records:
    /// ordinary tensors, header, low-precision records.
    TargetSize {
        bytes: u64,
        /// Bytes that are not records of high-precision experts.
        other: u64,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Widths {
    /// Types of every expert that is lowered.
    pub types: BTreeMap<ExpertId, SliceTypes>,
    /// Number of experts at each width.
    pub counts: BTreeMap<GgmlType, u64>,
    /// Predicted relative increase of perplexity.
    pub loss: f64,
    /// Measured relative increase of perplexity, if this choice was measured.
    pub measured: Option<f64>,
    pub record_bytes: u64,
}

/// Chooses a width for each expert of `map` from what `profile` measured.
pub fn widths(profile: &Profile, map: &ExpertMap, goal: Goal) -> Result<Widths, WidthsError> {
    if profile.widths.is_empty() {
        return Err(WidthsError::NoWidths);
    }
    let measured = match goal {
        Goal::Bounded(max) => profile.bounded.iter().find(|own| (own.max_loss - max).abs() < 1e-9),
        _ => None,
    };
    let goal = match (goal, measured) {
        (Goal::Bounded(max_loss), Some(own)) => Goal::Lowered { max_loss, n: own.lowered },
        _ => goal,
    };
    let allowed = match goal {
        Goal::Bounded(max_loss) | Goal::Lowered { max_loss, .. } => bounds(&profile.widths, max_loss),
        Goal::MaxLoss(_) | Goal::TargetSize { .. } => 0..=profile.widths.len(),
    };
    let mut ids = Vec::new();
    let mut choices = Vec::new();
    let mut types = Vec::new();
    for layer in &map.layers {
        let mismatch = |found| WidthsError::Layer { layer: layer.layer, found, expected: layer.n_expert as usize };
        let own = SliceTypes::own(layer);
        let whole = own.class(layer).ok_or(mismatch(0))?.stride;
        let mut lowered = Vec::new();
        for width in &profile.widths {
            let profiled = width.layers.iter().find(|profiled| profiled.layer == layer.layer).ok_or(mismatch(0))?;
            if profiled.experts.len() != layer.n_expert as usize {
                return Err(mismatch(profiled.experts.len()));
            }
            let bytes = profiled.types.class(layer).ok_or(mismatch(0))?.stride;
            lowered.push((width, profiled, bytes));
        }
        for index in 0..layer.n_expert as u16 {
            ids.push(ExpertId { layer: layer.layer, index });
            let of = |(width, profiled, bytes): &(&Width, &super::LayerWidth, u64)| Choice {
                bytes: *bytes,
                loss: profiled.experts[usize::from(index)] * width.scale,
            };
            let all = [Choice { bytes: whole, loss: 0.0 }].into_iter().chain(lowered.iter().map(of));
            choices.push(all.skip(*allowed.start()).take(allowed.clone().count()).collect());
            types.push(lowered.iter().map(|(width, profiled, _)| (width.dtype, profiled.types)).collect::<Vec<_>>());
        }
    }
    let chosen = choose(&choices, goal)?;
    let measured = measured.map(|own| own.perplexity_increase);
    let mut widths = Widths { types: BTreeMap::new(), counts: BTreeMap::new(), loss: 0.0, measured, record_bytes: 0 };
    let mut nats = 0.0;
    for (i, &choice) in chosen.iter().enumerate() {
        let Choice { bytes, loss } = choices[i][choice];
        nats += loss;
        widths.record_bytes += bytes;
        if let Some((width, slices)) = (allowed.start() + choice).checked_sub(1).map(|lowered| types[i][lowered]) {
            widths.types.insert(ids[i], slices);
            *widths.counts.entry(width).or_default() += 1;
        }
    }
    widths.loss = nats.exp_m1();
    Ok(widths)
}

/// EdgeMoE's bounds: the two neighbouring widths that experts may have. With every expert at the wider one, the model
/// was measured to be within `max` (a relative increase of perplexity), at the narrower one beyond it. 0 is the model's
/// own width, others are the profile's, widest first. One width alone if the narrowest is within the loss.
pub fn bounds(widths: &[Width], max: f64) -> RangeInclusive<usize> {
    let loss = |width: &Width| width.kl.exp_m1().max(width.perplexity_increase);
    let wider = widths.iter().take_while(|width| loss(width) <= max).count();
    wider..=(wider + 1).min(widths.len())
}

/// The position of each expert's choice. Every expert has at least its first choice, the widest.
fn choose(experts: &[Vec<Choice>], goal: Goal) -> Result<Vec<usize>, WidthsError> {
    match goal {
        Goal::MaxLoss(max) | Goal::Bounded(max) => Ok(walk(experts, |_, nats| nats.exp_m1() <= max).chosen),
        Goal::Lowered { n, .. } => {
            let left = Cell::new(n);
            Ok(walk(experts, |_, _| left.replace(left.get().saturating_sub(1)) > 0).chosen)
        }
        Goal::TargetSize { bytes: target, other } => {
            let walked = walk(experts, |bytes, _| bytes.saturating_add(other) > target);
            let smallest = walked.bytes.saturating_add(other);
            if smallest > target {
                return Err(WidthsError::TargetSize { target, smallest, loss: walked.loss.exp_m1() });
            }
            Ok(walked.chosen)
        }
    }
}

/// Runs of [`adjust`].
const RUNS_MAX: usize = 10;

/// EdgeMoE's loop (section III-B): the largest number of lowered experts, of `n_max`, whose measured loss is within
/// `max_loss`. Returns all numbers that were tried with what `measure` said, at most 10; they begin with `predicted`
/// and halve the interval between the last numbers within and beyond the loss, down to 1/64 of all. Loss is taken to
/// rise with the number, and 0 to be within the loss.
pub fn adjust<E>(
    n_max: u64,
    predicted: u64,
    max_loss: f64,
    mut measure: impl FnMut(u64) -> Result<f64, E>,
) -> Result<Vec<(u64, f64)>, E> {
    let (mut within, mut beyond) = (0, n_max + 1);
    let (mut next, mut runs) = (predicted.min(n_max).max(1), Vec::new());
    while beyond - within > 1 + n_max / 64 && runs.len() < RUNS_MAX {
        let loss = measure(next)?;
        runs.push((next, loss));
        *(if loss <= max_loss { &mut within } else { &mut beyond }) = next;
        next = within + (beyond - within) / 2;
    }
    Ok(runs)
}

#[cfg(test)]
mod tests;
