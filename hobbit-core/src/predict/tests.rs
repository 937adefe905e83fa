use proptest::prelude::*;

use super::*;
use crate::expert::{Precision, Version};

/// Layers 1, 2, 4 and 5 of eight experts, two used: 0 and 3 are dense.
fn shape() -> PredictShape {
    PredictShape { layers: vec![(1, 8, 2), (2, 8, 2), (4, 8, 2), (5, 8, 2)] }
}

fn predict(predictor: &mut dyn Predictor, layer: u16, distance: u8) -> Vec<Predicted> {
    let mut out = Vec::new();
    predictor.predict(layer, distance, &mut out);
    out
}

fn experts(predictor: &mut dyn Predictor, layer: u16, distance: u8) -> Vec<(u16, u16)> {
    predict(predictor, layer, distance).iter().map(|p| (p.expert.layer, p.expert.index)).collect()
}

/// A hundredth and a bit for each expert, and these.
fn scores(high: &[(usize, f32)]) -> Vec<f32> {
    let mut scores: Vec<f32> = (0..8).map(|i| 0.01 + 0.001 * i as f32).collect();
    high.iter().for_each(|&(index, score)| scores[index] = score);
    scores
}

#[test]
fn words_round_trip() {
    for kind in PredictorKind::ALL {
        assert_eq!(kind.to_string().parse(), Ok(kind));
        assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
    }
    assert_eq!(
        "stacked".parse::<PredictorKind>().unwrap_err().to_string(),
        "unknown predictor 'stacked' (expected one of: none, stacked-gate, cross-layer, path-table)"
    );
}

#[test]
fn distances_count_layers_with_experts() {
    assert_eq!(shape().target(2, 1), Some((4, 8, 2)));
    assert_eq!(shape().target(1, 3), Some((5, 8, 2)));
    for (layer, distance) in [(5, 1), (3, 1), (1, 0), (1, 255), (9, 1)] {
        assert_eq!(shape().target(layer, distance), None);
    }
}

#[test]
fn the_stacked_gate_takes_the_k_best_of_each_layer_ahead() {
    let mut gate = build(PredictorKind::StackedGate, shape(), None, 0);
    assert!(gate.needs_scores());
    gate.begin_token();
    gate.scores(1, 1, &scores(&[(3, 0.6), (6, 0.2)]));
    gate.scores(1, 2, &scores(&[(0, 0.3), (7, 0.5)]));
    gate.scores(1, 4, &scores(&[]));
    assert_eq!(experts(&mut *gate, 1, 1), [(2, 3), (2, 6)]);
    assert_eq!(experts(&mut *gate, 1, 2), [(4, 7), (4, 0)]);
    let weights: Vec<f32> = predict(&mut *gate, 1, 1).iter().map(|p| p.score).collect();
    assert!((weights[0] - 0.75).abs() < 1e-6 && (weights[1] - 0.25).abs() < 1e-6, "router weights: {weights:?}");
    // Other layers, missing scores and the previous token predict nothing.
    for (layer, distance) in [(2, 1), (1, 3), (1, 4), (1, 0)] {
        assert!(experts(&mut *gate, layer, distance).is_empty(), "{layer} {distance}");
    }
    gate.scores(2, 1, &scores(&[(1, 0.5), (2, 0.4)]));
    assert_eq!(experts(&mut *gate, 2, 1), [(4, 1), (4, 2)]);
    assert!(experts(&mut *gate, 1, 1).is_empty());
    gate.begin_token();
    assert!(experts(&mut *gate, 2, 1).is_empty());
}

#[test]
fn the_cross_layer_gate_takes_all_above_the_percentile() {
    let shape = PredictShape { layers: vec![(0, 16, 2), (1, 16, 2), (2, 16, 2)] };
    let scores: Vec<f32> = (0..16).map(|i| i as f32 / 120.0).collect();
    let mut gate = build(PredictorKind::CrossLayer, shape.clone(), None, 0);
    assert!(gate.needs_scores());
    gate.scores(0, 1, &scores);
    gate.scores(0, 2, &scores);
    assert_eq!(experts(&mut *gate, 0, 1), [(1, 15), (1, 14), (1, 13), (1, 12)]);
    assert!(experts(&mut *gate, 0, 2).is_empty(), "the next layer only");
    for (percentile, n) in [(1.0, 2), (0.9, 2), (0.5, 8), (0.0, 16), (f32::NAN, 2), (-3.0, 16), (7.0, 2)] {
        let mut gate = Gates::cross_layer(shape.clone(), 1, percentile);
        gate.scores(0, 1, &scores);
        assert_eq!(predict(&mut gate, 0, 1).len(), n, "{percentile}");
    }
}

