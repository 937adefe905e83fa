//! Scripts against the cache, and why slots are divided by layer.

use super::*;
use std::sync::{Arc, Mutex};

fn expert(layer: u16, index: u16) -> ExpertId {
    ExpertId { layer, index }
}

fn kinds() -> SliceKinds {
    [SliceKind::Gate, SliceKind::Up, SliceKind::Down].into_iter().collect()
}

fn pool(layers: std::ops::Range<u16>, n_expert: u16, n_slots: u32) -> PoolLayout {
    PoolLayout { layers: layers.map(|layer| LayerLayout { layer, n_expert, kinds: kinds() }).collect(), n_slots }
}

fn lru(pools: Vec<PoolLayout>) -> Cache {
    Cache::new(pools, Box::new(Lru::default()))
}

fn load(cache: &mut Cache, slot: SlotId) {
    for kind in kinds().iter() {
        cache.set_loading(slot, kind);
        cache.set_ready(slot, kind);
    }
}

#[test]
fn a_miss_becomes_a_hit_and_is_evicted_in_its_turn() {
    let mut cache = lru(vec![pool(0..1, 4, 2)]);
    assert_eq!(cache.lookup(expert(0, 0)), None);
    let first = cache.acquire(expert(0, 0)).unwrap();
    assert_eq!(first, Acquired { slot: SlotId { pool: 0, index: 0 }, evicted: None });
    assert!(!cache.is_ready(first.slot));
    load(&mut cache, first.slot);
    assert!(cache.is_ready(first.slot));
    let second = cache.acquire(expert(0, 1)).unwrap();
    assert_eq!(second.slot.index, 1);
    cache.touch(expert(0, 0), Use { hit: true });

    let third = cache.acquire(expert(0, 2)).unwrap();
    assert_eq!(third, Acquired { slot: second.slot, evicted: Some(expert(0, 1)) });
    assert_eq!(cache.lookup(expert(0, 1)), None);
    assert_eq!(cache.state(third.slot, SliceKind::Gate), SliceState::Free);
    let residents: Vec<_> = cache.residents().collect();
    assert_eq!(residents, [(expert(0, 0), first.slot), (expert(0, 2), third.slot)]);
}

#[test]
fn pinned_and_loading_experts_stay() {
    let mut cache = lru(vec![pool(0..1, 4, 2)]);
    let pinned = cache.acquire(expert(0, 0)).unwrap().slot;
    load(&mut cache, pinned);
    cache.pin(pinned);
    cache.pin(pinned);
    let loading = cache.acquire(expert(0, 1)).unwrap().slot;
    cache.set_loading(loading, SliceKind::Down);

    assert_eq!(cache.acquire(expert(0, 2)), None);
    cache.unpin(pinned);
    assert_eq!(cache.acquire(expert(0, 2)), None, "pins count");
    cache.set_failed(loading, SliceKind::Down);
    assert_eq!(cache.acquire(expert(0, 2)).unwrap().evicted, Some(expert(0, 1)), "a failed load shields nothing");
    cache.unpin(pinned);
    assert_eq!(cache.acquire(expert(0, 3)).unwrap().evicted, Some(expert(0, 0)));
}

#[test]
fn layers_and_pools_do_not_take_from_each_other() {
    let mut cache = lru(vec![pool(1..3, 4, 3), pool(3..4, 8, 1)]);
    let capacities: Vec<u32> = (0..6).map(|layer| cache.capacity_of_layer(layer)).collect();
    assert_eq!(capacities, [0, 2, 1, 1, 0, 0]);
    for index in 0..4 {
        cache.acquire(expert(1, index)).unwrap();
    }
    assert_eq!(cache.acquire(expert(2, 0)).unwrap().slot, SlotId { pool: 0, index: 2 });
    assert_eq!(cache.acquire(expert(3, 7)).unwrap().slot, SlotId { pool: 1, index: 0 });
    assert_eq!(cache.acquire(expert(2, 1)).unwrap().evicted, Some(expert(2, 0)));
    assert_eq!(cache.residents().count(), 4);
}

#[test]
fn a_share_of_no_slots_gives_none() {
    let mut cache = lru(vec![pool(0..2, 4, 1)]);
    assert_eq!(cache.acquire(expert(1, 0)), None);
    assert_eq!(cache.lookup(expert(7, 0)), None);
    assert_eq!(cache.lookup(expert(0, 900)), None);
}

/// Writes down what it is told.
struct Recorder(Arc<Mutex<Vec<String>>>);

impl Policy for Recorder {
    fn on_insert(&mut self, expert: ExpertId, now: Now) {
        self.0.lock().unwrap().push(format!("insert {expert} at {}/{}", now.token, now.layer));
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        self.0.lock().unwrap().push(format!("use {expert} hit={} at {}/{}", usage.hit, now.token, now.layer));
    }

