//! Dynamic precision on devices.

use gguf_tools::synth::Spec;
use hobbit::options::{DeviceChoice, LowShare, LowSource, PrecisionMode};
use hobbit::{DeviceOptions, Model, ModelOptions, PrecisionOptions};
use hobbit_core::plan::ExpertCache;
use lagging_device::{Options, Order};

use super::cases::{self, Case, Source};
use super::check::WAVES;
use super::compare::{BUDGET, Hobbit, same};
use super::dynamic::{End, check_on, lowered};
use super::fixture;
use super::script::{Row, Script};

const SIZES: [(ExpertCache, ExpertCache); 3] = [
    (ExpertCache::Percent(60.0), ExpertCache::Percent(60.0)),
    (ExpertCache::Percent(25.0), ExpertCache::Percent(25.0)),
    (WAVES, ExpertCache::Bytes(0)),
];

fn ends(options: Options, part: usize) {
    let device = lagging_device::register(Options { memory: 1 << 30, ..options });
    fixture::quiet_llama_cpp();
    let brief = |case: Case| Case { script: Script::Brief, ..case };
    let cases: Vec<Case> = cases::all_architectures().into_iter().skip(part).step_by(4).map(brief).collect();
    let mut failures = Vec::new();
    for (case, end) in cases.iter().flat_map(|case| [(case, End::AllHigh), (case, End::AllLow)]) {
        failures.extend(check_on(case, end, &[device.name()], &SIZES));
        failures.extend(device.faults());
    }
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn ends_with_copies_late() {
    ends(Options { order: Order::CopiesLate, ..Options::default() }, 0);
}

#[test]
fn ends_with_copies_early() {
    ends(Options { order: Order::CopiesEarly, ..Options::default() }, 1);
}

#[test]
fn ends_in_unified_memory() {
    ends(Options { unified: true, ..Options::default() }, 2);
}

/// In deterministic mode, when things run decides nothing: not even what is skipped.
#[test]
fn skipping_does_not_depend_on_when_things_run() {
    fixture::quiet_llama_cpp();
    for arch in ["qwen3moe", "gpt-oss", "deepseek2"] {
        let spec = Spec { experts: 16, topk: 4, seed: 21, ..Spec::tiny(arch) };
        let dir = tempfile::tempdir().unwrap();
        let high = fixture::write(dir.path(), &spec);
        let low_dir = tempfile::tempdir().unwrap();
        let low = fixture::write(low_dir.path(), &lowered(&spec));
        let case = Case { model: Source::Synth(Box::new(spec)), script: Script::Single, ..cases::plain().remove(0) };
        let run = |options: Options, device_cache, expert_cache| {
            let device = lagging_device::register(options);
            let devices = DeviceChoice::Named(vec![device.name().into()]);
            let options = ModelOptions {
                budget: BUDGET,
                expert_cache,
                low: Some(LowSource::File(low.clone())),
                low_share: LowShare::Percent(40.0),
                precision: PrecisionOptions {
                    mode: Some(PrecisionMode::Dynamic),
                    t1: Some(0.4),
                    t2: Some(0.7),
                    deterministic: true,
                    ..PrecisionOptions::default()
                },
                device: DeviceOptions { devices, cache: device_cache, headroom: 0.0, ..DeviceOptions::default() },
                ..ModelOptions::default()
            };
            let model = Model::open(&high, &options).unwrap();
            let mut hobbit = Hobbit::new(model.session(&case.options).unwrap());
            let rows = case.script.run(&mut hobbit, case.options.n_batch as usize).unwrap();
            let used = hobbit.stats().total().used;
            assert!(used.high > 0 && used.low > 0 && used.skipped > 0, "{arch}: {used:?}");
            assert_eq!(device.faults(), Vec::<String>::new());
            rows
        };
        let late = || Options { order: Order::CopiesLate, ..Options::default() };
        let early = || Options { order: Order::CopiesEarly, ..Options::default() };
        let equal =
            |what: &str, a: &[Row], b: &[Row]| same(a, b).unwrap_or_else(|error| panic!("{arch}, {what}: {error}"));
        let half = ExpertCache::Percent(50.0);
        for (device_cache, host_cache) in
            [(ExpertCache::Percent(25.0), half), (WAVES, half), (half, ExpertCache::Bytes(0))]
        {
            let rows = run(late(), device_cache, host_cache);
            equal("copies early", &rows, &run(early(), device_cache, host_cache));
            equal("again", &rows, &run(late(), device_cache, host_cache));
        }
        // Without slots of its own a device has what the host has.
        let rows = run(late(), WAVES, half);
        equal("unified", &rows, &run(Options { unified: true, ..late() }, WAVES, half));
        equal("unified, early", &rows, &run(Options { unified: true, ..early() }, WAVES, half));
    }
}