#[test]
fn odd_scores_lead_to_no_panic() {
    for kind in [PredictorKind::StackedGate, PredictorKind::CrossLayer] {
        let mut gate = build(kind, shape(), None, 0);
        gate.scores(1, 1, &scores(&[]));
        gate.scores(1, 1, &[0.5; 7]);
        assert!(experts(&mut *gate, 1, 1).is_empty(), "too few scores, and the earlier ones are of another time");
        gate.scores(1, 1, &[f32::NAN; 8]);
        assert!(experts(&mut *gate, 1, 1).is_empty());
        gate.scores(1, 1, &[0.0; 8]);
        assert_eq!(experts(&mut *gate, 1, 1), [(2, 0), (2, 1)]);
        gate.scores(1, 1, &scores(&[(4, f32::INFINITY), (5, f32::NAN)]));
        assert_eq!(predict(&mut *gate, 1, 1)[0], Predicted { score: 1.0, ..predict(&mut *gate, 1, 1)[0] });
        for (layer, distance) in [(5, 1), (77, 1), (1, 0), (1, 255)] {
            gate.scores(layer, distance, &scores(&[]));
            assert!(experts(&mut *gate, layer, distance).is_empty());
        }
    }
}

#[test]
fn the_oracle_is_always_right() {
    let token = |i: u16| vec![(1, vec![(i, 1.0)]), (2, vec![(i + 1, 0.6), (i + 2, 0.4)]), (5, vec![(7, 1.0)])];
    let mut oracle = Oracle::new(shape(), vec![vec![token(0)], vec![token(1)]]);
    oracle.begin_token();
    assert_eq!(experts(&mut oracle, 1, 1), [(2, 1), (2, 2)]);
    assert!(experts(&mut oracle, 1, 2).is_empty(), "the trace has nothing for layer 4");
    oracle.begin_token();
    assert_eq!(experts(&mut oracle, 1, 1), [(2, 2), (2, 3)]);
    assert_eq!(experts(&mut oracle, 1, 3), [(5, 7)]);
    oracle.begin_token();
    assert!(experts(&mut oracle, 1, 1).is_empty(), "the future is over");
}

#[test]
fn each_token_of_a_batch_has_a_predictor_of_its_own() {
    let mut lanes = Lanes::new(Box::new(Gates::stacked(shape(), 1)));
    let mut show = |likely: &[[usize; 2]]| -> Vec<(u16, u16)> {
        lanes.begin_batch(likely.len());
        for (token, [best, second]) in likely.iter().enumerate() {
            let lane = lanes.of_token(token).expect("a lane for each");
            lane.scores(1, 1, &scores(&[(*best, 0.6), (*second, 0.3)]));
        }
        predict(&mut lanes, 1, 1).iter().map(|p| (p.token, p.expert.index)).collect()
    };
    assert_eq!(show(&[[1, 2], [2, 3]]), [(0, 1), (0, 2), (1, 2), (1, 3)]);
    assert_eq!(show(&[[4, 5]]), [(0, 4), (0, 5)], "the others have no token");
    assert_eq!(show(&[[5, 1], [2, 1], [3, 1]]), [(0, 5), (0, 1), (1, 2), (1, 1), (2, 3), (2, 1)]);
    // One that knows all tokens is asked for all of them.
    let tokens = [vec![(2, vec![(1, 1.0)])], vec![(2, vec![(4, 1.0)])]];
    let mut lanes = Lanes::new(Box::new(Oracle::new(shape(), vec![tokens.to_vec()])));
    lanes.begin_batch(2);
    assert!(lanes.of_token(1).is_none());
    let named: Vec<_> = predict(&mut lanes, 1, 1).iter().map(|p| (p.token, p.expert.index)).collect();
    assert_eq!(named, [(0, 1), (1, 4)]);
}

