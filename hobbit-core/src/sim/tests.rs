//! Replays checked against caches driven directly, exhaustive search, and arithmetic.

mod device;
mod rerouting;

use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::cache::policy::{self, PolicyKind, Shape, Weights};
use crate::cache::{Cache, LayerLayout, PoolLayout, SliceKinds, Use};
use crate::expert::{ExpertId, Precision, SliceKind, Version};
use crate::load::prefetch::PrefetchRule;
use crate::options::PrecisionMode;
use crate::predict::PredictorKind;
use crate::route::{Demand, Thresholds, resolve};
use crate::trace::{Header, Layer, LayerRecord, ModelDescription, Needed, Phase, TraceReader, TraceWriter};

/// Needed experts of a batch as in `crate::route`, independent of the trace.
fn needed(tokens: &[Vec<u16>]) -> Vec<u16> {
    let mut needed: Vec<u16> = Vec::new();
    for &index in tokens.iter().flatten() {
        if !needed.contains(&index) {
            needed.push(index);
        }
    }
    if tokens.len() > 1 {
        needed.sort_unstable();
        needed.sort_by_key(|index| std::cmp::Reverse(tokens.iter().flatten().filter(|other| *other == index).count()));
    }
    needed
}

struct Toy {
    n_layers: u16,
    n_expert: u16,
    n_used: u16,
    slots: (u32, u32),
    thresholds: Option<Thresholds>,
    policy: PolicyKind,
}

/// High versions only, with LRU.
fn toy(n_layers: u16, n_expert: u16, n_used: u16, slots: u32) -> Toy {
    Toy { n_layers, n_expert, n_used, slots: (slots, 0), thresholds: None, policy: PolicyKind::Lru }
}

impl Toy {
    fn header(&self) -> Header {
        let layer = |layer| Layer {
            layer,
            n_expert: self.n_expert,
            n_used: self.n_used,
            bytes_high: 4000,
            bytes_low: if self.thresholds.is_some() { 1000 } else { 0 },
            slots_high: self.slots.0,
            slots_low: self.slots.1,
            ..Layer::default()
        };
        let model = ModelDescription { layers: (0..self.n_layers).map(layer).collect(), ..Default::default() };
        let mut header = Header { model, ..Header::default() };
        header.settings.policy = self.policy.to_string();
        if let Some(thresholds) = self.thresholds {
            header.settings.mode = PrecisionMode::Dynamic.to_string();
            (header.settings.t1, header.settings.t2) = (thresholds.t1, thresholds.t2);
        }
        header
    }

    /// A recording made by driving a cache as the engine does: one pool per precision, slots divided by the cache
    /// itself.
    fn record(&self, sequences: &[Vec<Vec<Vec<Vec<u16>>>>]) -> Vec<u8> {
        let kinds = SliceKinds::from_iter([SliceKind::Gate, SliceKind::Down]);
        let pool = |of: fn(ExpertId) -> Version, slots: u32| {
            let members = |layer| (0..self.n_expert).map(move |index| of(ExpertId { layer, index })).collect();
            let layers =
                (0..self.n_layers).map(|layer| LayerLayout { layer, members: members(layer), kinds }).collect();
            PoolLayout { layers, n_slots: slots * u32::from(self.n_layers), capacities: None, is_common: false }
        };
        let pools = vec![pool(Version::high, self.slots.0), pool(Version::low, self.slots.1)];
        let shape = Shape { n_layers: self.n_layers, low_cost: 0.25 };
        let mut cache = Cache::new(pools, policy::build(self.policy, &Weights::default(), shape));
        let mut writer = TraceWriter::new(Vec::new(), &self.header()).unwrap();
        for sequence in sequences {
            cache.begin_sequence();
            writer.sequence().unwrap();
            for batch in sequence {
                cache.begin_batch(batch[0].len() > 1);
                for (tokens, layer) in batch.iter().zip(0..) {
                    cache.begin_layer(layer, tokens.len() as u32);
                    let record = self.step(&mut cache, layer, tokens);
                    writer.layer(&record).unwrap();
                }
                cache.end_batch(batch[0].len() as u32);
                let phase = Phase::of(batch[0].len(), true);
                writer.batch(phase, batch[0].len() as u32, 0.01).unwrap();
            }
        }
        writer.finish().unwrap()
    }

