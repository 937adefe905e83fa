//! How many virtual experts each layer keeps, within a budget: from what absent experts were measured to cost.
//!
//! [`hull()`] takes each layer's curve of loss over experts, measured with that layer alone restricted, convex from below, and
//! gives slots to whoever saves most by the byte: optimal, if losses of layers add up. [`genetic()`] asks whatever predicts a
//! configuration's loss as a whole (SwapMoE, section 3.5.2), for which [`Regressor`] learns from configurations that were
//! measured.

use crate::units::ShortBytes;

mod genetic;
mod regressor;

pub use genetic::{GeneticOptions, genetic, random_configuration};
pub use regressor::Regressor;

/// One layer, and what it costs to leave experts of it out.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerCurve {
    /// Block number.
    pub layer: u16,
    /// Experts of the layer.
    pub n_expert: u16,
    /// The least that may be present: as many as a token uses.
    pub least: u16,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Experts that were present, ascending, and the mean KL divergence that was measured, nats. With all of them it is 0.
    pub points: Vec<(u16, f64)>,
}

/// Not even what a token uses has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the least that this model's virtual experts take is {} of slots, as many in each layer as a token uses and one to spare",
    ShortBytes(*least)
)]
pub struct NoRoom {
    /// Bytes.
    pub least: u64,
}

impl LayerCurve {
    /// Slots that so many present experts take: one is spare, where experts are missing.
    pub fn slots(&self, experts: u16) -> u32 {
        u32::from(experts) + u32::from(experts < self.n_expert)
    }

    /// Expected KL divergence of so many present experts: on the lower convex hull of what was measured. Beyond the ends it is as
    /// at the ends.
    pub fn kl(&self, experts: u16) -> f64 {
        let hull = self.hull();
        let x = f64::from(experts);
        let after = hull.partition_point(|(n, _)| *n < x);
        match (after.checked_sub(1).map(|before| hull[before]), hull.get(after)) {
            (Some((n0, y0)), Some(&(n1, y1))) => y0 + (y1 - y0) * (x - n0) / (n1 - n0),
            (None, Some(&(_, y))) | (Some((_, y)), None) => y,
            (None, None) => 0.0,
        }
    }

    /// The lower convex hull of the curve, all of its numbers finite.
    fn hull(&self) -> Vec<(f64, f64)> {
        let measured = self.points.iter().filter(|(n, kl)| *n < self.n_expert && kl.is_finite());
        let measured = measured.map(|(n, kl)| (f64::from(*n), kl.max(0.0)));
        lower_hull(measured.chain([(f64::from(self.n_expert), 0.0)]))
    }

    /// What further slots are worth, from those of [`LayerCurve::least`] on: nats that each saves, never more than the one before.
    fn gains(&self) -> Vec<f64> {
        let least = self.least.min(self.n_expert);
        // Where one expert is missing, the spare slot might as well hold it.
        let by_slots = |slots: u32| if slots >= u32::from(self.n_expert) { self.n_expert } else { (slots - 1) as u16 };
        let (first, last) = (self.slots(least), u32::from(self.n_expert));
        let points = (first..=last).map(|slots| (f64::from(slots), self.kl(by_slots(slots))));
        let hull = lower_hull(points);
        hull.windows(2)
            .flat_map(|ends| {
                let [(x0, y0), (x1, y1)] = [ends[0], ends[1]];
                std::iter::repeat_n((y0 - y1) / (x1 - x0), (x1 - x0) as usize)
            })
            .collect()
    }

    /// Experts that are present in so many slots.
    fn experts(&self, slots: u32) -> u16 {
        if slots >= u32::from(self.n_expert) { self.n_expert } else { (slots - 1) as u16 }
    }
}

/// Bytes of a configuration's slots.
pub fn bytes(curves: &[LayerCurve], experts: &[u16]) -> u64 {
    curves.iter().zip(experts).map(|(curve, n)| u64::from(curve.slots(*n)) * curve.slot_bytes).sum()
}

/// The sum of what each layer alone was measured to lose.
pub fn loss(curves: &[LayerCurve], experts: &[u16]) -> f64 {
    curves.iter().zip(experts).map(|(curve, n)| curve.kl(*n)).sum()
}

