//! A run that is traced, and its replay: under its own settings the simulator counts what the engine counted.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use hobbit::options::{Prefetch, RoutingOptions};
use hobbit::{CachingOptions, Model, ModelOptions, SessionOptions, Stats};
use hobbit_core::cache::Allocation;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::predict::PredictorKind;
use hobbit_core::route::Shares;
use hobbit_core::sim::{Config, FitGoal, Memory, PredictedBy, Recording, Slots, fit, recall, replay};
use hobbit_core::trace::{LayerRecord, ReadClass, Record, TraceReader};
use hobbit_synth::{self as synth, Spec};

use crate::fixture::cli::{CLI, demo_model, program};
use crate::fixture::{bundled, demo_tokens, no_reads_ahead, one_thread, quiet_llama_cpp};

fn options(policy: PolicyKind, trace: Option<&Path>) -> ModelOptions {
    ModelOptions { trace: trace.map(Path::to_owned), ..no_reads_ahead(50.0, policy) }
}

/// Logits of a text's tokens, one by one, in two sequences; hits and misses.
fn run(options: &ModelOptions) -> (Vec<f32>, u64, u64) {
    let (logits, stats) = run_with_stats(options);
    (logits, stats.total().hits, stats.total().misses)
}

fn run_with_stats(options: &ModelOptions) -> (Vec<f32>, Stats) {
    run_model(&bundled("demo.gguf"), options)
}

fn run_model(path: &Path, options: &ModelOptions) -> (Vec<f32>, Stats) {
    quiet_llama_cpp();
    let model = Model::open(path, options).unwrap();
    let mut session = model.session(&one_thread(512)).unwrap();
    let mut logits = Vec::new();
    for part in demo_tokens(&model, 400).chunks(200) {
        session.reset();
        for token in part.chunks(1) {
            session.feed(token).unwrap();
            logits.extend_from_slice(session.logits(0).unwrap());
        }
    }
    (logits, session.stats())
}

fn records(path: &Path) -> Vec<Record> {
    let mut reader = TraceReader::open(path).unwrap();
    let records = reader.by_ref().collect::<Result<_, _>>().unwrap();
    assert_eq!(reader.truncated(), None);
    records
}

fn layers(records: &[Record]) -> impl Iterator<Item = &LayerRecord> {
    records.iter().filter_map(|record| if let Record::Layer(layer) = record { Some(layer) } else { None })
}

#[test]
fn a_replay_counts_what_the_engine_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (expected, ..) = run(&options(PolicyKind::Lru, None));
    let mut hits_of = Vec::new();
    for policy in PolicyKind::ALL {
        let path = dir.path().join(format!("{policy}.trace"));
        let (logits, hits, misses) = run(&options(policy, Some(&path)));
        assert!(logits == expected, "{policy}: a policy changes no logit");
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

/// The trace has the routers' choices and the experts that were used. A replay reroutes by its scores as the engine
/// did, but for near ties, since scores are rounded.
#[test]
fn a_rerouted_run_is_recorded_and_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.trace");
    let routing = RoutingOptions { cache_bias: 0.2, ..RoutingOptions::default() };
    let (_, stats) = run_with_stats(&ModelOptions { routing, ..options(PolicyKind::Lru, Some(&path)) });
    let (uses, total) = (stats.decode.rerouted.uses, stats.total());
    let records = records(&path);
    let mut n_rerouted = 0;
    for layer in layers(&records) {
        let used = if layer.executed.is_empty() { &layer.chosen } else { &layer.executed };
        n_rerouted += used.iter().zip(&layer.chosen).filter(|(used, chosen)| used != chosen).count() as u64;
        let needed: Vec<u16> = layer.needed.iter().map(|needed| needed.expert).collect();
        assert_eq!(&needed, used, "a single token needs what it uses");
    }
    assert!(uses > 100 && n_rerouted == uses, "{n_rerouted} of {uses}");
    let recording = Recording::open(&path).unwrap();
    let config = Config::recorded(&recording).unwrap();
    assert_eq!((config.routing.cache_bias, config.routing.keep_top), (0.2, 1));
    let replayed = replay(&recording, &config, &mut |_, _, _| ()).unwrap();
    let near = |a: u64, b: u64| a.abs_diff(b) * 100 <= a.max(b);
    let (counted, again) = ((uses, total.hits), (replayed.decode.rerouted.uses, replayed.total().hits));
    assert!(near(counted.0, again.0) && near(counted.1, again.1), "{counted:?} and {again:?}");
    assert_eq!(replayed.decode.rerouted.refused, 0);
}

