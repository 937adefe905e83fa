//! Rerouting to experts in memory, checked by hand.

use super::{recorded, recording, replayed};
use crate::expert::Precision;
use crate::options::{RoutingOptions, VirtualExperts, VirtualUpdate};
use crate::sim::{Budget, Config, SimError, replay};
use crate::trace::{Header, Layer, LayerRecord, ModelDescription, Needed, Phase, TraceWriter};

/// A layer of four experts with two slots; single tokens, each with two experts and these scores. Records keep
/// `n_unselected` scores.
fn trace(tokens: &[([u16; 2], [f32; 4])], n_unselected: Option<usize>, routing: RoutingOptions) -> Vec<u8> {
    let layer = Layer { layer: 0, n_expert: 4, n_used: 2, bytes_high: 4000, slots_high: 2, ..Layer::default() };
    let model = ModelDescription { layers: vec![layer], ..ModelDescription::default() };
    let mut header = Header { model, ..Header::default() };
    header.settings.routing = routing;
    let mut writer = TraceWriter::new(Vec::new(), &header).unwrap();
    for (chosen, scores) in tokens {
        let mut record = LayerRecord::new(0, 2);
        let of = |index: u16| scores[usize::from(index)];
        let sum = of(chosen[0]) + of(chosen[1]);
        let weights = chosen.map(|index| of(index) / sum);
        record.push_token(chosen, &weights, n_unselected.map(|_| &scores[..]), n_unselected.unwrap_or(0));
        writer.layer(&record).unwrap();
        writer.batch(Phase::Decode, 1, 0.01).unwrap();
    }
    writer.finish().unwrap()
}

const TOKENS: [([u16; 2], [f32; 4]); 3] = [
    ([0, 1], [0.5, 0.3125, 0.125, 0.0625]),
    ([0, 2], [0.5, 0.1875, 0.25, 0.0625]),
    ([3, 0], [0.25, 0.125, 0.0625, 0.5]),
];

#[test]
fn a_missing_expert_gives_way_to_one_that_is_there() {
    let recording = recording(&trace(&TOKENS, Some(2), RoutingOptions::default()));
    let exact = Config::recorded(&recording).unwrap();
    let (_, outcome) = replayed(&recording, &exact);
    assert_eq!((outcome.decode.hits, outcome.decode.misses.high), (2, 4));
    assert_eq!((outcome.decode.bytes, outcome.bytes_read), (16_000, 16_000));

    // 0.2 of the range of 0.4375 exceeds 0.0625 but not 0.375; the best expert stays.
    let routing = RoutingOptions { cache_bias: 0.2, ..RoutingOptions::default() };
    let (seen, outcome) = replayed(&recording, &Config { routing, ..exact.clone() });
    let used: Vec<_> = seen.iter().map(|(expert, precision, hit)| (expert.index, *precision, *hit)).collect();
    let high = Some(Precision::High);
    assert_eq!(
        used,
        [(0, high, false), (1, high, false), (0, high, true), (1, high, true), (3, high, false), (0, high, true)]
    );
    let decode = outcome.decode;
    assert_eq!((decode.rerouted.uses, decode.rerouted.refused, decode.bytes), (1, 0, 12_000));
    assert!((decode.rerouted.mean_given_up().unwrap() - 0.0625 / 0.75).abs() < 1e-6, "{decode:?}");
    let shares = decode.shares().unwrap();
    assert_eq!((shares.hit, shares.reranked, shares.loaded), (2.0 / 6.0, 1.0 / 6.0, 0.5));

    let routing = RoutingOptions { substitute: 0.5, keep_top: 0, ..RoutingOptions::default() };
    let (_, outcome) = replayed(&recording, &Config { routing, ..exact.clone() });
    assert_eq!(outcome.decode.rerouted.uses, 1, "0.25 is less than 1.5 times 0.1875");
    let routing = RoutingOptions { drop: 0.8, ..RoutingOptions::default() };
    let (_, outcome) = replayed(&recording, &Config { routing, ..exact });
    assert_eq!((outcome.decode.misses.skipped, outcome.decode.hits), (2, 2), "{outcome:?}");
}

#[test]
fn flat_routers_can_be_spared() {
    let (first, then) = (([0, 1], [0.28, 0.26, 0.24, 0.22]), ([2, 3], [0.24, 0.22, 0.28, 0.26]));
    let tokens: Vec<_> = std::iter::once(first).chain(std::iter::repeat_n(then, 99)).collect();
    let recording = recording(&trace(&tokens, Some(2), RoutingOptions::default()));
    let exact = Config::recorded(&recording).unwrap();
    let replayed = |spares_flat| {
        let routing = RoutingOptions { substitute: 0.3, keep_top: 0, spares_flat, ..RoutingOptions::default() };
        let (_, outcome) = replayed(&recording, &Config { routing, ..exact.clone() });
        (outcome.decode.misses.high, outcome.decode.rerouted.uses)
    };
    assert_eq!(replayed(false), (2, 2 * 99), "the first token's experts stand in for all others");
    assert_eq!(replayed(true), (4, 2 * 31), "until 32 tokens that miss experts have shown that the router is flat");
}

