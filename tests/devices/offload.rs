//! Layers whose experts stay on the CPU (`-ncmoe`): the device computes them in large batches, as by llama.cpp's
//! op-offload.

use std::path::Path;

use gguf_tools::synth::Spec;
use hobbit::options::CpuHelper;
use hobbit::{DeviceOptions, Model, ModelOptions};
use hobbit_core::plan::ExpertCache;
use lagging_device::Device;

use super::compare::{ALL, NONE, Placed, open_stock, options};
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

/// Logits, and the slices and bytes that a batch of `n` tokens copies to the device.
type Run = (Vec<Vec<f32>>, u64, u64);

fn hobbit(path: &Path, device: &Device, n_gpu_layers: i32, place: &DeviceOptions, n: usize) -> Run {
    let device_options = DeviceOptions { cpu_helper: CpuHelper::Off, ..place.clone() };
    let options = ModelOptions { device: device_options, n_gpu_layers, ..options(ALL) };
    let mut session = Model::open(path, &options).unwrap().session(&session_options()).unwrap();
    let uploads = |session: &hobbit::Session| session.stats().devices.first().map_or(0, |own| own.uploads);
    let before = uploads(&session);
    let mut logits = Vec::new();
    let report = measure(device, || logits = Evaluate::evaluate(&mut session, &batch(0, &text(n))).unwrap());
    (logits, uploads(&session) - before, report.copied_bytes)
}

fn stock(path: &Path, device: &Device, placed: &Placed, n: usize) -> Run {
    let mut stock = open_stock(path, &session_options(), placed).unwrap();
    let mut logits = Vec::new();
    let report = measure(device, || logits = Evaluate::evaluate(&mut stock, &batch(0, &text(n))).unwrap());
    (logits, 0, report.copied_bytes)
}

#[test]
fn the_device_computes_large_batches_of_the_cpus_layers() {
    let dir = tempfile::tempdir().unwrap();
    let path =
        write(dir.path(), &Spec { layers: LAYERS, experts: EXPERTS, topk: 4, seed: 29, ..Spec::tiny("qwen3moe") });
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
            for (n, slices) in [(64, slices), (MANY - 1, 0)] {
                let what = format!("-ngl {n_gpu_layers} -ncmoe {n_cpu_moe}, {cache:?}, {n} tokens");
                let (expected, _, most) = stock(&path, &device, &placed, n);
                let (found, uploads, bytes) = run(&place, n);
                assert!(found == expected, "{what}: other logits");
                assert_eq!(uploads, slices, "{what}");
                // Rows of experts are gathered and scattered by indices.
                assert!(n < MANY || bytes <= most + most / 64, "{what}: {bytes} bytes copied, {most} by llama.cpp");
            }
            let (_, uploads, _) = run(&DeviceOptions { op_offload: false, ..place.clone() }, 64);
            assert_eq!(uploads, 0, "--no-op-offload");
        }
        assert_sound(&device);
    }
}
