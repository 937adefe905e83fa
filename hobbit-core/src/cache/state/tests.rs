use super::*;
use crate::cache::policy::{PolicyKind, Shape, Weights, build};
use crate::cache::{LayerLayout, Lru, Policy, PoolLayout, SliceKinds, Use};
use crate::expert::SliceKind;
use proptest::prelude::*;

const N_EXPERT: u16 = 8;
const N_LAYERS: u16 = 2;

/// Policies that carry nothing from one sequence to the next but what they save and the order of last uses.
const COMPLETE: [PolicyKind; 5] =
    [PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Hobbit, PolicyKind::EdgeMoe, PolicyKind::Learned];

/// A token: of each layer, the experts that are used and what the router says.
type Token = Vec<(Vec<u16>, Vec<f32>)>;

fn high(layer: u16, index: u16) -> Version {
    Version::high(ExpertId { layer, index })
}

fn policy(kind: PolicyKind) -> Box<dyn Policy> {
    build(kind, &Weights::default(), Shape { n_layers: N_LAYERS, low_cost: 1.0 })
}

fn cache(policy: Box<dyn Policy>, slots_per_layer: u32) -> Cache {
    let kinds = SliceKinds::from_iter([SliceKind::Down]);
    let members = |layer| (0..N_EXPERT).map(|index| high(layer, index)).collect();
    let layers = (0..N_LAYERS).map(|layer| LayerLayout { layer, members: members(layer), kinds }).collect();
    let n_slots = slots_per_layer * u32::from(N_LAYERS);
    Cache::new(vec![PoolLayout { layers, n_slots, capacities: None, is_common: false }], policy)
}

fn land(cache: &mut Cache, slot: SlotId) {
    cache.set_loading(slot, SliceKind::Down);
    cache.set_ready(slot, SliceKind::Down);
}

fn run(cache: &mut Cache, tokens: &[Token]) -> Vec<bool> {
    let mut hits = Vec::new();
    for token in tokens {
        for (layer, (used, scores)) in (0..).zip(token) {
            cache.scores(layer, scores);
            for &index in used {
                let hit = cache.lookup(high(layer, index)).is_some();
                hits.push(hit);
                let precision = Some(Precision::High);
                cache.touch(high(layer, index).expert, Use::by_one(hit, precision, 1.0 / used.len() as f32));
                if !hit {
                    let slot = cache.acquire(high(layer, index)).unwrap().slot;
                    land(cache, slot);
                }
            }
        }
        cache.end_batch(1);
    }
    hits
}

fn restored(kind: PolicyKind, slots_per_layer: u32, saved: &SavedCache) -> Cache {
    let mut cache = cache(policy(kind), slots_per_layer);
    assert!(cache.load_statistics(saved), "{kind}");
    for (slot, _) in cache.restore(saved) {
        land(&mut cache, slot);
    }
    cache
}

fn token() -> impl Strategy<Value = Token> {
    let used = prop::sample::subsequence((0..N_EXPERT).collect::<Vec<_>>(), 2);
    prop::collection::vec((used, prop::collection::vec(0.0f32..1.0, usize::from(N_EXPERT))), usize::from(N_LAYERS))
}

fn state() -> impl Strategy<Value = CacheState> {
    let version = (any::<u16>(), any::<u16>(), any::<bool>()).prop_map(|(layer, index, low)| {
        let expert = ExpertId { layer, index };
        if low { Version::low(expert) } else { Version::high(expert) }
    });
    let cache = (".*", prop::collection::vec(version, 0..40), prop::collection::vec(any::<u8>(), 0..40))
        .prop_map(|(name, residents, statistics)| SavedCache { name, residents, statistics });
    let model = (".*", any::<u64>(), any::<u64>());
    (model, ".*", prop::collection::vec(cache, 0..4)).prop_map(|((name, bytes, catalog), policy, caches)| CacheState {
        model: ModelMark { name, bytes, catalog },
        policy,
        caches,
    })
}