    fn step(&self, cache: &mut Cache, layer: u16, tokens: &[Vec<u16>]) -> LayerRecord {
        let mut record = LayerRecord::new(layer, self.n_used);
        let mut demands = vec![Demand::Skip; usize::from(self.n_expert)];
        let mut weight_of = vec![0.0f32; usize::from(self.n_expert)];
        for chosen in tokens {
            let raw: Vec<f32> = (0..chosen.len()).map(|rank| 1.0 / (rank as f32 + 1.5)).collect();
            let weights: Vec<f32> = raw.iter().map(|w| w / raw.iter().sum::<f32>()).collect();
            let mut asked = Vec::new();
            self.thresholds.unwrap_or(Thresholds { t1: 1.0, t2: 1.0 }).demands(&weights, &mut asked);
            for (rank, &index) in chosen.iter().enumerate() {
                let at = usize::from(index);
                demands[at] = demands[at].max(asked[rank]);
                weight_of[at] += crate::route::rounded(weights[rank]);
            }
            record.push_token(chosen, &weights, None, 0);
        }
        let (mut pinned, mut missing) = (Vec::new(), Vec::new());
        for index in needed(tokens) {
            let expert = ExpertId { layer, index };
            let there = |cache: &Cache, version| cache.lookup(version).is_some();
            let is_resident = Precision::ALL.map(|precision| there(cache, Version { expert, precision }));
            let demand = demands[usize::from(index)];
            let used = resolve(demand, is_resident, self.thresholds.is_some());
            let slot = used.and_then(|precision| cache.lookup(Version { expert, precision }));
            let hit = slot.is_some_and(|slot| cache.is_ready(slot));
            let users: Vec<usize> = (0..tokens.len()).filter(|token| tokens[*token].contains(&index)).collect();
            let since = (tokens.len() - 1 - users[users.len() - 1]) as u32;
            let (weight, n_tokens) = (weight_of[usize::from(index)], users.len() as u32);
            cache.touch(expert, Use { hit, precision: used, weight, n_tokens, since });
            record.needed.push(Needed { expert: index, demand, used, hit, class: None, bytes: 0 });
            match (slot, used) {
                (Some(slot), _) => {
                    cache.pin(slot);
                    pinned.push(slot);
                }
                (None, Some(precision)) => missing.push(Version { expert, precision }),
                (None, None) => {}
            }
        }
        for version in missing {
            let Some(acquired) = cache.acquire(version) else { continue };
            for kind in [SliceKind::Gate, SliceKind::Down] {
                cache.set_loading(acquired.slot, kind);
                cache.set_ready(acquired.slot, kind);
            }
            pinned.push(acquired.slot);
            cache.pin(acquired.slot);
        }
        pinned.into_iter().for_each(|slot| cache.unpin(slot));
        record.compute_seconds = 0.001;
        record
    }
}

fn recording(bytes: &[u8]) -> Recording {
    Recording::read(TraceReader::new(bytes, "toy.trace").unwrap(), Path::new("toy.trace")).unwrap()
}

type Seen = Vec<(ExpertId, Option<Precision>, bool)>;

fn recorded(recording: &Recording) -> Seen {
    let records = recording.batches().flat_map(|batch| &batch.layers);
    let of = |record: &LayerRecord| {
        let id = |index| ExpertId { layer: record.layer, index };
        record.needed.iter().map(|needed| (id(needed.expert), needed.used, needed.hit)).collect::<Vec<_>>()
    };
    records.flat_map(of).collect()
}

fn replayed(recording: &Recording, config: &Config) -> (Seen, Outcome) {
    let mut seen = Vec::new();
    let outcome = replay(recording, config, &mut |expert, used, hit| seen.push((expert, used, hit))).unwrap();
    (seen, outcome)
}

