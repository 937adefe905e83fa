//! Experts that are copied and read before their layer's router has spoken: what comes out is what comes out without.

use std::path::Path;

use gguf_tools::synth::Spec;
use hobbit::options::{CpuHelper, DeviceChoice, Prefetch};
use hobbit::stats::DeviceCounters;
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions, Session, SessionOptions};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::plan::ExpertCache;
use hobbit_core::predict::PredictorKind;
use hobbit_core::trace::{LayerRecord, Record, TraceReader};
use lagging_device::{Device, Options, Order, register};

use super::cases;
use super::check::{ALL, QUARTER, SIZES, WAVES, check_with};
use super::compare::BUDGET;
use super::fixture;
use super::places::{compare_with, named};
use super::stock::Placed;

const HALF: ExpertCache = ExpertCache::Percent(50.0);

fn always(predictor: PredictorKind, policy: PolicyKind) -> CachingOptions {
    CachingOptions { policy, predictor, prefetch: Prefetch::On, distance: 3, ..CachingOptions::default() }
}

/// A device to which copies take next to no virtual time: all that is predicted is worth copying.
fn device(options: &Options) -> Device {
    fixture::quiet_llama_cpp();
    register(Options { memory: 1 << 30, link_bandwidth: 1e12, ..options.clone() })
}

fn late() -> Device {
    device(&Options { order: Order::CopiesLate, ..Options::default() })
}

fn early() -> Device {
    device(&Options { order: Order::CopiesEarly, ..Options::default() })
}

