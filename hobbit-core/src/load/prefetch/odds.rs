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

/// What is known of a prediction before its layer's router speaks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guess {
    /// MoE layers until its own; 0 counts as 1.
    pub distance: u8,
    /// The predicted weight, `0.0..=1.0`.
    pub score: f32,
    /// What that is worth.
    pub worth: Demand,
    /// Whether it was there before anything was read on its account.
    pub standing: Standing,
}

/// Where a predicted expert was. Caches and predictors are right about the same experts: of 8 predicted ones 6 may be used,
/// but of the 2 among them that are missing one at most, unless much is missing just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// In memory.
    There,
    /// Not in memory, while caches find most of what is asked for, three quarters, half, less.
    Missing(Scarcity),
}

/// How much of what is asked for was missing of late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scarcity {
    /// Below an eighth.
    Little,
    /// Below a quarter.
    Some,
    /// Below a half.
    Much,
    /// Half of it, or more.
    Most,
}

impl Scarcity {
    /// Of a hit rate, `0.0..=1.0`.
    pub fn of(hit_rate: f64) -> Self {
        match hit_rate {
            rate if rate > 0.875 => Self::Little,
            rate if rate > 0.75 => Self::Some,
            rate if rate > 0.5 => Self::Much,
            _ => Self::Most,
        }
    }
}

impl Standing {
    const COUNT: usize = 5;

    fn index(self) -> usize {
        match self {
            Self::There => 0,
            Self::Missing(scarcity) => 1 + scarcity as usize,
        }
    }
}

/// The probability behind a score, learned by distance, size of the score, what the predicted weight is worth and whether the
/// expert was there. Scores mean different things (a router weight of 1/8 may be certain to be used; the first of two guesses
/// is often the second of the two that are chosen); counting makes probabilities of all of them. Depends on what happened,
/// never on when. Where nothing was seen of experts that stood so, what was seen of all counts; where nothing was, a score is
/// its own probability, and what it is worth is what will be asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Odds {
    /// By [`Guess::worth`].
    all: Bins,
    /// By [`Standing::index`].
    standing: [Bins; Standing::COUNT],
}

/// By what it is worth, distance and size of the score.
type Bins = [[[Bin; Odds::BINS]; Odds::DISTANCES]; 3];

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Bin {
    high: f32,
    low: f32,
    seen: f32,
}

impl Bin {
    fn add(&mut self, asked: Option<Demand>) {
        self.seen += 1.0;
        self.high += f32::from(u8::from(asked == Some(Demand::High)));
        self.low += f32::from(u8::from(asked == Some(Demand::Low)));
        if self.seen >= Odds::SEEN_MAX {
            *self = Self { high: self.high / 2.0, low: self.low / 2.0, seen: self.seen / 2.0 };
        }
    }

    /// What was seen, and what is `presumed` as [`Odds::PRIOR`] cases more.
    fn chances(self, presumed: Chances) -> Chances {
        let chance = |came, presumed| (came + Odds::PRIOR * presumed) / (self.seen + Odds::PRIOR);
        Chances { high: chance(self.high, presumed.high), low: chance(self.low, presumed.low) }
    }
}

impl Odds {
    /// Distances told apart; those beyond count as the last one.
    const DISTANCES: usize = 4;
    /// Scores told apart: half octaves downwards from 1; those below count as the last one.
    const BINS: usize = 16;
    /// Predictions that what is presumed counts as.
    const PRIOR: f32 = 4.0;
    /// At so many predictions in a bin, what was seen counts half.
    const SEEN_MAX: f32 = 512.0;

    /// Of such a prediction came `asked`; `None` if the router did not choose the expert.
    pub fn observe(&mut self, guess: Guess, asked: Option<Demand>) {
        let (worth, row, column) = Self::place(guess);
        self.all[worth][row][column].add(asked);
        self.standing[guess.standing.index()][worth][row][column].add(asked);
    }

