//! Experts on devices whose memory is not the host's: every logit is, bit for bit, that of stock llama.cpp with all
//! layers on the same device.
//!
//! A binary of its own: its devices are in ggml's list for the whole process, where other tests would choose them.

#![cfg(unix)]

mod ahead;
mod early;
#[path = "../fixture/mod.rs"]
mod fixture;
mod full_host;
mod launches;
mod offload;
mod overlap;
mod places;
mod precision;
mod real;
mod resize;
mod trouble;
mod virtual_experts;
mod waits;

use fixture::cases::{self, Case, known, part};
use fixture::compare::{self, DEVICE_SIZES, QUARTER, Sizes, WAVES, check_on_device, devices, each};
use fixture::{ends, optional, quiet_llama_cpp, routing};
use hobbit::options::{CpuHelper, Repack};
use hobbit::{DeviceOptions, ModelOptions};
use hobbit_core::plan::ExpertCache;
use lagging_device::{Device, Options, Order, Pinned};

/// Architectures with softmax before and after the choice, scales per expert, and groups of experts.
const SOME: [&str; 4] = ["qwen3moe", "gpt-oss", "deepseek2", "olmoe"];

/// A device of 1 GiB.
pub fn register(options: Options) -> Device {
    let device = lagging_device::register(Options { memory: 1 << 30, ..options });
    quiet_llama_cpp();
    device
}

/// A device with this order of execution.
pub fn ordered(order: Order) -> Device {
    register(Options { order, ..Options::default() })
}

/// hobbit on these devices.
pub fn on(all: &[&Device]) -> DeviceOptions {
    devices(&all.iter().map(|device| device.name()).collect::<Vec<_>>())
}

/// Misuse that a device has found.
pub fn assert_sound(device: &Device) {
    assert_eq!(device.faults(), Vec::<String>::new());
}

/// Checks cases on a device with caches of these sizes.
fn check(options: Options, helper: CpuHelper, cases: Vec<Case>, sizes: &[Sizes]) {
    let device = register(options);
    let device_options = DeviceOptions { cpu_helper: helper, ..on(&[&device]) };
    let options = ModelOptions { device: device_options, ..compare::options(ExpertCache::Auto) };
    each(cases, |case| {
        let mut failures = check_on_device(&case, &options, sizes, &mut |_| ());
        failures.extend(device.faults());
        failures
    });
}

fn late() -> Options {
    Options { order: Order::CopiesLate, ..Options::default() }
}

fn early() -> Options {
    Options { order: Order::CopiesEarly, ..Options::default() }
}

#[test]
fn copies_late_in_the_first_half_of_architectures() {
    check(late(), CpuHelper::default(), part(0, 2), &DEVICE_SIZES[..4]);
}

#[test]
fn copies_late_in_the_second_half_of_architectures() {
    check(late(), CpuHelper::default(), part(1, 2), &DEVICE_SIZES[..4]);
}

#[test]
fn copies_early() {
    check(early(), CpuHelper::default(), part(1, 4), &DEVICE_SIZES);
}

#[test]
fn memory_that_cannot_be_pinned() {
    for (at, pinned) in [(2, Pinned::Refused), (3, Pinned::None)] {
        check(Options { pinned, ..late() }, CpuHelper::default(), part(at, 8), &DEVICE_SIZES[1..2]);
    }
}

#[test]
fn unified_memory() {
    check(Options { unified: true, ..late() }, CpuHelper::default(), part(0, 4), &DEVICE_SIZES[2..]);
    check(Options { unified: true, ..early() }, CpuHelper::default(), part(2, 4), &DEVICE_SIZES[3..]);
}

/// A layer comes in several splits: the contents of its slots differ between them.
#[test]
fn a_device_without_some_operations() {
    let without = vec![ggml_sys::llama::GGML_OP_GLU, ggml_sys::llama::GGML_OP_ADD_ID];
    for (options, helper) in [(late(), CpuHelper::Off), (early(), CpuHelper::Auto)] {
        check(Options { without: without.clone(), ..options }, helper, known(&SOME), &DEVICE_SIZES[1..]);
    }
}

/// The lazy device multiplies on this CPU, so the helper's products have its bits.
#[test]
fn the_cpu_helper() {
    for (options, helper) in [(late(), CpuHelper::On), (early(), CpuHelper::Auto)] {
        check(options, helper, part(0, 3), &DEVICE_SIZES[1..4]);
    }
    check(early(), CpuHelper::On, cases::many_sequences(), &[(QUARTER, compare::ALL), (WAVES, QUARTER)]);
}

/// Nodes between a layer's products, whose memory a product may take that is computed before them.
#[test]
fn subsets_of_optional_tensors() {
    for (seed, options, helper) in [(20_000, late(), CpuHelper::Off), (30_000, early(), CpuHelper::Auto)] {
        let cases = optional::scales().chain(optional::random(seed, 20));
        check(options, helper, cases.collect(), &DEVICE_SIZES[1..4]);
    }
}

#[test]
fn several_sequences() {
    let cases = cases::two_sequences().into_iter().chain(cases::many_sequences());
    check(late(), CpuHelper::default(), cases.collect(), &DEVICE_SIZES[..4]);
}

/// Experts on the device are not read, and those that it evicts come from the host while they are there.
#[test]
fn reads_are_as_many_as_forecast() {
    let device = register(Options::default());
    fixture::forecast::check(&on(&[&device]), &fixture::forecast::SIZES);
    assert_sound(&device);
}

#[test]
fn recorded_routes() {
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = ordered(order);
        let with = |(cache, expert_cache)| ModelOptions {
            device: DeviceOptions { cache, ..on(&[&device]) },
            ..compare::options(expert_cache)
        };
        let all = DEVICE_SIZES.map(with);
        each(known(&SOME), |case| routing::check_recorded(&case, &[device.name()], &all));
        assert_sound(&device);
    }
}

/// Ids and weights of rerouted tokens are written on the device.
#[test]
fn rerouted_tokens() {
    let is_special = |case: &Case| case.name.contains("groups") || case.name.contains("per expert");
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = ordered(order);
        // Its routers see another input than its experts.
        let cases = known(&["gemma4"]).into_iter().chain(known(&SOME));
        let cases = cases.chain(cases::layouts().into_iter().filter(is_special));
        let sizes = [(QUARTER, QUARTER), (WAVES, QUARTER)];
        each(cases, |case| routing::check_rerouted(&case, &[device.name()], &sizes));
        assert_sound(&device);
    }
}

#[test]
fn dynamic_precision_at_its_ends() {
    let alike = [60.0, 25.0].map(|percent| (ExpertCache::Percent(percent), ExpertCache::Percent(percent)));
    let sizes = [alike[0], alike[1], (WAVES, compare::NONE)];
    let unified = Options { unified: true, ..Options::default() };
    for (at, options) in [late(), early(), unified].into_iter().enumerate() {
        let device = register(options);
        each(part(at, 4).into_iter().map(Case::brief), |case| {
            let mut failures = ends::check(&case, &[device.name()], &sizes, Repack::Off);
            failures.extend(device.faults());
            failures
        });
    }
}
