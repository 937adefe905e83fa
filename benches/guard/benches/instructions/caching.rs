//! The cache, one token long: looking up slots, a hit's way, a miss's way, and both under a policy.

use std::hint::black_box;

use gungraun::{library_benchmark, library_benchmark_group};
use hobbit_core::cache::policy::{self, PolicyKind, Shape, Weights};
use hobbit_core::cache::{Cache, LayerLayout, PoolLayout, SliceKinds, SlotId, Use};
use hobbit_core::expert::{ExpertId, SliceKind, Version};
use hobbit_core::route::{Demand, resolve};
use hobbit_guard::inputs::{self, N_EXPERT, N_LAYERS, N_SLOTS, Token};

const KINDS: [SliceKind; 3] = [SliceKind::Gate, SliceKind::Up, SliceKind::Down];
const N_BEFORE: usize = 24;

/// A cache that has seen some tokens, and the next one.
struct Warm {
    cache: Cache,
    shows_scores: bool,
    token: Token,
    /// The token's demands, by layer and expert.
    demands: Vec<Vec<Demand>>,
    has_low: bool,
    pinned: Vec<SlotId>,
    reads: Vec<(SlotId, Version)>,
}

impl Warm {
    /// One layer in the order of `hobbit_core::residency`; every read lands at once.
    fn layer(&mut self, at: usize) {
        let choice = &self.token[at];
        let cache = &mut self.cache;
        cache.begin_layer(choice.layer, 1);
        if self.shows_scores {
            cache.scores(choice.layer, &choice.scores);
        }
        self.pinned.clear();
        self.reads.clear();
        for &(index, weight) in &choice.chosen {
            let expert = ExpertId { layer: choice.layer, index };
            let [high, low] = [Version::high(expert), Version::low(expert)];
            let is_resident = [cache.lookup(high).is_some(), self.has_low && cache.lookup(low).is_some()];
            let precision = resolve(self.demands[at][usize::from(index)], is_resident, self.has_low);
            let version = precision.map(|precision| Version { expert, precision });
            let slot = version.and_then(|version| cache.lookup(version));
            let hit = slot.is_some_and(|slot| cache.is_ready(slot));
            cache.touch(expert, Use::by_one(hit, precision, weight));
            match (slot, version) {
                (Some(slot), _) => {
                    cache.pin(slot);
                    self.pinned.push(slot);
                }
                (None, Some(version)) => self.reads.push((SlotId { pool: 0, index: 0 }, version)),
                (None, None) => {}
            }
        }
        for (slot, version) in &mut self.reads {
            let Some(acquired) = cache.acquire(*version) else { continue };
            *slot = acquired.slot;
            KINDS.into_iter().for_each(|kind| cache.set_loading(*slot, kind));
            cache.pin(*slot);
            self.pinned.push(*slot);
        }
        for kind in KINDS {
            self.reads.iter().for_each(|(slot, _)| cache.set_ready(*slot, kind));
        }
        self.pinned.iter().for_each(|slot| cache.unpin(*slot));
    }

    fn run(&mut self) {
        (0..self.token.len()).for_each(|at| self.layer(at));
        self.cache.next_token();
    }

    fn show(&mut self, token: &Token) {
        self.token.clone_from(token);
        let mut asked = Vec::new();
        for (choice, demands) in token.iter().zip(&mut self.demands) {
            demands.clear();
            demands.resize(N_EXPERT.into(), Demand::High);
            if self.has_low {
                let weights: Vec<f32> = choice.chosen.iter().map(|(_, weight)| *weight).collect();
                hobbit_core::route::Thresholds::default().demands(&weights, &mut asked);
                choice.chosen.iter().zip(&asked).for_each(|((index, _), asked)| demands[usize::from(*index)] = *asked);
            }
        }
    }
}

