//! Synthetic routes of a given locality, for models without a recording and of any size.
//!
//! Each layer keeps its experts ordered by last use. A token draws its k experts by their positions in that order, with
//! the probabilities of the locality ([Mattson's stack model](super::locality) reversed), so that an LRU cache of any
//! size has the hit rate of the locality. Systematic sampling draws exactly k and keeps every position's probability.

use super::locality::Locality;

/// One layer's experts and how they are drawn.
#[derive(Clone, Debug)]
pub(super) struct LayerRoutes {
    /// Experts, last used first.
    stack: Vec<u16>,
    /// Probability of each position.
    draws: Vec<f64>,
    n_used: usize,
    places: Vec<usize>,
}

impl LayerRoutes {
    /// Routes of `n_expert` experts, `n_used` of them for each token (at most all).
    pub(super) fn new(n_expert: u16, n_used: u32, locality: &Locality, random: &mut Random) -> Self {
        let n = usize::from(n_expert);
        let n_used = (n_used as usize).min(n);
        let share = |place: usize| place as f64 / n as f64;
        let mut draws: Vec<f64> =
            (0..n).map(|place| n_used as f64 * (locality.hit(share(place + 1)) - locality.hit(share(place)))).collect();
        // No expert is drawn twice: probability above 1 moves to the next positions.
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
            // Count the sampling points between the two sums; each position has at most one.
            if (before - first).ceil() < (sum - first).ceil() && taken.len() < self.n_used {
                taken.push(place);
            }
        }
        // Rounding may leave the last ones out.
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
            // Each expert moved to the front shifts the others back.
            let expert = self.stack.remove(place + removed);
            self.stack.insert(0, expert);
        }
        debug_assert_eq!(chosen.len() - start, self.n_used);
    }
}

/// SplitMix64: the same numbers on every machine.
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
