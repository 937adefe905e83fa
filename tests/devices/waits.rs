//! Waits of the host for the device: one for a layer of which the device has some experts, none for a layer that it has
//! wholly, whatever the other layers are.

use hobbit::options::CpuHelper;
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions, Session};
use hobbit_core::cache::Allocation;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::plan::ExpertCache;
use hobbit_core::predict::PredictorKind;
use hobbit_core::trace::{Record, TraceReader};
use hobbit_synth::Spec;
use lagging_device::{Device, Options};

use super::compare::{ALL, Placed, QUARTER, Reference, options, same};
use super::fixture::cases::{Case, case};
use super::fixture::one_thread;
use super::{assert_sound, late, on, register};

const LAYERS: u64 = 4;
const TOKENS: u64 = 8;
/// Width of an input that is much larger than what a layer copies otherwise.
const WIDE: u32 = 512;
/// With this rule and cache the first two of four layers are wholly on the device, the others have two slots each.
const TWO_WHOLE: (Allocation, ExpertCache) = (Allocation::ShallowFirst { layers: 2 }, ExpertCache::Percent(62.5));

fn spec() -> Spec {
    Spec { layers: LAYERS as u32, experts: 8, topk: 2, seed: 29, ..Spec::tiny("qwen3moe") }
}

fn model_case() -> Case {
    case("qwen3moe", spec())
}

fn caching(policy: PolicyKind, slots: Allocation) -> CachingOptions {
    CachingOptions { policy, slots, predictor: Some(PredictorKind::None), ..CachingOptions::default() }
}

fn model_options(device: &Device, cache: ExpertCache, caching: CachingOptions) -> ModelOptions {
    let device = DeviceOptions { cache, cpu_helper: CpuHelper::Off, ..on(&[device]) };
    ModelOptions { device, caching, ..options(ALL) }
}

fn session_of(model: &Model) -> Session {
    model.session(&one_thread(256)).unwrap()
}

/// Waits for a few tokens, evaluated one by one.
fn waits(device: &Device, session: &mut Session) -> u64 {
    session.reset();
    session.feed(&[7]).unwrap();
    device.reset();
    (0..TOKENS).for_each(|i| session.feed(&[3 + (i * 37 % 50) as i32]).unwrap());
    assert_sound(device);
    device.report().waits
}

#[test]
fn the_host_waits_once_for_a_divided_layer() {
    let dir = tempfile::tempdir().unwrap();
    let path = model_case().write(dir.path());
    // The first policy asks for nothing but ids, the second for the router's scores.
    for policy in [PolicyKind::Lru, PolicyKind::Smoe] {
        let device = register(late());
        let [none, all] = [ALL, QUARTER].map(|cache| {
            let caching = caching(policy, Allocation::Even);
            let model = Model::open(&path, &model_options(&device, cache, caching)).unwrap();
            waits(&device, &mut session_of(&model))
        });
        assert_eq!(all - none, TOKENS * LAYERS, "{policy:?}: {none} waits without divided layers");
    }
}

#[test]
fn no_waits_for_a_layer_wholly_on_the_device() {
    for options in [late(), super::early()] {
        let device = register(options);
        let case = model_case();
        let reference = Reference::new(&case, &Placed::on(&[device.name()]));
        let (slots, cache) = TWO_WHOLE;
        let open = |cache| {
            let caching = caching(PolicyKind::Lru, slots);
            Model::open(&reference.path, &model_options(&device, cache, caching)).unwrap()
        };
        let none = waits(&device, &mut session_of(&open(ALL)));
        let model = open(cache);
        let mut session = session_of(&model);
        let divided = |session: &mut Session| (waits(&device, session) - none) / TOKENS;
        assert_eq!(divided(&mut session), 2);
        let exact = || same(&reference.expected, &case.run(&mut model.session(&case.options).unwrap()).unwrap());
        exact().unwrap();
        assert_eq!(divided(&mut session), 2, "many misses of other layers evict nothing in whole ones");
        let bytes = model.device_reports()[0].cache_bytes;
        model.set_device_cache(ExpertCache::Bytes(bytes / 2));
        assert_eq!(divided(&mut session), LAYERS);
        exact().unwrap();
        assert_eq!(model.set_device_cache(ExpertCache::Auto), bytes);
        assert_eq!(divided(&mut session), 2, "they are filled again");
        exact().unwrap();
        assert_sound(&device);
    }
}

/// A trace needs the choices of all layers, and the router's scores, which come from logits of the device: its input is
/// not copied for them.
#[test]
fn a_trace_has_layers_that_are_wholly_on_the_device() {
    let device = register(Options::default());
    let dir = tempfile::tempdir().unwrap();
    let case = case("qwen3moe", Spec { embd: WIDE, ..spec() });
    let path = case.write(dir.path());
    let copied = |slots, cache, trace| {
        let options = model_options(&device, cache, caching(PolicyKind::Lru, slots));
        let model = Model::open(&path, &ModelOptions { trace, ..options }).unwrap();
        waits(&device, &mut session_of(&model));
        device.report().copied_bytes
    };
    for (name, (slots, cache)) in [("two", TWO_WHOLE), ("all", (Allocation::Even, ALL))] {
        let trace = dir.path().join(name);
        let bytes = copied(slots, cache, Some(trace.clone()));
        let records = TraceReader::open(&trace).unwrap().map(Result::unwrap);
        let layers: Vec<_> =
            records.filter_map(|record| if let Record::Layer(layer) = record { Some(layer) } else { None }).collect();
        assert_eq!(layers.len() as u64, (1 + TOKENS) * LAYERS);
        assert!(layers.iter().all(|layer| layer.unselected.len() == 6), "of 8, two are selected");
        if cache == ALL {
            let more = bytes - copied(slots, cache, None);
            assert!(more < TOKENS * LAYERS * u64::from(WIDE) * 4, "{more} bytes more");
        }
    }
    assert_sound(&device);
}

/// The host has a quarter of the experts, and is waited for whenever it reads another one.
#[test]
fn reads_of_files_take_the_devices_time() {
    const BANDWIDTH: f64 = 1e6;
    let case = model_case();
    for unified in [false, true] {
        let device = register(Options { unified, disk_bandwidth: BANDWIDTH, ..late() });
        let reference = Reference::new(&case, &Placed::on(&[device.name()]));
        let caching = CachingOptions { fill: false, ..caching(PolicyKind::Lru, Allocation::Even) };
        let all = model_options(&device, QUARTER, caching);
        let model = Model::open(&reference.path, &ModelOptions { expert_cache: QUARTER, ..all }).unwrap();
        let mut session = model.session(&case.options).unwrap();
        let read = |session: &Session| session.stats().total().bytes_read as f64;
        let before = (read(&session), device.report().host_time);
        same(&reference.expected, &case.run(&mut session).unwrap()).unwrap();
        let (bytes, seconds) = (read(&session) - before.0, device.report().host_time - before.1);
        assert!(bytes > 0.0 && seconds > bytes / BANDWIDTH, "{bytes} bytes in {seconds} s");
        assert_sound(&device);
    }
}
