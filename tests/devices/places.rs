//! Where layers and experts go: on several devices, partly on the CPU, for several sessions.

use hobbit::options::{SplitMode, UnifiedMemory};
use hobbit::{
    CachingOptions, DeviceError, DeviceOptions, Model, ModelOptions, OpenError, Sampler, SamplingOptions,
    SessionOptions,
};
use hobbit_core::plan::ExpertCache;
use hobbit_synth::Spec;
use lagging_device::{Device, Options, Order, Report};

use super::compare::{ALL, NONE, Placed, QUARTER, Reference, WAVES, devices, each, options, same};
use super::fixture::cases::{self, Case, known};
use super::fixture::script::bits;
use super::{assert_sound, on, ordered, register};

const EXPERTS: &str = r"ffn_(gate|up|down|gate_up)_exps\.weight";

fn some_cases() -> Vec<Case> {
    known(&["qwen3moe", "gpt-oss", "deepseek2", "llama4"])
}

/// Stock llama.cpp and hobbit with the same placement give the same logits.
fn compare(placed: &Placed, device: &DeviceOptions, devices: &[&Device]) {
    compare_with(placed, device, devices, CachingOptions::default());
}

pub fn compare_with(placed: &Placed, device: &DeviceOptions, devices: &[&Device], caching: CachingOptions) {
    let n_gpu_layers = placed.n_gpu_layers;
    each(some_cases(), |case| {
        let reference = Reference::new(&case, placed);
        let check = |expert_cache| {
            let options = ModelOptions { n_gpu_layers, caching, device: device.clone(), ..options(expert_cache) };
            let found = reference.check(&options, None);
            devices.iter().for_each(|device| assert_sound(device));
            reference.failure(format!("{expert_cache:?}"), found)
        };
        [QUARTER, ALL].into_iter().filter_map(check).collect()
    });
}

#[test]
fn some_layers_or_experts_on_the_cpu() {
    let lag = ordered(Order::CopiesLate);
    let placed = Placed { on_cpu: EXPERTS, ..Placed::on(&[lag.name()]) };
    compare(&placed, &DeviceOptions { cache: NONE, ..on(&[&lag]) }, &[&lag]);
    assert!(lag.report().graph_computes > 0, "ordinary weights are on the device");
    let on_cpu = format!(r"^blk\.(0|1)\.{EXPERTS}");
    let early = ordered(Order::CopiesEarly);
    let placed = Placed { on_cpu: &on_cpu, ..Placed::on(&[early.name()]) };
    compare(&placed, &DeviceOptions { n_cpu_moe: 2, cache: QUARTER, ..on(&[&early]) }, &[&early]);
    for n_gpu_layers in [1, 2, 4] {
        let placed = Placed { n_gpu_layers, ..Placed::on(&[lag.name()]) };
        compare(&placed, &DeviceOptions { cache: QUARTER, ..on(&[&lag]) }, &[&lag]);
    }
}

/// Unless an option says where experts are computed.
#[test]
fn llama_cpp_runs_what_fits_on_the_device() {
    let lag = ordered(Order::CopiesLate);
    each(some_cases(), |case| {
        let reference = Reference::new(&case, &Placed::on(&[lag.name()]));
        let with = |change: &dyn Fn(&mut ModelOptions)| {
            let given = options(ExpertCache::Auto);
            let mut options = ModelOptions { device: on(&[&lag]), expects: case.options.clone(), ..given };
            change(&mut options);
            reference.check(&options, None).unwrap_or_else(|error| panic!("{}: {error:#}", case.name))
        };
        let n_layer = i32::try_from(case.spec().layers).unwrap();
        for n_gpu_layers in [-1, n_layer + 1] {
            let session = with(&|options| options.n_gpu_layers = n_gpu_layers);
            assert!(session.model().run_mode().is_passthrough(), "{}", case.name);
            let devices = &session.description().devices;
            assert_eq!((devices.len(), devices[0].n_layers, devices[0].slots), (1, case.spec().layers, 0));
            assert!(session.description().io_choice.contains(&format!("fits on {}", lag.name())));
            assert_sound(&lag);
        }
        let at_the_seam: [fn(&mut ModelOptions); 3] = [
            |options| options.passthrough = false,
            |options| options.device.cache = ALL,
            |options| options.expert_cache = QUARTER,
        ];
        for change in at_the_seam {
            assert!(!with(&change).model().run_mode().is_passthrough(), "{}", case.name);
        }
        Vec::new()
    });
}

