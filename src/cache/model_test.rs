//! The cache against a plain model: a `HashMap` of residents and a `Vec` in order of use.
//!
//! A script of bytes decides the pools and then the calls; steps that would break the cache's order of calls are
//! left out. Used by the tests below and by the fuzz target `cache_model`.

use super::{Acquired, Cache, LayerLayout, Lru, PoolLayout, SliceKinds, SliceState, SlotId, Use};
use crate::expert::{ExpertId, SliceKind};
use std::collections::{HashMap, HashSet};

/// What the model knows of a resident.
struct Resident {
    slot: SlotId,
    states: HashMap<SliceKind, SliceState>,
    pins: u32,
}

impl Resident {
    fn is_evictable(&self) -> bool {
        self.pins == 0 && !self.states.values().any(|state| *state == SliceState::Loading)
    }
}

struct Model {
    layers: Vec<LayerLayout>,
    cache: Cache,
    residents: HashMap<ExpertId, Resident>,
    /// Residents, least recently used first.
    recency: Vec<ExpertId>,
}

/// Runs `script` and checks the cache against the model after every call.
/// Returns what each `acquire` gave: equal scripts give equal lists.
///
/// # Panics
/// When the cache and the model differ.
pub fn run(script: &[u8]) -> Vec<Option<Acquired>> {
    let mut bytes = script.iter().copied();
    let pools = read_pools(&mut bytes);
    let mut model = Model::new(pools);
    let mut log = Vec::new();
    while let (Some(op), Some(a), Some(b)) = (bytes.next(), bytes.next(), bytes.next()) {
        model.call(op, a, b, &mut log);
        model.compare();
    }
    log
}

fn read_pools(bytes: &mut impl Iterator<Item = u8>) -> Vec<PoolLayout> {
    let mut below = |n: u8| bytes.next().map_or(0, |byte| byte % n);
    let split = [SliceKind::Gate, SliceKind::Up, SliceKind::Down].into_iter().collect::<SliceKinds>();
    let fused = [SliceKind::GateUp, SliceKind::Down].into_iter().collect::<SliceKinds>();
    let mut layer = u16::from(below(3)); // leading dense layers
    (0..below(3) + 1)
        .map(|_| {
            let (n_layer, n_expert) = (below(3) + 1, below(6) + 1);
            let kinds = if below(2) == 0 { split } else { fused };
            let layers = (0..n_layer).map(|_| {
                layer += 1;
                LayerLayout { layer, n_expert: n_expert.into(), kinds }
            });
            PoolLayout { layers: layers.collect(), n_slots: below(n_layer * n_expert + 2).into() }
        })
        .collect()
}

impl Model {
    fn new(pools: Vec<PoolLayout>) -> Self {
        for_every_pool_shares_are_even(&pools);
        let layers = pools.iter().flat_map(|pool| pool.layers.clone()).collect();
        let cache = Cache::new(pools, Box::new(Lru::default()));
        Self { layers, cache, residents: HashMap::new(), recency: Vec::new() }
    }

    fn call(&mut self, op: u8, a: u8, b: u8, log: &mut Vec<Option<Acquired>>) {
        let layout = self.layers[usize::from(a) % self.layers.len()];
        let expert = ExpertId { layer: layout.layer, index: u16::from(b) % layout.n_expert };
        match op % 10 {
            0 | 1 => return self.acquire(expert, layout.kinds, log),
            8 => return self.touch(expert),
            9 if a < 16 => return self.cache.begin_sequence(),
            9 => return self.cache.next_token(),
            _ => {}
        }
        let kinds: Vec<_> = layout.kinds.iter().collect();
        let kind = kinds[usize::from(op / 10) % kinds.len()];
        let Some(resident) = self.residents.get_mut(&expert) else { return };
        let (slot, state) = (resident.slot, resident.states[&kind]);
        match (op % 10, state) {
            (2 | 3, SliceState::Free) => {
                self.cache.set_loading(slot, kind);
                resident.states.insert(kind, SliceState::Loading);
            }
            (4, SliceState::Loading) => {
                self.cache.set_ready(slot, kind);
                resident.states.insert(kind, SliceState::Ready);
            }
            (5, SliceState::Loading) => {
                self.cache.set_failed(slot, kind);
                resident.states.insert(kind, SliceState::Free);
            }
            (6, _) if resident.states.values().all(|state| *state != SliceState::Free) => {
                self.cache.pin(slot);
                resident.pins += 1;
            }
            (7, _) if resident.pins > 0 => {
                self.cache.unpin(slot);
                resident.pins -= 1;
            }
            _ => {}
        }
    }

