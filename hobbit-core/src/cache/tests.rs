//! Cases beside the model test: calls of the policy, broken order of calls, and why slots are divided by layer.

use super::*;
use crate::expert::Precision;
use std::sync::{Arc, Mutex};

fn expert(layer: u16, index: u16) -> ExpertId {
    ExpertId { layer, index }
}

fn kinds() -> SliceKinds {
    [SliceKind::Gate, SliceKind::Up, SliceKind::Down].into_iter().collect()
}

fn high(layer: u16, index: u16) -> Version {
    Version::high(expert(layer, index))
}

fn low(layer: u16, index: u16) -> Version {
    Version::low(expert(layer, index))
}

fn use_high(hit: bool) -> Use {
    Use::by_one(hit, Some(Precision::High), 0.5)
}

/// A pool of the given versions of experts `0..n_expert` of each layer.
fn pool_of(version: fn(u16, u16) -> Version, layers: std::ops::Range<u16>, n_expert: u16, n_slots: u32) -> PoolLayout {
    let members = |layer| (0..n_expert).map(|index| version(layer, index)).collect();
    let layers = layers.map(|layer| LayerLayout { layer, members: members(layer), kinds: kinds() });
    PoolLayout { layers: layers.collect(), n_slots, capacities: None, is_common: false }
}

fn pool(layers: std::ops::Range<u16>, n_expert: u16, n_slots: u32) -> PoolLayout {
    pool_of(high, layers, n_expert, n_slots)
}

fn lru(pools: Vec<PoolLayout>) -> Cache {
    Cache::new(pools, Box::new(Lru))
}

fn load(cache: &mut Cache, slot: SlotId) {
    for kind in kinds().iter() {
        cache.set_loading(slot, kind);
        cache.set_ready(slot, kind);
    }
}

#[test]
fn a_share_of_no_slots_gives_none() {
    let mut cache = lru(vec![pool(0..2, 4, 1)]);
    assert_eq!(cache.acquire(high(1, 0)), None);
    assert_eq!(cache.acquire_upgrade(high(1, 0)), None);
    // More than there are versions.
    let cache_of_all = lru(vec![PoolLayout { capacities: Some(vec![0, 9, 2]), ..pool(0..3, 4, 11) }]);
    assert_eq!([0, 1, 2].map(|layer| cache_of_all.pools().capacity_of_layer(layer, Precision::High)), [0, 4, 2]);
    for stranger in [high(7, 0), high(0, 900), low(0, 0)] {
        assert_eq!(cache.lookup(stranger), None);
        assert_eq!(cache.pools().share_of(stranger), None);
        assert!(!cache.has_empty_slot(stranger) && !cache.release(stranger));
    }
}

#[test]
fn guesses_evict_no_shielded_expert() {
    let mut cache = lru(vec![pool(0..2, 8, 4)]);
    cache.shield([high(0, 0)].into_iter());
    assert_eq!(cache.acquire_ahead(high(0, 0)).unwrap().evicted, None);
    assert_eq!(cache.acquire_ahead(high(0, 1)).unwrap().evicted, None);
    assert_eq!(cache.acquire_ahead(high(0, 2)).unwrap().evicted, Some(high(0, 1)), "0 is older, but shielded");
    cache.shield([high(0, 2)].into_iter());
    assert_eq!(cache.acquire_ahead(high(0, 3)), None);
    assert_eq!(cache.lookup(high(0, 3)), None);
    cache.unshield_all();
    let slot = cache.lookup(high(0, 2)).unwrap();
    load(&mut cache, slot);
    cache.pin(slot);
    assert_eq!(cache.acquire_ahead(high(0, 3)).unwrap().evicted, Some(high(0, 0)), "2 is pinned");
}

