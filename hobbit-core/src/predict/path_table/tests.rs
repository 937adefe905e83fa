use proptest::prelude::*;
use rand_mt::Mt;

use super::builder::PathLimits;
use super::*;
use crate::expert::ExpertId;
use crate::predict::{PredictorKind, build};

/// Layers 1, 2 and 5 of four experts each, one used.
fn top_1() -> PredictShape {
    PredictShape { layers: vec![(1, 4, 1), (2, 4, 1), (5, 4, 1)] }
}

fn learn(shape: &PredictShape, limits: PathLimits, tokens: &[Vec<Vec<u16>>]) -> PathTable {
    let mut builder = PathTableBuilder::new(shape.clone());
    builder.limits = limits;
    for token in tokens {
        builder.begin_token();
        for (&(layer, ..), chosen) in shape.layers.iter().zip(token) {
            builder.observe(layer, chosen.iter().copied());
        }
    }
    builder.build()
}

/// Predictions for the third layer after these two.
fn predicted(shape: &PredictShape, table: &PathTable, first: &[u16], second: &[u16]) -> Vec<Predicted> {
    let mut predictor = PathPredictor::new(shape.clone(), table.clone(), 0);
    let chosen = |experts: &[u16]| experts.iter().map(|&index| (index, 1.0)).collect::<Vec<_>>();
    predictor.begin_token();
    predictor.observe(shape.layers[0].0, &chosen(first));
    predictor.observe(shape.layers[1].0, &chosen(second));
    let mut out = Vec::new();
    predictor.predict(shape.layers[1].0, 1, &mut out);
    out
}

/// The third layer is decided by both layers before together, as exclusive or: neither alone says anything.
fn exclusive_or() -> Vec<Vec<Vec<u16>>> {
    (0..40u16).map(|i| (i % 2, i / 2 % 2)).map(|(a, b)| vec![vec![a], vec![b], vec![2 + (a ^ b)]]).collect()
}

#[test]
fn two_layers_together_say_what_neither_does_alone() {
    let shape = top_1();
    let table = learn(&shape, PathLimits::default(), &exclusive_or());
    for (a, b) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let best = predicted(&shape, &table, &[a], &[b])[0];
        assert_eq!((best.expert, best.distance), (ExpertId { layer: 5, index: 2 + (a ^ b) }, 1));
        assert!(best.score > 0.9, "{best:?}");
    }
    // Without the pairs it is a toss-up between two experts.
    let blind = learn(&shape, PathLimits { pairs_max: 0, ..PathLimits::default() }, &exclusive_or());
    assert_eq!(blind.n_pairs(), 0);
    assert!((0.49..0.51).contains(&predicted(&shape, &blind, &[0], &[1])[0].score));
}

#[test]
fn a_pair_never_seen_falls_back_to_one_layer_and_that_to_popularity() {
    let shape = top_1();
    // Expert 3 of the last layer follows expert 3 of the middle one; otherwise expert 0 is used.
    let mut tokens: Vec<Vec<Vec<u16>>> = vec![vec![vec![0], vec![1], vec![0]]; 30];
    tokens.extend(vec![vec![vec![0], vec![3], vec![3]]; 10]);
    let table = learn(&shape, PathLimits::default(), &tokens);
    assert_eq!((table.n_layers(), table.n_pairs(), table.n_tokens()), (3, 2, 40));
    let best = |first: &[u16], second: &[u16]| predicted(&shape, &table, first, second)[0];
    assert_eq!(best(&[0], &[3]).expert.index, 3, "a known pair");
    assert_eq!(best(&[2], &[3]).expert.index, 3, "a new pair, a known layer before");
    assert!(best(&[0], &[3]).score > best(&[2], &[3]).score);
    // Expert 2 of the middle layer was never used: popularity, three quarters.
    assert_eq!((best(&[2], &[2]).expert.index, best(&[2], &[2]).score), (0, 0.75));
    assert_eq!(best(&[9], &[]).score, 0.75, "experts that do not exist");

    // The most used last; of equals the lowest number, and none that was never used.
    let shown: Vec<String> = table.by_frequency().iter().map(|id| format!("{}:{}", id.layer, id.index)).collect();
    assert_eq!(shown, ["5:3", "2:3", "5:0", "2:1", "1:0"]);

    // EdgeMoE preloads up to three experts, also where a token uses one.
    let mut three = PathPredictor::new(shape.clone(), table.clone(), 3);
    let mut named = Vec::new();
    three.observe(1, &[(0, 1.0)]);
    three.predict(1, 1, &mut named);
    assert_eq!(named.iter().map(|guess| guess.expert.index).collect::<Vec<_>>(), [1, 3, 0], "{named:?}");

    // The second layer has one layer before it; nothing is known of the one after the last, nor two ahead.
    let mut predictor = PathPredictor::new(shape.clone(), table.clone(), 0);
    let mut out = Vec::new();
    predictor.begin_token();
    predictor.observe(1, &[(0, 1.0)]);
    predictor.predict(1, 1, &mut out);
    assert_eq!((out[0].expert, out.len()), (ExpertId { layer: 2, index: 1 }, 1));
    for (layer, distance) in [(1, 0), (1, 2), (5, 1), (3, 1)] {
        out.clear();
        predictor.predict(layer, distance, &mut out);
        assert!(out.is_empty(), "layer {layer}, {distance} ahead");
    }
}

