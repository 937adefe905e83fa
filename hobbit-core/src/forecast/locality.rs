//! Hit rates by the share of a layer's experts that have slots.
//!
//! Transfer to other models: the *share* of slots decides, not the number of experts that a token uses (three models of
//! 128 experts with 4 to 8 used lie within 5 points of each other, see [`super::known`]). Models of fewer, larger
//! experts have less locality. A forecast interpolates in the logarithm between recorded numbers of experts, and takes
//! the nearest recording beyond them.

use crate::random::SplitMix64;

/// Hit rates, 0..=1, by share of slots, 0..=1: linear between points, from 0 without slots to 1 with a slot for each
/// expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Locality {
    /// Share and hit rate, both ascending.
    points: Vec<(f64, f64)>,
}

impl Locality {
    /// Hit rates at ascending shares. Values below their predecessor are raised to it; all are clamped to 0..=1.
    pub fn new(points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let mut kept: Vec<(f64, f64)> = vec![(0.0, 0.0)];
        for (share, hit) in points {
            let (last, least) = kept[kept.len() - 1];
            if share > last && share < 1.0 {
                kept.push((share, hit.clamp(least, 1.0)));
            }
        }
        kept.push((1.0, 1.0));
        Self { points: kept }
    }

    /// A router that chooses at random: the hit rate equals the share of slots.
    pub fn random() -> Self {
        Self::new([])
    }

    /// Share of uses, 0..=1, that hit if `share` of a layer's experts have slots.
    pub fn hit(&self, share: f64) -> f64 {
        let share = share.clamp(0.0, 1.0);
        let after = self.points.partition_point(|(x, _)| *x < share).max(1);
        let (from, to) = (self.points[after - 1], self.points[after]);
        from.1 + (to.1 - from.1) * (share - from.0) / (to.0 - from.0)
    }

    /// Combines several curves with `pick`, share by share.
    pub(super) fn of_several(curves: &[&Self], pick: impl Fn(&[f64]) -> f64) -> Self {
        Self::new(grid().map(|share| {
            let hits: Vec<f64> = curves.iter().map(|curve| curve.hit(share)).collect();
            (share, pick(&hits))
        }))
    }

    pub(super) fn towards(&self, other: &Self, part: f64) -> Self {
        Self::new(grid().map(|share| (share, self.hit(share) * (1.0 - part) + other.hit(share) * part)))
    }
}

fn grid() -> impl Iterator<Item = f64> {
    (1..100).map(|percent| f64::from(percent) / 100.0)
}

/// Tokens are drawn until the host beside a device has taken this many times its slots, and depends no longer on its
/// contents at the beginning, or until these steps over experts are spent.
const SETTLING_TURNS: usize = 4;
const SETTLING_STEPS: usize = 1 << 22;
const SETTLING_SEED: u64 = 17;

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
    pub(super) fn new(n_expert: u16, n_used: u32, locality: &Locality, random: &mut SplitMix64) -> Self {
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

    /// Contents of a host with `n_host` slots beside a device with `n_device`, after many tokens: places in the stack,
    /// last used first. The device holds the experts used last; the host sees uses of the others only.
    pub(super) fn beside_device(mut self, n_host: usize, n_device: usize) -> Vec<usize> {
        let n_expert = self.stack.len();
        let (on_device, others) = self.stack.split_at(n_device.min(n_expert));
        let mut host: Vec<u16> = others.iter().chain(on_device).take(n_host).copied().collect();
        let mut random = SplitMix64::new(SETTLING_SEED);
        let mut chosen = Vec::new();
        // Without evictions nothing changes, and without a device the host holds the experts used last.
        let is_settled = n_device == 0 || n_device >= n_expert || n_host == 0 || n_host >= n_expert;
        let mut left = if is_settled { 0 } else { SETTLING_STEPS / (n_expert * self.n_used.max(1)) };
        let mut n_seen = 0;
        while left > 0 && n_seen < SETTLING_TURNS * n_host {
            left -= 1;
            let on_device = self.stack[..n_device].to_vec();
            chosen.clear();
            self.token(&mut random, &mut chosen);
            for expert in chosen.iter().filter(|expert| !on_device.contains(expert)) {
                n_seen += 1;
                host.retain(|other| other != expert);
                host.insert(0, *expert);
                host.truncate(n_host);
            }
        }
        let place = |expert: &u16| self.stack.iter().position(|other| other == expert);
        host.iter().filter_map(place).collect()
    }

    /// The next token's experts, `[n_used]`, all different.
    pub(super) fn token(&mut self, random: &mut SplitMix64, chosen: &mut Vec<u16>) {
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
