//! Experts on devices whose memory is not the host's: every logit is, bit for bit, that of stock llama.cpp with all
//! layers on the same device.

mod ahead;
#[path = "../exactness/cases.rs"]
#[allow(dead_code)]
mod cases;
mod check;
#[path = "../exactness/compare.rs"]
#[allow(dead_code)]
mod compare;
#[path = "../exactness/dynamic.rs"]
mod dynamic;
#[path = "../fixture/mod.rs"]
mod fixture;
mod helper;
mod overlap;
mod places;
#[path = "../exactness/routes.rs"]
#[allow(dead_code)]
mod recorded;
mod rerouted;
mod routes;
#[path = "../exactness/script.rs"]
#[allow(dead_code)]
mod script;
#[path = "../exactness/rerouted.rs"]
mod sent;
mod skipped;
mod skipping;
#[path = "../exactness/stock.rs"]
#[allow(dead_code)]
mod stock;
mod trouble;
mod virtual_experts;
mod warm;

use cases::Case;
use check::{SIZES, check};
use hobbit::DeviceOptions;
use hobbit::options::{CpuHelper, DeviceChoice};
use hobbit_core::plan::ExpertCache;
use lagging_device::{Options, Order, Pinned};

/// A lazy device in the given order of execution.
fn lagging(options: Options, cases: &[Case], sizes: &[(ExpertCache, ExpertCache)]) {
    let device = lagging_device::register(Options { memory: 1 << 30, ..options });
    fixture::quiet_llama_cpp();
    let named = DeviceOptions {
        devices: DeviceChoice::Named(vec![device.name().into()]),
        headroom: 0.0,
        ..DeviceOptions::default()
    };
    let failures: Vec<String> = cases
        .iter()
        .flat_map(|case| {
            let mut failures = check(case, &named, sizes);
            failures.extend(device.faults());
            failures
        })
        .collect();
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

fn architectures(part: usize, of: usize) -> Vec<Case> {
    cases::all_architectures().into_iter().skip(part).step_by(of).collect()
}

#[test]
fn copies_late_in_the_first_half_of_architectures() {
    lagging(Options { order: Order::CopiesLate, ..Options::default() }, &architectures(0, 2), &SIZES[..4]);
}

#[test]
fn copies_late_in_the_second_half_of_architectures() {
    lagging(Options { order: Order::CopiesLate, ..Options::default() }, &architectures(1, 2), &SIZES[..4]);
}

#[test]
fn copies_early() {
    lagging(Options { order: Order::CopiesEarly, ..Options::default() }, &architectures(1, 4), &SIZES);
}

#[test]
fn memory_that_cannot_be_pinned() {
    lagging(Options { pinned: Pinned::Refused, ..Options::default() }, &architectures(2, 8), &SIZES[1..2]);
    lagging(Options { pinned: Pinned::None, ..Options::default() }, &architectures(3, 8), &SIZES[1..2]);
}

#[test]
fn unified_memory() {
    let options = Options { unified: true, ..Options::default() };
    lagging(Options { order: Order::CopiesLate, ..options.clone() }, &architectures(0, 4), &SIZES[2..]);
    lagging(Options { order: Order::CopiesEarly, ..options }, &architectures(2, 4), &SIZES[3..]);
}

/// A layer comes in several splits: what its slots get in one is not what another needs.
#[test]
fn a_device_without_some_operations() {
    let without = vec![ggml_sys::llama::GGML_OP_GLU, ggml_sys::llama::GGML_OP_ADD_ID];
    for (order, cpu_helper) in [(Order::CopiesLate, CpuHelper::Off), (Order::CopiesEarly, CpuHelper::Auto)] {
        let options = Options { memory: 1 << 30, order, without: without.clone(), ..Options::default() };
        let device = lagging_device::register(options);
        let named = DeviceOptions {
            devices: DeviceChoice::Named(vec![device.name().into()]),
            headroom: 0.0,
            cpu_helper,
            ..DeviceOptions::default()
        };
        fixture::quiet_llama_cpp();
        let known = ["qwen3moe", "gpt-oss", "deepseek2", "olmoe"];
        let cases = cases::all_architectures().into_iter().filter(|case| known.contains(&case.name.as_str()));
        let failures: Vec<String> = cases.flat_map(|case| check(&case, &named, &SIZES[1..])).collect();
        assert!(failures.is_empty(), "{cpu_helper:?}: {}", failures.join("\n"));
        assert_eq!(device.faults(), Vec::<String>::new());
    }
}

/// The lazy device multiplies on this CPU: what the helper computes has its bits.
#[test]
fn cpu_helper() {
    for (mode, order) in [(CpuHelper::On, Order::CopiesLate), (CpuHelper::Auto, Order::CopiesEarly)] {
        let device = lagging_device::register(Options { memory: 1 << 30, order, ..Options::default() });
        let named = DeviceOptions {
            devices: DeviceChoice::Named(vec![device.name().into()]),
            headroom: 0.0,
            cpu_helper: mode,
            ..DeviceOptions::default()
        };
        fixture::quiet_llama_cpp();
        let cases = architectures(0, 3);
        let failures: Vec<String> = cases.iter().flat_map(|case| check(case, &named, &SIZES[1..4])).collect();
        assert!(failures.is_empty(), "{mode:?}: {} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
        assert_eq!(device.faults(), Vec::<String>::new());
    }
}
