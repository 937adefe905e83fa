//! How often a predicted score comes true.

/// The probability behind a score, learned by distance and size of the score. Scores mean different things (a router weight
/// of 1/8 may be certain to be used); counting makes probabilities of all of them. Depends on what happened, never on
/// when.
#[derive(Clone, Debug, PartialEq)]
pub struct Odds {
    bins: [[Bin; Self::BINS]; Self::DISTANCES],
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Bin {
    used: f32,
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

    /// Nothing seen: a score is its own probability.
    pub fn new() -> Self {
        Self { bins: [[Bin::default(); Self::BINS]; Self::DISTANCES] }
    }

    /// A prediction of this score, `0.0..=1.0`, came true or did not. A distance of 0 counts as 1.
    pub fn observe(&mut self, distance: u8, score: f32, is_used: bool) {
        let bin = self.bin_mut(distance, score);
        bin.seen += 1.0;
        bin.used += f32::from(u8::from(is_used));
        if bin.seen >= Self::SEEN_MAX {
            *bin = Bin { used: bin.used / 2.0, seen: bin.seen / 2.0 };
        }
    }

    /// The probability, `0.0..=1.0`, that a prediction of this score comes true.
    pub fn probability(&self, distance: u8, score: f32) -> f32 {
        let bin = self.bins[Self::row(distance)][Self::column(score)];
        let score = if score.is_nan() { 0.0 } else { score.clamp(0.0, 1.0) };
        (bin.used + Self::PRIOR * score) / (bin.seen + Self::PRIOR)
    }

    fn bin_mut(&mut self, distance: u8, score: f32) -> &mut Bin {
        &mut self.bins[Self::row(distance)][Self::column(score)]
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

impl Default for Odds {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_become_probabilities() {
        let mut odds = Odds::new();
        assert_eq!(odds.probability(1, 0.125), 0.125);
        (0..400).for_each(|i| odds.observe(1, 0.125, i % 10 != 0));
        let learned = odds.probability(1, 0.13);
        assert!((0.88..0.91).contains(&learned), "{learned}");
        assert_eq!((odds.probability(2, 0.125), odds.probability(1, 0.5)), (0.125, 0.5), "of others nothing is known");
        // What changes is believed before long.
        (0..1000).for_each(|_| odds.observe(1, 0.125, false));
        assert!(odds.probability(1, 0.125) < 0.2);
    }

    #[test]
    fn bins_are_half_octaves() {
        let columns =
            [1.0, 0.99, 0.75, 0.74, 0.5, 0.49, 0.004, 0.0, f32::MIN_POSITIVE, f32::NAN, -1.0].map(Odds::column);
        assert_eq!(columns, [0, 1, 1, 2, 2, 3, 15, 15, 15, 15, 15]);
        assert_eq!([0, 1, 2, 4, 5, 255].map(Odds::row), [0, 0, 1, 3, 3, 3]);
        assert_eq!(Odds::new().probability(1, f32::NAN), 0.0);
        assert_eq!(Odds::new().probability(1, 7.0), 1.0);
    }
}