#[test]
fn a_wanted_expert_evicts_one_that_is_used_clearly_less() {
    let mut cache = lru(vec![pool(0..1, 8, 2)]);
    let use_it = |cache: &mut Cache, index, hit| cache.touch(expert(0, index), use_high(hit));
    use_it(&mut cache, 0, false);
    assert_eq!(cache.acquire_wanted(high(0, 0)).unwrap().evicted, None, "an empty slot costs nothing");
    (0..2).for_each(|_| use_it(&mut cache, 1, false));
    assert_eq!(cache.acquire_wanted(high(0, 1)).unwrap().evicted, None);
    use_it(&mut cache, 2, false);
    assert_eq!(cache.acquire_wanted(high(0, 2)), None, "as often as the least used resident");
    use_it(&mut cache, 2, false);
    cache.shield([high(0, 0)].into_iter());
    assert_eq!(cache.acquire_wanted(high(0, 2)), None, "1 is used as often, and 0 is shielded");
    cache.unshield_all();
    assert_eq!(cache.acquire_wanted(high(0, 2)).unwrap().evicted, Some(high(0, 0)));
    cache.begin_sequence();
    use_it(&mut cache, 3, false);
    assert_eq!(cache.acquire_wanted(high(0, 3)), None, "one use is too few for an eviction");
}

struct Recorder(Arc<Mutex<Vec<String>>>);

impl Policy for Recorder {
    fn on_insert(&mut self, version: Version, now: Now) {
        self.0.lock().unwrap().push(format!("insert {version} at {}/{}", now.token, now.layer));
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        let precision = usage.precision.map_or("skipped".to_owned(), |precision| precision.to_string());
        let line = format!("use {expert} {precision} hit={} at {}/{}", usage.hit, now.token, now.layer);
        self.0.lock().unwrap().push(line);
    }

    fn on_share(&mut self, share: ShareId, members: &[Version]) {
        self.0.lock().unwrap().push(format!("pool {} layer {} has {}", share.pool, share.layer, members.len()));
    }

    fn on_scores(&mut self, layer: u16, scores: &[f32], now: Now) {
        self.0.lock().unwrap().push(format!("scores {scores:?} of {layer} at {}/{}", now.token, now.layer));
    }

    fn on_remove(&mut self, version: Version, now: Now) {
        self.0.lock().unwrap().push(format!("remove {version} at {}/{}", now.token, now.layer));
    }

    fn begin_sequence(&mut self) {
        self.0.lock().unwrap().push("sequence".into());
    }

    fn victim(&mut self, incoming: Version, candidates: &[Candidate], now: Now) -> usize {
        let line = format!("victim of {} for {incoming} at {}/{}", candidates.len(), now.token, now.layer);
        self.0.lock().unwrap().push(line);
        candidates.len() - 1
    }
}

#[test]
fn a_policy_hears_tokens_layers_prefetches_and_removals() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let mut cache = Cache::new(vec![pool(0..2, 4, 4)], Box::new(Recorder(Arc::clone(&told))));
    cache.begin_sequence();
    cache.touch(expert(0, 3), use_high(false));
    cache.acquire(high(0, 3)).unwrap();
    cache.acquire(high(1, 0)).unwrap();
    cache.end_batch(1);
    cache.touch(expert(0, 3), use_high(true));
    cache.scores(1, &[0.25, 0.75]);
    cache.touch(expert(1, 2), Use::by_one(false, None, 0.5));
    cache.acquire(high(1, 2)).unwrap();
    assert_eq!(cache.acquire(high(1, 1)).unwrap().evicted, Some(high(1, 2)), "the policy's choice");
    assert_eq!(cache.acquire_upgrade(high(1, 3)).unwrap().evicted, Some(high(1, 0)), "not the policy's choice");
    assert!(cache.release(high(0, 3)));
    assert!(!cache.release(high(0, 3)), "released already");
    let told = told.lock().unwrap();
    assert_eq!(
        *told,
        [
            "pool 0 layer 0 has 4",
            "pool 0 layer 1 has 4",
            "sequence",
            "use layer 0 expert 3 high hit=false at 0/0",
            "insert layer 0 expert 3 (high) at 0/0",
            "insert layer 1 expert 0 (high) at 0/0",
            "use layer 0 expert 3 high hit=true at 1/0",
            "scores [0.25, 0.75] of 1 at 1/1",
            "use layer 1 expert 2 skipped hit=false at 1/1",
            "insert layer 1 expert 2 (high) at 1/1",
            "victim of 2 for layer 1 expert 1 (high) at 1/1",
            "insert layer 1 expert 1 (high) at 1/1",
            "remove layer 1 expert 0 (high) at 1/1",
            "insert layer 1 expert 3 (high) at 1/1",
            "remove layer 0 expert 3 (high) at 1/1",
        ]
    );
}

