//! Devices on bad days: too little memory at the start and later, and a device that is gone.

use ggml_sys::llama;
use gguf_tools::synth::Spec;
use hobbit::options::DeviceChoice;
use hobbit::{BatchToken, DeviceOptions, Error, Model, ModelOptions, SessionOptions};
use hobbit_core::plan::ExpertCache;
use lagging_device::{Device, Options, Order, Pinned};

use super::cases::{Case, Source};
use super::check::{ALL, QUARTER};
use super::compare::{BUDGET, Hobbit, same};
use super::fixture;
use super::script::{Evaluate, Row, Script};
use super::stock::Stock;

/// A device, a model, and what stock llama.cpp makes of it there.
struct Rig {
    device: Device,
    case: Case,
    path: std::path::PathBuf,
    expected: Vec<Row>,
    _dir: tempfile::TempDir,
}

impl Rig {
    fn new(options: Options, script: Script) -> Rig {
        let device = lagging_device::register(options);
        fixture::quiet_llama_cpp();
        let dir = tempfile::tempdir().unwrap();
        // A layer's experts take more than anything llama.cpp itself allocates.
        let spec = Spec { experts: 32, layers: 3, seed: 11, ..Spec::tiny("qwen3moe") };
        let path = fixture::write(dir.path(), &spec);
        let options = SessionOptions { n_ctx: 512, n_ubatch: 64, threads: Some(1), ..SessionOptions::default() };
        let case = Case { name: "qwen3moe".into(), model: Source::Synth(Box::new(spec)), options, script };
        let mut stock = Stock::open_on(&path, &case.options, &[device.name()]).unwrap();
        let expected = case.script.run(&mut stock, case.options.n_batch as usize).unwrap();
        Rig { device, case, path, expected, _dir: dir }
    }

    fn open(&self, cache: ExpertCache, headroom: f64) -> Model {
        let devices = DeviceChoice::Named(vec![self.device.name().into()]);
        let device = DeviceOptions { devices, cache, headroom, ..DeviceOptions::default() };
        let options = ModelOptions { budget: BUDGET, expert_cache: QUARTER, device, ..ModelOptions::default() };
        Model::open(&self.path, &options).unwrap()
    }

    /// Evaluates the case; `trouble` comes before each batch, of which it gets the number. A failed batch is evaluated once
    /// more. What failed, and the session's side.
    fn run(&self, model: &Model, trouble: &mut dyn FnMut(usize)) -> (Vec<String>, Hobbit) {
        let hobbit = Hobbit::new(model.session(&self.case.options).unwrap());
        let mut troubled = Troubled { hobbit, trouble, n_batches: 0, errors: Vec::new() };
        let found = self.case.script.run(&mut troubled, self.case.options.n_batch as usize);
        let faults = self.device.faults();
        assert!(faults.is_empty(), "{faults:?}");
        found.and_then(|found| same(&self.expected, &found)).unwrap();
        (troubled.errors, troubled.hobbit)
    }

    fn said(&self, what: &str) {
        let notices = fixture::notices_about(self.device.name());
        assert!(notices.iter().any(|line| line.contains(what)), "{what}: {notices:?}");
    }
}

struct Troubled<'a> {
    hobbit: Hobbit,
    trouble: &'a mut dyn FnMut(usize),
    n_batches: usize,
    errors: Vec<String>,
}

impl Evaluate for Troubled<'_> {
    fn n_vocab(&self) -> usize {
        self.hobbit.n_vocab()
    }

    fn evaluate(&mut self, batch: &[BatchToken]) -> Result<Vec<Vec<f32>>, String> {
        (self.trouble)(self.n_batches);
        self.n_batches += 1;
        self.hobbit.evaluate(batch).or_else(|error| {
            self.errors.push(error);
            self.hobbit.evaluate(batch)
        })
    }
}

#[test]
fn memory_that_is_refused_at_the_start_makes_the_cache_smaller() {
    let rig = Rig::new(Options::default(), Script::Single);
    let model = rig.open(ALL, 0.0);
    rig.device.fail_allocations_above(3 << 20);
    let (errors, hobbit) = rig.run(&model, &mut |_| ());
    assert!(errors.is_empty(), "{errors:?}");
    let report = &model.device_reports()[0];
    assert!(report.cache_bytes > 3 << 20 && report.cache_bytes <= 9 << 20, "{report:?}");
    assert!(report.slots > 0 && report.slots < report.experts, "{report:?}");
    let counters = hobbit.stats().devices[0];
    assert!(counters.cache_shrunk > 0 && counters.hits > 0 && counters.misses > 0, "{counters:?}");
    rig.said("the device refused memory");
}

