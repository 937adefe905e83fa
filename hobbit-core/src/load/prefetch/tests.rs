use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::expert::{ExpertId, Precision, Version};
use crate::predict::{Ahead, Gates, PredictShape, Predicted, Predictor};
use crate::route::{Demand, Thresholds};

const MIB: u64 = 1 << 20;

/// Experts of 8 MiB, a quarter of that in low precision where there is any.
#[derive(Clone, Default)]
struct World {
    resident: HashSet<Version>,
    has_low: bool,
    forced_low: bool,
    large: Option<u16>,
}

impl Holdings for World {
    fn is_resident(&self, version: Version) -> bool {
        self.resident.contains(&version)
    }

    fn bytes(&self, version: Version) -> Option<u64> {
        let bytes = if self.large == Some(version.expert.index) { 16 * MIB } else { 8 * MIB };
        match version.precision {
            Precision::High => (!self.forced_low).then_some(bytes),
            Precision::Low => self.has_low.then_some(bytes / 4),
        }
    }

    fn n_used(&self, _layer: u16) -> usize {
        2
    }
}

fn expert(index: u16) -> ExpertId {
    ExpertId { layer: 1, index }
}

/// Predictions for layer 1, all wanted.
fn wanted_at(distance: u8, scores: &[f32]) -> Ahead {
    let one = |(index, &score)| Predicted { expert: expert(index), score, distance, token: 0 };
    let predicted: Vec<_> = (0..).zip(scores).map(one).collect();
    Ahead { wanted: predicted.clone(), predicted, depth: distance }
}

fn wanted(scores: &[f32]) -> Ahead {
    wanted_at(1, scores)
}

/// An expert takes 8 ms.
fn prefetcher(layer_seconds: f64, options: PrefetchOptions) -> Prefetcher {
    let mut prefetcher = Prefetcher::new(options, Estimates::default());
    prefetcher.estimates.observe_layer(layer_seconds);
    prefetcher.estimates.observe_load(8 * MIB, 0.008);
    prefetcher
}

fn timed(layer_seconds: f64) -> Prefetcher {
    prefetcher(layer_seconds, PrefetchOptions::default())
}

/// Reads every guess, in the precision that its weight asks for.
fn dynamic(t1: f32, t2: f32) -> Prefetcher {
    let thresholds = Thresholds::new(t1, t2).unwrap();
    prefetcher(1.0, PrefetchOptions { thresholds, rule: PrefetchRule::All, ..PrefetchOptions::default() })
}

fn versions(loads: &[Load]) -> Vec<Version> {
    loads.iter().map(|load| load.version).collect()
}

fn high(indices: &[u16]) -> Vec<Version> {
    indices.iter().map(|&index| Version::high(expert(index))).collect()
}

fn chosen(indices: &[u16]) -> Vec<(u16, f32)> {
    indices.iter().map(|&index| (index, 1.0 / indices.len() as f32)).collect()
}

/// The chance of high precision, of a prediction that is worth it, of an expert that is missing as most are.
fn chance(odds: &Odds, distance: u8, score: f32) -> f32 {
    let presence = Presence::Missing(MissRate::HalfOrMore);
    odds.chances(Guess { distance, score, worth: Demand::High, presence }).high
}

#[test]
fn no_more_than_there_is_time_for() {
    let n = |layer_seconds, score| {
        timed(layer_seconds).plan(&wanted(&[score; 8]), Link::default(), &World::default()).len()
    };
    // Fate's n = T / t_expert, and one more if a quarter of its read fits.
    assert_eq!([0.0019, 0.0021, 0.0099, 0.0101, 0.0181, 1.0].map(|seconds| n(seconds, 0.6)), [0, 1, 1, 2, 3, 8]);
    assert_eq!([n(1.0, 0.5), n(1.0, 0.0)], [0, 0], "not more likely used than not");
    let whole = PrefetchOptions { in_time_min: 1.0, ..PrefetchOptions::default() };
    let n_whole = |layer_seconds| {
        prefetcher(layer_seconds, whole).plan(&wanted(&[0.6; 8]), Link::default(), &World::default()).len()
    };
    assert_eq!([0.0079, 0.0081, 0.0159, 0.0161].map(n_whole), [0, 1, 1, 2]);
    // Twice as far, twice as long.
    assert_eq!(timed(0.005).plan(&wanted_at(2, &[0.6; 8]), Link::default(), &World::default()).len(), 2);
}

