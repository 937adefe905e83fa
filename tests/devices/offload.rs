//! Layers whose experts stay on the CPU (`-ncmoe`): the device computes them in large batches, as by llama.cpp's
//! op-offload.

use std::path::Path;

use hobbit::options::{CpuHelper, LowSource};
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions, PrecisionOptions};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::plan::ExpertCache;
use hobbit_core::stats::DeviceCounters;
use hobbit_synth::{Format, Spec};
use lagging_device::{Device, Report};

use super::compare::{ALL, NONE, Placed, QUARTER, open_stock, options};
use super::fixture::script::Evaluate;
use super::fixture::write;
use super::overlap::{batch, measure, session_options, text};
use super::{assert_sound, early, late, on, register};

const LAYERS: u32 = 4;
const EXPERTS: u32 = 16;
/// Slices of a layer's experts, all of which a batch of 64 tokens uses.
const LAYER: u64 = 3 * EXPERTS as u64;
/// Fewest tokens that are offloaded.
const MANY: usize = 32;

fn spec() -> Spec {
    Spec { layers: LAYERS, experts: EXPERTS, topk: 4, seed: 29, ..Spec::tiny("qwen3moe") }
}

/// Logits, the slices that a batch of `n` tokens copies to the device, and the device's report.
type Run = (Vec<Vec<f32>>, u64, Report);

fn hobbit(path: &Path, device: &Device, n_gpu_layers: i32, place: &DeviceOptions, n: usize) -> Run {
    let device_options = DeviceOptions { cpu_helper: CpuHelper::Off, ..place.clone() };
    let options = ModelOptions { device: device_options, n_gpu_layers, ..options(ALL) };
    let mut session = Model::open(path, &options).unwrap().session(&session_options()).unwrap();
    let uploads = |session: &hobbit::Session| session.stats().devices.first().map_or(0, |own| own.uploads);
    let before = uploads(&session);
    let mut logits = Vec::new();
    let report = measure(device, || logits = Evaluate::evaluate(&mut session, &batch(0, &text(n))).unwrap());
    (logits, uploads(&session) - before, report)
}

fn stock(path: &Path, device: &Device, placed: &Placed, n: usize) -> Run {
    let mut stock = open_stock(path, &session_options(), placed).unwrap();
    let mut logits = Vec::new();
    let report = measure(device, || logits = Evaluate::evaluate(&mut stock, &batch(0, &text(n))).unwrap());
    (logits, 0, report)
}

#[test]
fn the_device_computes_large_batches_of_the_cpus_layers() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec());
    for order in [late(), early()] {
        let device = register(order);
        let first_two = r"^blk\.(0|1)\.ffn_.*_exps";
        // Layers on the device, those whose experts the CPU computes, the device's cache, and slices copied.
        let rows: [(i32, u32, ExpertCache, &str, u64); 4] = [
            (-1, 2, ALL, first_two, 2 * LAYER),
            (-1, u32::MAX, ExpertCache::Auto, "ffn_.*_exps", 4 * LAYER),
            (-1, 0, NONE, "ffn_.*_exps", 4 * LAYER),
            // The output layer counts.
            (3, 0, ALL, "", 2 * LAYER),
        ];
        for (n_gpu_layers, n_cpu_moe, cache, on_cpu, slices) in rows {
            let all = if n_gpu_layers < 0 { 999 } else { n_gpu_layers };
            let placed = Placed { on_cpu, n_gpu_layers: all, ..Placed::on(&[device.name()]) };
            let place = DeviceOptions { n_cpu_moe, cache, ..on(&[&device]) };
            let run = |place: &DeviceOptions, n| hobbit(&path, &device, n_gpu_layers, place, n);
            for (n, slices) in [(64, Some(slices)), (MANY, None), (MANY - 1, Some(0))] {
                let what = format!("-ngl {n_gpu_layers} -ncmoe {n_cpu_moe}, {cache:?}, {n} tokens");
                let (expected, _, by_llama_cpp) = stock(&path, &device, &placed, n);
                let (found, uploads, report) = run(&place, n);
                assert!(found == expected, "{what}: other logits");
                // Not all experts are used by the fewest tokens.
                assert!(slices.map_or(uploads > 0, |slices| uploads == slices), "{what}: {uploads} uploads");
                // Rows of experts are gathered and scattered by indices.
                let [bytes, most] = [&report, &by_llama_cpp].map(|report| report.copied_bytes);
                assert!(n < MANY || bytes <= most + most / 64, "{what}: {bytes} bytes copied, {most} by llama.cpp");
                let [time, most] = [&report, &by_llama_cpp].map(|report| report.host_time);
                assert!(n < MANY || time <= most, "{what}: {time} s, {most} s by llama.cpp");
            }
            let (_, uploads, _) = run(&DeviceOptions { op_offload: false, ..place.clone() }, 64);
            assert_eq!(uploads, 0, "--no-op-offload");
        }
        assert_sound(&device);
    }
}

/// The device's policy and slots are of its own layers: those that only pass through it count for nothing there.
#[test]
fn offloaded_layers_have_no_part_in_the_devices_cache() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec());
    let device = register(late());
    let run = |op_offload: bool| {
        let place = DeviceOptions { n_cpu_moe: 2, op_offload, cache: QUARTER, ..on(&[&device]) };
        // A policy that asks for the router's scores.
        let caching = CachingOptions { policy: PolicyKind::Smoe, ..CachingOptions::default() };
        let place = DeviceOptions { cpu_helper: CpuHelper::Off, ..place };
        let precision = PrecisionOptions { deterministic: true, ..PrecisionOptions::default() };
        let options = ModelOptions { device: place, caching, precision, ..options(ALL) };
        let mut session = Model::open(&path, &options).unwrap().session(&session_options()).unwrap();
        let mut logits = Evaluate::evaluate(&mut session, &batch(0, &text(64))).unwrap();
        let prompt = session.stats().devices[0];
        for (at, token) in text(16).into_iter().enumerate() {
            logits.extend(Evaluate::evaluate(&mut session, &batch(64 + at, &[token])).unwrap());
        }
        assert_sound(&device);
        (logits, session.stats().devices[0] - prompt)
    };
    let (with, without) = (run(true), run(false));
    assert!(with.0 == without.0, "other logits");
    let counts = |own: &DeviceCounters| (own.hits, own.misses, own.uploads);
    assert_eq!(counts(&with.1), counts(&without.1));
    assert!(with.1.hits > 0 && with.1.misses > 0);
}

/// Low precision saves copies of a device's own layers. A device without layers, beside a host that has everything,
/// misses nothing.
#[test]
fn low_precision_is_for_the_devices_own_layers() {
    let [dir, low_dir] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let high = Spec { embd: 256, ff: 64, types: vec![Format::Q8_0], ..spec() };
    let low = Spec { types: vec![Format::Q4_0], dense_type: Some(Format::Q8_0), ..high.clone() };
    let (path, low) = (write(dir.path(), &high), write(low_dir.path(), &low));
    let device = register(late());
    for (n_cpu_moe, is_dynamic) in [(2, true), (u32::MAX, false)] {
        let device = DeviceOptions { n_cpu_moe, cache: QUARTER, ..on(&[&device]) };
        let options = ModelOptions { device, low: Some(LowSource::File(low.clone())), ..options(ALL) };
        let session = Model::open(&path, &options).unwrap().session(&session_options()).unwrap();
        assert_eq!(session.description().precision.is_dynamic(), is_dynamic, "-ncmoe {n_cpu_moe}");
    }
}
