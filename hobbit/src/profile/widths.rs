//! Each expert its own width (EdgeMoE, section III-B): the most robust ones are lowered first.
//!
//! An expert can be kept as it is or lowered to any width of the profile. Seen from above, its choices are a staircase of
//! bytes saved against loss; its lower convex hull is walked step by step, each step costing more loss per byte than the
//! one before. The steps of all experts are taken in the order of loss per byte until the goal is reached. So choices
//! for a looser goal contain those for a stricter one, and no choice within the tolerance saves as much as this one and its
//! next step together.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::{Profile, SliceTypes, WidthsError};
use crate::expert::ExpertId;
use crate::gguf::{ExpertMap, GgmlType};

/// What the widths are chosen for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// Save as much as costs at most this relative increase of perplexity (predicted); 0.02 is two percent.
    MaxLoss(f64),
    /// Lose as little as a file of at most `bytes` allows; `other` of them are no high-precision expert records:
    /// ordinary tensors, header, low-precision records.
    TargetSize {
        /// Of the whole file.
        bytes: u64,
        /// Not records of high-precision experts.
        other: u64,
    },
}

/// The widths chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Widths {
    /// Types of every expert that is lowered; the others stay as they are.
    pub types: BTreeMap<ExpertId, SliceTypes>,
    /// Number of experts at each width.
    pub counts: BTreeMap<GgmlType, u64>,
    /// Predicted relative increase of perplexity.
    pub loss: f64,
    /// Bytes of all experts' records.
    pub record_bytes: u64,
}

/// One way to store an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Choice {
    pub(super) bytes: u64,
    /// In nats of perplexity.
    pub(super) loss: f64,
}

/// Chooses a width for each expert of `map` from what `profile` measured.
///
/// # Errors
/// [`WidthsError`]: no widths in the profile, layers that are not the model's, a goal without sense or out of reach.
pub fn widths(profile: &Profile, map: &ExpertMap, goal: Goal) -> Result<Widths, WidthsError> {
    if profile.widths.is_empty() {
        return Err(WidthsError::NoWidths);
    }
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
            let of = |(width, profiled, bytes): &(&super::Width, &super::LayerWidth, u64)| Choice {
                bytes: *bytes,
                loss: profiled.experts[usize::from(index)] * width.scale,
            };
            choices.push([Choice { bytes: whole, loss: 0.0 }].into_iter().chain(lowered.iter().map(of)).collect());
            types.push(lowered.iter().map(|(width, profiled, _)| (width.dtype, profiled.types)).collect::<Vec<_>>());
        }
    }
    let chosen = choose(&choices, goal)?;
    let mut widths = Widths { types: BTreeMap::new(), counts: BTreeMap::new(), loss: 0.0, record_bytes: 0 };
    let mut nats = 0.0;
    for (i, &choice) in chosen.iter().enumerate() {
        let Choice { bytes, loss } = choices[i][choice];
        nats += loss;
        widths.record_bytes += bytes;
        if let Some((width, slices)) = choice.checked_sub(1).map(|lowered| types[i][lowered]) {
            widths.types.insert(ids[i], slices);
            *widths.counts.entry(width).or_default() += 1;
        }
    }
    widths.loss = nats.exp_m1();
    Ok(widths)
}

/// The position of each expert's choice. An expert's first choice is to stay as it is; all have at least that one.
pub(super) fn choose(experts: &[Vec<Choice>], goal: Goal) -> Result<Vec<usize>, WidthsError> {
    if let Goal::MaxLoss(found) = goal
        && !(0.0..=f64::MAX).contains(&found)
    {
        return Err(WidthsError::MaxLoss { found });
    }
    let hulls: Vec<Vec<usize>> = experts.iter().map(|choices| hull(choices)).collect();
    let mut steps: Vec<Step> = Vec::new();
    for (expert, hull) in hulls.iter().enumerate() {
        steps.extend(hull.windows(2).map(|pair| Step {
            expert,
            to: pair[1],
            bytes: experts[expert][pair[0]].bytes - experts[expert][pair[1]].bytes,
            loss: experts[expert][pair[1]].loss - experts[expert][pair[0]].loss,
        }));
    }
    // Stable: equal slopes keep experts, and the steps of one, in order.
    steps.sort_by(|a, b| slope(a.loss, a.bytes).total_cmp(&slope(b.loss, b.bytes)));

    let mut chosen: Vec<usize> = hulls.iter().map(|hull| hull[0]).collect();
    let mut bytes: u64 = experts.iter().zip(&chosen).map(|(choices, &i)| choices[i].bytes).sum();
    let mut nats = 0.0;
    for step in &steps {
        let goes_on = match goal {
            Goal::MaxLoss(max) => (nats + step.loss).exp_m1() <= max,
            Goal::TargetSize { bytes: target, other } => bytes.saturating_add(other) > target,
        };
        if !goes_on {
            break;
        }
        chosen[step.expert] = step.to;
        bytes -= step.bytes;
        nats += step.loss;
    }
    match goal {
        Goal::TargetSize { bytes: target, other } if bytes.saturating_add(other) > target => {
            Err(WidthsError::TargetSize { target, smallest: bytes.saturating_add(other), loss: nats.exp_m1() })
        }
        _ => Ok(chosen),
    }
}

struct Step {
    expert: usize,
    to: usize,
    bytes: u64,
    loss: f64,
}

fn slope(loss: f64, bytes: u64) -> f64 {
    loss / bytes as f64
}

/// Positions of the choices on the lower convex hull from the first on, by falling bytes: slopes rise.
fn hull(choices: &[Choice]) -> Vec<usize> {
    let mut order: Vec<usize> = (1..choices.len()).filter(|&i| choices[i].bytes < choices[0].bytes).collect();
    let by_bytes = |&i: &usize, &j: &usize| -> Ordering {
        choices[j].bytes.cmp(&choices[i].bytes).then(choices[i].loss.total_cmp(&choices[j].loss)).then(i.cmp(&j))
    };
    order.sort_by(by_bytes);
    order.dedup_by_key(|i| choices[*i].bytes);
    let rise =
        |from: usize, to: usize| slope(choices[to].loss - choices[from].loss, choices[from].bytes - choices[to].bytes);
    let mut hull = vec![0];
    for next in order {
        while let &[.., before, last] = hull.as_slice() {
            if rise(last, next) > rise(before, last) {
                break;
            }
            hull.pop();
        }
        hull.push(next);
    }
    hull
}

#[cfg(test)]
mod tests;