/// Record, calibrate, run with the weights, as users do.
#[test]
fn fitted_weights_save_misses_and_their_run_is_replayed_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (expected, _, lru) = run(&options(PolicyKind::Lru, Some(&path("lru.trace"))));
    let recordings = [Recording::open(&path("lru.trace")).unwrap()];
    let goal = FitGoal {
        memory: Memory { budget: "50%".parse().unwrap(), slots: Slots::default(), low_percent: 0.0 },
        shares: Shares::new(0.67, 0.3, 0.03).unwrap(),
        thresholds: None,
    };
    let fitted = fit(&recordings, &goal).unwrap();
    let misses_of = [(Allocation::Even, [4; 6]), (Allocation::ShallowFirst { layers: 2 }, [8, 8, 2, 2, 2, 2])].map(
        |(slots, expected_slots)| {
            let trace = path(&format!("{slots}.trace"));
            let mut options = options(PolicyKind::Hobbit, Some(&trace));
            (options.caching.slots, options.caching.weights) = (slots, fitted.weights);
            let (logits, hits, misses) = run(&options);
            assert!(logits == expected, "{slots}");
            let recording = Recording::open(&trace).unwrap();
            let by_layer: Vec<u32> = recording.header.model.layers.iter().map(|layer| layer.slots_high).collect();
            assert_eq!(by_layer, expected_slots, "half of 6 layers of 8");
            let config = Config::recorded(&recording).unwrap();
            assert_eq!((config.memory.slots, config.weights), (Slots::Layers(slots), fitted.weights));
            let total = replay(&recording, &config, &mut |_, _, _| ()).unwrap().total();
            assert_eq!((total.hits, total.n_misses()), (hits, misses), "{slots}");
            misses
        },
    );
    // The fit's forecast for as many tokens.
    assert_eq!((400.0 * fitted.penalty).round() as u64, misses_of[0]);
    assert!(misses_of[0] < lru && misses_of[0] < misses_of[1], "{misses_of:?}, {lru} under LRU");

    let mut options = options(PolicyKind::Hobbit, None);
    options.caching.weights = "1,0,0,0".parse().unwrap();
    assert_eq!(run(&options).2, lru);
}

#[test]
fn the_replay_of_a_warm_run_begins_as_warm() {
    let dir = tempfile::tempdir().unwrap();
    // LRU knows only the order of uses, one policy starts its counts over, three have a state.
    let kinds = [PolicyKind::Lru, PolicyKind::Hobbit, PolicyKind::EdgeMoe, PolicyKind::Arc, PolicyKind::Learned];
    for policy in kinds {
        let (state, path) = (dir.path().join(format!("{policy}.state")), dir.path().join(format!("{policy}.trace")));
        let cold = ModelOptions { cache_state: Some(state.clone()), ..options(policy, None) };
        run(&cold);
        let warm = ModelOptions { cache_state: Some(state), ..options(policy, Some(&path)) };
        let (_, hits, misses) = run(&warm);
        let recording = Recording::open(&path).unwrap();
        assert_eq!(recording.start.versions.len(), 24, "half of 6 layers of 8");
        let config = Config::recorded(&recording).unwrap();
        let total = replay(&recording, &config, &mut |_, _, _| ()).unwrap().total();
        assert_eq!((total.hits, total.n_misses()), (hits, misses), "{policy}");
        // Otherwise the equality above would say nothing.
        let forgetful = Recording { start: Default::default(), ..recording };
        let total = replay(&forgetful, &config, &mut |_, _, _| ()).unwrap().total();
        assert!(total.hits < hits, "{policy}: {} hits from empty caches, {hits} from restored ones", total.hits);
    }
}

