//! Scripts, and routers that are made up but share what real ones have: preferences that last a token, a few, a topic,
//! for ever.

use super::*;
use crate::cache::policy::tests::replay::{Router, synthetic};
use crate::cache::policy::tests::scripts::{Aged, aged, at, high, insert, low, token, used, victim_of};
use crate::cache::policy::{Belady, PolicyKind, Shape, Weights, build};
use crate::expert::Precision;

fn learned() -> Aged<Learned> {
    aged(Learned::new(0.25))
}

#[test]
fn who_nearly_was_selected_stays() {
    let mut learned = learned();
    insert(&mut learned, &[0, 1, 2]);
    for time in 0..10 {
        learned.on_scores(3, &[0.01, 0.29, 0.30, 0.40], at(time));
        token(&mut learned, time, &[3]);
    }
    assert_eq!(victim_of(&mut learned, &[2, 1, 0]), 0);
    assert_eq!(victim_of(&mut learned, &[2, 1]), 1);
}

#[test]
fn without_scores_recent_and_frequent_experts_stay() {
    let mut learned = learned();
    insert(&mut learned, &[0, 1, 2]);
    for time in 0..10 {
        token(&mut learned, time, if time % 2 == 0 { &[0, 3] } else { &[1, 3] });
    }
    assert_eq!(victim_of(&mut learned, &[0, 1, 2]), 2);
    assert_eq!(victim_of(&mut learned, &[0, 1]), 0, "1 was used last");
    (10..20).for_each(|time| token(&mut learned, time, &[0, 3]));
    assert_eq!(victim_of(&mut learned, &[0, 1]), 1);
}

#[test]
fn of_two_layers_the_one_that_ran_gives_room() {
    let of_layer = |layer| Version::high(ExpertId { layer, index: 0 });
    let layers = [3, 4];
    let mut learned = Learned::new(0.25);
    learned.on_share(ShareId { pool: 0, layer: 3 }, &layers.map(of_layer));
    layers.into_iter().for_each(|layer| learned.on_insert(of_layer(layer), at(0)));
    let use_one = |learned: &mut Learned, layer, token| {
        learned.on_use(of_layer(layer).expert, used(Precision::High), Now { token, layer });
    };
    for token in 0..10 {
        layers.into_iter().for_each(|layer| use_one(&mut learned, layer, token));
    }
    let mut victim = |running: u16| {
        let candidates = layers.map(|layer| Candidate { version: of_layer(layer), last_use: 0 });
        let victim = learned.victim(of_layer(5), &candidates, Now { token: 10, layer: running });
        learned.on_insert(candidates[victim].version, at(10));
        layers[victim]
    };
    assert_eq!([3, 4, 0].map(&mut victim), [3, 4, 4], "whose next use is farthest");
    // Layer 3 was of no use lately.
    (10..40).for_each(|token| {
        learned.on_scores(3, &[0.1, 0.9], Now { token, layer: 3 });
        use_one(&mut learned, 4, token);
    });
    let candidates = layers.map(|layer| Candidate { version: of_layer(layer), last_use: 0 });
    assert_eq!(learned.victim(of_layer(5), &candidates, Now { token: 40, layer: 4 }), 0);
}

#[test]
fn a_new_sequence_counts_from_the_whole_run() {
    let mut learned = aged(Learned::new(1.0));
    let known = |learned: &Learned, index| learned.layers[3].features(index);
    (0..64).for_each(|time| token(&mut learned, time, &[0]));
    let before = known(&learned, 0);
    learned.begin_sequence();
    token(&mut learned, 0, &[1]);
    let after = known(&learned, 0);
    assert!(after[7] < before[7] && after[7] > known(&learned, 1)[7], "0 is not forgotten: {before:?}, {after:?}");
    (1..64).for_each(|time| token(&mut learned, time, &[1]));
    assert!(known(&learned, 0)[7] < known(&learned, 1)[7], "64 tokens are more than the prior of 32");
}

#[test]
fn a_loss_costs_what_the_uses_ask_for() {
    let mut learned = learned();
    for time in 0..20 {
        learned.on_use(high(0).expert, used(Precision::High), at(time));
        learned.on_use(high(1).expert, used(Precision::Low), at(time));
        learned.on_use(high(2).expert, Use::by_one(false, None, 0.1), at(time));
    }
    let cost = |learned: &Learned, version: Version| {
        learned.layers[3].cost(version.expert.index, version.precision, learned.low_cost)
    };
    let [needed, cheap, skipped] = [0, 1, 2].map(|index| cost(&learned, high(index)));
    assert!(needed > 0.85 && cheap < needed / 2.0 && skipped < cheap, "{needed} {cheap} {skipped}");
    assert!(cost(&learned, low(1)) > cost(&learned, low(0)));
    assert_eq!(victim_of(&mut learned, &[0, 1]), 1);

    learned.on_insert(high(1), at(20));
    assert_eq!(cost(&learned, low(1)), 0.0, "its high version serves");
    learned.on_insert(low(1), at(20));
    assert!(cost(&learned, high(1)) < cheap, "low uses are served without it");
    assert_eq!(Learned::new(1.0).worth(high(0)), 0.0, "the layer is unknown");
}

