//! Layers whose experts are all on the device: it does not wait for the host, which learns the router's choice while
//! the first products run.

use std::path::Path;

use hobbit::options::CpuHelper;
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions, Session};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::plan::ExpertCache;
use hobbit_core::predict::PredictorKind;
use hobbit_synth::{Format, Spec};
use lagging_device::{Device, Options, Order, Report};

use super::compare::{ALL, HALF, QUARTER, options};
use super::fixture::cases::case;
use super::fixture::write;
use super::overlap::{batch, chatter, measure, session_options, spec};
use super::{assert_sound, check, late, on, register};

const LAYERS: u64 = 3;
const N_USED: u64 = 4;
const EXPERTS: u32 = 16;
/// One of the experts of each layer has no slot.
const MOST: ExpertCache = ExpertCache::Percent(93.75);
/// Seconds of a copy, and of a wait of the host.
const LATENCY: f64 = 1e-3;

/// Products of a layer's gates and ups take 9 ms, longer than anything that the host waits for.
fn device(order: Order) -> Device {
    register(Options {
        order,
        link_latency: LATENCY,
        small_copy_bytes: 16 << 10,
        wait_latency: LATENCY,
        compute_bandwidth: 1.2e8,
        ..Options::default()
    })
}

fn session(path: &Path, device: &Device, cache: ExpertCache) -> Session {
    let caching = CachingOptions {
        policy: PolicyKind::Lru,
        predictor: Some(PredictorKind::None),
        fill: false,
        ..CachingOptions::default()
    };
    let device = DeviceOptions { cache, cpu_helper: CpuHelper::Off, ..on(&[device]) };
    Model::open(path, &ModelOptions { caching, device, ..options(ALL) }).unwrap().session(&session_options()).unwrap()
}

/// Reports of the tokens of a text, each with its misses.
fn reports(device: &Device, session: &mut Session) -> Vec<(u64, Report)> {
    let tokens = chatter(64);
    let mut evaluate = |(at, &token): (usize, &i32)| {
        let before = session.stats().devices[0].misses;
        let report = measure(device, || session.evaluate(&batch(at, &[token])).unwrap());
        (session.stats().devices[0].misses - before, report)
    };
    tokens.iter().enumerate().map(&mut evaluate).collect()
}

#[test]
fn the_device_never_waits_in_a_layer_whose_experts_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec(EXPERTS, LAYERS as u32, N_USED as u32));
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = device(order);
        let idle = |report: &Report| report.host_time - report.compute_busy;
        // The device has all layers wholly: the host waits for the logits only.
        let (_, whole) = reports(&device, &mut session(&path, &device, ALL)).pop().unwrap();
        let all = reports(&device, &mut session(&path, &device, MOST));
        // After a miss the device gets another table.
        let hits = all.windows(2).filter(|pair| pair[0].0 == 0 && pair[1].0 == 0).map(|pair| &pair[1].1);
        let hits: Vec<&Report> = hits.collect();
        assert!(hits.len() >= 8, "{order:?}: {} tokens without a miss", hits.len());
        for report in hits {
            assert!((idle(report) - idle(&whole)).abs() < 1e-9, "{order:?}: {} s idle", idle(report));
            assert_eq!(report.waits - whole.waits, LAYERS, "one for each choice");
            assert_eq!(report.copied_bytes - whole.copied_bytes, LAYERS * N_USED * 4, "choices come, nothing goes");
        }
        let missed = all.iter().find(|(misses, _)| *misses > 0);
        assert!(missed.is_some_and(|(_, report)| idle(report) > idle(&whole) + LATENCY));
        assert_sound(&device);
    }
}

/// The device finds fault with a token that has one slot twice, as it would by slots borrowed for missing experts.
#[test]
fn only_quantised_experts_without_a_slot_borrow_one() {
    use Format::{Bf16, F16, F32, Q8_0};
    // The last two differ in what is multiplied early: gate and up.
    let types = [(F16, F16), (Bf16, Bf16), (F32, F32), (F16, Q8_0), (Q8_0, F16)];
    let cases = types.map(|(dtype, down)| {
        let spec =
            Spec { types: vec![dtype], down_types: vec![down], dense_type: Some(Q8_0), ..Spec::tiny("qwen3moe") };
        case(format!("qwen3moe {dtype:?} down {down:?}"), spec)
    });
    check(Options { forbids_repeats: true, ..late() }, CpuHelper::Off, cases.into(), &[(QUARTER, ALL), (HALF, ALL)]);
}

/// Vulkan keeps an object for each record of an event until the host waits for the event. Here no layer waits for an
/// upload, but in the first token.
#[test]
fn events_are_waited_for_now_and_then() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec(EXPERTS, LAYERS as u32, N_USED as u32));
    for cache in [MOST, ALL] {
        let device = register(late());
        let mut session = session(&path, &device, cache);
        (0..400).for_each(|_| session.feed(&[7]).unwrap());
        assert_sound(&device);
        let report = device.report();
        assert!((1..300).contains(&report.event_records), "{cache:?}: {report:?}");
    }
}