proptest! {
    #[test]
    fn states_round_trip_and_damage_is_noticed(
        state in state(), cut in any::<prop::sample::Index>(), flip in any::<prop::sample::Index>(), bit in 0..8
    ) {
        let bytes = state.to_bytes();
        prop_assert_eq!(CacheState::from_bytes(&bytes), Ok(state));
        prop_assert_eq!(CacheState::from_bytes(&bytes[..cut.index(bytes.len())]), Err(StateError::Damaged));
        let mut flipped = bytes;
        let at = flip.index(flipped.len());
        flipped[at] ^= 1u8 << bit;
        prop_assert!(CacheState::from_bytes(&flipped).is_err());
    }

    #[test]
    fn any_bytes_behind_a_true_sum_are_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes(), &body].concat();
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        if let Ok(state) = CacheState::from_bytes(&bytes) {
            prop_assert_eq!(state.to_bytes(), bytes);
        }
    }

    #[test]
    fn policies_take_or_refuse_any_bytes(
        kind in prop::sample::select(PolicyKind::ALL.to_vec()),
        bytes in prop::collection::vec(any::<u8>(), 1..300),
        change in any::<prop::sample::Index>(),
        tokens in prop::collection::vec(token(), 1..20),
    ) {
        let mut before = cache(policy(kind), 3);
        run(&mut before, &tokens);
        let learned = before.save("");
        let mut changed = learned.statistics.clone();
        if !changed.is_empty() {
            changed[change.index(learned.statistics.len())] ^= bytes[0];
        }
        for statistics in [bytes, changed] {
            let mut cache = cache(policy(kind), 3);
            cache.load_statistics(&SavedCache { statistics, ..SavedCache::default() });
            run(&mut cache, &tokens);
        }
    }

    #[test]
    fn a_restored_cache_goes_on_as_after_a_new_sequence(
        kind in prop::sample::select(COMPLETE.to_vec()),
        before in prop::collection::vec(token(), 0..60),
        after in prop::collection::vec(token(), 1..60),
        slots in 2u32..6,
    ) {
        let mut lasting = cache(policy(kind), slots);
        run(&mut lasting, &before);
        let saved = lasting.save("");
        let mut restored = restored(kind, slots, &saved);
        prop_assert_eq!(restored.save(""), saved);
        prop_assert_eq!(run(&mut restored, &after), run(&mut lasting, &after), "{}", kind);
    }
}

#[test]
fn other_files_are_refused_by_name() {
    let state = CacheState { policy: "lru".to_owned(), ..CacheState::default() };
    let mut newer = state.to_bytes();
    newer[8] = 2;
    assert_eq!(CacheState::from_bytes(&newer), Err(StateError::Version { found: 2 }));
    assert_eq!(CacheState::from_bytes(b"GGUF"), Err(StateError::Foreign));
    assert_eq!(CacheState::from_bytes(b""), Err(StateError::Damaged));
    // Four thousand million residents in no bytes at all.
    let mut bytes = state.to_bytes();
    bytes.truncate(bytes.len() - 12);
    bytes.extend([1u32, 0, u32::MAX].map(u32::to_le_bytes).concat());
    bytes.extend(xxh3_64(&bytes).to_le_bytes());
    assert_eq!(CacheState::from_bytes(&bytes), Err(StateError::Damaged));
}

#[test]
fn a_policy_s_older_name_is_known() {
    let state = CacheState { policy: "foresight".to_owned(), ..CacheState::default() };
    assert_eq!(CacheState::from_bytes(&state.to_bytes()).unwrap().policy, PolicyKind::Learned.name());
}

/// Experts of layer 0, all slots taken, last used in the order 2, 0, 3, 1.
fn used() -> SavedCache {
    let mut cache = cache(Box::new(Lru), 4);
    let token = |index| vec![(vec![index], Vec::new())];
    run(&mut cache, &[0, 1, 2, 3, 2, 0, 3, 1].map(token));
    cache.save("")
}