#[test]
fn without_estimates_nothing_is_read() {
    let plan = |prefetcher: &mut Prefetcher| prefetcher.plan(&wanted(&[0.9]), Link::default(), &World::default()).len();
    let mut prefetcher = Prefetcher::new(PrefetchOptions::default(), Estimates::default());
    assert_eq!(plan(&mut prefetcher), 0);
    prefetcher.estimates.observe_layer(0.01);
    assert_eq!(plan(&mut prefetcher), 0);
    prefetcher.estimates.observe_load(0, 1.0);
    prefetcher.estimates.observe_load(MIB, f64::NAN);
    assert_eq!(plan(&mut prefetcher), 0);
    prefetcher.estimates.observe_load(MIB, 0.001);
    assert_eq!(plan(&mut prefetcher), 1);
    let mut seeded = Prefetcher::new(PrefetchOptions::default(), Estimates::seeded(1e9));
    seeded.estimates.observe_layer(0.01);
    assert_eq!(plan(&mut seeded), 1);
    assert_eq!(Estimates::seeded(0.0), Estimates::default());
}

#[test]
fn the_version_follows_the_predicted_weight() {
    let low = |index| Version::low(expert(index));
    let world = World { has_low: true, ..World::default() };
    let plan = |t1, t2, scores: &[f32], world: &World| {
        versions(&dynamic(t1, t2).plan(&wanted(scores), Link::default(), world))
    };
    assert_eq!(plan(0.6, 0.9, &[0.7, 0.3], &world), [high(&[0])[0], low(1)]);
    assert_eq!(plan(0.6, 0.9, &[0.55, 0.45], &world), high(&[0, 1]));
    assert_eq!(plan(0.6, 0.9, &[0.95, 0.05], &world), high(&[0]), "the second would be skipped");
    // Two are used: a third is at most the least important one.
    assert_eq!(plan(0.6, 1.0, &[0.4, 0.35, 0.34], &world), [high(&[0, 1])[0], high(&[1])[0], low(2)]);
    assert_eq!(plan(0.6, 0.9, &[0.4, 0.35, 0.34], &world), high(&[0, 1]));
    assert_eq!(plan(1.0, 1.0, &[0.7, 0.3, 0.2], &world), high(&[0, 1, 2]), "exact");
    assert_eq!(plan(0.6, 0.9, &[0.7, 0.3], &World::default()), high(&[0, 1]), "there are no low versions");
    let forced = World { forced_low: true, ..world.clone() };
    assert_eq!(plan(1.0, 1.0, &[0.7, 0.3], &forced), [low(0), low(1)]);
    assert!(plan(1.0, 1.0, &[0.7], &World { has_low: false, ..forced }).is_empty(), "there is no version at all");

    // A resident high version serves all demands, a low one only low demands.
    let with = |resident: &[Version]| World { resident: resident.iter().copied().collect(), ..world.clone() };
    assert_eq!(plan(0.6, 0.9, &[0.7, 0.3], &with(&[low(0), low(1)])), high(&[0]));
    assert!(plan(0.6, 0.9, &[0.7, 0.3], &with(&high(&[0, 1]))).is_empty());
}