fn with_predictor(predictor: PredictorKind, prefetch: Prefetch, path: &Path) -> ModelOptions {
    let base = options(PolicyKind::Lru, Some(path));
    ModelOptions {
        caching: CachingOptions { predictor: Some(predictor), prefetch, distance: 3, ..base.caching },
        ..base
    }
}

#[test]
fn a_trace_has_predictions_for_every_layer_in_reach() {
    let dir = tempfile::tempdir().unwrap();
    for predictor in [PredictorKind::StackedGate, PredictorKind::CrossLayer] {
        let path = dir.path().join(format!("{predictor}.trace"));
        let (_, stats) = run_with_stats(&with_predictor(predictor, Prefetch::Off, &path));
        let recording = Recording::open(&path).unwrap();
        let settings = &recording.header.settings;
        assert_eq!(
            (settings.predictor.as_str(), settings.prefetch.as_str(), settings.distance),
            (predictor.name(), "off", 3)
        );
        // Nothing was read ahead: the replay counts alike.
        let total = replay(&recording, &Config::recorded(&recording).unwrap(), &mut |_, _, _| ()).unwrap().total();
        assert_eq!((total.hits, total.n_misses()), (stats.total().hits, stats.total().misses), "{predictor}");
        // Routers are known once their layer has run.
        for batch in recording.batches().skip(1) {
            for (at, layer) in batch.layers.iter().enumerate() {
                let of = |distance| layer.predictions.iter().filter(|own| own.distance == distance).count();
                let expected = [1, 2, 3].map(|d| if at + d < batch.layers.len() { 8 } else { 0 });
                assert_eq!([1, 2, 3].map(of), expected, "{predictor}, layer {at}");
            }
        }
        // At distance 1 the engine looks at every layer.
        let reported = stats.prefetch.unwrap().recall.iter().find(|own| own.distance == 1).and_then(|own| own.recall);
        let recalls = recall(&recording, PredictedBy::Predictor(predictor), 3);
        let (reported, found) = (reported.unwrap(), recalls.total(1).recall().unwrap());
        assert!((reported - found).abs() < 0.005, "{predictor}: the engine found {reported}, the trace {found}");
        assert!(recalls.total(3).recall().unwrap() < found, "further is harder");
    }
}

/// Routers that see another input than their experts are asked about their own: their scores explain their choices, and
/// predict later ones.
#[test]
fn routers_with_inputs_of_their_own_are_asked() {
    let dir = tempfile::tempdir().unwrap();
    for arch in ["gemma4", "smallthinker", "llama4", "nemotron_h_moe", "kimi-k3"] {
        let (model, path) = (dir.path().join("model.gguf"), dir.path().join("a.trace"));
        let spec = Spec { experts: 16, topk: 2, ..Spec::tiny(arch) };
        synth::write(&model, &spec).unwrap();
        let (_, stats) = run_model(&model, &with_predictor(PredictorKind::StackedGate, Prefetch::Off, &path));
        let records = records(&path);
        assert!(layers(&records).count() > 400);
        for layer in layers(&records) {
            let best = layer.unselected.first().unwrap_or_else(|| panic!("{arch}: no scores of {}", layer.layer)).1;
            assert!(layer.scores.iter().all(|score| *score >= best), "{arch}: a router chooses the best: {layer:?}");
        }
        let recalls = stats.prefetch.unwrap().recall;
        let recall = recalls.iter().find(|own| own.distance == 1).and_then(|own| own.recall);
        // Two of 16 by chance: 0.125.
        assert!(recall.is_some_and(|recall| recall > 0.2), "{arch}: {recalls:?}");
    }
}