#[test]
fn batches_count_as_their_tokens_do() {
    let shape = top_1();
    let tokens = exclusive_or();
    let mut batches = PathBatches::new(shape.clone());
    for (i, batch) in tokens.chunks(7).enumerate() {
        for (position, &(layer, ..)) in shape.layers.iter().enumerate() {
            batches.layer(layer, 1, batch.iter().map(|token| token[position][0]));
        }
        // The next batch's first layer says as much.
        if i % 2 == 0 {
            batches.end_batch();
        }
    }
    assert_eq!(batches.build(), learn(&shape, PathLimits::default(), &tokens));
}

#[test]
fn a_layer_that_dropped_tokens_is_not_counted() {
    let shape = top_1();
    let mut batches = PathBatches::new(shape);
    batches.layer(1, 1, [0, 1, 2]);
    batches.layer(2, 1, [1, 2, 3]);
    batches.layer(5, 1, [3]);
    batches.layer(1, 1, [0]);
    batches.layer(2, 1, [1]);
    batches.layer(5, 1, [2]);
    // Nonsense changes nothing.
    batches.layer(7, 0, []);
    let table = batches.build();
    assert_eq!(table.layers.iter().map(|layer| layer.tokens).collect::<Vec<_>>(), [4, 4, 1]);
    assert_eq!(table.layers[2].popularity, [0, 0, 1, 0], "not expert 3: whose token it was is not known");
    assert_eq!(table.layers[1].rows[0], Row { tokens: 2, next: vec![(1, 2)] });
}

#[test]
fn sets_have_no_order() {
    let shape = PredictShape { layers: vec![(0, 4, 2), (1, 4, 2), (2, 4, 2)] };
    let mut tokens = vec![vec![vec![1, 0], vec![2, 3], vec![0, 1]]; 8];
    tokens.extend(vec![vec![vec![0, 1], vec![3, 2], vec![1, 0]]; 8]);
    let table = learn(&shape, PathLimits::default(), &tokens);
    assert_eq!(table.n_pairs(), 1);
    let pair = predicted(&shape, &table, &[0, 1], &[3, 2]);
    assert!(pair.iter().map(|p| p.expert.index).eq([0, 1]) && pair.iter().all(|p| p.score == 1.0), "{pair:?}");
    assert_ne!(pair_key(&[1], &[2, 3]), pair_key(&[1, 2], &[3]), "where one set ends counts");
}

#[test]
fn tables_stay_within_their_limits_and_keep_what_is_frequent() {
    let shape = top_1();
    let limits = PathLimits { pairs_max: 2, next_max: 1 };
    let mut tokens = Vec::new();
    // 14 pairs that come once per round, and one that comes eight times.
    for _ in 0..4 {
        tokens.extend((0..14u16).map(|i| vec![vec![i % 4], vec![i / 4], vec![i % 3]]));
        tokens.extend(vec![vec![vec![3], vec![3], vec![3]]; 8]);
    }
    let table = learn(&shape, limits, &tokens);
    assert!(table.layers.iter().all(|layer| layer.pairs.len() <= 2));
    assert!(table.layers.iter().flat_map(|layer| layer.rows.iter()).all(|row| row.next.len() <= 1));
    let frequent = pair_key(&[3], &[3]);
    assert!(table.layers[2].pairs.iter().any(|(key, row)| *key == frequent && row.tokens == 32), "{table:?}");
    let per_layer = 4 * 4 + (4 + 2) * (14 + 6);
    assert!(table.to_bytes().len() <= 18 + 3 * (16 + per_layer));
    // Pairs that came once are not kept.
    let once = learn(&shape, PathLimits::default(), &exclusive_or()[..4]);
    assert_eq!(once.n_pairs(), 0);
}

