//! Experts that are copied and read before their layer's router has chosen: the logits are those without.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hobbit::options::{CpuHelper, Prefetch};
use hobbit::stats::DeviceCounters;
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions, Session};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::plan::ExpertCache;
use hobbit_core::predict::PredictorKind;
use hobbit_core::trace::{LayerRecord, Record, TraceReader};
use hobbit_synth::Spec;
use lagging_device::{Device, Options};

use super::compare::{
    ALL, DEVICE_SIZES, HALF, Placed, QUARTER, WAVES, assert_none, check_on_device, devices, each, options,
};
use super::fixture::cases::part;
use super::fixture::{bundled, demo_tokens, one_thread, write};
use super::places::compare_with;
use super::{assert_sound, early, late, on, register};

fn always(predictor: PredictorKind, policy: PolicyKind) -> CachingOptions {
    CachingOptions {
        policy,
        predictor: Some(predictor),
        prefetch: Prefetch::On,
        distance: 3,
        ..CachingOptions::default()
    }
}

/// A device to which copies take next to no virtual time: all that is predicted is worth copying.
fn fast(options: Options) -> Device {
    register(Options { link_bandwidth: 1e12, ..options })
}

/// Every predictor over every architecture, in an order of execution.
fn every_architecture(options: Options) {
    let is_unified = options.unified;
    let device = fast(options);
    let kinds = [
        (PredictorKind::StackedGate, PolicyKind::Learned, Prefetch::All),
        (PredictorKind::CrossLayer, PolicyKind::Smoe, Prefetch::Budget),
        (PredictorKind::StackedGate, PolicyKind::Lru, Prefetch::On),
    ];
    let sizes = [&DEVICE_SIZES[..], &[(HALF, ALL), (HALF, HALF)]].concat();
    let mut ahead = 0;
    for (at, (predictor, policy, prefetch)) in kinds.into_iter().enumerate() {
        let caching = CachingOptions { prefetch, ..always(predictor, policy) };
        let options = ModelOptions { caching, device: on(&[&device]), ..super::compare::options(ExpertCache::Auto) };
        each(part(at, kinds.len()), |case| {
            let mut done = |counters: DeviceCounters| ahead += counters.ahead;
            let mut failures = check_on_device(&case, &options, &sizes, &mut done);
            failures.extend(device.faults());
            failures
        });
    }
    assert_eq!(ahead > 0, !is_unified, "{ahead} experts were copied ahead");
}

#[test]
fn copies_late() {
    every_architecture(late());
}

#[test]
fn copies_early() {
    every_architecture(early());
}

#[test]
fn unified_memory() {
    every_architecture(Options { unified: true, ..Options::default() });
}

#[test]
fn beside_the_cpu_helper() {
    let device = fast(early());
    for cpu_helper in [CpuHelper::On, CpuHelper::Auto] {
        let caching = always(PredictorKind::StackedGate, PolicyKind::Lru);
        let device_options = DeviceOptions { cpu_helper, ..on(&[&device]) };
        let options = ModelOptions { caching, device: device_options, ..options(ExpertCache::Auto) };
        each(part(0, 6), |case| check_on_device(&case, &options, &[(QUARTER, ALL), (HALF, ALL)], &mut |_| ()));
        assert_sound(&device);
    }
}

/// Expert slots of the device in each of the three layers of [`promoted`]'s model.
const N_SLOTS: u64 = 4;

/// A model of 16 experts, 4 of which a token uses, on a device with [`N_SLOTS`] for each layer, everything in host
/// memory: the device's counts of each phase, in which a token comes again and again.
fn promoted(cpu_helper: CpuHelper, link_bandwidth: f64, phases: &[(hobbit::Token, usize)]) -> Vec<DeviceCounters> {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { layers: 3, experts: 16, topk: N_SLOTS as u32, seed: 3, ..Spec::tiny("qwen3moe") };
    let path = write(dir.path(), &spec);
    let device = register(Options { link_bandwidth, compute_bandwidth: COMPUTE, ..early() });
    let caching = CachingOptions {
        policy: PolicyKind::Lru,
        predictor: Some(PredictorKind::None),
        fill: false,
        ..Default::default()
    };
    let device_options = DeviceOptions { cache: QUARTER, cpu_helper, ..on(&[&device]) };
    let options = ModelOptions { caching, device: device_options, ..options(ALL) };
    let mut session = Model::open(&path, &options).unwrap().session(&one_thread(512)).unwrap();
    let mut counts = Vec::new();
    for &(token, n) in phases {
        let before = session.stats().devices[0];
        (0..n).for_each(|_| session.feed(&[token]).unwrap());
        counts.push(session.stats().devices[0] - before);
    }
    assert_sound(&device);
    counts
}

