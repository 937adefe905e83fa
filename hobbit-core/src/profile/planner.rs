//! Virtual experts of each layer within a budget (SwapMoE, section 3.5), from the measured cost of absent experts.
//!
//! Each layer's curve of loss over experts is measured with that layer alone restricted. Slots go where they save the
//! most loss per byte, which is optimal if the losses of layers add up.

use super::hull::{Choice, height, walk};
use crate::units::ShortBytes;

/// One layer, and the measured loss of leaving out its experts.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerCurve {
    pub layer: u16,
    pub n_expert: u16,
    /// Fewest experts that may be present: as many as a token uses.
    pub least: u16,
    pub slot_bytes: u64,
    /// Experts that were present, ascending, and the measured mean KL divergence in nats. With all of them it is 0.
    pub points: Vec<(u16, f64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the smallest plan of this model takes {} of slots: as many in each layer as a token uses, and one to spare",
    ShortBytes(*least)
)]
pub struct NoRoom {
    pub least: u64,
}

impl LayerCurve {
    /// Slots for this many present experts: one is spare where experts are missing.
    pub fn slots(&self, experts: u16) -> u32 {
        u32::from(experts) + u32::from(experts < self.n_expert)
    }

    fn experts(&self, slots: u32) -> u16 {
        if slots >= u32::from(self.n_expert) { self.n_expert } else { (slots - 1) as u16 }
    }

    /// Expected KL divergence with this many present experts: the lower convex hull of the measurements.
    pub fn kl(&self, experts: u16) -> f64 {
        let measured = self.points.iter().filter(|(n, kl)| *n < self.n_expert && kl.is_finite());
        let measured = measured.map(|(n, kl)| (f64::from(*n), kl.max(0.0)));
        let points: Vec<_> = measured.chain([(f64::from(self.n_expert), 0.0)]).collect();
        height(&points, f64::from(experts))
    }

    /// One choice for each number of slots, from all experts down to the fewest; their losses are convex.
    fn choices(&self) -> Vec<Choice> {
        let slots = self.slots(self.least.min(self.n_expert))..=u32::from(self.n_expert);
        let points: Vec<_> = slots.clone().map(|slots| (f64::from(slots), self.kl(self.experts(slots)))).collect();
        let choice =
            |slots: u32| Choice { bytes: u64::from(slots) * self.slot_bytes, loss: height(&points, f64::from(slots)) };
        slots.rev().map(choice).collect()
    }
}

pub fn bytes(curves: &[LayerCurve], experts: &[u16]) -> u64 {
    curves.iter().zip(experts).map(|(curve, n)| u64::from(curve.slots(*n)) * curve.slot_bytes).sum()
}

/// Sum of the losses that were measured for each layer alone.
pub fn loss(curves: &[LayerCurve], experts: &[u16]) -> f64 {
    curves.iter().zip(experts).map(|(curve, n)| curve.kl(*n)).sum()
}

/// Experts present in each layer, in order, within `budget` bytes of slots.
pub fn hull(curves: &[LayerCurve], budget: u64) -> Result<Vec<u16>, NoRoom> {
    let choices: Vec<Vec<Choice>> = curves.iter().map(LayerCurve::choices).collect();
    let walked = walk(&choices, |bytes, _| bytes > budget);
    if walked.bytes > budget {
        return Err(NoRoom { least: walked.bytes });
    }
    let of = |(curve, at): (&LayerCurve, usize)| curve.experts(u32::from(curve.n_expert) - at as u32);
    Ok(curves.iter().zip(walked.chosen).map(of).collect())
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
