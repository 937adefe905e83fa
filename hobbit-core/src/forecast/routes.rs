//! Routes as a model of a given locality would take them, to be replayed: no recording, and as large as the model is.
//!
//! Each layer keeps its experts by their last use. A token draws its k by their places in that order, each place with the
//! probability that the locality says ([Mattson's stack model](super::locality) the other way round), so that an LRU cache
//! of any size finds what the locality promises. Systematic sampling draws exactly k and keeps every place's probability.

use super::locality::Locality;

/// One layer's experts and how they are drawn.
#[derive(Clone, Debug)]
pub(super) struct LayerRoutes {
    /// Last used first.
    stack: Vec<u16>,
    /// Probability of each place.
    draws: Vec<f64>,
    n_used: usize,
    /// Reused: places in the order in which they are drawn from.
    places: Vec<usize>,
}

impl LayerRoutes {
    /// Of `n_expert` experts, `n_used` of them for each token (at most all).
    pub(super) fn new(n_expert: u16, n_used: u32, locality: &Locality, random: &mut Random) -> Self {
        let n = usize::from(n_expert);
        let n_used = (n_used as usize).min(n);
        let share = |place: usize| place as f64 / n as f64;
        let mut draws: Vec<f64> =
            (0..n).map(|place| n_used as f64 * (locality.hit(share(place + 1)) - locality.hit(share(place)))).collect();
        // No expert is drawn twice: what is more than certain goes to the next places.
        let mut over = 0.0;
        for draw in &mut draws {
            let wanted = *draw + over;
            *draw = wanted.min(1.0);
            over = wanted - *draw;
        }
        let mut stack: Vec<u16> = (0..n_expert).collect();
        random.shuffle(&mut stack);
        Self { stack, draws, n_used, places: (0..n).collect() }
    }

    /// The experts used last, last used first.
    pub(super) fn latest(&self, n: usize) -> &[u16] {
        &self.stack[..n.min(self.stack.len())]
    }

    /// The next token's experts, `[n_used]`, all different.
    pub(super) fn token(&mut self, random: &mut Random, chosen: &mut Vec<u16>) {
        random.shuffle(&mut self.places);
        let first = random.unit();
        let mut sum = 0.0;
        let mut taken = Vec::with_capacity(self.n_used);
        for &place in &self.places {
            let before = sum;
            sum += self.draws[place];
            // Whole numbers and the first one's fraction, of which at most one lies here.
            if (before - first).ceil() < (sum - first).ceil() && taken.len() < self.n_used {
                taken.push(place);
            }
        }
        // Sums of fractions end a little early now and then.
        let mut spare = 0;
        while taken.len() < self.n_used {
            if !taken.contains(&spare) {
                taken.push(spare);
            }
            spare += 1;
        }
        let start = chosen.len();
        chosen.extend(taken.iter().map(|place| self.stack[*place]));
        taken.sort_unstable_by(|a, b| b.cmp(a));
        for (removed, place) in taken.iter().enumerate() {
            // What was put in front moved the others back.
            let expert = self.stack.remove(place + removed);
            self.stack.insert(0, expert);
        }
        debug_assert_eq!(chosen.len() - start, self.n_used);
    }
}

/// SplitMix64: equal everywhere.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// 0 inclusive to 1 exclusive.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = (u128::from(self.bits()) * (last as u128 + 1)) >> 64;
            items.swap(last, other as usize);
        }
    }
}