/// While the link is idle, the device copies experts that the CPU computes, once tokens use them more than its
/// residents: its hits grow.
#[test]
fn promotions_over_an_idle_link() {
    let (warm_up, once, often) = ((5, 32), [(9, 1), (5, 1), (9, 1)], (9, 96));
    let phases = [&[warm_up], &once[..], &[often]].concat();
    let run = |helper, link| -> Vec<_> {
        let counts = promoted(helper, link, &phases).into_iter();
        counts.map(|own| (own.hits, own.misses, own.promoted, own.helper_experts)).collect()
    };
    let on = run(CpuHelper::On, 1e12);
    // Misses that the file serves go to the device: three experts of the first token lose their slots, and come back.
    assert_eq!(on[1..3], [(9, 3, 0, 0), (9, 3, 3, 3)]);
    // Those of the second token are used twice, the others 33 times.
    assert_eq!(on[3], (9, 3, 0, 3));
    // The second token's replace them in the end.
    let (hits, misses, n_promoted, _) = on[4];
    assert!(n_promoted >= 3 && hits > 6 * misses, "{on:?}");
    // The idle time of a layer is too short for an expert: at most one is copied, to measure the link.
    let slow = run(CpuHelper::On, 1e6);
    assert!(slow.iter().map(|own| own.2).sum::<u64>() <= 1, "{slow:?}");
    // Every miss is copied on demand.
    let off = run(CpuHelper::Off, 1e12);
    assert!(off.iter().all(|own| (own.2, own.3) == (0, 0)), "{off:?}");
}

#[test]
fn two_devices() {
    for [a, b] in [[late(), early()], [early(), late()]].map(|pair| pair.map(fast)) {
        let names = [a.name(), b.name()];
        for (split, predictor) in
            [(&[] as &[f32], PredictorKind::StackedGate), (&[1.0, 3.0], PredictorKind::CrossLayer)]
        {
            let placed = Placed { tensor_split: split, ..Placed::on(&names) };
            let on_both = DeviceOptions { tensor_split: split.to_vec(), cache: HALF, ..on(&[&a, &b]) };
            compare_with(&placed, &on_both, &[&a, &b], always(predictor, PolicyKind::Learned));
        }
    }
}

#[test]
fn some_layers_on_the_cpu() {
    for lag in [late(), early()].map(fast) {
        for (n_gpu_layers, cache) in [(2, HALF), (4, QUARTER), (4, WAVES)] {
            let placed = Placed { n_gpu_layers, ..Placed::on(&[lag.name()]) };
            let caching = always(PredictorKind::StackedGate, PolicyKind::Smoe);
            compare_with(&placed, &DeviceOptions { cache, ..on(&[&lag]) }, &[&lag], caching);
        }
    }
}

fn demo() -> PathBuf {
    bundled("demo.gguf")
}

/// Routers' scores of a token are known on a device as on the CPU. Last bits may differ, and a trace rounds to 11 bits.
#[test]
fn scores_are_those_of_the_cpu() {
    let device = fast(late());
    let dir = tempfile::tempdir().unwrap();
    let layers = |name: &str, device: DeviceOptions| -> Vec<LayerRecord> {
        let path = dir.path().join(name);
        let device = DeviceOptions { cache: HALF, ..device };
        let model = Model::open(&demo(), &ModelOptions { device, trace: Some(path.clone()), ..options(HALF) });
        let mut session = model.and_then(|model| model.session(&one_thread(256))).unwrap();
        for token in demo_tokens(session.model(), 48) {
            session.feed(&[token]).unwrap();
        }
        drop(session);
        let records = TraceReader::open(&path).unwrap().map(Result::unwrap);
        records.filter_map(|record| if let Record::Layer(layer) = record { Some(layer) } else { None }).collect()
    };
    let (on_cpu, on_device) = (layers("cpu", devices(&[])), layers("device", on(&[&device])));
    assert_eq!((on_cpu.len(), on_device.len()), (48 * 6, 48 * 6));
    let assert_near = |cpu: &[f32], device: &[f32]| {
        let is_near = |(cpu, device): (&f32, &f32)| (cpu - device).abs() <= cpu / 1024.0;
        assert!(cpu.len() == device.len() && cpu.iter().zip(device).all(is_near), "{cpu:?}, {device:?}");
    };
    let by_expert = |layer: &LayerRecord| -> (Vec<u16>, Vec<f32>) {
        layer.unselected.iter().copied().collect::<BTreeMap<_, _>>().into_iter().unzip()
    };
    for (cpu, device) in on_cpu.iter().zip(&on_device) {
        assert_eq!(device.unselected.len(), 6, "of 8, two are selected");
        assert_eq!((&cpu.chosen, by_expert(cpu).0), (&device.chosen, by_expert(device).0));
        assert_near(&cpu.weights, &device.weights);
        assert_near(&cpu.scores, &device.scores);
        assert_near(&by_expert(cpu).1, &by_expert(device).1);
    }
    assert_sound(&device);
}

