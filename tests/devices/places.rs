//! Where layers and experts go: on several devices, partly on the CPU, for several sessions.

use hobbit::options::{DeviceChoice, SplitMode};
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions, Sampler, SamplingOptions, Session, SessionOptions};
use hobbit_core::plan::ExpertCache;
use lagging_device::{Device, Options, Order};

use super::cases::{self, Case, Source};
use super::check::{ALL, QUARTER, SIZES, WAVES, check};
use super::compare::{BUDGET, Hobbit, same};
use super::fixture;
use super::script::Row;
use super::stock::{Placed, Stock};

const EXPERTS: &str = r"ffn_(gate|up|down|gate_up)_exps\.weight";

fn device(order: Order) -> Device {
    fixture::quiet_llama_cpp();
    lagging_device::register(Options { memory: 1 << 30, order, ..Options::default() })
}

pub fn named(devices: &[&Device]) -> DeviceOptions {
    let names = devices.iter().map(|device| device.name().to_owned()).collect();
    DeviceOptions { devices: DeviceChoice::Named(names), headroom: 0.0, ..DeviceOptions::default() }
}

fn some_cases() -> Vec<Case> {
    let known = ["qwen3moe", "gpt-oss", "deepseek2", "llama4"];
    let cases: Vec<Case> =
        cases::all_architectures().into_iter().filter(|case| known.contains(&case.name.as_str())).collect();
    assert_eq!(cases.len(), known.len());
    cases
}

fn write(case: &Case) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let Source::Synth(spec) = &case.model else { panic!("{}: not a file of our own", case.name) };
    let path = fixture::write(dir.path(), spec);
    (dir, path)
}

fn run(case: &Case, session: Session) -> Vec<Row> {
    case.script.run(&mut Hobbit::new(session), case.options.n_batch as usize).unwrap()
}

/// Stock llama.cpp and hobbit with the same placement give the same logits.
fn compare(placed: &Placed, device: &DeviceOptions, devices: &[&Device]) {
    compare_with(placed, device, devices, CachingOptions::default());
}

pub fn compare_with(placed: &Placed, device: &DeviceOptions, devices: &[&Device], caching: CachingOptions) {
    for case in some_cases() {
        let (_dir, path) = write(&case);
        let mut stock = Stock::open_placed(&path, &case.options, placed).unwrap();
        let expected = case.script.run(&mut stock, case.options.n_batch as usize).unwrap();
        let n_gpu_layers = placed.n_gpu_layers;
        for expert_cache in [QUARTER, ALL] {
            let options = ModelOptions {
                budget: BUDGET,
                expert_cache,
                n_gpu_layers,
                caching,
                device: device.clone(),
                ..ModelOptions::default()
            };
            let model = Model::open(&path, &options).unwrap();
            let found = run(&case, model.session(&case.options).unwrap());
            same(&expected, &found).unwrap_or_else(|error| panic!("{}: {error}", case.name));
            devices.iter().for_each(|device| assert_eq!(device.faults(), Vec::<String>::new(), "{}", case.name));
        }
    }
}

#[test]
fn no_device_cache_computes_experts_on_the_cpu() {
    let lag = device(Order::CopiesLate);
    let placed = Placed { devices: &[lag.name()], on_cpu: EXPERTS, ..Placed::default() };
    compare(&placed, &DeviceOptions { cache: ExpertCache::Bytes(0), ..named(&[&lag]) }, &[&lag]);
    assert!(lag.report().graph_computes > 0, "ordinary weights are on the device");
}

#[test]
fn experts_of_some_layers_on_the_cpu() {
    let lag = device(Order::CopiesEarly);
    let on_cpu = format!(r"^blk\.(0|1)\.{EXPERTS}");
    let placed = Placed { devices: &[lag.name()], on_cpu: &on_cpu, ..Placed::default() };
    compare(&placed, &DeviceOptions { n_cpu_moe: 2, cache: QUARTER, ..named(&[&lag]) }, &[&lag]);
}

#[test]
fn some_layers_on_the_cpu() {
    let lag = device(Order::CopiesLate);
    for n_gpu_layers in [1, 2, 4] {
        let placed = Placed { devices: &[lag.name()], n_gpu_layers, ..Placed::default() };
        compare(&placed, &DeviceOptions { cache: QUARTER, ..named(&[&lag]) }, &[&lag]);
    }
}