/// Experts present in each layer, in order, within `budget` bytes of slots.
///
/// # Errors
/// [`NoRoom`].
pub fn hull(curves: &[LayerCurve], budget: u64) -> Result<Vec<u16>, NoRoom> {
    let mut slots: Vec<u32> = curves.iter().map(|curve| curve.slots(curve.least.min(curve.n_expert))).collect();
    let first = slots.clone();
    let least = curves.iter().zip(&slots).map(|(curve, slots)| u64::from(*slots) * curve.slot_bytes).sum();
    let mut left = budget.checked_sub(least).ok_or(NoRoom { least })?;
    let gains: Vec<Vec<f64>> = curves.iter().map(LayerCurve::gains).collect();
    loop {
        let next = |at: usize| {
            let gain = gains[at].get((slots[at] - first[at]) as usize)?;
            (curves[at].slot_bytes <= left).then(|| (gain / curves[at].slot_bytes.max(1) as f64, at))
        };
        // Of equals the layer with the fewest slots, then the first.
        let best = (0..curves.len()).filter_map(next);
        let best = best.min_by(|(a, i), (b, j)| b.total_cmp(a).then(slots[*i].cmp(&slots[*j])).then(i.cmp(j)));
        let Some((_, at)) = best else { break };
        left -= curves[at].slot_bytes;
        slots[at] += 1;
    }
    Ok(curves.iter().zip(slots).map(|(curve, slots)| curve.experts(slots)).collect())
}

/// The lower convex hull of points, `x` ascending and finite.
fn lower_hull(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut hull: Vec<(f64, f64)> = Vec::new();
    for (x, y) in points {
        while let [.., (x0, y0), (x1, y1)] = hull[..]
            && (y1 - y0) * (x - x0) >= (y - y0) * (x1 - x0)
        {
            hull.pop();
        }
        hull.push((x, y));
    }
    hull
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(layer: u16, points: &[(u16, f64)]) -> LayerCurve {
        LayerCurve { layer, n_expert: 8, least: 2, slot_bytes: 10, points: points.to_vec() }
    }

    #[test]
    fn losses_lie_on_the_hull() {
        // 5 is worse than the line from 3 to 8.
        let one = curve(0, &[(2, 6.0), (3, 2.0), (5, 1.9)]);
        let kl: Vec<f64> = [0, 2, 3, 4, 5, 8, 9].map(|n| one.kl(n)).to_vec();
        assert_eq!(kl, [6.0, 6.0, 2.0, 1.6, 1.2, 0.0, 0.0]);
        // Noise does not make more experts worse than fewer.
        assert_eq!(curve(0, &[(2, 1.0), (4, f64::NAN), (6, 3.0)]).kl(5), 0.5);
        assert_eq!(curve(0, &[(2, 1.0), (4, -1.0)]).kl(4), 0.0);
    }

    #[test]
    fn slots_go_where_they_save_most() {
        let curves = [curve(0, &[(2, 6.0), (3, 2.0), (5, 1.5)]), curve(1, &[(2, 1.0), (4, 0.5)])];
        assert_eq!(hull(&curves, 59), Err(NoRoom { least: 60 }));
        assert_eq!(hull(&curves, 60), Ok(vec![2, 2]));
        assert_eq!(hull(&curves, 79), Ok(vec![3, 2]));
        // Seven slots: six experts and a spare one; the eighth makes all eight.
        let steps: Vec<Vec<u16>> = (7..=16).map(|slots| hull(&curves, slots * 10).unwrap()).collect();
        let expected =
            [[3, 2], [4, 2], [5, 2], [6, 2], [8, 2], [8, 3], [8, 4], [8, 5], [8, 6], [8, 8]].map(|own| own.to_vec());
        assert_eq!(steps, expected);
        assert_eq!(hull(&curves, u64::MAX), Ok(vec![8, 8]));
        assert!(steps.iter().zip(7..).all(|(own, slots)| bytes(&curves, own) == slots * 10));
        assert!(steps.windows(2).all(|two| loss(&curves, &two[1]) <= loss(&curves, &two[0])));
    }

    #[test]
    fn where_nothing_is_known_all_are_equal() {
        let curves = [curve(0, &[]), curve(1, &[]), LayerCurve { least: 9, ..curve(2, &[]) }];
        assert_eq!(hull(&curves, 180), Ok(vec![4, 4, 8]));
        assert_eq!(hull(&[], 0), Ok(vec![]));
    }
}