/// Bytes of weights per virtual second.
const COMPUTE: f64 = 1e9;
/// Speeds of the link, relative to computing.
const FASTER: [f64; 2] = [0.25, 1.0];
/// Copies ahead may cost this much where nothing can be hidden. Unless the user asks for them, they are then given up.
const SLOWER_MAX: f64 = 1.06;
/// They save at least this much where there is time for them.
const FASTER_MIN: f64 = 0.95;

/// Virtual seconds per token of a text that is evaluated token by token, everything in host memory, and the device's
/// counts.
fn measure(path: &Path, device: &Device, cache: ExpertCache, predictor: PredictorKind) -> (f64, DeviceCounters) {
    let caching = CachingOptions { distance: 2, ..always(predictor, PolicyKind::Lru) };
    let device_options = DeviceOptions { cache, cpu_helper: CpuHelper::Off, ..on(&[device]) };
    let options = ModelOptions { caching, device: device_options, ..options(ALL) };
    let model = Model::open(path, &options).unwrap();
    let mut session: Session = model.session(&one_thread(512)).unwrap();
    let tokens: Vec<hobbit::Token> = if path == demo() {
        demo_tokens(session.model(), 160)
    } else {
        (0..160).map(|i| 3 + i * i * 7 % 101).collect()
    };
    // Once for the host's cache.
    tokens.chunks(1).for_each(|token| session.feed(token).unwrap());
    session.reset();
    let before = session.stats().devices[0];
    device.reset();
    tokens.chunks(1).for_each(|token| session.feed(token).unwrap());
    let seconds = device.report().host_time;
    assert_sound(device);
    (seconds / tokens.len() as f64, session.stats().devices[0] - before)
}

/// Over a link so slow that no guess pays, the papers' prefetching copies every guess, and `on` copies none.
#[test]
fn every_guess_is_copied_as_in_the_papers() {
    let device = register(Options { link_bandwidth: 1e6, compute_bandwidth: 1e9, ..Options::default() });
    let counts = |prefetch| {
        let caching = always(PredictorKind::StackedGate, PolicyKind::Lru);
        let caching = CachingOptions { prefetch, distance: 1, fill: false, ..caching };
        let device_options = DeviceOptions { cache: HALF, cpu_helper: CpuHelper::Off, ..on(&[&device]) };
        let options = ModelOptions { caching, device: device_options, ..options(ALL) };
        let mut session = Model::open(&demo(), &options).unwrap().session(&one_thread(512)).unwrap();
        for token in demo_tokens(session.model(), 32) {
            session.feed(&[token]).unwrap();
        }
        let counters = session.stats().devices[0];
        assert_sound(&device);
        (counters.ahead, counters.ahead_used)
    };
    // A guess that the host has not read yet is not copied, so the number varies with the speed of reads.
    let (copied, used) = counts(Prefetch::All);
    assert_eq!(counts(Prefetch::On), (0, 0));
    assert!((80..=110).contains(&copied) && used > copied / 2, "{copied} copied, {used} used");
}

#[test]
fn copies_hide_where_there_is_something_to_compute() {
    let dir = tempfile::tempdir().unwrap();
    let model = |name: &str, spec: Spec| {
        let dir = dir.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        write(&dir, &Spec { layers: 6, embd: 256, experts: 16, topk: 4, ..spec })
    };
    let most = model("experts", Spec { ff: 512, ..Spec::tiny("qwen3moe") });
    let attention = Spec { heads: 16, kv_heads: Some(16), head_dim: Some(64), ..Spec::tiny("qwen3moe") };
    let least = model("attention", Spec { ff: 32, ..attention });
    let mut failures = Vec::new();
    for (name, path) in [("demo", &demo()), ("mostly experts", &most), ("mostly attention", &least)] {
        for faster in FASTER {
            let link_bandwidth = COMPUTE * faster;
            let device = register(Options { link_bandwidth, compute_bandwidth: COMPUTE, ..Options::default() });
            for cache in [QUARTER, HALF] {
                let (without, _) = measure(path, &device, cache, PredictorKind::None);
                let (with, done) = measure(path, &device, cache, PredictorKind::StackedGate);
                let ratio = with / without;
                let what = format!(
                    "{name}, link {faster}x as fast, {cache:?}: {:.3} ms to {:.3} ms a token ({ratio:.3}), {} experts \
                     ahead, {} used",
                    1e3 * without,
                    1e3 * with,
                    done.ahead,
                    done.ahead_used
                );
                assert!(done.ahead > 0 && done.ahead_used > 0, "{what}");
                let has_time = path == &least && faster < 1.0 && cache == QUARTER;
                if ratio > if has_time { FASTER_MIN } else { SLOWER_MAX } {
                    failures.push(what);
                }
            }
        }
    }
    assert_none(failures);
}
