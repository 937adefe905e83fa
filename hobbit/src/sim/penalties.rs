//! What misses cost each layer with ever more slots: measured, by replays.

use super::budget::Budget;
use super::config::Config;
use super::error::SimError;
use super::recording::Recording;
use super::replay::replay;
use crate::fitted::LayerPenalty;

/// Numbers of slots that are tried, at the most, beside none.
const STEPS: u32 = 32;

/// What was measured, and with how many replays of all recordings.
pub(super) struct Penalties {
    pub(super) layers: Vec<LayerPenalty>,
    pub(super) n_replays: u64,
}

/// Replays with 0, 1, ... slots in every layer; where there are more than [`STEPS`] experts, with so many numbers of slots.
/// Layers do not compete for slots here, so one replay measures a point of each layer's curve.
///
/// `go_on` is asked before each number of slots. If it answers false, layers have no curves.
pub(super) fn penalties(
    recordings: &[Recording],
    config: &Config,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Penalties, SimError> {
    let layers = &recordings[0].header.model.layers;
    let empty = |layer: &crate::trace::Layer| LayerPenalty {
        layer: layer.layer,
        n_expert: layer.n_expert,
        ..LayerPenalty::default()
    };
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
            return Ok(Penalties { layers: layers.iter().map(empty).collect(), n_replays });
        }
        let config = Config { budget: Budget::Slots(slots), ..config.clone() };
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
    Ok(Penalties { layers: curves, n_replays })
}

/// From 0 to `n`, at most [`STEPS`] apart from 0.
fn steps(n: u32) -> impl Iterator<Item = u32> {
    let n_steps = n.min(STEPS);
    (0..=n_steps).map(move |step| (u64::from(n) * u64::from(step) / u64::from(n_steps.max(1))) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_up_to_32_then_32_of_them() {
        assert_eq!(steps(3).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(steps(0).collect::<Vec<_>>(), [0]);
        let many: Vec<u32> = steps(200).collect();
        assert_eq!((many.len(), many[1], many[32]), (33, 6, 200));
        assert!(many.is_sorted_by(|a, b| a < b));
    }
}
