//! Where layers and experts go: on several devices, partly on the CPU, for several sessions.

use hobbit::options::SplitMode;
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions, Sampler, SamplingOptions, SessionOptions};
use hobbit_core::plan::ExpertCache;
use lagging_device::{Device, Order};

use super::compare::{ALL, NONE, Placed, QUARTER, Reference, WAVES, devices, each, options, same};
use super::fixture::cases::{self, Case, known};
use super::fixture::script::bits;
use super::{assert_sound, on, ordered};

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