    fn begin_sequence(&mut self) {
        self.0.lock().unwrap().push("sequence".into());
    }

    fn victim(&mut self, incoming: ExpertId, candidates: &[ExpertId], now: Now) -> usize {
        let line = format!("victim of {} for {incoming} at {}/{}", candidates.len(), now.token, now.layer);
        self.0.lock().unwrap().push(line);
        candidates.len() - 1
    }
}

#[test]
fn a_policy_hears_tokens_layers_and_prefetches() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let mut cache = Cache::new(vec![pool(0..2, 4, 4)], Box::new(Recorder(Arc::clone(&told))));
    cache.begin_sequence();
    cache.touch(expert(0, 3), Use { hit: false });
    cache.acquire(expert(0, 3)).unwrap();
    cache.acquire(expert(1, 0)).unwrap();
    cache.next_token();
    cache.touch(expert(0, 3), Use { hit: true });
    cache.touch(expert(1, 2), Use { hit: false });
    cache.acquire(expert(1, 2)).unwrap();
    assert_eq!(cache.acquire(expert(1, 1)).unwrap().evicted, Some(expert(1, 2)), "the policy's choice");
    let told = told.lock().unwrap();
    assert_eq!(
        *told,
        [
            "sequence",
            "use layer 0 expert 3 hit=false at 0/0",
            "insert layer 0 expert 3 at 0/0",
            "insert layer 1 expert 0 at 0/0",
            "use layer 0 expert 3 hit=true at 1/0",
            "use layer 1 expert 2 hit=false at 1/1",
            "insert layer 1 expert 2 at 1/1",
            "victim of 2 for layer 1 expert 1 at 1/1",
            "insert layer 1 expert 1 at 1/1",
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
                let mut pinned: Vec<SlotId> = chosen.iter().filter_map(|&expert| cache.lookup(expert)).collect();
                pinned.iter().for_each(|&slot| cache.pin(slot));
                if token > 0 {
                    hits += pinned.len();
                    uses += chosen.len();
                }
                for &expert in chosen {
                    let hit = cache.lookup(expert).is_some();
                    cache.touch(expert, Use { hit });
                    if let Some(acquired) = (!hit).then(|| cache.acquire(expert)).flatten() {
                        load(cache, acquired.slot);
                        cache.pin(acquired.slot);
                        pinned.push(acquired.slot);
                    }
                }
                pinned.into_iter().for_each(|slot| cache.unpin(slot));
            }
        }
        cache.next_token();
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

mod broken_order {
    use super::*;

    fn resident() -> (Cache, SlotId) {
        let mut cache = lru(vec![pool(0..1, 4, 2)]);
        let slot = cache.acquire(expert(0, 0)).unwrap().slot;
        (cache, slot)
    }

    #[test]
    #[should_panic(expected = "is resident already")]
    fn acquiring_twice() {
        let (mut cache, _) = resident();
        cache.acquire(expert(0, 0));
    }

    #[test]
    #[should_panic(expected = "no pool has this layer")]
    fn acquiring_in_a_dense_layer() {
        resident().0.acquire(expert(5, 0));
    }

    #[test]
    #[should_panic(expected = "expected Loading before Ready")]
    fn ready_without_loading() {
        let (mut cache, slot) = resident();
        cache.set_ready(slot, SliceKind::Up);
    }

    #[test]
    #[should_panic(expected = "expected Free before Loading")]
    fn loading_twice() {
        let (mut cache, slot) = resident();
        cache.set_loading(slot, SliceKind::Up);
        cache.set_loading(slot, SliceKind::Up);
    }

    #[test]
    #[should_panic(expected = "have no GateUp slice")]
    fn a_slice_the_layer_lacks() {
        let (mut cache, slot) = resident();
        cache.set_loading(slot, SliceKind::GateUp);
    }

    #[test]
    #[should_panic(expected = "not even loading")]
    fn pinning_before_loading() {
        let (mut cache, slot) = resident();
        cache.set_loading(slot, SliceKind::Gate);
        cache.pin(slot);
    }

    #[test]
    #[should_panic(expected = "is not pinned")]
    fn unpinning_what_is_not_pinned() {
        let (mut cache, slot) = resident();
        cache.unpin(slot);
    }

    #[test]
    #[should_panic(expected = "holds no expert")]
    fn loading_into_an_empty_slot() {
        let (mut cache, _) = resident();
        cache.set_loading(SlotId { pool: 0, index: 1 }, SliceKind::Gate);
    }

    #[test]
    #[should_panic(expected = "not a hit")]
    fn a_hit_on_a_stranger() {
        resident().0.touch(expert(0, 1), Use { hit: true });
    }

    #[test]
    #[should_panic(expected = "belongs to two pools")]
    fn a_layer_in_two_pools() {
        lru(vec![pool(0..2, 4, 2), pool(1..3, 4, 2)]);
    }
}