#[test]
fn a_batch_counts_by_its_tokens_and_teaches_nothing() {
    let mut learned = learned();
    insert(&mut learned, &[0, 1]);
    let weigh = |learned: &mut Aged<Learned>, index: u16, weight: f32, time| {
        let n_tokens = weight as u32;
        learned.on_use(high(index).expert, Use { weight, n_tokens, ..used(Precision::High) }, at(time));
    };
    for (index, weight) in [(0, 60.0), (1, 4.0)] {
        weigh(&mut learned, index, weight, 0);
    }
    assert_eq!(victim_of(&mut learned, &[0, 1]), 1, "60 of 64 tokens are more than 4");
    let before = learned.blind.weights;
    for time in 1..40 {
        (0..2).for_each(|index| weigh(&mut learned, index, 32.0, time));
    }
    assert_eq!(learned.blind.weights, before);
    (40..80).for_each(|time| token(&mut learned, time, &[1]));
    assert_ne!(learned.blind.weights, before);
}

#[test]
fn a_batch_tells_which_of_its_tokens_used_an_expert_last() {
    let mut learned = learned();
    insert(&mut learned, &[0, 1, 2]);
    for (index, since) in [(0, 3), (1, 60), (2, 0)] {
        let usage = Use { weight: 1.0, n_tokens: 4, since, ..used(Precision::High) };
        learned.on_use(high(index).expert, usage, at(63));
    }
    let candidates = [0, 1, 2].map(|index| learned.worth(high(index)));
    assert!(candidates[1] < candidates[0] && candidates[0] < candidates[2], "{candidates:?}");
    // One by one, the same uses are as long ago.
    let mut one_by_one = self::learned();
    (0..64).for_each(|time| match time {
        3 => token(&mut one_by_one, time, &[1]),
        60 => token(&mut one_by_one, time, &[0]),
        63 => token(&mut one_by_one, time, &[2]),
        _ => token(&mut one_by_one, time, &[3]),
    });
    let ages = |learned: &Learned| [0, 1, 2].map(|index| learned.layers[3].features(index)[9..11].to_vec());
    assert_eq!(ages(&learned), ages(&one_by_one));
}

/// Fine-grained and coarse, of more and of less to know.
const ROUTERS: [Router; 4] = [
    Router { n_expert: 64, n_chosen: 6, n_tokens: 1500, always: 0.5, topic: 1.0, drift: 1.0, noise: 0.5 },
    Router { n_expert: 32, n_chosen: 4, n_tokens: 1500, always: 0.2, topic: 0.5, drift: 1.2, noise: 0.3 },
    Router { n_expert: 64, n_chosen: 8, n_tokens: 1500, always: 1.0, topic: 1.0, drift: 0.5, noise: 1.0 },
    Router { n_expert: 8, n_chosen: 2, n_tokens: 1500, always: 0.2, topic: 0.6, drift: 0.6, noise: 0.6 },
];

#[test]
fn it_misses_less_than_every_paper_where_there_is_something_to_know() {
    for (router, seed) in ROUTERS.into_iter().zip(101..) {
        let trace = synthetic(router, seed);
        let shape = Shape { n_layers: 2, low_cost: 1.0 };
        for n_slots in [u32::from(router.n_expert) * 3 / 8, u32::from(router.n_expert) / 2] {
            let least = trace.misses(Box::new(Belady::new(trace.future(), 1.0)), n_slots, true);
            let others = PolicyKind::ALL.into_iter().filter(|kind| *kind != PolicyKind::Learned);
            let misses = |kind| trace.misses(build(kind, &Weights::default(), shape), n_slots, true);
            let others: Vec<_> = others.map(|kind| (misses(kind), kind)).collect();
            let mine = misses(PolicyKind::Learned);
            let blind = trace.misses(build(PolicyKind::Learned, &Weights::default(), shape), n_slots, false);
            eprintln!("{router:?}, {n_slots} slots: {mine}, blind {blind}, Belady {least}, others {others:?}");
            assert!(least < mine, "the future is not known");
            let best = others.iter().min_by_key(|(misses, _)| *misses).unwrap();
            assert!(mine < best.0, "{} misses less: {others:?}, ours {mine}", best.1);
        }
    }
}