#[test]
fn a_trace_accounts_for_every_byte() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.trace");
    let (_, stats) = run_with_stats(&with_predictor(PredictorKind::StackedGate, Prefetch::On, &path));
    let records = records(&path);
    let (mut ahead, mut back) = (0, 0);
    for record in &records {
        match record {
            Record::Load { class, bytes, .. } => {
                assert_eq!(*class, ReadClass::Prefetch);
                ahead += bytes;
            }
            Record::Withdrawn { bytes, .. } => back += bytes,
            _ => {}
        }
    }
    let needed = || layers(&records).flat_map(|layer| &layer.needed);
    let on_demand: u64 = needed().filter(|own| own.class == Some(ReadClass::OnDemand)).map(|own| own.bytes).sum();
    assert!(ahead > 0 && on_demand > 0);
    assert_eq!(on_demand + ahead - back, stats.total().bytes_read, "{on_demand} + {ahead} - {back}");
    let used: u64 = needed().filter(|own| own.class == Some(ReadClass::Prefetch)).map(|own| own.bytes).sum();
    assert!(used > 0 && used <= ahead - back, "{used} of {}", ahead - back);
    assert!(needed().any(|own| own.hit && own.class == Some(ReadClass::Prefetch)), "some came in time");
    let Some(Record::Measured { host }) = records.last() else { panic!("it ends with {:?}", records.last()) };
    assert!(host["link_bytes_per_second"] > 0.0);
    let recording = Recording::open(&path).unwrap();
    assert_eq!(Config::recorded(&recording).unwrap().link.bytes_per_second, host["link_bytes_per_second"]);
}

fn traced(mut command: Command, trace: &Path, n: &str) -> Command {
    command.args(["-p", "In the beginning", "-no-cnv", "--temp", "0", "-t", "1", "-c", "512", "--ignore-eos"]);
    command.args(["--context-shift", "-n", n]).arg("-m").arg(demo_model()).arg("--trace").arg(trace);
    command
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_ends_the_trace_not_the_run() {
    use crate::fixture::cli::{program_after, ran};

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.trace");
    let expected = ran(traced(program(CLI), &dir.path().join("b.trace"), "128").output().unwrap()).expect(0);
    // Files of this process end after this many blocks of 512 bytes, as on a full disk.
    let limited = program_after("trap '' XFSZ; ulimit -f 64", CLI);
    let cut = ran(traced(limited, &path, "128").output().unwrap()).expect(0);
    assert_eq!(cut.stdout, expected.stdout, "the run goes on");
    cut.says(&[&format!("trace {}: cannot write this trace: ", path.display()), "the run goes on"]);
    let (found, whole) = (records(&path), records(&dir.path().join("b.trace")));
    assert!(layers(&found).count() > 0 && layers(&found).count() < layers(&whole).count());
}

#[test]
fn a_killed_process_leaves_every_token_that_was_shown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.trace");
    let mut child = traced(program(CLI), &path, "-1").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // A shown token was sampled from the batch before; no token of this vocabulary is longer than 32 bytes.
    let mut shown = [0u8; 320];
    child.stdout.take().unwrap().read_exact(&mut shown).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let records = TraceReader::open(&path).unwrap().collect::<Result<Vec<_>, _>>().unwrap();
    let tokens = records.iter().filter(|record| matches!(record, Record::Batch { .. })).count();
    assert!(tokens >= 10, "{tokens} batches in the trace");
}

#[test]
fn a_trace_has_scores_and_waits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.trace");
    run(&options(PolicyKind::Lru, Some(&path)));
    let records = records(&path);
    let layers = || layers(&records);
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
    let error = Model::open(&bundled("demo.gguf"), &options(PolicyKind::Lru, Some(Path::new("/nonexistent/a.trace"))));
    let error = error.err().unwrap().to_string();
    assert!(error.contains("trace /nonexistent/a.trace: cannot write this file"), "{error}");
}

#[test]
fn a_text_beside_others_begins_no_sequence() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.trace");
    quiet_llama_cpp();
    let model = Model::open(&bundled("demo.gguf"), &options(PolicyKind::Learned, Some(&path))).unwrap();
    let mut session = model.session(&SessionOptions { n_ctx: 64, n_seq_max: 2, ..SessionOptions::default() }).unwrap();
    for is_alone in [true, false, false, true] {
        session.begin_text(is_alone);
        session.feed(&[1]).unwrap();
    }
    drop((session, model));
    let is_sequence = |record: &&Record| matches!(record, Record::Sequence);
    assert_eq!(records(&path).iter().filter(is_sequence).count(), 2);
}