#[test]
fn fewer_slots_keep_who_was_used_last() {
    let saved = used();
    assert_eq!(saved.residents, [2, 0, 3, 1].map(|index| high(0, index)));
    let residents = |slots| {
        let mut cache = cache(Box::new(Lru), slots);
        let mut taken = cache.restore(&saved);
        taken.sort_unstable_by_key(|(slot, _)| *slot);
        assert_eq!(taken, cache.residents().map(|(version, slot)| (slot, version)).collect::<Vec<_>>());
        assert!(taken.iter().all(|(slot, _)| cache.state(*slot, SliceKind::Down) == crate::cache::SliceState::Free));
        let mut fit = cache.pools().that_fit(&saved);
        fit.sort_unstable();
        let mut resident: Vec<u16> = taken.iter().map(|(_, version)| version.expert.index).collect();
        resident.sort_unstable();
        assert_eq!(fit.iter().map(|version| version.expert.index).collect::<Vec<_>>(), resident);
        resident
    };
    assert_eq!(residents(0), [0; 0]);
    assert_eq!(residents(1), [1]);
    assert_eq!(residents(2), [1, 3]);
    assert_eq!(residents(7), [0, 1, 2, 3]);
}

#[test]
fn strangers_and_repetitions_are_passed_over() {
    let mut saved = used();
    assert_eq!(cache(Box::new(Lru), 3).pools().that_fit(&saved), [0, 3, 1].map(|index| high(0, index)));
    let strangers = [high(9, 0), high(0, N_EXPERT), Version::low(high(0, 1).expert)];
    saved.residents.extend([high(0, 3), high(0, 2), high(0, 3)].into_iter().chain(strangers));
    let mut cache = cache(Box::new(Lru), 3);
    assert_eq!(cache.pools().that_fit(&saved), [1, 2, 3].map(|index| high(0, index)));
    let slot = cache.acquire(high(0, 3)).unwrap().slot;
    land(&mut cache, slot);
    cache.pin(slot);
    let taken: Vec<u16> = cache.restore(&saved).iter().map(|(_, version)| version.expert.index).collect();
    assert_eq!(taken, [1, 2]);
    assert_eq!(cache.lookup(high(0, 3)), Some(slot), "a resident stays in its slot");
}

#[test]
fn slices_that_never_came_are_not_saved() {
    let mut cache = cache(Box::new(Lru), 4);
    cache.acquire(high(0, 3)).unwrap();
    assert_eq!(cache.save("gpu"), SavedCache { name: "gpu".to_owned(), ..SavedCache::default() });
}

#[test]
fn slots_are_filled_in_the_order_of_layers_and_of_the_last_uses() {
    let cache = cache(policy(PolicyKind::Learned), 2);
    let residents = vec![high(0, 1), high(1, 5), high(1, 6), high(0, 2), high(0, 3), high(9, 1), high(1, 4)];
    let saved = SavedCache { residents, ..SavedCache::default() };
    assert_eq!(cache.pools().in_filling_order(&saved), [high(0, 3), high(1, 4), high(0, 2), high(1, 6)]);
}

#[test]
fn residents_that_have_not_come_back_are_remembered() {
    let mut saved = SavedCache { residents: vec![high(0, 2), high(1, 1)], ..SavedCache::default() };
    saved.remember(&[high(0, 1), high(0, 2), high(1, 7)]);
    assert_eq!(saved.residents, [high(0, 1), high(1, 7), high(0, 2), high(1, 1)]);
}

#[test]
fn every_model_has_a_name_of_its_own() {
    let mark = |name: &str, bytes, catalog| ModelMark { name: name.to_owned(), bytes, catalog };
    let marks = [mark("a.gguf", 1, 2), mark("a.gguf", 1, 3), mark("a.gguf", 2, 2), mark("b.gguf", 1, 2)];
    let names: BTreeSet<String> = marks.iter().map(ModelMark::state_name).collect();
    assert_eq!(names.len(), marks.len(), "{names:?}");
    assert!(names.iter().all(|name| name.contains(".gguf-") && name.ends_with(".state")), "{names:?}");
    assert!(mark(&"ö".repeat(255), 1, 2).state_name().len() < 128);
}
