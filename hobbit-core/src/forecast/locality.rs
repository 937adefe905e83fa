//! How often an expert is found in memory, by the share of a layer's experts that have slots.
//!
//! Recordings are short: an expert that is met for the first time would have been met before, had the recording begun
//! earlier. Such a use says only that the expert's distance (the number of other experts used since) is above the number
//! seen so far: it is a censored observation, and Kaplan and Meier's estimator takes it as one. What better policies and
//! the optimum save of LRU's misses is replayed.
//!
//! What carries over to other models: the *share* of slots decides, not how many experts a token uses (three models of
//! 128 experts with 4 to 8 used lie within 5 points of each other, see [`super::known`]); models of fewer, larger experts
//! have less locality. Between the numbers of experts that were recorded a forecast interpolates in the logarithm, beyond
//! them it takes the nearest.

use crate::sim::{Budget, Config, Eviction, Recording, SimError, replay};

/// Shares at which curves are told.
pub const SHARES: [f64; 13] = [0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.32, 0.4, 0.5, 0.62, 0.75, 0.87, 1.0];
/// Of all uses, misses beside first meetings below which two policies are not told apart.
const MISSES_MIN: f64 = 0.005;

/// Hit rates, 0..=1, by share of slots, 0..=1: straight lines between points, from nothing without slots to everything
/// with a slot for each expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Locality {
    /// Share and hit rate, both ascending.
    points: Vec<(f64, f64)>,
}

impl Locality {
    /// Hit rates at ascending shares. What falls is raised to what stood before; all are held within 0 and 1.
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

    /// A router that chooses blindly: as many are found as have slots.
    pub fn random() -> Self {
        Self::new([])
    }

    /// Share of uses, 0..=1, that find their expert where `share` of a layer's experts have slots.
    pub fn hit(&self, share: f64) -> f64 {
        let share = share.clamp(0.0, 1.0);
        let after = self.points.partition_point(|(own, _)| *own < share).max(1);
        let (from, to) = (self.points[after - 1], self.points[after]);
        from.1 + (to.1 - from.1) * (share - from.0) / (to.0 - from.0)
    }

    /// Share by share what `pick` makes of several curves.
    pub(super) fn of_several(curves: &[&Self], pick: impl Fn(&[f64]) -> f64) -> Self {
        Self::new(grid().map(|share| {
            let hits: Vec<f64> = curves.iter().map(|curve| curve.hit(share)).collect();
            (share, pick(&hits))
        }))
    }

    /// So far from this curve to another one, 0..=1.
    pub(super) fn towards(&self, other: &Self, part: f64) -> Self {
        Self::new(grid().map(|share| (share, self.hit(share) * (1.0 - part) + other.hit(share) * part)))
    }

    /// Of the tokens that a recording decodes, each expert met before: LRU's rate from distances, times what `eviction`
    /// makes of LRU's misses.
    ///
    /// # Errors
    /// A recording that cannot be replayed.
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
        // With slots for all only first meetings miss.
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

/// LRU's curve: an expert's distance is its place, from 1, among its layer's experts by their last use, before the token.
fn distances(recording: &Recording) -> Locality {
    let layers = &recording.header.model.layers;
    let mut stacks: Vec<Vec<u16>> = vec![Vec::new(); layers.len()];
    // Share that would have sufficed, or that would not; and whether it would.
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
    // A distance that is known comes before one that is only known to be greater.
    seen.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
    let (mut missing, mut points) = (1.0, Vec::new());
    for (before, (share, found)) in seen.iter().enumerate() {
        if *found {
            missing *= 1.0 - 1.0 / (seen.len() - before) as f64;
        }
        points.push((*share, 1.0 - missing));
    }
    // Of equal shares the last counts.
    points.reverse();
    points.dedup_by(|a, b| a.0 == b.0);
    points.reverse();
    Locality::new(points)
}
