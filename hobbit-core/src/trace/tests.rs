//! Round trips of records; damaged traces are refused, or read up to the damage.

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::expert::{ExpertId, Precision, Version};
use crate::route::Demand;

fn header() -> Header {
    let (bytes_high, bytes_low, slots_high) = (4096, 1024, 4);
    let layer = |layer, n_expert| {
        let n_used = 2;
        Layer { layer, n_expert, n_used, bytes_high, bytes_low, bytes_rest: 0, slots_high, slots_low: 0 }
    };
    let layers = vec![layer(1, 8), layer(3, 300)];
    let model = ModelDescription { name: "toy".into(), architecture: "toymoe".into(), layers };
    let mut header = Header { model, ..Header::default() };
    header.host.insert("link_bytes_per_second".into(), 2.5e9);
    header.settings.more.insert("text".into(), "prose".into());
    header
}

fn records() -> Vec<Record> {
    let mut single = LayerRecord::new(1, 2);
    let scores = [0.0, 0.5, 0.125, 0.0625, 0.25, 0.03125, 0.0, 0.0];
    single.push_token(&[1, 4], &[0.75, 0.25], Some(&scores), 2);
    single.predictions = [(1, 299, 0.5), (2, 3, 0.25)]
        .map(|(distance, expert, score)| Prediction { token: 0, distance, expert, score })
        .to_vec();
    let hit = Needed { expert: 1, demand: Demand::High, used: Some(Precision::High), hit: true, class: None, bytes: 0 };
    let class = Some(ReadClass::OnDemand);
    let miss = Needed { expert: 4, demand: Demand::Low, used: Some(Precision::Low), hit: false, class, bytes: 1024 };
    single.needed = vec![hit, miss];
    (single.wait_seconds, single.compute_seconds) = (0.5, 0.25);
    let mut many = LayerRecord::new(3, 2);
    for token in 0..100u16 {
        many.push_token(&[token, 299], &[0.5, 0.5], None, 0);
    }
    many.executed = (0..100u16).flat_map(|token| [token, 298]).collect();
    many.needed = vec![Needed { expert: 299, demand: Demand::Skip, used: None, hit: false, class: None, bytes: 0 }];
    let version = Version::low(ExpertId { layer: 3, index: 299 });
    vec![
        Record::Sequence,
        Record::Layer(single),
        Record::Load { version, class: ReadClass::Prefetch, bytes: 1 << 40 },
        Record::Layer(many),
        Record::Withdrawn { version, bytes: 1 << 40 },
        Record::Batch { phase: Phase::Decode, n_tokens: 1, seconds: 0.0625 },
        Record::Residents(ResidentsRecord {
            versions: vec![Version::high(version.expert), Version::low(ExpertId { layer: 1, index: 0 })],
            statistics: vec![0, 255, 7],
        }),
        Record::Measured { host: [("link_bytes_per_second".to_owned(), 2.5e9)].into() },
    ]
}

fn written(records: &[Record]) -> Vec<u8> {
    let mut writer = TraceWriter::new(Vec::new(), &header()).unwrap();
    for record in records {
        match record {
            Record::Sequence => writer.sequence().unwrap(),
            Record::Layer(layer) => writer.layer(layer).unwrap(),
            Record::Load { version, class, bytes } => writer.load(*version, *class, *bytes).unwrap(),
            Record::Batch { phase, n_tokens, seconds } => writer.batch(*phase, *n_tokens, *seconds).unwrap(),
            Record::Residents(residents) => writer.residents(residents).unwrap(),
            Record::Withdrawn { version, bytes } => writer.withdrawn(*version, *bytes).unwrap(),
            Record::Measured { host } => writer.measured(host).unwrap(),
        }
    }
    writer.finish().unwrap()
}

/// The records read, the offset of a truncated record, and the error that ended reading.
fn read(bytes: &[u8]) -> (Vec<Record>, Option<u64>, Option<TraceError>) {
    let mut reader = TraceReader::new(bytes, "a.trace").unwrap();
    let (mut records, mut error) = (Vec::new(), None);
    for record in &mut reader {
        match record {
            Ok(record) => records.push(record),
            Err(found) => error = Some(found),
        }
    }
    assert!(reader.next().is_none(), "it ends once");
    (records, reader.truncated(), error)
}