#[test]
fn a_table_of_another_model_is_told_and_predicts_nothing_it_does_not_know() {
    let table = learn(&top_1(), PathLimits::default(), &exclusive_or());
    assert_eq!(table.check_shape(&top_1()), Ok(()));
    let message = |layers| table.check_shape(&PredictShape { layers }).unwrap_err().to_string();
    assert_eq!(
        message(vec![(1, 4, 1), (2, 8, 1), (5, 4, 1)]),
        "path table: experts of layer 2: found 4, expected 8; it was made of another model, profile this one"
    );
    assert!(message(vec![(1, 4, 1)]).contains("number of layers with experts: found 3, expected 1"));
    assert!(message(vec![(1, 4, 1), (2, 4, 2), (5, 4, 1)]).contains("experts used per token of layer 2"));
    assert!(message(vec![(1, 4, 1), (3, 4, 1), (5, 4, 1)]).contains("block number"));
    let other = PredictShape { layers: vec![(1, 4, 1), (2, 8, 1), (5, 4, 1)] };
    assert!(predicted(&other, &table, &[0], &[7]).is_empty());
    let mut none = build(PredictorKind::PathTable, top_1(), None, 0);
    let mut out = Vec::new();
    none.begin_token();
    none.observe(1, &[(0, 1.0)]);
    none.predict(1, 1, &mut out);
    assert!(out.is_empty());
}

/// A model whose experts follow each other in circles, with noise; `tokens[token][layer]` are two experts of 16.
fn noisy_paths(n_tokens: usize, seed: u32) -> Vec<Vec<Vec<u16>>> {
    let mut random = Mt::new(seed);
    let mut token = || {
        let start = (random.next_u32() % 16) as u16;
        let mut layer = |l: u16| {
            let first = if random.next_u32().is_multiple_of(4) { random.next_u32() as u16 } else { start + 3 * l };
            vec![first % 16, (first + 5) % 16]
        };
        (0..6).map(&mut layer).collect()
    };
    (0..n_tokens).map(|_| token()).collect()
}

#[test]
fn every_damaged_byte_and_every_missing_one_is_noticed() {
    let shape = PredictShape { layers: (0..3).map(|layer| (layer, 16, 2)).collect() };
    let bytes = learn(&shape, PathLimits::default(), &noisy_paths(20, 3)).to_bytes();
    for at in 0..bytes.len() {
        for flip in [1, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            assert!(PathTable::from_bytes(&damaged).is_err(), "byte {at} ^ {flip:#x}");
        }
        assert!(PathTable::from_bytes(&bytes[..at]).is_err(), "{at} bytes");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(PathTable::from_bytes(&longer), Err(PathTableError::Damaged));
}

/// Bytes with a right checksum, whatever they say.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() - 8);
    let checksum = xxh3_64(&bytes);
    bytes.extend(checksum.to_le_bytes());
    bytes
}