#[test]
fn virtual_experts_change_beside_tokens_that_wait_for_none() {
    let first = ([0, 1], [0.5, 0.3, 0.1, 0.1]);
    let then = ([2, 3], [0.1, 0.15, 0.4, 0.35]);
    let tokens: Vec<_> = std::iter::repeat_n(first, 8).chain(std::iter::repeat_n(then, 300)).collect();
    let recording = recording(&trace(&tokens, Some(2), RoutingOptions::default()));
    let mut exact = Config::recorded(&recording).unwrap();
    exact.memory.budget = Budget::Slots(3);
    for update in [VirtualUpdate::Tokens(1), VirtualUpdate::Tokens(4), VirtualUpdate::Auto] {
        let virtual_experts = VirtualExperts::Auto;
        let routing = RoutingOptions { virtual_experts, virtual_update: update, ..RoutingOptions::default() };
        let (seen, outcome) = replayed(&recording, &Config { routing, ..exact.clone() });
        let decode = outcome.decode;
        assert_eq!(
            (decode.misses.high, decode.misses.skipped),
            (2, 0),
            "{update:?}: only the first token waits: {decode:?}"
        );
        assert!(decode.rerouted.uses > 0 && decode.rerouted.refused == 0, "{decode:?}");
        assert!(decode.bytes >= 16_000, "two were read, and two more beside tokens: {decode:?}");
        let last: Vec<u16> = seen[seen.len() - 2..].iter().map(|(expert, ..)| expert.index).collect();
        assert_eq!(last.iter().sum::<u16>(), 5, "{update:?}: {last:?}, where the first ones gave way");
    }
    let routing = RoutingOptions { virtual_experts: VirtualExperts::Auto, ..RoutingOptions::default() };
    let light = Config { norms: vec![(0, vec![1.0, 1.0, 1e-6, 1e-6])], routing, ..exact };
    let (seen, _) = replayed(&recording, &light);
    let last: Vec<u16> = seen[seen.len() - 2..].iter().map(|(expert, ..)| expert.index).collect();
    assert_eq!(last.iter().sum::<u16>(), 1, "{last:?}: experts of little norm replace none");
    let recorded = RoutingOptions { virtual_experts: VirtualExperts::Auto, ..RoutingOptions::default() };
    let ran = super::recording(&trace(&tokens, Some(2), recorded));
    assert_eq!(Config::recorded(&ran).unwrap().routing.virtual_experts, VirtualExperts::Auto);
}

#[test]
fn without_scores_no_token_is_rerouted() {
    for n_unselected in [None, Some(0)] {
        let recording = recording(&trace(&TOKENS, n_unselected, RoutingOptions::default()));
        let routing = RoutingOptions { cache_bias: 0.2, ..RoutingOptions::default() };
        let config = Config { routing, ..Config::recorded(&recording).unwrap() };
        let error = replay(&recording, &config, &mut |_, _, _| {}).unwrap_err();
        assert!(matches!(error, SimError::NoScores { .. }) && error.to_string().contains("no scores"), "{error}");
    }
}

#[test]
fn rerouted_runs_replay_with_and_without_rerouting() {
    let routing = RoutingOptions { cache_bias: 0.2, ..RoutingOptions::default() };
    let plain = recording(&trace(&TOKENS, Some(2), routing.clone()));
    let config = Config::recorded(&plain).unwrap();
    assert_eq!((config.routing.cache_bias, config.routing.keep_top), (0.2, 1));
    let (seen, _) = replayed(&plain, &config);
    // As the engine writes it: the executed experts and the demands.
    let mut writer = TraceWriter::new(Vec::new(), &plain.header).unwrap();
    for ((batch, of_token), hits) in plain.batches().zip(seen.chunks(2)).zip(seen.chunks(2)) {
        let mut record = batch.layers[0].clone();
        let used: Vec<u16> = of_token.iter().map(|(expert, ..)| expert.index).collect();
        record.needed = (hits.iter())
            .map(|&(expert, used, hit)| Needed {
                expert: expert.index,
                demand: crate::route::Demand::High,
                used,
                hit,
                class: None,
                bytes: 0,
            })
            .collect();
        if used != record.chosen {
            record.executed = used;
        }
        writer.layer(&record).unwrap();
        writer.batch(Phase::Decode, 1, 0.01).unwrap();
    }
    let rerouted = recording(&writer.finish().unwrap());
    assert_eq!(rerouted.batches().filter(|batch| !batch.layers[0].executed.is_empty()).count(), 1);
    assert_eq!(replayed(&rerouted, &config).0, recorded(&rerouted));
    let exact = Config { routing: RoutingOptions::default(), ..config };
    let of_exact = recording(&trace(&TOKENS, Some(2), RoutingOptions::default()));
    assert_eq!(replayed(&rerouted, &exact).0, replayed(&of_exact, &Config::recorded(&of_exact).unwrap()).0);
}