#[test]
fn looking_ahead_goes_past_layers_that_have_what_they_need() {
    let shape = PredictShape { layers: vec![(0, 4, 2), (1, 4, 2), (2, 4, 2)] };
    let mut gate = Gates::stacked(shape, 2);
    gate.scores(0, 1, &[0.7, 0.3, 0.0, 0.0]);
    gate.scores(0, 2, &[0.0, 0.0, 0.7, 0.3]);
    let low_1 = Version::low(expert(1));
    let mut world = World { has_low: true, ..World::default() };
    world.resident.extend(high(&[0]));
    world.resident.insert(low_1);
    let prefetcher = dynamic(0.6, 0.9);
    let ahead = prefetcher.look_ahead(&mut gate, 0, 2, &world);
    assert_eq!((ahead.depth, ahead.predicted.len()), (2, 4), "the low version is all that expert 1 needs");
    assert!(ahead.wanted.iter().map(|p| (p.expert.layer, p.expert.index)).eq([(2, 2), (2, 3)]));
    let exact = timed(1.0).look_ahead(&mut gate, 0, 2, &world);
    assert_eq!((exact.depth, exact.wanted.len()), (1, 1), "the high version is missing");
    // Once it is on its way, the layer behind it is looked at.
    let mut exact = dynamic(1.0, 1.0);
    let ahead = exact.look_ahead(&mut gate, 0, 2, &world);
    assert_eq!(versions(&exact.plan(&ahead, Link::default(), &world)), high(&[1]));
    assert_eq!(exact.look_ahead(&mut gate, 0, 2, &world).depth, 2);
}

#[test]
fn guesses_that_were_not_chosen_are_dropped() {
    // 12 ms per layer: one expert lands, the second is read half.
    let mut prefetcher = timed(0.012);
    let loads = prefetcher.plan(&wanted(&[0.9, 0.8]), Link::default(), &World::default());
    assert_eq!(versions(&loads), high(&[0, 1]));
    prefetcher.settle(7, &[chosen(&[0, 1])], &high(&[0, 1])); // another layer
    prefetcher.landed(loads[0].version);
    prefetcher.settle(1, &[chosen(&[0, 5])], &high(&[0, 5]));
    let counters = prefetcher.counters;
    assert_eq!((counters.issued, counters.useful, counters.late, counters.wasted), (2, 1, 0, 1));
    assert_eq!((counters.issued_bytes, counters.wasted_bytes), (16 * MIB, 8 * MIB));
    assert!(!prefetcher.is_outstanding(loads[1].version));

    prefetcher.plan(&wanted(&[0.9, 0.9]), Link::default(), &World::default());
    prefetcher.landed(high(&[0])[0]);
    prefetcher.settle(1, &[chosen(&[1])], &high(&[1]));
    assert_eq!(prefetcher.counters.late, 1);

    prefetcher.plan(&wanted(&[0.9, 0.9]), Link::default(), &World::default());
    prefetcher.landed(high(&[0])[0]);
    prefetcher.abandon();
    assert_eq!(prefetcher.counters.wasted, 4);
    assert!(!prefetcher.is_outstanding(high(&[0])[0]) && !prefetcher.is_outstanding(high(&[1])[0]));
    // A low version of an expert that is used in high precision is a wrong guess too.
    let mut dynamic = dynamic(0.0, 1.0);
    dynamic.plan(&wanted(&[0.9]), Link::default(), &World { has_low: true, ..World::default() });
    dynamic.settle(1, &[chosen(&[0])], &high(&[0]));
    assert_eq!((dynamic.counters.useful, dynamic.counters.wasted), (0, 1));
}

