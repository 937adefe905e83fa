//! Caches that get smaller and larger while a model is open: memory really goes and comes back, logits stay the same.
//! One test in a process of its own, whose resident set it measures.

use hobbit::stats::rss_bytes;
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions};
use hobbit_core::cache::Allocation;
use hobbit_core::plan::ExpertCache;
use hobbit_synth::Spec;
use lagging_device::{Device, Options, Pinned};

use super::compare::{ALL, NONE, Placed, QUARTER, Reference, devices, options, same};
use super::fixture::cases::case;
use super::fixture::in_own_process;
use super::{assert_sound, register};

struct Rig<'a>(Reference<'a>);

impl Rig<'_> {
    fn open(&self, expert_cache: ExpertCache, device: DeviceOptions, slots: Allocation) -> Model {
        let caching = CachingOptions { slots, ..CachingOptions::default() };
        let options = ModelOptions { device, caching, ..options(expert_cache) };
        Model::open(&self.0.path, &options).unwrap()
    }

    fn is_exact(&self, model: &Model) {
        let case = self.0.case;
        same(&self.0.expected, &case.run(&mut model.session(&case.options).unwrap()).unwrap()).unwrap();
    }
}

/// MiB of the resident set.
fn rss_mib() -> f64 {
    rss_bytes() as f64 / f64::from(1 << 20)
}

fn on(device: &Device, cache: ExpertCache) -> DeviceOptions {
    DeviceOptions { cache, ..super::on(&[device]) }
}

#[test]
fn caches_get_smaller_and_larger() {
    if !in_own_process("resize::caches_get_smaller_and_larger") {
        return;
    }
    let device = register(Options { pinned: Pinned::None, ..Options::default() });
    // 51 MiB of experts.
    let spec = Spec { layers: 4, experts: 32, topk: 4, embd: 256, ff: 512, seed: 31, ..Spec::tiny("qwen3moe") };
    let case = case("qwen3moe", spec);
    let rig = Rig(Reference::new(&case, &Placed::default()));
    the_cache_of_the_host(&rig);
    the_cache_of_a_device(&rig, &device);
    unequal_layers(&rig, &device);
    for slots in [Allocation::Even, Allocation::ShallowFirst { layers: 1 }] {
        both_with_dynamic_sizes(&rig, &device, slots);
    }
}

fn the_cache_of_the_host(rig: &Rig) {
    let model = rig.open(ALL, devices(&[]), Allocation::Even);
    let before = (model.host_cache_bytes(), model.set_host_cache(QUARTER));
    assert_eq!(before, (0, 0), "there is no cache before the first session");
    let session = model.session(&rig.0.case.options).unwrap();
    let planned = model.host_cache_bytes();
    assert!(planned > 48 << 20, "{planned}");
    rig.is_exact(&model);
    let full = rss_mib();
    let quarter = model.set_host_cache(QUARTER);
    assert!(quarter > planned / 5 && quarter <= planned / 4, "{quarter} of {planned}");
    assert_eq!(model.host_cache_bytes(), quarter);
    assert!(full - rss_mib() > 30.0, "{} MiB before, {} after", full, rss_mib());
    let slots: u32 = session.stats().layers.iter().map(|layer| layer.slots).sum();
    assert_eq!(slots, 32);
    rig.is_exact(&model);
    assert!(full - rss_mib() > 25.0, "{} MiB before, {} after a run", full, rss_mib());
    assert_eq!(model.set_host_cache(NONE), 0);
    rig.is_exact(&model);
    assert_eq!(model.set_host_cache(ExpertCache::Bytes(1 << 40)), planned, "no more than was planned");
    rig.is_exact(&model);
    rig.is_exact(&model);
    assert!(full - rss_mib() < 15.0, "{} MiB before, {} in the end", full, rss_mib());
    assert_eq!(model.set_host_cache(QUARTER), quarter);
    assert_eq!(model.set_host_cache(ExpertCache::Auto), planned);
}

