//! Devices with too little memory at the start and later, and a device that is gone.

use anyhow::Result;
use ggml_sys::llama;
use hobbit::{BatchToken, DeviceOptions, Model, ModelOptions, OpenError, Session, SessionOptions};
use hobbit_core::plan::ExpertCache;
use hobbit_synth::Spec;
use lagging_device::{Device, Options, Order, Pinned};

use super::compare::{ALL, HALF, Placed, QUARTER, WAVES, options, same};
use super::fixture::cases::{Case, case};
use super::fixture::script::{Evaluate, Row, Script};
use super::fixture::{notices_about, quiet_llama_cpp, write};
use super::{assert_sound, on};

/// A device, a model, and stock llama.cpp's logits there.
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
        quiet_llama_cpp();
        let dir = tempfile::tempdir().unwrap();
        // A layer's experts take more than anything llama.cpp itself allocates.
        let plain = case("qwen3moe", Spec { experts: 32, layers: 3, seed: 11, ..Spec::tiny("qwen3moe") });
        let case = Case { script, options: SessionOptions { n_ubatch: 64, ..plain.options.clone() }, ..plain };
        let path = case.write(dir.path());
        let expected = case.stock(&path, &Placed::on(&[device.name()]));
        Rig { device, case, path, expected, _dir: dir }
    }

    fn open(&self, cache: ExpertCache, headroom: f64) -> Model {
        let device = DeviceOptions { cache, headroom, ..on(&[&self.device]) };
        Model::open(&self.path, &ModelOptions { device, ..options(QUARTER) }).unwrap()
    }

    /// Evaluates the case; `trouble` gets the number of each batch before it. A failed batch is evaluated once more.
    /// Returns the errors, and the session.
    fn run(&self, model: &Model, trouble: &mut dyn FnMut(usize)) -> (Vec<String>, Session) {
        let session = model.session(&self.case.options).unwrap();
        let mut troubled = Troubled { session, trouble, n_batches: 0, errors: Vec::new() };
        let found = self.case.run(&mut troubled);
        assert_sound(&self.device);
        found.and_then(|found| same(&self.expected, &found)).unwrap();
        (troubled.errors, troubled.session)
    }

    fn noticed(&self, text: &str) {
        let notices = notices_about(self.device.name());
        assert!(notices.iter().any(|line| line.contains(text)), "{text}: {notices:?}");
    }
}

struct Troubled<'a> {
    session: Session,
    trouble: &'a mut dyn FnMut(usize),
    n_batches: usize,
    errors: Vec<String>,
}

impl Evaluate for Troubled<'_> {
    fn n_vocab(&self) -> usize {
        self.session.n_vocab()
    }

    fn evaluate(&mut self, batch: &[BatchToken]) -> Result<Vec<Vec<f32>>> {
        (self.trouble)(self.n_batches);
        self.n_batches += 1;
        Evaluate::evaluate(&mut self.session, batch).or_else(|error| {
            self.errors.push(error.to_string());
            Evaluate::evaluate(&mut self.session, batch)
        })
    }
}

#[test]
fn memory_refused_at_the_start_shrinks_the_cache() {
    let rig = Rig::new(Options::default(), Script::Single);
    let model = rig.open(ALL, 0.0);
    rig.device.fail_allocations_above(3 << 20);
    let (errors, session) = rig.run(&model, &mut |_| ());
    assert!(errors.is_empty(), "{errors:?}");
    let report = &model.device_reports()[0];
    assert!(report.cache_bytes > 3 << 20 && report.cache_bytes <= 9 << 20, "{report:?}");
    assert!(report.slots > 0 && report.slots < report.experts, "{report:?}");
    let counters = session.stats().devices[0];
    assert!(counters.cache_shrunk > 0 && counters.hits > 0 && counters.misses > 0, "{counters:?}");
    rig.noticed("the device refused memory");

    let rig = Rig::new(Options { pinned: Pinned::Refused, ..Options::default() }, Script::Brief);
    let (errors, _) = rig.run(&rig.open(QUARTER, 0.0), &mut |_| ());
    assert!(errors.is_empty(), "{errors:?}");
    rig.noticed("cannot pin");
}

#[test]
fn a_device_that_has_no_room_even_for_staging_is_refused() {
    let rig = Rig::new(Options::default(), Script::Brief);
    let error = rig.open(QUARTER, 100.0).session(&rig.case.options).err().unwrap();
    let text = error.to_string();
    assert!(matches!(error, OpenError::Plan(_)) && text.contains(rig.device.name()), "{text}");
    // Memory that the device calls free is refused.
    let spec = Spec { experts: 4, layers: 2, ff: 4096, ..Spec::tiny("qwen3moe") };
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec);
    let model = Rig { path, _dir: dir, ..rig };
    let options = SessionOptions { n_ctx: 256, n_batch: 8, n_ubatch: 8, threads: Some(1), ..SessionOptions::default() };
    let opened = model.open(QUARTER, 0.0);
    model.device.fail_allocations_above(256 * 4096 * 34 / 32 - 1);
    let error = opened.session(&options).err().unwrap();
    let text = error.to_string();
    assert!(matches!(error, OpenError::DeviceMemory { .. }), "{error:?}");
    assert!(["refuses 1114624 bytes", model.device.name()].iter().all(|part| text.contains(part)), "{text}");
    model.device.fail_allocations_above(u64::MAX);
    assert!(opened.session(&options).is_ok(), "memory has come back");
}

/// Any graph of a token may fail.
#[test]
fn a_graph_without_memory_makes_the_cache_smaller_and_runs() {
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        for cache in [ALL, HALF] {
            let rig = Rig::new(Options { order, ..Options::default() }, Script::Single);
            let model = rig.open(cache, 0.0);
            let (mut n_failed, mut before) = (0, 0);
            let (errors, session) = rig.run(&model, &mut |n| {
                if n % 3 == 1 && n_failed < 6 {
                    rig.device.fail_graphs(n / 3 % 9, 1, llama::GGML_STATUS_ALLOC_FAILED);
                    n_failed += 1;
                    before = model.device_reports()[0].cache_bytes;
                }
            });
            assert!(errors.is_empty(), "{errors:?}");
            assert_eq!(session.stats().devices[0].cache_shrunk, 6);
            assert!(model.device_reports()[0].cache_bytes < before, "{:?}", model.device_reports());
            rig.noticed("out of device memory");
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

/// Another program has taken memory that was free when the session began.
#[test]
fn scratch_memory_that_is_gone_comes_out_of_the_cache() {
    let rig = Rig::new(Options::default(), Script::Single);
    let model = rig.open(ExpertCache::Percent(90.0), 0.0);
    let mut taken = Vec::new();
    let (errors, session) = rig.run(&model, &mut |n| {
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
    assert!(session.stats().devices[0].cache_shrunk > 0);
    let report = &model.device_reports()[0];
    assert!(report.slots < report.experts, "{report:?}");
}

#[test]
fn a_lost_device_fails_every_batch_and_nothing_else() {
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let rig = Rig::new(Options { order, ..Options::default() }, Script::Brief);
        for cache in [ALL, QUARTER, WAVES] {
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