#[test]
fn dropped_and_failed_reads_are_not_outstanding() {
    let mut prefetcher = timed(0.012);
    let loads = prefetcher.plan(&wanted(&[0.9, 0.8]), Link::default(), &World::default());
    prefetcher.dropped(loads[1].version);
    prefetcher.dropped(loads[1].version);
    assert!(!prefetcher.is_outstanding(loads[1].version));
    prefetcher.settle(1, &[chosen(&[0, 5])], &high(&[0, 5]));
    assert_eq!((prefetcher.counters.dropped, prefetcher.counters.wasted), (1, 0));
    // A failed read may be tried again.
    let again = prefetcher.plan(&wanted(&[0.9]), Link::default(), &World::default());
    (0..2).for_each(|_| prefetcher.failed(again[0].version));
    assert_eq!(prefetcher.counters.failed, 1);
    assert_eq!(prefetcher.plan(&wanted(&[0.9]), Link::default(), &World::default()), again);
}

#[test]
fn odds_are_learned_from_all_predictions() {
    let mut prefetcher = timed(0.004);
    let world = World { resident: high(&[0]).into_iter().collect(), ..World::default() };
    let ask = wanted(&[0.125, 0.125]);
    assert!(prefetcher.plan(&ask, Link::default(), &world).is_empty(), "one to eight");
    for _ in 0..50 {
        prefetcher.plan(&ask, Link { elapsed_seconds: 1.0, ..Link::default() }, &world);
        prefetcher.settle(1, &[chosen(&[0, 1])], &high(&[0, 1]));
    }
    assert!(chance(&prefetcher.odds, 1, 0.125) > 0.9);
    assert_eq!(versions(&prefetcher.plan(&ask, Link::default(), &world)), high(&[1]));
    // Planned twice, judged once.
    let mut twice = timed(0.004);
    (0..3).for_each(|_| drop(twice.plan(&ask, Link::default(), &world)));
    twice.settle(1, &[], &[]);
    // One prediction of two was of a missing expert.
    assert_eq!(chance(&twice.odds, 1, 0.125), 4.0 * (0.5 / 6.0) / 5.0);
}

#[test]
fn papers_read_every_guess() {
    let n = |rule, layer_seconds, scores: &[f32]| {
        let options = PrefetchOptions { rule, ..PrefetchOptions::default() };
        let late = Link { queued_bytes: 64 * MIB, elapsed_seconds: 1.0 };
        prefetcher(layer_seconds, options).plan(&wanted(scores), late, &World::default()).len()
    };
    let unlikely = [0.01; 8];
    assert_eq!(timed(1.0).plan(&wanted(&unlikely), Link::default(), &World::default()).len(), 0);
    assert_eq!(n(PrefetchRule::All, 1e-9, &unlikely), 8, "HOBBIT");
    assert_eq!(n(PrefetchRule::Budget, 1.0, &[0.01, 0.01, 0.0]), 2, "SMoE: the last one will be substituted");
    assert_eq!(n(PrefetchRule::First(3), 1e-9, &unlikely), 3, "EdgeMoE");
    let fate = |layer_seconds| n(PrefetchRule::Budget, layer_seconds, &unlikely);
    assert_eq!([0.0079, 0.0081, 0.0161, 0.0401, 1.0].map(fate), [0, 1, 2, 5, 8], "whole reads of 8 ms in a layer");
    let options = PrefetchOptions { rule: PrefetchRule::Budget, ..PrefetchOptions::default() };
    let mut unknown = Prefetcher::new(options, Estimates::default());
    assert!(unknown.plan(&wanted(&unlikely), Link::default(), &World::default()).is_empty(), "T is unknown");
}

#[test]
fn all_predicted_experts_are_shielded_where_all_are_read() {
    let shielded = |prefetcher: &Prefetcher| {
        let mut indices: Vec<u16> = prefetcher.shielded().map(|version| version.expert.index).collect();
        indices.dedup();
        indices
    };
    // The first one is resident.
    let world = World { resident: high(&[0]).into_iter().collect(), ..World::default() };
    let ahead = wanted(&[0.2, 0.7, 0.1]);
    let mut judging = timed(0.008);
    assert_eq!(versions(&judging.plan(&ahead, Link::default(), &world)), high(&[1]));
    assert_eq!(shielded(&judging), [1]);
    let options = PrefetchOptions { rule: PrefetchRule::All, ..PrefetchOptions::default() };
    let mut paper = prefetcher(0.008, options);
    assert_eq!(versions(&paper.plan(&ahead, Link::default(), &world)), high(&[1, 2]));
    assert_eq!(shielded(&paper), [0, 1, 2, 1, 2], "what is read ahead is shielded on its own account, too");
    paper.plan(&Ahead::default(), Link::default(), &world);
    assert_eq!(paper.shielded().collect::<Vec<_>>(), high(&[1, 2]), "until its layer begins");
    paper.settle(1, &[], &[]);
    assert_eq!(paper.shielded().count(), 0);
}