/// An expert is missing when none of its versions is resident.
fn ahead_of(gate: &mut Gates, layer: u16, p_max: u8, is_resident: &dyn Fn(Version) -> bool) -> Ahead {
    let is_there = |expert| is_resident(Version::high(expert)) || is_resident(Version::low(expert));
    ahead(gate, layer, p_max, &mut |predicted, wanted| {
        wanted.extend(predicted.iter().filter(|predicted| !is_there(predicted.expert)));
    })
}

#[test]
fn looking_ahead_stops_at_the_first_layer_with_misses() {
    let mut gate = Gates::stacked(shape(), 3);
    gate.scores(1, 1, &scores(&[(0, 0.6), (1, 0.3)]));
    gate.scores(1, 2, &scores(&[(2, 0.6), (3, 0.3)]));
    gate.scores(1, 3, &scores(&[(4, 0.6), (5, 0.3)]));
    let resident = |experts: &'static [(u16, u16)]| {
        move |version: Version| experts.contains(&(version.expert.layer, version.expert.index))
    };
    let indices = |predicted: &[Predicted]| predicted.iter().map(|p| p.expert.index).collect::<Vec<_>>();

    let near = ahead_of(&mut gate, 1, 3, &resident(&[(2, 1)]));
    assert_eq!((near.depth, indices(&near.wanted)), (1, vec![0]));
    assert_eq!(indices(&near.predicted), [0, 1], "what is there is shielded");

    let far = ahead_of(&mut gate, 1, 3, &resident(&[(2, 0), (2, 1), (4, 2), (4, 3)]));
    assert_eq!((far.depth, indices(&far.wanted)), (3, vec![4, 5]));
    assert_eq!(indices(&far.predicted), [0, 1, 2, 3, 4, 5]);
    assert!(far.of_layer(4).map(|p| p.distance).eq([2, 2]));

    let all = ahead_of(&mut gate, 1, 3, &|_| true);
    assert_eq!((all.depth, all.wanted.len(), all.predicted.len()), (3, 0, 6));
    assert_eq!(ahead_of(&mut gate, 1, 2, &|_| true).depth, 2);
    assert_eq!(ahead_of(&mut gate, 1, 0, &|_| false), Ahead::default());
    assert_eq!(ahead_of(&mut gate, 2, 3, &|_| false), Ahead::default(), "nothing is predicted from there");
    // One version is enough.
    assert_eq!(ahead_of(&mut gate, 1, 3, &|version| version.precision == Precision::Low).depth, 3);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// The contract of [`Predictor`], for every kind and any input.
    #[test]
    fn predictions_are_distinct_ranked_and_in_range(
        tokens in prop::collection::vec(
            (prop::collection::vec(prop::collection::vec(-0.2f32..1.0, 7..9), 16), any::<bool>()), 1..8),
    ) {
        for kind in PredictorKind::ALL {
            let mut runs = [build(kind, shape(), None, 0), build(kind, shape(), None, 0)];
            for (rows, is_new) in &tokens {
                let mut row = rows.iter();
                if *is_new {
                    runs.iter_mut().for_each(|predictor| predictor.begin_sequence());
                }
                runs.iter_mut().for_each(|predictor| predictor.begin_token());
                for (layer, ..) in shape().layers {
                    let mut best = Vec::new();
                    top_k(row.next().unwrap(), 2, &mut best);
                    let chosen: Vec<(u16, f32)> = best.into_iter().zip([0.75, 0.25]).collect();
                    runs.iter_mut().for_each(|predictor| predictor.observe(layer, &chosen));
                    for distance in 0..=2 {
                        let scores = row.next().unwrap();
                        runs.iter_mut().for_each(|predictor| predictor.scores(layer, distance, scores));
                    }
                    for distance in 0..=5 {
                        let [out, again] = runs.each_mut().map(|predictor| predict(&mut **predictor, layer, distance));
                        prop_assert_eq!(&out, &again);
                        let target = shape().target(layer, distance);
                        prop_assert!(target.is_some() || out.is_empty());
                        prop_assert!(out.is_sorted_by(|a, b| a.score >= b.score));
                        for (i, p) in out.iter().enumerate() {
                            prop_assert_eq!((p.expert.layer, p.distance), (target.unwrap().0, distance));
                            prop_assert!(p.expert.index < 8 && (0.0..=1.0).contains(&p.score));
                            prop_assert!(out[..i].iter().all(|other| other.expert != p.expert));
                        }
                    }
                }
            }
        }
    }
}