#[test]
fn the_default_context_is_fitted_to_the_device() {
    const TRAINED: u32 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { layers: 8, ctx: TRAINED, experts: 32, topk: 4, embd: 256, ff: 512, ..Spec::tiny("qwen3moe") };
    let path = super::fixture::write(dir.path(), &spec);
    let n_ctx = |lag: &Device, asked: u32, passthrough: bool| {
        let session = SessionOptions { n_ctx: asked, ..SessionOptions::default() };
        let options = options(ExpertCache::Auto);
        let options = ModelOptions { device: on(&[lag]), expects: session.clone(), passthrough, ..options };
        let model = Model::open(&path, &options).unwrap();
        (model.session(&session).unwrap().context().n_ctx(), model.run_mode().is_passthrough())
    };
    let lag = ordered(Order::CopiesLate);
    let (fitted, is_passthrough) = n_ctx(&lag, 0, true);
    assert!((4096..TRAINED).contains(&fitted) && is_passthrough, "{fitted}, {is_passthrough}");
    assert_eq!(n_ctx(&lag, 0, false), (fitted, false), "the same where hobbit keeps the experts");
    assert_eq!(n_ctx(&lag, 2 * fitted, true), (2 * fitted, true), "as asked");
    let memory = Model::open(&path, &options(ExpertCache::Auto)).unwrap().info().expert_bytes;
    let small = lagging_device::register(Options { memory, ..Options::default() });
    assert_eq!(n_ctx(&small, 256, true), (256, false), "{memory} bytes of experts leave nothing for other weights");
}

#[test]
fn two_devices() {
    let (a, b) = (ordered(Order::CopiesLate), ordered(Order::CopiesEarly));
    let names = [a.name(), b.name()];
    let with = || DeviceOptions { cache: QUARTER, ..on(&[&a, &b]) };
    for split in [&[] as &[f32], &[1.0, 3.0], &[3.0, 1.0]] {
        let placed = Placed { tensor_split: split, ..Placed::on(&names) };
        compare(&placed, &DeviceOptions { tensor_split: split.to_vec(), ..with() }, &[&a, &b]);
    }
    b.reset();
    let placed = Placed::on(&names[..1]);
    let alone = |main| DeviceOptions { split: SplitMode::None, main, ..with() };
    compare(&placed, &alone(0), &[&a]);
    assert_eq!(b.report().graph_computes, 0, "the other device is left alone");
    compare(&placed, &alone(1), &[&b]);
    assert!(b.report().graph_computes > 0);
}

/// A prompt of several ubatches: one device still copies the host's staging when the other wants to stage.
#[test]
fn two_devices_share_the_host_staging() {
    for orders in [[Order::CopiesLate, Order::CopiesLate], [Order::CopiesEarly, Order::CopiesLate]] {
        let [a, b] = orders.map(ordered);
        for mut case in some_cases() {
            case.options.n_ubatch = 16;
            let placed = Placed { tensor_split: &[1.0, 1.0], ..Placed::on(&[a.name(), b.name()]) };
            let reference = Reference::new(&case, &placed);
            for expert_cache in [NONE, ExpertCache::Bytes(1)] {
                let device = DeviceOptions { tensor_split: vec![1.0, 1.0], cache: WAVES, ..on(&[&a, &b]) };
                let found = reference.check(&ModelOptions { device, ..options(expert_cache) }, None);
                found.unwrap_or_else(|error| panic!("{}: {error:#}", case.name));
            }
        }
        assert_sound(&a);
        assert_sound(&b);
    }
}

#[test]
fn sessions_side_by_side_and_one_after_the_other() {
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let lag = ordered(order);
        let case = cases::plain();
        let reference = Reference::new(&case, &Placed::on(&[lag.name()]));
        for cache in [ALL, QUARTER, WAVES] {
            let device = DeviceOptions { cache, ..on(&[&lag]) };
            let model = Model::open(&reference.path, &ModelOptions { device, ..options(QUARTER) }).unwrap();
            let run = || same(&reference.expected, &case.run(&mut model.session(&case.options).unwrap()).unwrap());
            std::thread::scope(|scope| {
                for thread in [(); 2].map(|()| scope.spawn(run)) {
                    thread.join().unwrap().unwrap();
                }
            });
            run().unwrap();
            assert_sound(&lag);
        }
    }
}

