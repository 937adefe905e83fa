//! Experts that dynamic precision leaves out: the device computes what the CPU does without them.

use std::path::Path;

use gguf_tools::synth::{Format, Spec};
use hobbit::options::{DeviceChoice, LowSource, PrecisionMode};
use hobbit::{DeviceOptions, Model, ModelOptions, PrecisionOptions, SessionOptions};
use hobbit_core::plan::ExpertCache;
use lagging_device::{Options, Order, register};

use super::check::WAVES;
use super::compare::{BUDGET, Hobbit};
use super::fixture;
use super::script::{Row, Script};

/// Without caches every use is a miss, so that both leave out the same ones: all but each token's first few.
fn run(path: &Path, low: &Path, device: DeviceOptions) -> (Vec<Row>, u64) {
    let precision = PrecisionOptions {
        mode: Some(PrecisionMode::Dynamic),
        t1: Some(0.5),
        t2: Some(0.6),
        ..PrecisionOptions::default()
    };
    let options = ModelOptions {
        budget: BUDGET,
        expert_cache: ExpertCache::Bytes(0),
        low: Some(LowSource::File(low.to_owned())),
        precision,
        device,
        ..ModelOptions::default()
    };
    let session = SessionOptions { n_ctx: 512, threads: Some(1), ..SessionOptions::default() };
    let session = Model::open(path, &options).unwrap().session(&session).unwrap();
    let mut hobbit = Hobbit::new(session);
    let rows = Script::Brief.run(&mut hobbit, 512).unwrap();
    (rows, hobbit.stats().total().used.skipped)
}

#[test]
fn a_device_leaves_out_what_the_cpu_leaves_out() {
    let (dir, low_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let spec = Spec { topk: 4, dense_type: Some(Format::Q8_0), ..Spec::tiny("qwen3moe") };
    let path = fixture::write(dir.path(), &spec);
    let low = fixture::write(low_dir.path(), &Spec { types: vec![Format::Q4_0], ..spec });
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = register(Options { memory: 1 << 30, order, ..Options::default() });
        fixture::quiet_llama_cpp();
        let named = |names| DeviceOptions {
            devices: DeviceChoice::Named(names),
            headroom: 0.0,
            cache: WAVES,
            cpu_helper: hobbit::options::CpuHelper::Off,
            ..DeviceOptions::default()
        };
        let (expected, on_cpu) =
            run(&path, &low, DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() });
        let (found, on_device) = run(&path, &low, named(vec![device.name().into()]));
        assert_eq!(device.faults(), Vec::<String>::new());
        assert!(on_cpu > 0, "nothing was left out");
        assert_eq!(on_cpu, on_device);
        for (expected, found) in expected.iter().zip(&found) {
            let apart = expected.logits.iter().zip(&found.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-3, "{}: {apart} apart from the CPU", expected.what);
        }
    }
}