/// Every predictor over every architecture, in an order of execution.
fn every_architecture(options: &Options) {
    let device = device(options);
    let on_it = named(&[&device]);
    let kinds = [
        (PredictorKind::StackedGate, PolicyKind::Learned),
        (PredictorKind::CrossLayer, PolicyKind::Smoe),
        (PredictorKind::Previous, PolicyKind::Lru),
    ];
    let mut sizes = SIZES.to_vec();
    sizes.extend([(HALF, ALL), (HALF, HALF)]);
    let (mut failures, mut ahead) = (Vec::new(), 0);
    for (part, (predictor, policy)) in kinds.into_iter().enumerate() {
        for case in cases::all_architectures().into_iter().skip(part).step_by(kinds.len()) {
            let mut done = |counters: DeviceCounters| ahead += counters.ahead;
            let found = check_with(&case, &on_it, always(predictor, policy), &sizes, &mut done);
            failures.extend(found.into_iter().map(|failure| format!("{predictor}, {failure}")));
            failures.extend(device.faults());
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(ahead > 0, !options.unified, "{ahead} experts were copied ahead");
}

#[test]
fn copies_late() {
    every_architecture(&Options { order: Order::CopiesLate, ..Options::default() });
}

#[test]
fn copies_early() {
    every_architecture(&Options { order: Order::CopiesEarly, ..Options::default() });
}

#[test]
fn unified_memory() {
    every_architecture(&Options { unified: true, ..Options::default() });
}

#[test]
fn beside_the_cpu_helper() {
    let device = early();
    for cpu_helper in [CpuHelper::On, CpuHelper::Auto] {
        let on_it = DeviceOptions { cpu_helper, ..named(&[&device]) };
        let caching = always(PredictorKind::StackedGate, PolicyKind::Lru);
        let cases = cases::all_architectures().into_iter().step_by(6);
        let failures: Vec<String> = cases
            .flat_map(|case| check_with(&case, &on_it, caching, &[(QUARTER, ALL), (HALF, ALL)], &mut |_| ()))
            .collect();
        assert!(failures.is_empty(), "{cpu_helper:?}: {}", failures.join("\n"));
        assert_eq!(device.faults(), Vec::<String>::new());
    }
}

#[test]
fn two_devices() {
    for [a, b] in [[late(), early()], [early(), late()]] {
        let names = [a.name(), b.name()];
        for (split, predictor) in [(&[] as &[f32], PredictorKind::StackedGate), (&[1.0, 3.0], PredictorKind::Previous)]
        {
            let placed = Placed { devices: &names, tensor_split: split, ..Placed::default() };
            let on_both = DeviceOptions { tensor_split: split.to_vec(), cache: HALF, ..named(&[&a, &b]) };
            compare_with(&placed, &on_both, &[&a, &b], always(predictor, PolicyKind::Learned));
        }
    }
}

#[test]
fn some_layers_on_the_cpu() {
    for lag in [late(), early()] {
        for (n_gpu_layers, cache) in [(2, HALF), (4, QUARTER), (4, WAVES)] {
            let placed = Placed { devices: &[lag.name()], n_gpu_layers, ..Placed::default() };
            let caching = always(PredictorKind::StackedGate, PolicyKind::Smoe);
            compare_with(&placed, &DeviceOptions { cache, ..named(&[&lag]) }, &[&lag], caching);
        }
    }
}

fn demo() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo.gguf")
}

fn text(model: &Model, n: usize) -> Vec<hobbit::Token> {
    let text = std::fs::read_to_string(demo().with_file_name("demo-heldout-prose.txt")).unwrap();
    let mut tokens = model.tokenize(&text[..8192], true, false).unwrap();
    tokens.truncate(n);
    assert_eq!(tokens.len(), n);
    tokens
}

/// What routers think of a token is known on a device as it is on the CPU.
#[test]
fn scores_are_those_of_the_cpu() {
    let device = late();
    let dir = tempfile::tempdir().unwrap();
    let layers = |name: &str, devices: DeviceChoice| -> Vec<LayerRecord> {
        let path = dir.path().join(name);
        {
            let options = ModelOptions {
                budget: BUDGET,
                expert_cache: HALF,
                device: DeviceOptions { devices, cache: HALF, headroom: 0.0, ..DeviceOptions::default() },
                trace: Some(path.clone()),
                ..ModelOptions::default()
            };
            let model = Model::open(&demo(), &options).unwrap();
            let options = SessionOptions { n_ctx: 256, threads: Some(1), ..SessionOptions::default() };
            let mut session = model.session(&options).unwrap();
            for token in text(&model, 48) {
                session.feed(&[token]).unwrap();
            }
        }
        let records = TraceReader::open(&path).unwrap().map(Result::unwrap);
        records.filter_map(|record| if let Record::Layer(layer) = record { Some(layer) } else { None }).collect()
    };
    let on_cpu = layers("cpu", DeviceChoice::None);
    let on_device = layers("device", DeviceChoice::Named(vec![device.name().into()]));
    assert_eq!((on_cpu.len(), on_device.len()), (48 * 6, 48 * 6));
    for (cpu, device) in on_cpu.iter().zip(&on_device) {
        assert_eq!(device.unselected.len(), 6, "of 8, two are selected");
        assert_eq!((&cpu.chosen, &cpu.weights), (&device.chosen, &device.weights));
        assert_eq!((&cpu.scores, &cpu.unselected), (&device.scores, &device.unselected));
    }
    assert_eq!(device.faults(), Vec::<String>::new());
}

fn session(path: &Path, device: &Device, cache: ExpertCache, caching: CachingOptions) -> Session {
    let device = DeviceOptions { cache, cpu_helper: CpuHelper::Off, ..named(&[device]) };
    let options = ModelOptions { budget: BUDGET, expert_cache: ALL, caching, device, ..ModelOptions::default() };
    let options_of_session = SessionOptions { n_ctx: 512, threads: Some(1), ..SessionOptions::default() };
    Model::open(path, &options).unwrap().session(&options_of_session).unwrap()
}

/// Bytes of weights per virtual second.
const COMPUTE: f64 = 1e9;
/// How much faster the link is.
const FASTER: [f64; 2] = [0.25, 1.0];
/// What copies ahead may cost where nothing can be hidden. Unless the user says otherwise, they are then given up.
const SLOWER_MAX: f64 = 1.06;
/// What they save at least where there is time for them.
const FASTER_MIN: f64 = 0.95;

/// Virtual seconds per token of a text that is evaluated token by token, everything in host memory, and what the device did.
fn measure(path: &Path, device: &Device, cache: ExpertCache, predictor: PredictorKind) -> (f64, DeviceCounters) {
    let caching = CachingOptions { distance: 2, ..always(predictor, PolicyKind::Lru) };
    let mut session = session(path, device, cache, caching);
    let tokens: Vec<hobbit::Token> = match path == demo() {
        true => text(session.model(), 160),
        false => (0..160).map(|i| 3 + i * i * 7 % 101).collect(),
    };
    // Once for the host's cache.
    tokens.chunks(1).for_each(|token| session.feed(token).unwrap());
    session.reset();
    let before = session.stats().devices[0];
    device.reset();
    tokens.chunks(1).for_each(|token| session.feed(token).unwrap());
    let seconds = device.report().host_time;
    assert_eq!(device.faults(), Vec::<String>::new());
    (seconds / tokens.len() as f64, session.stats().devices[0] - before)
}

#[test]
fn copies_hide_where_there_is_something_to_compute() {
    let dir = tempfile::tempdir().unwrap();
    let model = |name: &str, spec: Spec| {
        let dir = dir.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        fixture::write(&dir, &Spec { layers: 6, embd: 256, experts: 16, topk: 4, ..spec })
    };
    let most = model("experts", Spec { ff: 512, ..Spec::tiny("qwen3moe") });
    let attention = Spec { heads: 16, kv_heads: Some(16), head_dim: Some(64), ..Spec::tiny("qwen3moe") };
    let least = model("attention", Spec { ff: 32, ..attention });
    let mut failures = Vec::new();
    for (name, path) in [("demo", &demo()), ("mostly experts", &most), ("mostly attention", &least)] {
        for faster in FASTER {
            let link_bandwidth = COMPUTE * faster;
            let device =
                register(Options { memory: 1 << 30, link_bandwidth, compute_bandwidth: COMPUTE, ..Options::default() });
            fixture::quiet_llama_cpp();
            for cache in [QUARTER, HALF] {
                let (without, _) = measure(path, &device, cache, PredictorKind::None);
                let (with, done) = measure(path, &device, cache, PredictorKind::StackedGate);
                let ratio = with / without;
                let what = format!(
                    "{name}, link {faster}x as fast, {cache:?}: {:.3} ms to {:.3} ms a token ({ratio:.3}), {} experts ahead, \
                     {} used",
                    1e3 * without,
                    1e3 * with,
                    done.ahead,
                    done.ahead_used
                );
                println!("{what}");
                assert!(done.ahead > 0 && done.ahead_used > 0, "{what}");
                let has_time = path == &least && faster < 1.0 && cache == QUARTER;
                if ratio > if has_time { FASTER_MIN } else { SLOWER_MAX } {
                    failures.push(what);
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
