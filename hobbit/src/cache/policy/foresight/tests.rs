//! Scripts, and routers that are made up but share what real ones have: preferences that last a token, a few, a topic,
//! for ever.

use super::*;
use crate::cache::policy::replay::{Router, synthetic};
use crate::cache::policy::scripts::{Aged, aged, at, high, insert, low, token, used, victim_of};
use crate::cache::policy::{Belady, PolicyKind, Shape, Weights, build};
use crate::expert::Precision;

fn foresight() -> Aged<Foresight> {
    aged(Foresight::new(ForesightOptions::default(), 0.25))
}

#[test]
fn who_nearly_was_selected_stays() {
    let mut foresight = foresight();
    insert(&mut foresight, &[0, 1, 2]);
    for time in 0..10 {
        foresight.on_scores(3, &[0.01, 0.29, 0.30, 0.40], at(time));
        token(&mut foresight, time, &[3]);
    }
    assert_eq!(victim_of(&mut foresight, &[2, 1, 0]), 0);
    assert_eq!(victim_of(&mut foresight, &[2, 1]), 1);
}

#[test]
fn without_scores_recent_and_frequent_experts_stay() {
    let mut foresight = foresight();
    insert(&mut foresight, &[0, 1, 2]);
    for time in 0..10 {
        token(&mut foresight, time, if time % 2 == 0 { &[0, 3] } else { &[1, 3] });
    }
    assert_eq!(victim_of(&mut foresight, &[0, 1, 2]), 2);
    assert_eq!(victim_of(&mut foresight, &[0, 1]), 0, "1 was used last");
    (10..20).for_each(|time| token(&mut foresight, time, &[0, 3]));
    assert_eq!(victim_of(&mut foresight, &[0, 1]), 1);
}

#[test]
fn of_two_layers_the_one_that_ran_gives_room() {
    let of_layer = |layer| Version::high(ExpertId { layer, index: 0 });
    let layers = [3, 4];
    let mut foresight = Foresight::new(ForesightOptions::default(), 0.25);
    foresight.on_share(ShareId { pool: 0, layer: 3 }, &layers.map(of_layer));
    layers.into_iter().for_each(|layer| foresight.on_insert(of_layer(layer), at(0)));
    let use_one = |foresight: &mut Foresight, layer, token| {
        foresight.on_use(of_layer(layer).expert, used(Precision::High), Now { token, layer });
    };
    for token in 0..10 {
        layers.into_iter().for_each(|layer| use_one(&mut foresight, layer, token));
    }
    let mut victim = |running: u16| {
        let candidates = layers.map(|layer| Candidate { version: of_layer(layer), last_use: 0 });
        let victim = foresight.victim(of_layer(5), &candidates, Now { token: 10, layer: running });
        foresight.on_insert(candidates[victim].version, at(10));
        layers[victim]
    };
    assert_eq!([3, 4, 0].map(&mut victim), [3, 4, 4], "whose next use is farthest");
    // Layer 3 was of no use lately.
    (10..40).for_each(|token| {
        foresight.on_scores(3, &[0.1, 0.9], Now { token, layer: 3 });
        use_one(&mut foresight, 4, token);
    });
    let candidates = layers.map(|layer| Candidate { version: of_layer(layer), last_use: 0 });
    assert_eq!(foresight.victim(of_layer(5), &candidates, Now { token: 40, layer: 4 }), 0);
}

#[test]
fn a_new_sequence_counts_from_the_whole_run() {
    let mut foresight = aged(Foresight::new(ForesightOptions { learning_rate: 0.0, ..Default::default() }, 1.0));
    let known = |foresight: &Foresight, index| foresight.layers[3].features(index, &foresight.rates);
    (0..64).for_each(|time| token(&mut foresight, time, &[0]));
    let before = known(&foresight, 0);
    foresight.begin_sequence();
    token(&mut foresight, 0, &[1]);
    let after = known(&foresight, 0);
    assert!(after[7] < before[7] && after[7] > known(&foresight, 1)[7], "0 is not forgotten: {before:?}, {after:?}");
    (1..64).for_each(|time| token(&mut foresight, time, &[1]));
    assert!(known(&foresight, 0)[7] < known(&foresight, 1)[7], "64 tokens are more than the prior of 32");
}

#[test]
fn a_loss_costs_what_the_uses_ask_for() {
    let mut foresight = foresight();
    for time in 0..20 {
        foresight.on_use(high(0).expert, used(Precision::High), at(time));
        foresight.on_use(high(1).expert, used(Precision::Low), at(time));
        foresight.on_use(high(2).expert, Use::by_one(false, None, 0.1), at(time));
    }
    let cost = |foresight: &Foresight, version: Version| {
        foresight.layers[3].cost(version.expert.index, version.precision, foresight.low_cost)
    };
    let [needed, cheap, skipped] = [0, 1, 2].map(|index| cost(&foresight, high(index)));
    assert!(needed > 0.85 && cheap < needed / 2.0 && skipped < cheap, "{needed} {cheap} {skipped}");
    assert!(cost(&foresight, low(1)) > cost(&foresight, low(0)));
    assert_eq!(victim_of(&mut foresight, &[0, 1]), 1);

    foresight.on_insert(high(1), at(20));
    assert_eq!(cost(&foresight, low(1)), 0.0, "its high version serves");
    foresight.on_insert(low(1), at(20));
    assert!(cost(&foresight, high(1)) < cheap, "low uses are served without it");
    assert_eq!(Foresight::new(ForesightOptions::default(), 1.0).worth(high(0)), 0.0, "nobody knows the layer");
}

#[test]
fn a_batch_counts_by_its_tokens_and_teaches_nothing() {
    let mut foresight = foresight();
    insert(&mut foresight, &[0, 1]);
    let weigh = |foresight: &mut Aged<Foresight>, index: u16, weight: f32, time| {
        let n_tokens = weight as u32;
        foresight.on_use(high(index).expert, Use { weight, n_tokens, ..used(Precision::High) }, at(time));
    };
    for (index, weight) in [(0, 60.0), (1, 4.0)] {
        weigh(&mut foresight, index, weight, 0);
    }
    assert_eq!(victim_of(&mut foresight, &[0, 1]), 1, "60 of 64 tokens are more than 4");
    let before = foresight.blind.weights;
    for time in 1..40 {
        (0..2).for_each(|index| weigh(&mut foresight, index, 32.0, time));
    }
    assert_eq!(foresight.blind.weights, before);
    (40..80).for_each(|time| token(&mut foresight, time, &[1]));
    assert_ne!(foresight.blind.weights, before);
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
            let others = PolicyKind::ALL.into_iter().filter(|kind| *kind != PolicyKind::Foresight);
            let misses = |kind| trace.misses(build(kind, &Weights::default(), shape), n_slots, true);
            let others: Vec<_> = others.map(|kind| (misses(kind), kind)).collect();
            let mine = misses(PolicyKind::Foresight);
            let blind = trace.misses(build(PolicyKind::Foresight, &Weights::default(), shape), n_slots, false);
            eprintln!("{router:?}, {n_slots} slots: {mine}, blind {blind}, Belady {least}, others {others:?}");
            assert!(least < mine, "the future is not known");
            let best = others.iter().min_by_key(|(misses, _)| *misses).unwrap();
            assert!(mine < best.0, "{} misses less: {others:?}, ours {mine}", best.1);
        }
    }
}