#[test]
fn records_survive() {
    let bytes = written(&records());
    assert_eq!(TraceReader::new(&bytes[..], "a.trace").unwrap().header(), &header());
    let (found, truncated, error) = read(&bytes);
    assert_eq!((found, truncated), (records(), None));
    assert!(error.is_none());
}

#[test]
fn the_best_unselected_scores_are_kept_in_order() {
    let mut record = LayerRecord::new(0, 2);
    let scores = [0.1, 0.9, 0.3, 0.3, 0.8, 0.05];
    record.push_token(&[1, 4], &[0.5, 0.5], Some(&scores), 3);
    assert_eq!(record.scores, [0.9, 0.8]);
    assert_eq!(record.unselected, [(2, 0.3), (3, 0.3), (0, 0.1)]);
    record.push_token(&[4, 5], &[0.5, 0.5], Some(&scores), 3);
    assert_eq!(record.unselected[3..], [(1, 0.9), (2, 0.3), (3, 0.3)]);
    let mut all = Vec::new();
    assert!(record.scores_of(1, 6, &mut all));
    assert_eq!(all, [0.0, 0.9, 0.3, 0.3, 0.8, 0.05]);
    record.clear(0, 2);
    record.push_token(&[1, 4], &[0.5, 0.5], Some(&scores), 9);
    assert_eq!(record.unselected.len(), 4, "there are no more");
    record.clear(0, 2);
    record.push_token(&[1, 4], &[0.5, 0.5], Some(&scores), 0);
    assert!(record.unselected.is_empty());
}

#[test]
fn whole_records_before_a_cut_are_read() {
    let bytes = written(&records());
    let header_len = written(&[]).len();
    let ends: Vec<usize> = (0..=records().len()).map(|n| written(&records()[..n]).len()).collect();
    for len in 0..bytes.len() {
        if len < header_len {
            assert!(TraceReader::new(&bytes[..len], "a.trace").is_err(), "{len}");
            continue;
        }
        let (found, truncated, error) = read(&bytes[..len]);
        let whole = ends.iter().filter(|end| **end <= len).count() - 1;
        assert_eq!(found, records()[..whole], "{len}");
        assert!(error.is_none(), "{len}: {error:?}");
        // A cut after the first byte of a record leaves a tag and no length.
        assert_eq!(truncated, (!ends.contains(&len)).then_some(ends[whole] as u64), "{len}");
    }
}

#[test]
fn unknown_records_are_skipped_and_damaged_ones_named() {
    let mut bytes = written(&[]);
    let start = bytes.len() + 7;
    bytes.extend_from_slice(&[99, 3, 1, 2, 3]);
    bytes.extend_from_slice(&[reader::SEQUENCE, 0]);
    assert_eq!(read(&bytes).0, [Record::Sequence]);
    let head = format!("a.trace: the record at byte {start} is damaged: ");
    let cases: [(&[u8], &str); 12] = [
        (
            &[reader::SEQUENCE, 1, 0],
            "1 bytes are left over at its end; what precedes it can be read, record the rest again",
        ),
        (&[reader::BATCH, 1, 7], "the phase is 7, expected 0 or 1"),
        (&[reader::BATCH, 2, 0, 1], "it ends within the batch"),
        (&[reader::LAYER, 1, 2], "the model has no layer 2 with experts"),
        (&[reader::LAYER, 4, 1, 90, 2, 0], "the number of tokens is 90, but only 2 bytes"),
        (&[reader::LAYER, 0xff, 0xff, 0xff, 0xff], "it claims more than 67108864 bytes"),
        (&[reader::LOAD, 5, 1, 8, 0, 2, 1], "the expert is 8, expected less than 8"),
        (&[reader::LOAD, 5, 1, 7, 0, 0, 1], "the class of a read is 0"),
        (&[reader::RESIDENTS, 2, 9, 0], "the number of residents is 9, but only 1 bytes"),
        (&[reader::RESIDENTS, 3, 0, 2, 0], "the number of bytes of statistics is 2"),
        (&[reader::WITHDRAWN, 3, 1, 7, 2], "the precision is 2, expected 0 or 1"),
        (&[reader::MEASURED, 2, b'[', b']'], "the machine's numbers"),
    ];
    for (record, part) in cases {
        let (found, truncated, error) = read(&[&bytes, record].concat());
        assert_eq!((found.len(), truncated), (1, None));
        let error = error.unwrap().to_string();
        assert!(error.starts_with(&format!("{head}{part}")), "{error}");
    }
}