/// 50 tokens that choose the same 4 experts in each of 8 layers: a cycle of 32. `at_once` experts are looked up before
/// the misses among them are loaded; they stay pinned meanwhile, and an expert that gets no slot is done without.
/// `place` maps (layer, index) to the expert the cache knows. Returns the hits in percent, after the first token.
fn hits_on_a_cyclic_trace(cache: &mut Cache, at_once: usize, place: fn(u16, u16) -> ExpertId) -> usize {
    let (mut hits, mut uses) = (0, 0);
    for token in 0..50 {
        for layer in 0..8 {
            let chosen: Vec<ExpertId> = (0..4).map(|index| place(layer, index)).collect();
            for chosen in chosen.chunks(at_once) {
                let mut pinned: Vec<SlotId> =
                    chosen.iter().filter_map(|&expert| cache.lookup(Version::high(expert))).collect();
                pinned.iter().for_each(|&slot| cache.pin(slot));
                if token > 0 {
                    hits += pinned.len();
                    uses += chosen.len();
                }
                for &expert in chosen {
                    let hit = cache.lookup(Version::high(expert)).is_some();
                    cache.touch(expert, use_high(hit));
                    if let Some(acquired) = (!hit).then(|| cache.acquire(Version::high(expert))).flatten() {
                        load(cache, acquired.slot);
                        cache.pin(acquired.slot);
                        pinned.push(acquired.slot);
                    }
                }
                pinned.into_iter().for_each(|slot| cache.unpin(slot));
            }
        }
        cache.end_batch(1);
    }
    hits * 100 / uses
}

/// A global list smaller than the cycle has always just evicted what comes next: by one expert if they are asked for
/// one by one, by one layer if a layer's are asked for together. The same slots divided by layer hit.
/// A global LRU is a cache of one layer that has the experts of all.
#[test]
fn a_global_lru_smaller_than_one_tokens_cycle_never_hits() {
    for (n_slots, at_once, hits_by_layer) in [(31, 1, 87), (28, 4, 87), (16, 4, 50), (8, 4, 25)] {
        let mut global = lru(vec![pool(0..1, 8 * 16, n_slots)]);
        let hits = hits_on_a_cyclic_trace(&mut global, at_once, |layer, index| expert(0, layer * 16 + index));
        assert_eq!(hits, 0, "global, {n_slots} slots");

        let mut by_layer = lru(vec![pool(0..8, 16, n_slots)]);
        let hits = hits_on_a_cyclic_trace(&mut by_layer, at_once, expert);
        assert_eq!(hits, hits_by_layer, "by layer, {n_slots} slots");
    }
}

fn common(layers: std::ops::Range<u16>, n_expert: u16, n_slots: u32) -> PoolLayout {
    PoolLayout { is_common: true, ..pool(layers, n_expert, n_slots) }
}

#[test]
fn layers_compete_for_the_slots_of_a_common_share() {
    let mut cache = lru(vec![common(4..6, 4, 3)]);
    let share = ShareId { pool: 0, layer: 4 };
    assert_eq!([high(4, 0), high(5, 3)].map(|version| cache.pools().share_of(version)), [Some(share); 2]);
    assert_eq!(cache.pools().slots_of_share(share), 0..3);
    assert_eq!([4, 5, 6].map(|layer| cache.pools().capacity_of_layer(layer, Precision::High)), [3, 3, 0]);
    for version in [high(4, 0), high(4, 1), high(4, 2)] {
        let slot = cache.acquire(version).unwrap().slot;
        load(&mut cache, slot);
    }
    assert_eq!(cache.acquire(high(5, 0)).unwrap().evicted, Some(high(4, 0)), "another layer's");
    assert_eq!(cache.residents().count(), 3);
    assert!(lru(vec![common(4..6, 1, 9)]).pools().slots_of_share(share).len() == 2, "no more than there are versions");
}