#[test]
fn a_device_that_has_no_room_even_for_staging_is_refused() {
    let rig = Rig::new(Options::default(), Script::Brief);
    let error = rig.open(QUARTER, 100.0).session(&rig.case.options).err().unwrap();
    let text = error.to_string();
    assert!(matches!(error, Error::Plan(_)) && text.contains(rig.device.name()), "{text}");
    // What it says is free is not to be had.
    let spec = Spec { experts: 4, layers: 2, ff: 4096, ..Spec::tiny("qwen3moe") };
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &spec);
    let model = Rig { path, _dir: dir, ..rig };
    let options = SessionOptions { n_ctx: 256, n_batch: 8, n_ubatch: 8, threads: Some(1), ..SessionOptions::default() };
    let opened = model.open(QUARTER, 0.0);
    model.device.fail_allocations_above(256 * 4096 * 34 / 32 - 1);
    let error = opened.session(&options).err().unwrap();
    let text = error.to_string();
    assert!(matches!(error, Error::DeviceMemory { .. }), "{error:?}");
    assert!(["refuses 1114624 bytes", model.device.name()].iter().all(|part| text.contains(part)), "{text}");
    model.device.fail_allocations_above(u64::MAX);
    assert!(opened.session(&options).is_ok(), "memory has come back");
}

#[test]
fn pinned_memory_that_is_refused_is_told() {
    let rig = Rig::new(Options { pinned: Pinned::Refused, ..Options::default() }, Script::Brief);
    let (errors, _) = rig.run(&rig.open(QUARTER, 0.0), &mut |_| ());
    assert!(errors.is_empty(), "{errors:?}");
    rig.said("cannot pin");
}

/// Wherever in a token's graphs it happens.
#[test]
fn a_graph_without_memory_makes_the_cache_smaller_and_runs() {
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        for cache in [ALL, ExpertCache::Percent(50.0)] {
            let rig = Rig::new(Options { order, ..Options::default() }, Script::Single);
            let model = rig.open(cache, 0.0);
            let mut n_failed = 0;
            let mut before = 0;
            let (errors, hobbit) = rig.run(&model, &mut |n| {
                if n % 3 == 1 && n_failed < 6 {
                    rig.device.fail_graphs(n / 3 % 9, 1, llama::GGML_STATUS_ALLOC_FAILED);
                    n_failed += 1;
                    before = model.device_reports()[0].cache_bytes;
                }
            });
            assert!(errors.is_empty(), "{errors:?}");
            let shrunk = hobbit.stats().devices[0].cache_shrunk;
            assert_eq!(shrunk, 6);
            assert!(model.device_reports()[0].cache_bytes < before, "{:?}", model.device_reports());
            rig.said("out of device memory");
        }
    }
}

#[test]
fn a_device_that_stays_without_memory_fails_one_batch() {
    let rig = Rig::new(Options::default(), Script::Single);
    let model = rig.open(QUARTER, 0.0);
    let (errors, _) = rig.run(&model, &mut |n| {
        if (1..9).contains(&n) {
            rig.device.fail_graphs(n - 1, 2, llama::GGML_STATUS_ALLOC_FAILED);
        }
    });
    assert_eq!(errors.len(), 8, "{errors:?}");
    for error in errors {
        let expected = format!("device {} is out of memory", rig.device.name());
        assert!(error.contains(&expected) && error.contains("fewer layers"), "{error}");
    }
}

/// Another program has taken what was free when the session began.
#[test]
fn scratch_memory_that_is_gone_comes_out_of_the_cache() {
    let rig = Rig::new(Options::default(), Script::Single);
    let model = rig.open(ExpertCache::Percent(90.0), 0.0);
    let mut taken = Vec::new();
    let (errors, hobbit) = rig.run(&model, &mut |n| {
        if n == 0 {
            let (mut free, mut total) = (0, 0);
            // SAFETY: a registered device; the buffer is freed below.
            unsafe {
                llama::ggml_backend_dev_memory(rig.device.raw(), &mut free, &mut total);
                let buft = llama::ggml_backend_dev_buffer_type(rig.device.raw());
                taken.push(llama::ggml_backend_buft_alloc_buffer(buft, free - 4096));
            }
        }
    });
    // SAFETY: allocated above, freed once.
    taken.into_iter().for_each(|buffer| unsafe { llama::ggml_backend_buffer_free(buffer) });
    assert!(errors.is_empty(), "{errors:?}");
    assert!(hobbit.stats().devices[0].cache_shrunk > 0);
    let report = &model.device_reports()[0];
    assert!(report.slots < report.experts, "{report:?}");
}

#[test]
fn a_lost_device_fails_every_batch_and_nothing_else() {
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let rig = Rig::new(Options { order, ..Options::default() }, Script::Brief);
        for cache in [ALL, QUARTER, ExpertCache::Bytes(1)] {
            let model = rig.open(cache, 0.0);
            let mut session = model.session(&rig.case.options).unwrap();
            session.feed(&[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
            // In the middle of the next batch, which is a single graph where every expert is on the device.
            let n_before = if cache == ALL { 0 } else { 4 };
            rig.device.fail_graphs(n_before, 1, llama::GGML_STATUS_FAILED);
            let error = session.feed(&[9]).unwrap_err().to_string();
            assert!(error.contains(&format!("device {} failed", rig.device.name())), "{error}");
            session.feed(&[9]).unwrap();
        }
        let model = rig.open(QUARTER, 0.0);
        let mut session = model.session(&rig.case.options).unwrap();
        session.feed(&[1, 2, 3]).unwrap();
        rig.device.lose();
        for tokens in [vec![4], vec![4, 5, 6]] {
            let error = session.feed(&tokens).unwrap_err().to_string();
            assert!(error.contains(&format!("device {} failed", rig.device.name())), "{error}");
        }
        drop(session);
        drop(model);
    }
}