#[test]
fn consistent_but_impossible_tables_are_refused() {
    let row = |tokens, next: &[(u16, u32)]| Row { tokens, next: next.to_vec() };
    let first = || LayerTable { layer: 1, k: 1, tokens: 5, popularity: vec![5, 0], ..LayerTable::default() };
    let second = |rows, pairs| LayerTable { layer: 2, rows, pairs, ..first() };
    let read = |layers| PathTable::from_bytes(&PathTable { layers }.to_bytes()).map(drop);
    let rows = |next: &[(u16, u32)]| vec![row(5, next), row(0, &[])];
    let pairs = |keys: [u64; 2]| keys.map(|key| (key, row(1, &[(0, 1)]))).to_vec();
    assert_eq!(read(vec![first(), second(rows(&[(1, 3), (0, 2)]), pairs([7, 8]))]), Ok(()));
    let wrong_rows: [&[(u16, u32)]; 5] =
        [&[(2, 5)], &[(0, 6)], &[(0, 2), (1, 3)], &[(0, 2), (1, 0)], &[(1, 2), (1, 2)]];
    let with_row = |next: &&[(u16, u32)]| vec![first(), second(rows(next), vec![])];
    let others = [
        vec![first(), second(vec![], vec![])],
        vec![first(), first()],
        vec![LayerTable { k: 3, ..first() }],
        vec![LayerTable { tokens: 4, ..first() }],
        vec![first(), second(rows(&[(0, 5)]), pairs([7, 7]))],
    ];
    for wrong in wrong_rows.iter().map(with_row).chain(others) {
        assert_eq!(read(wrong.clone()), Err(PathTableError::Damaged), "{wrong:?}");
    }

    let mut bytes = PathTable::default().to_bytes();
    let mut newer = bytes.clone();
    newer[4] = 2;
    assert_eq!(PathTable::from_bytes(&sealed(newer)), Err(PathTableError::Version { found: 2, expected: 1 }));
    assert!(PathTable::from_bytes(b"GGUF").unwrap_err().to_string().starts_with("not a path table"));
    assert!(matches!(PathTable::from_bytes(b""), Err(PathTableError::NotATable { .. })));
    bytes.resize(PathTable::BYTES_MAX as usize + 1, 0);
    assert!(matches!(PathTable::from_bytes(&bytes), Err(PathTableError::TooLong { .. })));
    // Four billion pairs are announced, none is there.
    let mut greedy = PathTable { layers: vec![first()] }.to_bytes();
    greedy[22..26].fill(0xff);
    assert!(matches!(PathTable::from_bytes(&sealed(greedy)), Err(PathTableError::Damaged)));
}

fn any_shape() -> impl Strategy<Value = PredictShape> {
    prop::collection::vec((1u16..9, 1u16..4), 0..5).prop_map(|layers| PredictShape {
        layers: layers.into_iter().zip(0u16..).map(|((n, k), i)| (2 * i, n, k.min(n))).collect(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tables_round_trip_and_predict_in_range(
        shape in any_shape(),
        tokens in prop::collection::vec(prop::collection::vec(prop::collection::vec(0u16..10, 0..4), 5), 0..40),
        pairs_max in 0usize..6,
        next_max in 0u16..6,
    ) {
        let table = learn(&shape, PathLimits { pairs_max, next_max }, &tokens);
        prop_assert_eq!(&learn(&shape, PathLimits { pairs_max, next_max }, &tokens), &table);
        prop_assert_eq!(&PathTable::from_bytes(&table.to_bytes()).unwrap(), &table);
        prop_assert_eq!(table.check_shape(&shape), Ok(()));
        let mut predictor = PathPredictor::new(shape.clone(), table, 0);
        for token in &tokens {
            predictor.begin_token();
            for (&(layer, ..), chosen) in shape.layers.iter().zip(token) {
                predictor.observe(layer, &chosen.iter().map(|&index| (index, 0.5)).collect::<Vec<_>>());
                let mut out = Vec::new();
                predictor.predict(layer, 1, &mut out);
                let target = shape.target(layer, 1);
                prop_assert_eq!(out.len(), target.map_or(0, |(_, _, k)| usize::from(k)));
                prop_assert!(out.iter().all(|p| p.expert.index < target.unwrap().1 && (0.0..=1.0).contains(&p.score)));
                prop_assert!(out.is_sorted_by(|a, b| a.score >= b.score));
            }
        }
    }

    #[test]
    fn no_bytes_make_it_panic(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        is_cut: bool,
    ) {
        let shape = PredictShape { layers: (0..3).map(|layer| (layer, 16, 2)).collect() };
        let mut bytes = learn(&shape, PathLimits::default(), &noisy_paths(12, 4)).to_bytes();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if is_cut {
            bytes.truncate(8 + cut.index(bytes.len() - 8));
        }
        // With a right checksum, so that damage gets past it; what is accepted can be used.
        if let Ok(table) = PathTable::from_bytes(&sealed(bytes)) {
            let again = PathTable::from_bytes(&table.to_bytes()).unwrap();
            prop_assert_eq!(again, table.clone());
            let out = predicted(&shape, &table, &[1, 2], &[3, 4]);
            prop_assert!(out.iter().all(|p| p.expert.index < 16 && (0.0..=1.0).contains(&p.score)));
        }
    }
}
