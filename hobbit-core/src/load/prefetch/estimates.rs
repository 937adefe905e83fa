//! The planner's statistics: how long things take, and how often predictions come true.

use crate::load::balance::RunningMean;
use crate::route::Demand;

/// Running means of times and hit rates. No plan is made before both times were observed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimates {
    layer: RunningMean,
    byte: RunningMean,
    recent_hit_rate: f64,
}

impl Estimates {
    /// Weight of one layer in the recent hit rate.
    const WEIGHT: f64 = 1.0 / 16.0;

    /// Starts with the measured bandwidth of the link; a figure that is not positive is ignored.
    pub fn seeded(bytes_per_s: f64) -> Self {
        Self { byte: RunningMean::seeded(bytes_per_s.recip()), ..Self::default() }
    }

    /// Time from one router's choice to the next one's, without waits for experts.
    pub fn observe_layer(&mut self, seconds: f64) {
        self.layer.add(seconds);
    }

    /// The link was busy for `seconds`, at whatever depth, and moved `bytes`.
    pub fn observe_load(&mut self, bytes: u64, seconds: f64) {
        if bytes > 0 {
            self.byte.add(seconds / bytes as f64);
        }
    }

    /// A token used `n_used` experts of a layer, `n_hits` of which were resident.
    pub(crate) fn observe_uses(&mut self, n_hits: u64, n_used: u64) {
        if n_used > 0 {
            let share = n_hits.min(n_used) as f64 / n_used as f64;
            self.recent_hit_rate += (share - self.recent_hit_rate) * Self::WEIGHT;
        }
    }

    /// How much of the uses of the last few layers missed.
    pub(crate) fn miss_rate(&self) -> MissRate {
        MissRate::of(self.recent_hit_rate)
    }

    pub fn layer_seconds(&self) -> Option<f64> {
        self.layer.get()
    }

    /// Seconds that the link takes for this many bytes, if known.
    pub fn load_seconds(&self, bytes: u64) -> Option<f64> {
        self.byte.get().map(|seconds| seconds * bytes as f64)
    }
}

/// Probability that the router asks for a predicted expert in each precision, together at most 1. The rest: the expert
/// is not chosen, or not worth reading.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Chances {
    pub high: f32,
    pub low: f32,
}

/// A prediction before its layer's router has chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guess {
    /// MoE layers until its own; 0 counts as 1.
    pub distance: u8,
    /// The predicted weight, `0.0..=1.0`.
    pub score: f32,
    /// Precision that this weight asks for.
    pub worth: Demand,
    /// Before any prefetch for this prediction.
    pub presence: Presence,
}

/// Whether a predicted expert is in memory. Caches and predictors are right about the same experts: of 8 predicted
/// experts 6 may be used, but of the 2 missing ones among them at most one, unless misses are frequent at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    Resident,
    Missing(MissRate),
}

/// Recent share of uses that missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MissRate {
    BelowEighth,
    BelowQuarter,
    BelowHalf,
    HalfOrMore,
}

impl MissRate {
    fn of(hit_rate: f64) -> Self {
        match hit_rate {
            rate if rate > 0.875 => Self::BelowEighth,
            rate if rate > 0.75 => Self::BelowQuarter,
            rate if rate > 0.5 => Self::BelowHalf,
            _ => Self::HalfOrMore,
        }
    }
}

impl Presence {
    const COUNT: usize = 5;

    fn index(self) -> usize {
        match self {
            Self::Resident => 0,
            Self::Missing(rate) => 1 + rate as usize,
        }
    }
}

/// The probability behind a score, counted by distance, size of the score, precision that it asks for, and presence.
///
/// Scores mean different things: a router weight of 1/8 may be certain to be used, and the first of two guesses is
/// often the second of the two chosen experts. Counting turns all of them into probabilities. It depends on events
/// only, never on time. A presence without observations takes the counts of all presences; without any, a score is its
/// own probability.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Odds {
    all: Bins,
    /// By [`Presence::index`].
    by_presence: [Bins; Presence::COUNT],
}

/// By [`Guess::worth`], distance and size of the score.
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

    /// The counts, with `prior` as [`Odds::PRIOR`] further cases.
    fn chances(self, prior: Chances) -> Chances {
        let chance = |came, prior| (came + Odds::PRIOR * prior) / (self.seen + Odds::PRIOR);
        Chances { high: chance(self.high, prior.high), low: chance(self.low, prior.low) }
    }
}