#[test]
fn deterministic_plans_know_no_time() {
    let options = PrefetchOptions { rule: PrefetchRule::First(2), ..PrefetchOptions::default() };
    let busy = Link { queued_bytes: u64::MAX, elapsed_seconds: 1e9 };
    let mut unknown = Prefetcher::new(options, Estimates::default());
    let mut slow = prefetcher(1e-9, options);
    for _ in 0..3 {
        let ask = wanted(&[0.2, 0.1, 0.1]);
        let loads = unknown.plan(&ask, busy, &World::default());
        assert_eq!(loads, slow.plan(&ask, Link::default(), &World::default()));
        assert_eq!(versions(&loads), high(&[0, 1]));
        assert!(unknown.plan(&ask, busy, &World::default()).is_empty(), "two per layer, however often asked");
        unknown.landed(high(&[1])[0]);
        unknown.settle(1, &[], &[]);
        slow.settle(1, &[], &[]);
        drop(slow.plan(&ask, busy, &World::default()));
        slow.abandon();
        let all = unknown.plan(&ask, busy, &World::default());
        slow.plan(&ask, busy, &World::default());
        assert_eq!(all.len(), 2);
        unknown.settle(1, &[], &[]);
        slow.settle(1, &[], &[]);
    }
}

fn any_predictions() -> impl Strategy<Value = Vec<(u16, f32)>> {
    prop::collection::vec((0u16..12, prop_oneof![0.0f32..=1.0, Just(0.0), Just(1.0)]), 0..12).prop_map(|mut all| {
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        let mut seen = HashSet::new();
        all.retain(|(index, _)| seen.insert(*index));
        all
    })
}

