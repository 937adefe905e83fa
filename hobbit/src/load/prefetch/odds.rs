//! How often a predicted score comes true.

use crate::route::Demand;

/// How likely a predicted expert is asked for in which precision, each `0.0..=1.0`, together at most 1. The rest: it is not
/// chosen, or not worth reading.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Chances {
    /// In high precision.
    pub high: f32,
    /// In low precision.
    pub low: f32,
}

/// The probability behind a score, learned by distance, size of the score and what the predicted weight is worth. Scores
/// mean different things (a router weight of 1/8 may be certain to be used; the first of two guesses is often the second of
/// the two that are chosen); counting makes probabilities of all of them. Depends on what happened, never on when. Where nothing was seen, a score is its own
/// probability, and what it is worth is what will be asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Odds {
    bins: [[[Bin; Self::BINS]; Self::DISTANCES]; 3],
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Bin {
    high: f32,
    low: f32,
    seen: f32,
}

impl Odds {
    /// Distances told apart; those beyond count as the last one.
    const DISTANCES: usize = 4;
    /// Scores told apart: half octaves downwards from 1; those below count as the last one.
    const BINS: usize = 16;
    /// Predictions that the score itself, taken for a probability, counts as.
    const PRIOR: f32 = 4.0;
    /// At so many predictions in a bin, what was seen counts half.
    const SEEN_MAX: f32 = 512.0;

    /// Of a prediction of this score, `0.0..=1.0`, that was worth `worth`, came `asked`; `None` if the router did not choose
    /// the expert. A distance of 0 counts as 1.
    pub fn observe(&mut self, distance: u8, score: f32, worth: Demand, asked: Option<Demand>) {
        let bin = &mut self.bins[worth as usize][Self::row(distance)][Self::column(score)];
        bin.seen += 1.0;
        bin.high += f32::from(u8::from(asked == Some(Demand::High)));
        bin.low += f32::from(u8::from(asked == Some(Demand::Low)));
        if bin.seen >= Self::SEEN_MAX {
            *bin = Bin { high: bin.high / 2.0, low: bin.low / 2.0, seen: bin.seen / 2.0 };
        }
    }

    /// What a prediction of this score that is worth `worth` comes to.
    pub fn chances(&self, distance: u8, score: f32, worth: Demand) -> Chances {
        let bin = self.bins[worth as usize][Self::row(distance)][Self::column(score)];
        let score = if score.is_nan() { 0.0 } else { score.clamp(0.0, 1.0) };
        let presumed = |demand| if demand == worth { Self::PRIOR * score } else { 0.0 };
        let chance = |came, demand| (came + presumed(demand)) / (bin.seen + Self::PRIOR);
        Chances { high: chance(bin.high, Demand::High), low: chance(bin.low, Demand::Low) }
    }

    fn row(distance: u8) -> usize {
        usize::from(distance.saturating_sub(1)).min(Self::DISTANCES - 1)
    }

    /// The exponent's bits and the first one of the mantissa: the same on every machine, unlike a logarithm.
    fn column(score: f32) -> usize {
        if score > 0.0 {
            let below_one = 1.0f32.to_bits().saturating_sub(score.to_bits());
            (below_one.div_ceil(1 << 22) as usize).min(Self::BINS - 1)
        } else {
            Self::BINS - 1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIGH: Option<Demand> = Some(Demand::High);

    fn high(odds: &Odds, distance: u8, score: f32) -> f32 {
        let Chances { high, low } = odds.chances(distance, score, Demand::High);
        assert_eq!(low, 0.0);
        high
    }

    #[test]
    fn scores_become_probabilities() {
        let mut odds = Odds::default();
        assert_eq!(high(&odds, 1, 0.125), 0.125);
        (0..400).for_each(|i| odds.observe(1, 0.125, Demand::High, HIGH.filter(|_| i % 10 != 0)));
        let learned = high(&odds, 1, 0.13);
        assert!((0.88..0.91).contains(&learned), "{learned}");
        assert_eq!((high(&odds, 2, 0.125), high(&odds, 1, 0.5)), (0.125, 0.5), "of others nothing is known");
        // What changes is believed before long.
        (0..1000).for_each(|_| odds.observe(1, 0.125, Demand::High, None));
        assert!(high(&odds, 1, 0.125) < 0.2);
    }

    #[test]
    fn what_it_is_worth_is_not_what_is_asked_for() {
        let mut odds = Odds::default();
        assert_eq!(odds.chances(1, 0.5, Demand::Low), Chances { high: 0.0, low: 0.5 });
        assert_eq!(odds.chances(1, 0.5, Demand::Skip), Chances::default());
        let asked = [HIGH, HIGH, Some(Demand::Low), Some(Demand::Skip), None];
        (0..400).for_each(|i| odds.observe(1, 0.5, Demand::Low, asked[i % asked.len()]));
        let Chances { high, low } = odds.chances(1, 0.5, Demand::Low);
        assert!((0.38..0.41).contains(&high) && (0.19..0.22).contains(&low), "{high} {low}");
        assert_eq!(odds.chances(1, 0.5, Demand::High), Chances { high: 0.5, low: 0.0 });
    }

    #[test]
    fn bins_are_half_octaves() {
        let columns =
            [1.0, 0.99, 0.75, 0.74, 0.5, 0.49, 0.004, 0.0, f32::MIN_POSITIVE, f32::NAN, -1.0].map(Odds::column);
        assert_eq!(columns, [0, 1, 1, 2, 2, 3, 15, 15, 15, 15, 15]);
        assert_eq!([0, 1, 2, 4, 5, 255].map(Odds::row), [0, 0, 1, 3, 3, 3]);
        assert_eq!(high(&Odds::default(), 1, f32::NAN), 0.0);
        assert_eq!(high(&Odds::default(), 1, 7.0), 1.0);
    }
}