#[test]
fn batches_keep_within_their_layers_parts_of_a_common_share() {
    let mut cache = lru(vec![common(0..2, 4, 4)]);
    cache.begin_batch(true);
    for version in [high(0, 0), high(0, 1)] {
        let slot = cache.acquire(version).unwrap().slot;
        load(&mut cache, slot);
    }
    assert!(!cache.has_empty_slot(high(0, 2)) && cache.has_empty_slot(high(1, 0)), "layer 0 has its part");
    let third = cache.acquire(high(0, 2)).unwrap();
    assert_eq!(third.evicted, Some(high(0, 0)), "though two slots are empty");
    load(&mut cache, third.slot);
    for version in [high(0, 1), high(0, 2)] {
        cache.pin(cache.lookup(version).unwrap());
    }
    assert_eq!(cache.acquire(high(0, 3)), None, "what the batch itself uses stays");
    cache.begin_batch(false);
    assert_eq!(cache.acquire(high(0, 3)).unwrap().evicted, None);
}

/// The model test knows no order among experts of equal use.
#[test]
fn equally_used_experts_are_upgraded_by_index() {
    let mut cache = lru(vec![pool(0..1, 6, 2), pool_of(low, 0..1, 6, 6)]);
    for index in [5, 1] {
        let slot = cache.acquire(low(0, index)).unwrap().slot;
        load(&mut cache, slot);
    }
    for index in [5, 1, 1, 5] {
        cache.touch(expert(0, index), Use::by_one(true, Some(Precision::Low), 0.5));
    }
    assert_eq!(cache.upgrade(0), Some(expert(0, 1)));
}

/// The message that `broken` panics with.
fn panic_of(broken: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(broken)).expect_err("it panics");
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

#[test]
fn every_step_out_of_order_panics_with_the_reason() {
    type Step = fn(&mut Cache, SlotId);
    let steps: [(&str, Step); 14] = [
        ("is resident already", |cache, _| _ = cache.acquire(high(0, 0))),
        ("no pool has this version", |cache, _| _ = cache.acquire(high(5, 0))),
        ("expected Loading before Ready", |cache, slot| cache.set_ready(slot, SliceKind::Up)),
        ("expected Free before Loading", |cache, slot| {
            (0..2).for_each(|_| cache.set_loading(slot, SliceKind::Up));
        }),
        ("have no GateUp slice", |cache, slot| cache.set_loading(slot, SliceKind::GateUp)),
        ("not even loading", |cache, slot| {
            cache.set_loading(slot, SliceKind::Gate);
            cache.pin(slot);
        }),
        ("is not pinned", |cache, slot| cache.unpin(slot)),
        ("slot is empty", |cache, _| cache.set_loading(SlotId { pool: 0, index: 1 }, SliceKind::Gate)),
        ("not a hit", |cache, _| cache.touch(expert(0, 1), use_high(true))),
        ("not a hit", |cache, _| cache.touch(expert(0, 0), Use::by_one(true, Some(Precision::Low), 0.5))),
        ("not a hit", |cache, _| cache.touch(expert(0, 0), Use::by_one(true, None, 0.5))),
        ("is resident already", |cache, _| _ = cache.acquire_upgrade(high(0, 0))),
        ("layers have 11 slots, their pool 10", |_, _| {
            lru(vec![PoolLayout { capacities: Some(vec![2, 9]), ..pool(0..2, 8, 10) }]);
        }),
        ("2 capacities, 3 layers", |_, _| {
            lru(vec![PoolLayout { capacities: Some(vec![1, 9]), ..pool(0..3, 8, 10) }]);
        }),
    ];
    for (message, step) in steps {
        let mut cache = lru(vec![pool(0..1, 4, 2)]);
        let slot = cache.acquire(high(0, 0)).unwrap().slot;
        let panic = panic_of(|| step(&mut cache, slot));
        assert!(panic.contains(message), "{panic}, expected {message}");
    }
    let twice = [pool(1..2, 4, 2).layers, pool_of(low, 1..2, 4, 2).layers].concat();
    let mut stranger = pool(0..2, 4, 2);
    stranger.layers[1].members = vec![high(0, 0)];
    for (message, layouts) in [
        ("layer 1 expert 0 (high) belongs to two shares", vec![pool(0..2, 4, 2), pool(1..3, 4, 2)]),
        ("pool 0 names layer 1 twice", vec![PoolLayout { layers: twice, ..pool(1..2, 4, 2) }]),
        ("cannot belong to", vec![stranger]),
    ] {
        let panic = panic_of(|| _ = lru(layouts));
        assert!(panic.contains(message), "{panic}, expected {message}");
    }
}