/// Text that goes on beyond the context.
#[test]
fn context_shift() {
    let lag = ordered(Order::CopiesLate);
    let dir = tempfile::tempdir().unwrap();
    let path = cases::plain().write(dir.path());
    let generate = |device: DeviceOptions| {
        let model = Model::open(&path, &ModelOptions { device, ..options(QUARTER) }).unwrap();
        let options = SessionOptions { n_ctx: 256, threads: Some(1), context_shift: true, ..SessionOptions::default() };
        let mut session = model.session(&options).unwrap();
        session.feed(&(1..200).collect::<Vec<_>>()).unwrap();
        let mut sampler = Sampler::new(&model, &SamplingOptions::greedy()).unwrap();
        let mut texts = Vec::new();
        // The end of a text ends a generation; it goes on with another.
        for round in 0..4 {
            texts.push(session.generate(&mut sampler, Some(60)).map(|token| token.unwrap()).collect::<Vec<_>>());
            session.feed(&[round + 7]).unwrap();
        }
        (texts, bits((0..3).find_map(|index| session.logits(index)).unwrap()))
    };
    let expected = generate(devices(&[]));
    assert!(generate(DeviceOptions { cache: QUARTER, ..on(&[&lag]) }) == expected);
    assert_sound(&lag);
}

/// As on Jetson: an integrated GPU whose backend supports its own buffers only.
#[test]
fn experts_in_unified_memory_are_there_once_and_never_copied() {
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let lag = register(Options { unified: true, undeclared: true, order, ..Options::default() });
        for case in some_cases() {
            let reference = Reference::new(&case, &Placed::on(&[lag.name()]));
            let n_expert = case.spec().experts;
            let run = |unified, expert_cache| {
                let device = DeviceOptions { unified, cache: ALL, ..on(&[&lag]) };
                let session = reference.check(&ModelOptions { device, ..options(expert_cache) }, None);
                let session = session.unwrap_or_else(|error| panic!("{}, {unified}: {error:#}", case.name));
                assert_sound(&lag);
                session
            };
            for expert_cache in [ALL, QUARTER, NONE] {
                let session = run(UnifiedMemory::On, expert_cache);
                let (report, counters) = (&session.description().devices[0], session.stats().devices[0]);
                assert!(report.unified);
                assert_eq!((report.slots, report.staging_slots, report.cache_bytes), (0, 0, 0), "{report:?}");
                assert_eq!((counters.uploads, counters.uploaded_bytes), (0, 0), "{counters:?}");
            }
            let copies = |session: &hobbit::Session| -> Vec<(String, u32, u32)> {
                let slots = session.description().caching.slots_by_layer.iter();
                slots.map(|slots| (slots.cache.clone(), slots.least, slots.most)).collect()
            };
            let host = ("the host".to_owned(), n_expert, n_expert);
            assert_eq!(copies(&run(UnifiedMemory::On, ALL)), std::slice::from_ref(&host));
            for unified in [UnifiedMemory::Auto, UnifiedMemory::Off] {
                let session = run(unified, ALL);
                assert_eq!(copies(&session), [host.clone(), (lag.name().to_owned(), n_expert, n_expert)]);
                let (report, counters) = (&session.description().devices[0], session.stats().devices[0]);
                assert!(!report.unified && counters.uploaded_bytes > 0, "{report:?} {counters:?}");
            }
        }
    }
}

#[test]
fn unified_memory_can_be_left_unused() {
    let lag = register(Options { unified: true, ..Options::default() });
    let device = DeviceOptions { unified: UnifiedMemory::Off, cache: QUARTER, ..on(&[&lag]) };
    compare(&Placed::on(&[lag.name()]), &device, &[&lag]);
}

#[test]
fn unified_memory_is_refused_where_a_device_has_its_own() {
    let lag = ordered(Order::CopiesLate);
    let dir = tempfile::tempdir().unwrap();
    let path = cases::plain().write(dir.path());
    let device = DeviceOptions { unified: UnifiedMemory::On, ..on(&[&lag]) };
    let error = Model::open(&path, &ModelOptions { device, ..options(QUARTER) }).err().unwrap();
    assert!(matches!(error, OpenError::Device(DeviceError::NotUnified { .. })), "{error:?}");
    assert_eq!(error.to_string(), format!("'{}' (LAG) cannot compute in the host's memory", lag.name()));
    assert_eq!(lag.report(), Report::default(), "nothing was loaded");
}