    fn acquire(&mut self, expert: ExpertId, kinds: SliceKinds, log: &mut Vec<Option<Acquired>>) {
        if self.residents.contains_key(&expert) {
            return;
        }
        let of_layer = self.recency.iter().filter(|other| other.layer == expert.layer);
        let has_room = (of_layer.clone().count() as u32) < self.cache.capacity_of_layer(expert.layer);
        let victim = of_layer.copied().find(|other| self.residents[other].is_evictable()).filter(|_| !has_room);

        let acquired = self.cache.acquire(expert);
        log.push(acquired);
        assert_eq!(acquired.is_some(), has_room || victim.is_some(), "acquire of {expert}");
        let Some(Acquired { slot, evicted }) = acquired else { return };
        assert_eq!(evicted, victim, "victim for {expert}");
        if let Some(victim) = victim {
            let left = self.residents.remove(&victim);
            assert_eq!(left.map(|resident| resident.slot), Some(slot), "{expert} sits where {victim} sat");
            self.recency.retain(|other| *other != victim);
        }
        let states = kinds.iter().map(|kind| (kind, SliceState::Free)).collect();
        self.residents.insert(expert, Resident { slot, states, pins: 0 });
        self.recency.push(expert);
    }

    fn touch(&mut self, expert: ExpertId) {
        let resident = self.residents.get(&expert);
        let hit = resident.is_some_and(|r| r.states.values().all(|state| *state == SliceState::Ready));
        assert_eq!(hit, self.cache.lookup(expert).is_some_and(|slot| self.cache.is_ready(slot)), "{expert} ready");
        self.cache.touch(expert, Use { hit });
        if resident.is_some() {
            self.recency.retain(|other| *other != expert);
            self.recency.push(expert);
        }
    }

    /// Everything one can ask the cache, against the model.
    fn compare(&self) {
        for layout in &self.layers {
            let experts = (0..layout.n_expert).map(|index| ExpertId { layer: layout.layer, index });
            let mut n_resident = 0;
            for expert in experts {
                let resident = self.residents.get(&expert);
                assert_eq!(self.cache.lookup(expert), resident.map(|r| r.slot), "slot of {expert}");
                let Some(resident) = resident else { continue };
                n_resident += 1;
                for (&kind, &state) in &resident.states {
                    assert_eq!(self.cache.state(resident.slot, kind), state, "{kind:?} of {expert}");
                }
            }
            assert!(n_resident <= self.cache.capacity_of_layer(layout.layer), "layer {} overflows", layout.layer);
        }
        let listed: HashMap<ExpertId, SlotId> = self.cache.residents().collect();
        let slots: HashSet<SlotId> = listed.values().copied().collect();
        assert_eq!(listed.len(), self.residents.len(), "residents");
        assert_eq!(slots.len(), listed.len(), "two experts in one slot");
    }
}

fn for_every_pool_shares_are_even(pools: &[PoolLayout]) {
    let cache = Cache::new(pools.to_vec(), Box::new(Lru::default()));
    for pool in pools {
        let shares = || pool.layers.iter().map(|layer| cache.capacity_of_layer(layer.layer));
        let n_expert: u32 = pool.layers.iter().map(|layer| u32::from(layer.n_expert)).sum();
        assert_eq!(shares().sum::<u32>(), pool.n_slots.min(n_expert), "slots of {pool:?}");
        assert!(shares().max() <= shares().min().map(|least| least + 1), "shares of {pool:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::run;

    /// Bytes of xorshift64*, so that a failure names a seed that reproduces it everywhere.
    fn script(seed: u64, len: usize) -> Vec<u8> {
        let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            x ^= x >> 12;
            x ^= x << 25;
            x ^= x >> 27;
            (x.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 56) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn the_cache_equals_its_model_on_random_scripts() {
        let (mut evictions, mut refusals) = (0, 0);
        for seed in 1..=300 {
            eprintln!("seed {seed}");
            let script = script(seed, 3000);
            let log = run(&script);
            assert_eq!(log, run(&script), "equal calls, equal answers");
            evictions += log.iter().flatten().filter(|acquired| acquired.evicted.is_some()).count();
            refusals += log.iter().filter(|acquired| acquired.is_none()).count();
        }
        assert!(evictions > 1000 && refusals > 1000, "scripts reach {evictions} evictions, {refusals} refusals");
    }
}
