//! Every step out of order panics and says why.

use super::*;

fn resident() -> (Cache, SlotId) {
    let mut cache = lru(vec![pool(0..1, 4, 2)]);
    let slot = cache.acquire(high(0, 0)).unwrap().slot;
    (cache, slot)
}

#[test]
#[should_panic(expected = "is resident already")]
fn acquiring_twice() {
    let (mut cache, _) = resident();
    cache.acquire(high(0, 0));
}

#[test]
#[should_panic(expected = "no pool has this version")]
fn acquiring_in_a_dense_layer() {
    resident().0.acquire(high(5, 0));
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
#[should_panic(expected = "slot is empty")]
fn loading_into_an_empty_slot() {
    let (mut cache, _) = resident();
    cache.set_loading(SlotId { pool: 0, index: 1 }, SliceKind::Gate);
}

#[test]
#[should_panic(expected = "not a hit")]
fn a_hit_on_a_stranger() {
    resident().0.touch(expert(0, 1), use_high(true));
}

#[test]
#[should_panic(expected = "not a hit")]
fn a_hit_in_another_precision() {
    resident().0.touch(expert(0, 0), Use::by_one(true, Some(Precision::Low), 0.5));
}

#[test]
#[should_panic(expected = "not a hit")]
fn a_hit_that_is_skipped() {
    resident().0.touch(expert(0, 0), Use::by_one(true, None, 0.5));
}

#[test]
#[should_panic(expected = "is resident already")]
fn upgrading_twice() {
    resident().0.acquire_upgrade(high(0, 0));
}

#[test]
#[should_panic(expected = "layer 1 expert 0 (high) belongs to two shares")]
fn a_version_in_two_pools() {
    lru(vec![pool(0..2, 4, 2), pool(1..3, 4, 2)]);
}

#[test]
#[should_panic(expected = "pool 0 names layer 1 twice")]
fn a_layer_twice_in_a_pool() {
    let mut layouts = pool(1..2, 4, 2);
    layouts.layers.extend(pool_of(low, 1..2, 4, 2).layers);
    lru(vec![layouts]);
}

#[test]
#[should_panic(expected = "cannot belong to")]
fn a_member_of_another_layer() {
    let mut layouts = pool(0..2, 4, 2);
    layouts.layers[1].members = vec![high(0, 0)];
    lru(vec![layouts]);
}
