//! Literal tables for upgrades: layer 0 has experts 0..6, high versions in pool 0, low ones in pool 1.

use super::{Cache, LayerLayout, Lru, PoolLayout, SliceKinds, Use};
use crate::expert::{ExpertId, Precision, SliceKind, Version};

fn expert(index: u16) -> ExpertId {
    ExpertId { layer: 0, index }
}

/// A cache of `n_high` high slots in which every low version is ready.
fn all_low(n_high: u32) -> Cache {
    let kinds = SliceKinds::from_iter([SliceKind::GateUp, SliceKind::Down]);
    let pool = |version: fn(ExpertId) -> Version, n_slots| {
        let members = (0..6).map(expert).map(version).collect();
        PoolLayout {
            layers: vec![LayerLayout { layer: 0, members, kinds }],
            n_slots,
            capacities: None,
            is_common: false,
        }
    };
    let mut cache = Cache::new(vec![pool(Version::high, n_high), pool(Version::low, 6)], Box::new(Lru));
    (0..6).for_each(|index| load(&mut cache, Version::low(expert(index))));
    cache
}

fn load(cache: &mut Cache, version: Version) {
    let slot = cache.acquire(version).unwrap().slot;
    for kind in [SliceKind::GateUp, SliceKind::Down] {
        cache.set_loading(slot, kind);
        cache.set_ready(slot, kind);
    }
}

fn use_at(cache: &mut Cache, precision: Precision, index: u16, n: usize) {
    (0..n).for_each(|_| cache.touch(expert(index), Use::by_one(true, Some(precision), 0.5)));
}

/// One use per listed expert and token.
fn use_low(cache: &mut Cache, tokens: &[&[u16]]) {
    for indices in tokens {
        indices.iter().for_each(|&index| use_at(cache, Precision::Low, index, 1));
        cache.next_token();
    }
}

#[test]
fn the_most_used_low_expert_is_upgraded_first() {
    let mut cache = all_low(2);
    assert_eq!(cache.upgrade(0), None, "nobody was used");
    use_low(&mut cache, &[&[4]]);
    assert_eq!(cache.upgrade(0), None, "one use is not enough");
    use_low(&mut cache, &[&[2, 4], &[4, 2], &[3]]);
    assert_eq!(cache.upgrade(0), Some(expert(4)));
    assert!(cache.acquire_upgrade(Version::high(expert(4))).is_some());
    assert!(cache.release(Version::low(expert(4))));
    assert_eq!(cache.upgrade(0), Some(expert(2)));
    assert_eq!(cache.upgrade(1), None, "no such layer");
}

#[test]
fn equals_go_by_index_and_skips_do_not_count() {
    let mut cache = all_low(2);
    use_low(&mut cache, &[&[5, 1], &[1, 5]]);
    for _ in 0..9 {
        cache.touch(expert(0), Use::by_one(false, None, 0.5));
    }
    assert_eq!(cache.upgrade(0), Some(expert(1)));
}

#[test]
fn uses_fade_and_end_with_the_sequence() {
    let mut cache = all_low(2);
    use_low(&mut cache, &[&[1], &[1]]);
    assert_eq!(cache.upgrade(0), Some(expert(1)));
    let mut later = all_low(2);
    use_low(&mut later, &[&[1], &[1]]);
    (0..32).for_each(|_| later.next_token());
    assert_eq!(later.upgrade(0), None, "long ago");
    cache.begin_sequence();
    assert_eq!(cache.upgrade(0), None, "another sequence");
}

#[test]
fn only_a_ready_low_version_is_upgraded() {
    let mut cache = all_low(2);
    use_low(&mut cache, &[&[1, 2], &[1, 2], &[1]]);
    assert!(cache.release(Version::low(expert(1))));
    let slot = cache.acquire(Version::low(expert(1))).unwrap().slot;
    cache.set_loading(slot, SliceKind::Down);
    assert_eq!(cache.upgrade(0), Some(expert(2)));
}

#[test]
fn a_full_share_yields_only_to_the_clearly_more_used() {
    let mut cache = all_low(2);
    load(&mut cache, Version::high(expert(0)));
    load(&mut cache, Version::high(expert(1)));
    use_at(&mut cache, Precision::High, 0, 5);
    use_at(&mut cache, Precision::High, 1, 4);
    use_at(&mut cache, Precision::Low, 2, 6);
    assert_eq!(cache.upgrade(0), None, "6 are not more than 1.5 x 4");
    use_at(&mut cache, Precision::Low, 2, 1);
    assert_eq!(cache.upgrade(0), Some(expert(2)));

    // The policy would evict expert 0, which came first.
    let coldest = cache.lookup(Version::high(expert(1))).unwrap();
    cache.pin(coldest);
    assert_eq!(cache.upgrade(0), None, "7 are not more than 1.5 x 5, and who has 4 is pinned");
    cache.unpin(coldest);
    assert_eq!(cache.upgrade(0), Some(expert(2)));
    let acquired = cache.acquire_upgrade(Version::high(expert(2))).unwrap();
    assert_eq!(acquired.evicted, Some(Version::high(expert(1))));
    assert_eq!(acquired.slot, coldest);
    assert_eq!(cache.upgrade(0), None, "no expert is upgraded twice");
}

#[test]
fn without_high_slots_there_are_no_upgrades() {
    let mut cache = all_low(0);
    use_low(&mut cache, &[&[1], &[1], &[1]]);
    assert_eq!(cache.upgrade(0), None);
}