/// Batches of one to three tokens for `n_layers` layers; none needs nine tenths of a layer, and each token uses
/// distinct experts.
fn sequences(n_layers: usize, n_expert: u16, n_used: usize) -> impl Strategy<Value = Vec<Vec<Vec<Vec<Vec<u16>>>>>> {
    // Half of the tokens stay among few experts, so that there are hits.
    let experts: Vec<u16> = (0..n_expert).collect();
    let few: Vec<u16> = (0..n_expert.div_ceil(2)).collect();
    let token = prop_oneof![
        prop::sample::subsequence(experts, n_used).prop_shuffle(),
        prop::sample::subsequence(few, n_used).prop_shuffle()
    ];
    let batch = prop_oneof![3 => Just(1usize), 1 => 2..4usize]
        .prop_flat_map(move |n_tokens| prop::collection::vec(prop::collection::vec(token.clone(), n_tokens), n_layers));
    prop::collection::vec(prop::collection::vec(batch, 1..12), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn its_own_settings_give_every_recorded_hit(
        sequences in sequences(3, 8, 2),
        slots in 0..9u32,
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
    ) {
        let toy = Toy { policy, ..toy(3, 8, 2, slots) };
        let recording = recording(&toy.record(&sequences));
        let config = Config::recorded(&recording).unwrap();
        let (seen, outcome) = replayed(&recording, &config);
        let expected = recorded(&recording);
        prop_assert_eq!(&seen, &expected);
        let hits = expected.iter().filter(|(.., hit)| *hit).count() as u64;
        let total = outcome.total();
        prop_assert_eq!((total.hits, total.n_misses()), (hits, expected.len() as u64 - hits));
        prop_assert_eq!(total.penalty, total.n_misses() as f64);
        // The same number of slots as a budget.
        let memory = Memory { budget: Budget::Slots(slots), ..config.memory };
        let even = Config { memory, ..config };
        prop_assert_eq!(replayed(&recording, &even).0, expected);
    }

    #[test]
    fn dynamic_precision_is_replayed_too(sequences in sequences(2, 12, 3), high in 0..5u32, low in 0..5u32) {
        let thresholds = Some(Thresholds { t1: 0.5, t2: 0.75 });
        let toy = Toy { slots: (high, low), thresholds, ..toy(2, 12, 3, high) };
        let recording = recording(&toy.record(&sequences));
        let config = Config::recorded(&recording).unwrap();
        let (seen, outcome) = replayed(&recording, &config);
        prop_assert_eq!(seen, recorded(&recording));
        let total = outcome.total();
        prop_assert_eq!(total.penalty, total.misses.high as f64 + 0.25 * total.misses.low as f64);
    }

    #[test]
    fn no_policy_beats_belady_and_nothing_breaks_with_prefetch(
        sequences in sequences(3, 8, 2),
        slots in 2..8u32,
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
        predictor in prop::sample::select(vec![
            PredictedBy::Oracle,
            PredictedBy::Partly(50),
            PredictedBy::Predictor(PredictorKind::None),
        ]),
    ) {
        let toy = Toy { policy, ..toy(3, 8, 2, slots) };
        let recording = recording(&toy.record(&sequences));
        let config = Config::recorded(&recording).unwrap();
        let belady = Config { eviction: Eviction::Belady, ..config.clone() };
        let least = replayed(&recording, &belady).1.total().n_misses();
        // If more experts are needed at once than there are slots, their order is arbitrary.
        let fits = |record: &LayerRecord| record.needed.len() <= slots as usize;
        if recording.batches().flat_map(|batch| &batch.layers).all(fits) {
            prop_assert!(least <= replayed(&recording, &config).1.total().n_misses());
        }
        let config = Config { predictor, prefetch: Some(Prefetch::default()), ..config };
        let (seen, outcome) = replayed(&recording, &config);
        prop_assert_eq!(seen.len(), recorded(&recording).len());
        let PrefetchOutcome { issued, useful, wasted, dropped } = outcome.prefetch;
        prop_assert_eq!(issued, useful + wasted + dropped);
        prop_assert_eq!(replayed(&recording, &config).1, outcome, "equal replays are equal");
    }

    #[test]
    fn belady_is_the_optimum(
        tokens in prop::collection::vec(prop::sample::subsequence(vec![0u16, 1, 2, 3, 4], 2), 1..8),
        slots in 2..4u32,
    ) {
        let toy = toy(1, 5, 2, slots);
        let sequence: Vec<_> = tokens.iter().map(|token| vec![vec![token.clone()]]).collect();
        let recording = recording(&toy.record(&[sequence]));
        let config = Config { eviction: Eviction::Belady, ..Config::recorded(&recording).unwrap() };
        prop_assert_eq!(replayed(&recording, &config).1.total().n_misses(), fewest_misses(&tokens, slots, &[]));
    }
}

/// Tries every victim.
fn fewest_misses(tokens: &[Vec<u16>], slots: u32, resident: &[u16]) -> u64 {
    let Some((token, rest)) = tokens.split_first() else { return 0 };
    let missing: Vec<u16> = token.iter().copied().filter(|index| !resident.contains(index)).collect();
    let mut states = vec![resident.to_vec()];
    for &index in &missing {
        let mut next = Vec::new();
        for state in states {
            if state.len() < slots as usize {
                next.push([state.clone(), vec![index]].concat());
                continue;
            }
            for victim in state.iter().filter(|victim| !token.contains(victim)) {
                let stays = state.iter().copied().filter(|other| other != victim);
                next.push(stays.chain([index]).collect());
            }
        }
        states = next;
    }
    let least = states.iter().map(|state| fewest_misses(rest, slots, state)).min();
    missing.len() as u64 + least.expect("there is always room for a token")
}

/// One layer of four experts, one per token, all with a slot; a read takes 4 seconds, products 1, the rest 2.
fn clockwork(prefetch: Option<Prefetch>, n_layers: u16) -> Outcome {
    let toy = toy(n_layers, 4, 1, 4);
    let token = |index| vec![vec![vec![index]]; usize::from(n_layers)];
    let recording = recording(&toy.record(&[vec![token(0), token(1), token(0)]]));
    let config = Config {
        predictor: PredictedBy::Oracle,
        prefetch,
        link: LinkModel { bytes_per_second: 1000.0, latency_seconds: 0.0, in_flight: 1 },
        compute: Compute::Given { layer_seconds: 2.0, expert_seconds: 1.0 },
        ..Config::recorded(&recording).unwrap()
    };
    replayed(&recording, &config).1
}

#[test]
fn the_clock_waits_for_misses_only() {
    let outcome = clockwork(None, 1);
    // Twice 2 + 4 + 1, and 2 + 1 for the hit.
    assert_eq!((outcome.decode.seconds, outcome.decode.stall_seconds), (17.0, 8.0));
    assert_eq!(outcome.decode.tokens_per_second(), Some(3.0 / 17.0));
    assert_eq!((outcome.decode.hits, outcome.decode.n_misses(), outcome.bytes_read), (1, 2, 8000));
}

#[test]
fn a_perfect_guess_hides_what_time_allows() {
    let late = Prefetch { distance_max: 1, rule: PrefetchRule::All, tries: false };
    assert_eq!(clockwork(None, 2).decode.stall_seconds, 16.0);
    // The second layer's read starts behind the first one's and has 1 + 2 of its 4 seconds.
    assert_eq!(clockwork(Some(late), 2).decode.stall_seconds, 10.0);
    assert_eq!(clockwork(Some(late), 2).prefetch, PrefetchOutcome { issued: 2, useful: 2, wasted: 0, dropped: 0 });
    // Part of a read that is sure is worth it.
    let in_time = Prefetch { rule: PrefetchRule::Timed, ..late };
    assert_eq!(clockwork(Some(in_time), 2).decode.stall_seconds, 10.0);
}

#[test]
fn without_overlap_a_layer_begins_when_its_reads_have_ended() {
    // A token of one hit and two misses: reads take 4 seconds each, the products of an expert 1, the rest 2.
    let toy = toy(1, 4, 3, 4);
    let recording = recording(&toy.record(&[vec![vec![vec![vec![0, 1, 2]]], vec![vec![vec![1, 2, 3]]]]]));
    let seconds = |overlap| {
        let link = LinkModel { bytes_per_second: 1000.0, latency_seconds: 0.0, in_flight: 1 };
        let compute = Compute::Given { layer_seconds: 2.0, expert_seconds: 1.0 };
        let config = Config { overlap, link, compute, ..Config::recorded(&recording).unwrap() };
        let decode = replayed(&recording, &config).1.decode;
        (decode.seconds, decode.stall_seconds)
    };
    // Reads until 14, the last product until 15; then 2 + 4 + 1 with two products beside the read.
    assert_eq!(seconds(true), (22.0, 12.0));
    assert_eq!(seconds(false), (26.0, 16.0));
}

#[test]
fn a_path_table_fills_a_cold_cache() {
    let toy = toy(2, 4, 1, 2);
    let token = |index| vec![vec![vec![index]]; 2];
    let recording = recording(&toy.record(&[vec![token(3), token(3), token(2), token(3), token(1)]]));
    let link = LinkModel { bytes_per_second: 1e12, latency_seconds: 0.0, in_flight: 4 };
    let cold = Config { link, ..Config::recorded(&recording).unwrap() };
    assert_eq!(replayed(&recording, &cold).1.decode.n_misses(), 6, "3, 2 and 1 of two layers");
    let table = Some(Arc::new(path_table(std::slice::from_ref(&recording))));
    let predictor = PredictedBy::Predictor(PredictorKind::PathTable);
    let filled = Config { predictor, path_table: table, ..cold };
    assert_eq!(replayed(&recording, &filled).1.decode.n_misses(), 4, "3 and 1 have slots: the lower of equals");
}

#[test]
fn a_dense_batch_fills_the_next_layers_empty_slots() {
    let recording =
        recording(&toy(2, 4, 2, 3).record(&[vec![vec![vec![vec![0, 1], vec![2, 3]], vec![vec![0, 1], vec![3, 1]]]]]));
    let config = Config::recorded(&recording).unwrap();
    let link = LinkModel { bytes_per_second: 1e12, latency_seconds: 0.0, in_flight: 4 };
    let (seen, outcome) = replayed(&recording, &Config { link, ..config });
    let hits: Vec<u16> = seen.iter().filter(|(.., hit)| *hit).map(|(expert, ..)| expert.index).collect();
    assert_eq!(hits, [1, 0], "0, 1 and 2 were read ahead; 3 found no empty slot");
    assert_eq!(outcome.prefetch, PrefetchOutcome::default(), "that is no guess");
    assert_eq!(outcome.bytes_read, 8 * 4000, "four, three ahead, one missing");
}

#[test]
fn the_oracle_recalls_everything() {
    let toy = toy(3, 4, 1, 4);
    let token = |index: u16| vec![vec![vec![index]], vec![vec![index]], vec![vec![3 - index]]];
    let recording = recording(&toy.record(&[vec![token(0), token(1), token(1)]]));
    let of = |predictor| {
        let recall = recall(&recording, predictor, 2);
        [(1, 1), (2, 1), (2, 2)].map(|(layer, distance)| {
            let counts = recall.get(layer, distance);
            (counts.both, counts.used)
        })
    };
    assert_eq!(of(PredictedBy::Oracle), [(3, 3); 3]);
    assert_eq!(of(PredictedBy::Partly(100)), [(3, 3); 3]);
    assert_eq!(of(PredictedBy::Partly(0)), [(0, 3); 3]);
}

#[test]
fn a_partial_oracle_guesses_the_rest() {
    let toy = toy(2, 32, 4, 8);
    let token = |i: u16| vec![vec![(0..4).map(|k| (5 * i + 7 * k) % 32).collect()]; 2];
    let recording = recording(&toy.record(&[(0..500).map(token).collect()]));
    let counts = |percent| recall(&recording, PredictedBy::Partly(percent), 1).total(1);
    for (percent, least, most) in [(60, 0.56, 0.64), (80, 0.77, 0.83), (97, 0.955, 0.985)] {
        let counts = counts(percent);
        assert_eq!((counts.used, counts.predicted), (2000, 2000), "as many as are used, each once");
        let part = counts.recall().unwrap();
        assert!((least..=most).contains(&part), "{percent}%: {part}");
    }
    assert_eq!(counts(80), counts(80));
    assert_eq!("oracle:80%".parse::<PredictedBy>().unwrap().to_string(), "oracle:80%");
    for word in ["oracle:", "oracle:80", "oracle:101%", "oracle:-1%", "lru:80%"] {
        assert!(word.parse::<PredictedBy>().unwrap_err().to_string().contains("oracle:N%"), "{word}");
    }
}

#[test]
fn layers_of_one_pool_compete() {
    // The first layer always uses the same expert, the second one four in turn.
    let token = |i: u16| vec![vec![vec![0]], vec![vec![i % 4]]];
    let toy = Toy { policy: PolicyKind::default(), ..toy(2, 8, 1, 2) };
    let recording = recording(&toy.record(&[(0..40).map(token).collect()]));
    let config = Config::recorded(&recording).unwrap();
    let misses = |slots| {
        let memory = Memory { budget: Budget::Bytes(5 * 4000), slots, ..config.memory };
        replayed(&recording, &Config { memory, ..config.clone() }).1.decode.misses.high
    };
    assert!(misses(config.memory.slots) > 15, "two or three slots for four");
    assert_eq!(misses(Slots::Global), 5, "each for the first time");
}

#[test]
fn weights_are_fitted_to_what_the_trace_rewards() {
    // Two experts recur between ever new ones: a frequency policy keeps them, a recency policy does not.
    let tokens: Vec<u16> = (0..60).flat_map(|i| [0, 2 + i % 6, 1, 2 + (i + 3) % 6, 2 + (i + 1) % 6]).collect();
    let sequence: Vec<_> = tokens.iter().map(|&index| vec![vec![vec![index]]]).collect();
    let policy: PolicyKind = "hobbit".parse().unwrap();
    let toy = Toy { policy, ..toy(1, 8, 1, 3) };
    let recording = recording(&toy.record(&[sequence]));
    let goal = FitGoal {
        memory: Memory { budget: Budget::Recorded, slots: Slots::default(), low_percent: 0.0 },
        shares: crate::route::Shares::new(0.67, 0.30, 0.03).unwrap(),
        thresholds: None,
    };
    let recordings = [recording];
    let fitted = fit(&recordings, &goal).unwrap();
    assert!(fitted.penalty < 0.8 * fitted.penalty_lru, "{fitted:?}");
    let Weights { lru, lfu, lhu, fld } = fitted.weights;
    assert!((lru + lfu + lhu + fld - 1.0).abs() < 1e-6);
    assert_eq!((fitted.thresholds, fitted.tokens), (None, 300), "no low versions");
}