    /// What such a prediction comes to.
    pub fn chances(&self, guess: Guess) -> Chances {
        let (worth, row, column) = Self::place(guess);
        let score = if guess.score.is_nan() { 0.0 } else { guess.score.clamp(0.0, 1.0) };
        let presumed = |demand| if demand == guess.worth { score } else { 0.0 };
        let presumed = Chances { high: presumed(Demand::High), low: presumed(Demand::Low) };
        let of_all = self.all[worth][row][column].chances(presumed);
        self.standing[guess.standing.index()][worth][row][column].chances(of_all)
    }

    fn place(guess: Guess) -> (usize, usize, usize) {
        (guess.worth as usize, Self::row(guess.distance), Self::column(guess.score))
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

    fn guess(distance: u8, score: f32, worth: Demand) -> Guess {
        Guess { distance, score, worth, standing: Standing::There }
    }

    fn high(odds: &Odds, distance: u8, score: f32) -> f32 {
        let Chances { high, low } = odds.chances(guess(distance, score, Demand::High));
        assert_eq!(low, 0.0);
        high
    }

    #[test]
    fn scores_become_probabilities() {
        let mut odds = Odds::default();
        assert_eq!(high(&odds, 1, 0.125), 0.125);
        (0..400).for_each(|i| odds.observe(guess(1, 0.125, Demand::High), HIGH.filter(|_| i % 10 != 0)));
        let learned = high(&odds, 1, 0.13);
        assert!((0.88..0.91).contains(&learned), "{learned}");
        assert_eq!((high(&odds, 2, 0.125), high(&odds, 1, 0.5)), (0.125, 0.5), "of others nothing is known");
        // What changes is believed before long.
        (0..1000).for_each(|_| odds.observe(guess(1, 0.125, Demand::High), None));
        assert!(high(&odds, 1, 0.125) < 0.2);
    }

    #[test]
    fn what_it_is_worth_is_not_what_is_asked_for() {
        let mut odds = Odds::default();
        let of = |odds: &Odds, worth| odds.chances(guess(1, 0.5, worth));
        assert_eq!(of(&odds, Demand::Low), Chances { high: 0.0, low: 0.5 });
        assert_eq!(of(&odds, Demand::Skip), Chances::default());
        let asked = [HIGH, HIGH, Some(Demand::Low), Some(Demand::Skip), None];
        (0..400).for_each(|i| odds.observe(guess(1, 0.5, Demand::Low), asked[i % asked.len()]));
        let Chances { high, low } = of(&odds, Demand::Low);
        assert!((0.38..0.41).contains(&high) && (0.19..0.22).contains(&low), "{high} {low}");
        assert_eq!(of(&odds, Demand::High), Chances { high: 0.5, low: 0.0 });
    }

    #[test]
    fn what_is_missing_is_another_matter() {
        let mut odds = Odds::default();
        let of = |standing| Guess { standing, ..guess(1, 0.5, Demand::High) };
        let [little, most] = [Scarcity::Little, Scarcity::Most].map(Standing::Missing);
        // Nine of ten that are there come, one of ten that are missing.
        for i in 0..400 {
            odds.observe(of(Standing::There), HIGH.filter(|_| i % 10 != 0));
            odds.observe(of(little), HIGH.filter(|_| i % 10 == 0));
        }
        let chance = |standing| odds.chances(of(standing)).high;
        assert!((0.88..0.91).contains(&chance(Standing::There)), "{}", chance(Standing::There));
        assert!((0.09..0.12).contains(&chance(little)), "{}", chance(little));
        // Where nothing was seen, what was seen of all.
        assert!((0.48..0.52).contains(&chance(most)), "{}", chance(most));
    }

    #[test]
    fn scarcity_is_told_by_the_hit_rate() {
        let of = [1.0, 0.9, 0.8, 0.6, 0.5, 0.0, f64::NAN].map(Scarcity::of);
        use Scarcity::{Little, Most, Much, Some};
        assert_eq!(of, [Little, Little, Some, Much, Most, Most, Most]);
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