fn rules() -> impl Strategy<Value = PrefetchRule> {
    let first = (0usize..5).prop_map(PrefetchRule::First);
    prop_oneof![Just(PrefetchRule::Timed), first, Just(PrefetchRule::All), Just(PrefetchRule::Budget)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_keep_their_promises(
        asks in prop::collection::vec(
            (any_predictions(), 1u8..4, 0u64..32 * MIB, 0.0f64..0.05,
             prop::collection::vec((0u16..12, any::<bool>()), 0..6), any::<bool>()), 1..12),
        layer_seconds in 1e-4f64..0.1,
        thresholds in (0.0f32..=1.0, 0.0f32..=1.0),
        has_low: bool,
        large in prop::option::of(0u16..12),
        rule in rules(),
    ) {
        let thresholds = Thresholds::new(thresholds.0.min(thresholds.1), thresholds.0.max(thresholds.1)).unwrap();
        let options = PrefetchOptions { thresholds, rule, outstanding_max: 9, ..PrefetchOptions::default() };
        let mut prefetcher = prefetcher(layer_seconds, options);
        let mut outstanding: HashSet<Version> = HashSet::new();
        for (predictions, distance, queued_bytes, elapsed_seconds, resident, settles) in asks {
            let version = |(index, is_high)| {
                let expert = expert(index);
                if is_high { Version::high(expert) } else { Version::low(expert) }
            };
            let resident: HashSet<Version> = resident.into_iter().map(version).collect();
            let world = World { resident, has_low, large, ..World::default() };
            let one = |&(index, score): &(u16, f32)| Predicted { expert: expert(index), score, distance, token: 0 };
            let predicted: Vec<Predicted> = predictions.iter().map(one).collect();
            let ask = Ahead { wanted: predicted.clone(), predicted, depth: distance };
            let link = Link { queued_bytes, elapsed_seconds };
            let odds = prefetcher.odds.clone();
            let loads = prefetcher.plan(&ask, link, &world);

            for (i, load) in loads.iter().enumerate() {
                prop_assert!(!world.is_resident(load.version), "resident");
                prop_assert!(!world.is_resident(Version::high(load.version.expert)), "better is resident");
                prop_assert!(outstanding.insert(load.version), "twice");
                prop_assert_eq!(Some(load.bytes), world.bytes(load.version));
                prop_assert!(loads[..i].iter().all(|other| other.version.expert != load.version.expert));
                prop_assert!(predictions.iter().any(|(index, _)| *index == load.version.expert.index));
            }
            prop_assert!(outstanding.len() <= 9);
            match rule {
                PrefetchRule::Timed => {
                    let queued = prefetcher.estimates.load_seconds(queued_bytes).unwrap();
                    let mut slack = f64::from(distance) * layer_seconds - queued - elapsed_seconds;
                    for load in &loads {
                        let seconds = prefetcher.estimates.load_seconds(load.bytes).unwrap();
                        prop_assert!(slack >= 0.25 * seconds, "time");
                        slack -= seconds;
                        if thresholds.t1 == 1.0 {
                            let is_it = |(index, _): &&(u16, f32)| *index == load.version.expert.index;
                            let score = predictions.iter().find(is_it).unwrap().1;
                            prop_assert!(chance(&odds, distance, score) > 0.5, "likely");
                        }
                    }
                }
                PrefetchRule::First(n) => prop_assert!(outstanding.len() <= n, "fixed budget"),
                PrefetchRule::All => prop_assert!(outstanding.len() <= 9, "room"),
                PrefetchRule::Budget => {
                    let least = prefetcher.estimates.load_seconds(2 * MIB).unwrap();
                    prop_assert!(outstanding.len() as f64 <= layer_seconds / least, "Fate's n");
                }
            }
            if settles {
                let used: Vec<Version> = loads.iter().map(|load| load.version).take(1).collect();
                let indices: Vec<u16> = used.iter().map(|version| version.expert.index).collect();
                prefetcher.settle(1, &[chosen(&indices)], &used);
                outstanding.clear();
            }
        }
        let counters = prefetcher.counters;
        let settled = counters.useful + counters.late + counters.wasted;
        prop_assert_eq!(counters.issued, settled + outstanding.len() as u64);
    }
}

#[test]
fn a_batch_wants_an_expert_as_the_token_that_wants_it_most() {
    let thresholds = Thresholds::new(0.6, 1.0).unwrap();
    let options = PrefetchOptions { thresholds, rule: PrefetchRule::First(8), ..PrefetchOptions::default() };
    let (mut planner, world) = (prefetcher(1.0, options), World { has_low: true, ..World::default() });
    // Expert 1 is the second of the first token and the first of the second one.
    let one = |(token, index, score)| Predicted { expert: expert(index), score, distance: 1, token };
    let predicted = [(0, 0, 0.9), (0, 1, 0.1), (1, 1, 0.7), (1, 2, 0.3)].map(one).to_vec();
    let ahead = Ahead { wanted: predicted.clone(), predicted, depth: 1 };
    let loads = versions(&planner.plan(&ahead, Link::default(), &world));
    assert_eq!(loads, [high(&[0, 1]), vec![Version::low(expert(2))]].concat());
    let tokens = [vec![(0, 0.9), (5, 0.1)], vec![(1, 0.7), (2, 0.3)]];
    planner.settle(1, &tokens, &loads);
    assert_eq!((planner.counters.late, planner.counters.wasted), (3, 0), "each token uses its own");
}
