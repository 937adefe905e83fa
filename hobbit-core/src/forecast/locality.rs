//! Hit rates by the share of a layer's experts that have slots.
//!
//! Recordings are short: an expert used for the first time would have been used before, had the recording begun
//! earlier. Such a use only says that the expert's distance (the number of other experts used since) is above the
//! number seen so far. It is a censored observation, which Kaplan and Meier's estimator accounts for. Better policies
//! and the optimum are replayed to find how many of LRU's misses they save.
//!
//! Transfer to other models: the *share* of slots decides, not the number of experts that a token uses (three models of
//! 128 experts with 4 to 8 used lie within 5 points of each other, see [`super::known`]). Models of fewer, larger
//! experts have less locality. A forecast interpolates in the logarithm between recorded numbers of experts, and takes
//! the nearest recording beyond them.

use crate::sim::{Budget, Config, Eviction, Recording, SimError, replay};

/// Shares of slots at which curves are sampled.
pub const SHARES: [f64; 13] = [0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.32, 0.4, 0.5, 0.62, 0.75, 0.87, 1.0];
/// Misses beside first uses, as a share of all uses, below which two policies are not distinguished.
const MISSES_MIN: f64 = 0.005;

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
        let after = self.points.partition_point(|(own, _)| *own < share).max(1);
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

    /// Hit rates of the decoded tokens of a recording, as if each expert had been used before: LRU's rate from
    /// distances, times the ratio of misses of `eviction` to LRU's.
    pub fn of(recording: &Recording, eviction: Eviction) -> Result<Self, SimError> {
        let lru = distances(recording);
        let config = Config {
            eviction: Eviction::Policy(crate::cache::policy::PolicyKind::Lru),
            ..Config::recorded(recording)?
        };
        let misses = |eviction, share: f64| -> Result<f64, SimError> {
            let config = Config { eviction, budget: Budget::Percent(100.0 * share), ..config.clone() };
            Ok(replay(recording, &config, &mut |_, _, _| {})?.decode.n_misses() as f64)
        };
        // With slots for all experts, only first uses miss.
        let whole =
            replay(recording, &Config { budget: Budget::Percent(100.0), ..config.clone() }, &mut |_, _, _| {})?.decode;
        let (first, uses) = (whole.n_misses() as f64, (whole.hits + whole.n_misses()) as f64);
        let mut points = Vec::new();
        for share in SHARES {
            let of_lru = misses(config.eviction, share)? - first;
            let ratio = match of_lru > MISSES_MIN * uses {
                true => ((misses(eviction, share)? - first) / of_lru).clamp(0.0, 1.0),
                false => 1.0,
            };
            points.push((share, 1.0 - (1.0 - lru.hit(share)) * ratio));
        }
        Ok(Self::new(points))
    }
}

fn grid() -> impl Iterator<Item = f64> {
    (1..100).map(|percent| f64::from(percent) / 100.0)
}

/// LRU's curve: an expert's distance is its position, from 1, among its layer's experts by their last use, before the
/// token.
fn distances(recording: &Recording) -> Locality {
    let layers = &recording.header.model.layers;
    let mut stacks: Vec<Vec<u16>> = vec![Vec::new(); layers.len()];
    // A share of slots, and whether it would have sufficed.
    let mut seen: Vec<(f64, bool)> = Vec::new();
    for record in recording.batches().flat_map(|batch| &batch.layers) {
        let Ok(at) = layers.binary_search_by_key(&record.layer, |layer| layer.layer) else { continue };
        let (stack, all) = (&mut stacks[at], f64::from(layers[at].n_expert.max(1)));
        for chosen in record.chosen.chunks(usize::from(record.n_used).max(1)) {
            for expert in chosen {
                let place = stack.iter().rposition(|other| other == expert);
                let distance = place.map_or(stack.len(), |place| stack.len() - place);
                seen.push((distance as f64 / all, place.is_some()));
            }
            for expert in chosen {
                stack.retain(|other| other != expert);
                stack.push(*expert);
            }
        }
    }
    // A known distance precedes one that is only known to be greater.
    seen.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
    let (mut missing, mut points) = (1.0, Vec::new());
    for (before, (share, found)) in seen.iter().enumerate() {
        if *found {
            missing *= 1.0 - 1.0 / (seen.len() - before) as f64;
        }
        points.push((*share, 1.0 - missing));
    }
    // The last of equal shares counts.
    points.reverse();
    points.dedup_by(|a, b| a.0 == b.0);
    points.reverse();
    Locality::new(points)
}

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