impl Odds {
    /// Distances with bins of their own; those beyond count as the last one.
    const DISTANCES: usize = 4;
    /// Half octaves of scores downwards from 1; those below count as the last one.
    const BINS: usize = 16;
    /// Predictions that the prior counts as.
    const PRIOR: f32 = 4.0;
    /// At this many predictions in a bin, its counts are halved.
    const SEEN_MAX: f32 = 512.0;

    /// The router asked for `asked`; `None` if it did not choose the expert.
    pub fn observe(&mut self, guess: Guess, asked: Option<Demand>) {
        let (worth, row, column) = Self::place(guess);
        self.all[worth][row][column].add(asked);
        self.by_presence[guess.presence.index()][worth][row][column].add(asked);
    }

    pub(crate) fn chances(&self, guess: Guess) -> Chances {
        let (worth, row, column) = Self::place(guess);
        let score = if guess.score.is_nan() { 0.0 } else { guess.score.clamp(0.0, 1.0) };
        let prior = |demand| if demand == guess.worth { score } else { 0.0 };
        let prior = Chances { high: prior(Demand::High), low: prior(Demand::Low) };
        let of_all = self.all[worth][row][column].chances(prior);
        self.by_presence[guess.presence.index()][worth][row][column].chances(of_all)
    }

    fn place(guess: Guess) -> (usize, usize, usize) {
        (guess.worth as usize, Self::row(guess.distance), Self::column(guess.score))
    }

    fn row(distance: u8) -> usize {
        usize::from(distance.saturating_sub(1)).min(Self::DISTANCES - 1)
    }

    /// From the exponent's bits and the first bit of the mantissa: the same on every machine, unlike a logarithm.
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
        Guess { distance, score, worth, presence: Presence::Resident }
    }

    fn high(odds: &Odds, distance: u8, score: f32) -> f32 {
        odds.chances(guess(distance, score, Demand::High)).high
    }

    #[test]
    fn scores_become_probabilities() {
        let mut odds = Odds::default();
        assert_eq!(high(&odds, 1, 0.125), 0.125);
        (0..400).for_each(|i| odds.observe(guess(1, 0.125, Demand::High), HIGH.filter(|_| i % 10 != 0)));
        let learned = high(&odds, 1, 0.13);
        assert!((0.88..0.91).contains(&learned), "{learned}");
        assert_eq!((high(&odds, 2, 0.125), high(&odds, 1, 0.5)), (0.125, 0.5), "other bins");
        (0..1000).for_each(|_| odds.observe(guess(1, 0.125, Demand::High), None));
        assert!(high(&odds, 1, 0.125) < 0.2, "old counts fade");
    }

    #[test]
    fn the_precision_that_is_asked_for_is_counted() {
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
    fn missing_experts_have_odds_of_their_own() {
        let mut odds = Odds::default();
        let of = |presence| Guess { presence, ..guess(1, 0.5, Demand::High) };
        let [few, most] = [MissRate::BelowEighth, MissRate::HalfOrMore].map(Presence::Missing);
        // Nine of ten resident experts are used, one of ten missing ones.
        for i in 0..400 {
            odds.observe(of(Presence::Resident), HIGH.filter(|_| i % 10 != 0));
            odds.observe(of(few), HIGH.filter(|_| i % 10 == 0));
        }
        let chance = |presence| odds.chances(of(presence)).high;
        assert!((0.88..0.91).contains(&chance(Presence::Resident)), "{}", chance(Presence::Resident));
        assert!((0.09..0.12).contains(&chance(few)), "{}", chance(few));
        assert!((0.48..0.52).contains(&chance(most)), "{}, without observations the odds of all", chance(most));
    }

    #[test]
    fn bins_are_half_octaves() {
        let columns =
            [1.0, 0.99, 0.75, 0.74, 0.5, 0.49, 0.004, 0.0, f32::MIN_POSITIVE, f32::NAN, -1.0].map(Odds::column);
        assert_eq!(columns, [0, 1, 1, 2, 2, 3, 15, 15, 15, 15, 15]);
        assert_eq!([0, 1, 2, 4, 5, 255].map(Odds::row), [0, 0, 1, 3, 3, 3]);
        assert_eq!((high(&Odds::default(), 1, f32::NAN), high(&Odds::default(), 1, 7.0)), (0.0, 1.0));
        let rates = [1.0, 0.9, 0.8, 0.6, 0.5, 0.0, f64::NAN].map(|rate| MissRate::of(rate) as usize);
        assert_eq!(rates, [0, 0, 1, 2, 3, 3, 3]);
    }
}