/// A cache that has seen some tokens under this policy.
fn warm(kind: PolicyKind, n_slots: u32, has_low: bool) -> Warm {
    let pool = |of: fn(ExpertId) -> Version| PoolLayout {
        layers: (0..N_LAYERS)
            .map(|layer| LayerLayout {
                layer,
                members: (0..N_EXPERT).map(|index| of(ExpertId { layer, index })).collect(),
                kinds: SliceKinds::from_iter(KINDS),
            })
            .collect(),
        n_slots: n_slots * u32::from(N_LAYERS),
        capacities: None,
        is_common: false,
    };
    let pools = if has_low { vec![pool(Version::high), pool(Version::low)] } else { vec![pool(Version::high)] };
    let shape = Shape { n_layers: N_LAYERS, low_cost: 0.25 };
    let mut warm = Warm {
        cache: Cache::new(pools, policy::build(kind, &Weights::default(), shape)),
        shows_scores: kind.needs_scores(),
        token: Vec::new(),
        demands: vec![Vec::new(); N_LAYERS.into()],
        has_low,
        pinned: Vec::new(),
        reads: Vec::new(),
    };
    warm.cache.begin_sequence();
    let tokens = inputs::tokens(N_BEFORE + 1, 3);
    for token in &tokens[..N_BEFORE] {
        warm.show(token);
        warm.run();
    }
    warm.show(&tokens[N_BEFORE]);
    warm
}

#[library_benchmark(setup = warm)]
#[bench::lru(PolicyKind::Lru, N_SLOTS, false)]
#[bench::lru_dynamic(PolicyKind::Lru, N_SLOTS / 2, true)]
#[bench::learned(PolicyKind::Learned, N_SLOTS, false)]
#[bench::learned_dynamic(PolicyKind::Learned, N_SLOTS / 2, true)]
fn token(mut warm: Warm) -> Warm {
    black_box(&mut warm).run();
    warm
}

/// A cache whose 256 versions in the second place are all resident, or none of them is, as `hit` says.
fn versions(hit: bool) -> (Cache, Vec<Version>) {
    let Warm { cache, .. } = warm(PolicyKind::Lru, N_SLOTS, false);
    let mut versions = Vec::new();
    for layer in 0..N_LAYERS {
        let all = (0..N_EXPERT).map(|index| Version::high(ExpertId { layer, index }));
        versions.extend(all.filter(|version| cache.lookup(*version).is_some() == hit).take(inputs::N_USED.into()));
    }
    assert_eq!(versions.len(), 256);
    (cache, versions)
}

#[library_benchmark(setup = versions)]
#[bench::hits(true)]
#[bench::misses(false)]
fn lookup((cache, versions): (Cache, Vec<Version>)) -> (Cache, Vec<Version>) {
    for &version in black_box(&versions) {
        let slot = cache.lookup(version);
        black_box(slot.is_some_and(|slot| cache.is_ready(slot)));
    }
    (cache, versions)
}

const WEIGHT: f32 = 0.125;

// 256 uses of what is there.
#[library_benchmark(setup = versions)]
#[bench::lru(true)]
fn hit((mut cache, versions): (Cache, Vec<Version>)) -> (Cache, Vec<Version>) {
    for &version in black_box(&versions) {
        let Some(slot) = cache.lookup(version) else { continue };
        cache.touch(version.expert, Use::by_one(true, Some(version.precision), WEIGHT));
        cache.pin(slot);
        cache.unpin(slot);
    }
    (cache, versions)
}

// 256 uses of what is not: reserved, loaded, committed slice by slice.
#[library_benchmark(setup = versions)]
#[bench::lru(false)]
fn miss((mut cache, versions): (Cache, Vec<Version>)) -> (Cache, Vec<Version>) {
    for &version in black_box(&versions) {
        cache.touch(version.expert, Use::by_one(false, Some(version.precision), WEIGHT));
        let Some(acquired) = cache.acquire(version) else { continue };
        KINDS.into_iter().for_each(|kind| cache.set_loading(acquired.slot, kind));
        cache.pin(acquired.slot);
        KINDS.into_iter().for_each(|kind| cache.set_ready(acquired.slot, kind));
        cache.unpin(acquired.slot);
    }
    (cache, versions)
}

library_benchmark_group!(name = cache, benchmarks = [token, lookup, hit, miss]);