fn free_on(device: &Device) -> u64 {
    let (mut free, mut total) = (0, 0);
    // SAFETY: a registered device.
    unsafe { ggml_sys::llama::ggml_backend_dev_memory(device.raw(), &mut free, &mut total) };
    free as u64
}

fn the_cache_of_a_device(rig: &Rig, device: &Device) {
    let model = rig.open(QUARTER, on(device, ALL), Allocation::Even);
    let _session = model.session(&rig.0.case.options).unwrap();
    rig.is_exact(&model);
    let report = model.device_reports().remove(0);
    assert_eq!((report.slots, report.experts), (128, 128));
    let full = free_on(device);
    let quarter = model.set_device_cache(QUARTER);
    let smaller = model.device_reports().remove(0);
    assert_eq!((smaller.slots, smaller.cache_bytes), (32, quarter));
    assert_eq!(free_on(device) - full, report.cache_bytes - quarter, "it is free on the device");
    rig.is_exact(&model);
    assert_eq!(model.set_device_cache(NONE), 0);
    rig.is_exact(&model);
    assert_eq!(model.set_device_cache(ExpertCache::Auto), report.cache_bytes);
    assert_eq!((model.device_reports().remove(0), free_on(device)), (report, full));
    rig.is_exact(&model);
    assert_sound(device);
}

/// Each layer keeps its share of a smaller cache, and gets its slots back with a larger one.
fn unequal_layers(rig: &Rig, device: &Device) {
    let model = rig.open(ExpertCache::Percent(62.5), devices(&[]), Allocation::ShallowFirst { layers: 1 });
    let session = model.session(&rig.0.case.options).unwrap();
    let slots = || session.stats().layers.iter().map(|layer| layer.slots).collect::<Vec<_>>();
    assert_eq!(slots(), [32, 16, 16, 16], "80 of 128: the first layer whole, and a third of the rest for each other");
    rig.is_exact(&model);
    let planned = model.host_cache_bytes();
    assert_eq!((model.set_host_cache(ExpertCache::Bytes(planned / 2)), slots()), (planned / 2, vec![16, 8, 8, 8]));
    rig.is_exact(&model);
    assert_eq!((model.set_host_cache(ExpertCache::Auto), slots()), (planned, vec![32, 16, 16, 16]));
    rig.is_exact(&model);

    let model = rig.open(QUARTER, on(device, QUARTER), Allocation::ShallowFirst { layers: 1 });
    let session = model.session(&rig.0.case.options).unwrap();
    let reported = &session.description().caching.slots_by_layer;
    assert_eq!((reported[0].cache.as_str(), reported[1].cache.as_str()), ("the host", device.name()));
    for slots in reported {
        assert!(slots.least == 0 && slots.most == 32, "{reported:?}");
    }
    rig.is_exact(&model);
    let report = model.device_reports().remove(0);
    assert_eq!(report.slots, 32);
    model.set_device_cache(ExpertCache::Bytes(report.cache_bytes / 2));
    rig.is_exact(&model);
    assert_eq!(model.set_device_cache(ExpertCache::Auto), report.cache_bytes);
    rig.is_exact(&model);
    assert_sound(device);
}

/// In the middle of a text, and while another session evaluates.
fn both_with_dynamic_sizes(rig: &Rig, device: &Device, slots: Allocation) {
    let size = ExpertCache::Percent(60.0);
    let model = rig.open(size, on(device, size), slots);
    let _session = model.session(&rig.0.case.options).unwrap();
    std::thread::scope(|scope| {
        let runs = [(); 2].map(|()| scope.spawn(|| rig.is_exact(&model)));
        for round in 0..200 {
            let size = ExpertCache::Percent([60.0, 5.0, 30.0, 0.0, 15.0][round % 5]);
            model.set_device_cache(size);
            model.set_host_cache(size);
        }
        runs.into_iter().for_each(|run| run.join().unwrap());
    });
    rig.is_exact(&model);
    assert_sound(device);
}
