//! A run that is traced, and its replay: under its own settings the simulator counts what the engine counted.

use std::path::Path;

use hobbit::cache::policy::PolicyKind;
use hobbit::plan::{Budget, ExpertCache};
use hobbit::sim::{Config, Recording, replay};
use hobbit::trace::{Record, TraceReader};
use hobbit::{CachingOptions, DeviceChoice, DeviceOptions, Model, ModelOptions, SessionOptions};

fn options(policy: PolicyKind, trace: Option<&Path>) -> ModelOptions {
    ModelOptions {
        budget: Budget::Bytes(4 << 30),
        expert_cache: ExpertCache::Percent(50.0),
        caching: CachingOptions { policy, ..CachingOptions::default() },
        trace: trace.map(Path::to_owned),
        device: DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() },
        ..ModelOptions::default()
    }
}

/// Logits of a text's tokens, one by one, in two sequences; hits and misses.
fn run(options: &ModelOptions) -> (Vec<f32>, u64, u64) {
    hobbit::set_log(|_, _| ());
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    let model = Model::open(&models.join("demo.gguf"), options, |_| true).unwrap();
    let session = SessionOptions { n_ctx: 512, threads: Some(1), ..SessionOptions::default() };
    let mut session = model.session(&session).unwrap();
    let text = std::fs::read_to_string(models.join("demo-heldout-prose.txt")).unwrap();
    let tokens = model.tokenize(&text[..4096], true, false).unwrap();
    let mut logits = Vec::new();
    for part in tokens[..400].chunks(200) {
        session.reset();
        for token in part.chunks(1) {
            session.feed(token).unwrap();
            logits.extend_from_slice(session.logits(0).unwrap());
        }
    }
    let total = session.stats().total();
    (logits, total.hits, total.misses)
}

#[test]
fn a_replay_counts_what_the_engine_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (expected, ..) = run(&options(PolicyKind::Lru, None));
    let mut hits_of = Vec::new();
    for policy in PolicyKind::ALL {
        let path = dir.path().join(format!("{policy}.trace"));
        let (logits, hits, misses) = run(&options(policy, Some(&path)));
        assert!(logits == expected, "{policy}: a policy decides what is read, not what comes out");
        let recording = Recording::open(&path).unwrap();
        assert_eq!(recording.n_tokens(), 400);
        let config = Config::recorded(&recording).unwrap();
        let total = replay(&recording, &config, &mut |_, _, _| ()).unwrap().total();
        assert_eq!((total.hits, total.n_misses()), (hits, misses), "{policy}");
        hits_of.push(hits);
    }
    hits_of.dedup();
    assert!(hits_of.len() > 3, "policies do not differ: {hits_of:?}");
}

#[test]
fn a_trace_has_scores_and_waits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.trace");
    run(&options(PolicyKind::Lru, Some(&path)));
    let records: Vec<Record> = TraceReader::open(&path).unwrap().collect::<Result<_, _>>().unwrap();
    let layers =
        || records.iter().filter_map(|record| if let Record::Layer(layer) = record { Some(layer) } else { None });
    assert_eq!(layers().count(), 400 * 6);
    // The first token's graph shows each router before its layer is recorded.
    assert!(layers().all(|layer| layer.scores.len() == 2 && layer.unselected.len() == 6));
    for layer in layers() {
        let best = layer.unselected[0].1;
        assert!(layer.scores.iter().all(|score| *score >= best), "a router chooses the best: {layer:?}");
        assert!((layer.weights.iter().sum::<f32>() - 1.0).abs() < 2e-3);
    }
    assert!(layers().map(|layer| layer.compute_seconds).sum::<f32>() > 0.0);
    assert_eq!(records.iter().filter(|record| matches!(record, Record::Sequence)).count(), 2);
    let error = Model::open(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo.gguf"),
        &options(PolicyKind::Lru, Some(Path::new("/nonexistent/a.trace"))),
        |_| true,
    );
    let error = error.unwrap().session(&SessionOptions::default()).err().unwrap().to_string();
    assert!(error.contains("--trace") && error.contains("/nonexistent/a.trace"), "{error}");
}