#[test]
fn two_devices() {
    let (a, b) = (device(Order::CopiesLate), device(Order::CopiesEarly));
    let devices = [a.name(), b.name()];
    for split in [&[] as &[f32], &[1.0, 3.0], &[3.0, 1.0]] {
        let placed = Placed { devices: &devices, tensor_split: split, ..Placed::default() };
        compare(
            &placed,
            &DeviceOptions { tensor_split: split.to_vec(), cache: QUARTER, ..named(&[&a, &b]) },
            &[&a, &b],
        );
    }
    b.reset();
    let placed = Placed { devices: &devices[..1], ..Placed::default() };
    let alone = |main| DeviceOptions { split: SplitMode::None, main, cache: QUARTER, ..named(&[&a, &b]) };
    compare(&placed, &alone(0), &[&a]);
    assert_eq!(b.report().graph_computes, 0, "the other device is left alone");
    compare(&placed, &alone(1), &[&b]);
    assert!(b.report().graph_computes > 0);
}

/// A prompt of several ubatches: one device still copies what the host had staged for it when the other wants to stage.
#[test]
fn two_devices_share_what_the_host_stages() {
    for orders in [[Order::CopiesLate, Order::CopiesLate], [Order::CopiesEarly, Order::CopiesLate]] {
        let [a, b] = orders.map(device);
        for mut case in some_cases() {
            case.options.n_ubatch = 16;
            let (_dir, path) = write(&case);
            let placed = Placed { devices: &[a.name(), b.name()], tensor_split: &[1.0, 1.0], ..Placed::default() };
            let mut stock = Stock::open_placed(&path, &case.options, &placed).unwrap();
            let expected = case.script.run(&mut stock, case.options.n_batch as usize).unwrap();
            for expert_cache in [ExpertCache::Bytes(0), ExpertCache::Bytes(1)] {
                let device = DeviceOptions { tensor_split: vec![1.0, 1.0], cache: WAVES, ..named(&[&a, &b]) };
                let options = ModelOptions { budget: BUDGET, expert_cache, device, ..ModelOptions::default() };
                let model = Model::open(&path, &options).unwrap();
                let found = run(&case, model.session(&case.options).unwrap());
                same(&expected, &found).unwrap_or_else(|error| panic!("{}: {error}", case.name));
            }
        }
        assert_eq!((a.faults(), b.faults()), (Vec::new(), Vec::new()));
    }
}

#[test]
fn several_sequences() {
    let lag = device(Order::CopiesLate);
    let all = cases::two_sequences().into_iter().chain(cases::many_sequences());
    let failures: Vec<String> = all.flat_map(|case| check(&case, &named(&[&lag]), &SIZES[..4])).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(lag.faults(), Vec::<String>::new());
}

#[test]
fn sessions_side_by_side_and_one_after_the_other() {
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let lag = device(order);
        for case in cases::plain() {
            let (_dir, path) = write(&case);
            let mut stock = Stock::open_on(&path, &case.options, &[lag.name()]).unwrap();
            let expected = case.script.run(&mut stock, case.options.n_batch as usize).unwrap();
            for cache in [ALL, QUARTER, WAVES] {
                let device = DeviceOptions { cache, ..named(&[&lag]) };
                let options = ModelOptions { budget: BUDGET, expert_cache: QUARTER, device, ..ModelOptions::default() };
                let model = Model::open(&path, &options).unwrap();
                std::thread::scope(|scope| {
                    let threads = [(); 2].map(|()| scope.spawn(|| run(&case, model.session(&case.options).unwrap())));
                    for thread in threads {
                        same(&expected, &thread.join().unwrap()).unwrap();
                    }
                });
                same(&expected, &run(&case, model.session(&case.options).unwrap())).unwrap();
                assert_eq!(lag.faults(), Vec::<String>::new());
            }
        }
    }
}

/// Text that goes on beyond the context.
#[test]
fn context_shift() {
    let lag = device(Order::CopiesLate);
    let case = cases::plain().remove(0);
    let (_dir, path) = write(&case);
    let generate = |device: DeviceOptions| {
        let options = ModelOptions { budget: BUDGET, expert_cache: QUARTER, device, ..ModelOptions::default() };
        let model = Model::open(&path, &options).unwrap();
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
        let logits: Vec<u32> =
            (0..3).find_map(|index| session.logits(index)).unwrap().iter().map(|logit| logit.to_bits()).collect();
        (texts, logits)
    };
    let none = DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() };
    let expected = generate(none);
    assert!(generate(DeviceOptions { cache: QUARTER, ..named(&[&lag]) }) == expected);
    assert_eq!(lag.faults(), Vec::<String>::new());
}