#[test]
fn other_files_and_headers_are_refused_by_name() {
    let with = |at: usize, with: &[u8]| {
        let mut bytes = written(&[]);
        bytes[at..at + with.len()].copy_from_slice(with);
        bytes
    };
    let magic = "a.trace: not a trace: it begins with [47, 47, 55, 46, 03, 00, 00, 00], expected \"HOBBITTR\"";
    for (bytes, part) in [
        (b"GGUF\x03\0\0\0\0\0\0\0".to_vec(), magic),
        (Vec::new(), "a.trace: not a trace: it begins with []"),
        (with(8, &[2]), "version 2 of the trace format, expected 1"),
        (with(12, &[0xff; 4]), "it claims 4294967295 bytes, expected at most 4194304"),
    ] {
        let error = TraceReader::new(&bytes[..], "a.trace").unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    type Change = fn(&mut Header);
    let changes: [(Change, &str); 6] = [
        (|h| h.model.layers.reverse(), "layer 1 follows layer 3, expected ascending"),
        (|h| h.model.layers[0].n_used = 9, "layer 1 uses 9 of 8 experts"),
        (|h| h.model.layers[0].bytes_low = 5000, "4096 bytes high and 5000 low"),
        (|h| h.settings.mode = "fast".into(), "unknown precision mode 'fast'"),
        (|h| h.settings.t1 = 2.0, "t1 is 2, expected a number from 0 to 1"),
        (|h| h.settings.routing.substitute = -1.0, "substitute is -1"),
    ];
    for (change, part) in changes {
        let mut header = header();
        change(&mut header);
        let error = TraceWriter::new(Vec::new(), &header).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let mut rerouted = header();
    rerouted.settings.routing.substitute = 0.25;
    let bytes = TraceWriter::new(Vec::new(), &rerouted).unwrap().finish().unwrap();
    assert_eq!(TraceReader::new(&bytes[..], "a.trace").unwrap().header(), &rerouted);
}

#[test]
fn lists_that_do_not_fit_together_are_not_written() {
    let mut writer = TraceWriter::new(Vec::new(), &header()).unwrap();
    let mut record = LayerRecord::new(1, 2);
    assert!(writer.layer(&record).is_err(), "no tokens");
    record.push_token(&[0, 1], &[0.5], None, 0);
    assert_eq!(
        writer.layer(&record).unwrap_err().to_string(),
        "this cannot be recorded: layer 1 has 1 weights, expected 2"
    );
    record.weights.push(0.5);
    record.wait_seconds = f32::NAN;
    assert!(writer.layer(&record).is_err());
    record.wait_seconds = 0.0;
    writer.layer(&record).unwrap();
}

/// Changes, inserts, removes, repeats or truncates bytes after the header.
fn mutate(bytes: &mut Vec<u8>, n_header: usize, kind: u8, (at, other): (Index, Index), with: u8) {
    let n = bytes.len() - n_header;
    if n == 0 {
        return;
    }
    let (at, other) = (n_header + at.index(n), n_header + other.index(n));
    let (start, end) = (at.min(other), at.max(other));
    match kind {
        0 => bytes[at] ^= with,
        1 => bytes.insert(at, with),
        2 => drop(bytes.drain(start..end.min(start + usize::from(with)))),
        3 => {
            let repeated = bytes[start..end.min(start + usize::from(with))].to_vec();
            bytes.splice(at..at, repeated);
        }
        _ => bytes.truncate(end),
    }
}

fn half() -> impl Strategy<Value = f32> {
    (-2048..=2048i16).prop_map(|n| f32::from(n) / 2048.0)
}

prop_compose! {
    fn layer_record()(n_tokens in 1..6usize, n_used in 1..4usize, m in 0..4usize, has_scores in any::<bool>())(
        chosen in prop::collection::vec(0..300u16, n_tokens * n_used),
        weights in prop::collection::vec(half(), n_tokens * n_used),
        scores in prop::collection::vec(half(), if has_scores { n_tokens * n_used } else { 0 }),
        unselected in prop::collection::vec((0..300u16, half()), if has_scores { n_tokens * m } else { 0 }),
        predictions in prop::collection::vec((1..=255u8, any::<u16>(), half()), 0..5),
        needed in prop::collection::vec(
            (0..300u16, 0..3usize, 0..3usize, any::<bool>(), 0..4usize, any::<u64>()),
            0..5,
        ),
        (n_tokens, n_used, wait, compute) in (Just(n_tokens), Just(n_used), 0.0..9f32, 0.0..9f32),
    ) -> LayerRecord {
        let classes = [None, Some(ReadClass::OnDemand), Some(ReadClass::Prefetch), Some(ReadClass::Upgrade)];
        let token = |distance: u8| u16::from(distance) % n_tokens as u16;
        let prediction = |(distance, expert, score)| Prediction { token: token(distance), distance, expert, score };
        LayerRecord {
            layer: 3,
            n_tokens: n_tokens as u32,
            n_used: n_used as u16,
            executed: if wait < 3.0 { chosen.iter().rev().copied().collect() } else { Vec::new() },
            chosen,
            weights,
            scores,
            unselected,
            predictions: predictions.into_iter().map(prediction).collect(),
            needed: needed.into_iter().map(|(expert, demand, used, hit, class, bytes)| Needed {
                expert,
                demand: [Demand::Skip, Demand::Low, Demand::High][demand],
                used: [Some(Precision::High), Some(Precision::Low), None][used],
                hit,
                class: classes[class],
                bytes: if class > 0 { bytes } else { 0 },
            }).collect(),
            wait_seconds: wait,
            compute_seconds: compute,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_layer_survives_the_round_trip(layers in prop::collection::vec(layer_record(), 0..4)) {
        let records: Vec<Record> = layers.into_iter().map(Record::Layer).collect();
        prop_assert_eq!(read(&written(&records)).0, records);
    }

    #[test]
    fn a_mutated_trace_can_be_written_and_read_again(
        mutations in prop::collection::vec((0..5u8, any::<Index>(), any::<Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = written(&records());
        let n_header = written(&[]).len();
        for (kind, at, other, with) in mutations {
            mutate(&mut bytes, n_header, kind, (at, other), with);
        }
        let (found, truncated, error) = read(&bytes);
        prop_assert!(truncated.is_none() || error.is_none(), "one end only");
        if let Some(error) = error {
            let words = error.to_string();
            prop_assert!(words.starts_with("a.trace: the record at byte "), "{}", words);
        }
        // Compare bytes, because a mutated weight may be NaN.
        let again = written(&found);
        let (reread, truncated, error) = read(&again);
        prop_assert!(error.is_none() && truncated.is_none());
        prop_assert_eq!(written(&reread), again);
    }
}

#[test]
fn executed_experts_stand_before_their_layer() {
    let all = records();
    let [_, single, _, many, ..] = &all[..] else { panic!("a layer of one token, and one of many") };
    let (whole, alone) = (written(std::slice::from_ref(many)), written(&[]).len());
    // Tag, length of at least two bytes, and the record.
    let executed_bytes = written(std::slice::from_ref(many)).len() - {
        let Record::Layer(layer) = many else { panic!("a layer") };
        written(&[Record::Layer(LayerRecord { executed: Vec::new(), ..layer.clone() })]).len()
    };
    let executed = whole[alone..alone + executed_bytes].to_vec();
    for (after, part) in [
        (&written(&[Record::Sequence])[alone..], "without the layer"),
        (&written(std::slice::from_ref(single))[alone..], "stand before layer 1"),
        (&executed[..], "without the layer"),
    ] {
        let bytes = [&whole[..alone + executed_bytes], after].concat();
        let (records, _, error) = read(&bytes);
        let error = error.unwrap().to_string();
        assert!(records.is_empty() && error.contains(part), "{error}");
    }
    let (records, truncated, error) = read(&whole[..alone + executed_bytes]);
    assert_eq!((records.len(), truncated, error.is_none()), (0, Some(alone as u64), true));
}
