//! Checks for a real device: `HOBBIT_TEST_DEVICE` is its name in `--list-devices`. With `LAG` (the default) and `ORIN`
//! it is the tests' own device, with an RTX 4090's speeds or a Jetson AGX Orin's.
//!
//! benches/gpu/check.sh runs these tests one by one and reads the lines that begin with `record: `. Models are
//! generated, so that the test program runs alone on another machine. On kernels that round rows of a batch unlike
//! single ones (CUDA's, Vulkan's), only single tokens have llama.cpp's bits; prompts are near.

use std::path::PathBuf;
use std::ptr;
use std::time::Instant;

use anyhow::{Result, ensure};
use ggml_sys::llama::{self, ggml_backend_t, ggml_tensor};
use hobbit::engine::Stock;
use hobbit::options::{CpuHelper, UnifiedMemory};
use hobbit::stats::DeviceCounters;
use hobbit::{CachingOptions, DeviceError, DeviceOptions, Model, ModelOptions, OpenError, Session, Token};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::plan::ExpertCache;
use hobbit_synth::Spec;
use lagging_device::{Device, Options};
use serde_json::{Value, json};

use super::compare::{ALL, HALF, Placed, QUARTER, WAVES, assert_none, devices, open_stock, options};
use super::fixture::cases::{Case, all_architectures, recent_q8_0};
use super::fixture::script::{Evaluate, bits};
use super::fixture::{one_thread, write};
use super::overlap::{batch, chatter, text};
use super::precision::{KL_MAX, divergence};
use super::{assert_sound, quiet_llama_cpp, register};

const VARIABLE: &str = "HOBBIT_TEST_DEVICE";
/// One of 16 experts of each layer has no slot.
const MOST: ExpertCache = ExpertCache::Percent(93.75);

type Logits = Vec<Vec<f32>>;

/// The device under test.
struct Target {
    name: String,
    lag: Option<Device>,
}

impl Target {
    fn new() -> Target {
        let name = std::env::var(VARIABLE).unwrap_or_else(|_| "LAG".to_owned());
        let profile = match name.as_str() {
            "LAG" => Options::rtx_4090(),
            "ORIN" => Options::orin_64gb(),
            _ => {
                quiet_llama_cpp();
                let found = hobbit::devices(&[]).expect("a list of devices");
                assert!(found.iter().any(|device| device.name == name), "no device '{name}' in {found:?}");
                return Target { name, lag: None };
            }
        };
        // As kernels of another make: what the CPU computed would have other bits.
        let lag = register(Options { rounds_products: true, ..profile });
        Target { name: lag.name().to_owned(), lag: Some(lag) }
    }

    fn options(&self, cache: ExpertCache) -> DeviceOptions {
        DeviceOptions { cache, cpu_helper: CpuHelper::Off, ..devices(&[&self.name]) }
    }

    fn assert_sound(&self) {
        self.lag.iter().for_each(assert_sound);
    }

    /// Median seconds of some work, on the tests' own device in virtual time.
    fn seconds(&self, mut work: impl FnMut()) -> f64 {
        work();
        let mut times = [0.0; 9].map(|_: f64| {
            self.lag.iter().for_each(Device::reset);
            let start = Instant::now();
            work();
            self.lag.map_or_else(|| start.elapsed().as_secs_f64(), |lag| lag.report().host_time)
        });
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }
}

fn record(value: &Value) {
    println!("\nrecord: {value}");
}

fn one_by_one(engine: &mut dyn Evaluate, tokens: &[Token]) -> Result<Logits> {
    let one = |(at, token): (usize, &Token)| Ok(engine.evaluate(&batch(at, &[*token]))?.remove(0));
    tokens.iter().enumerate().map(one).collect()
}

/// Tokens of which the logits are not llama.cpp's.
fn unequal(expected: &Logits, found: &Logits) -> usize {
    expected.iter().zip(found).filter(|(expected, found)| bits(expected) != bits(found)).count()
}

/// KL divergence in nats of the median token, and the mean. In random models a difference in rounding sends a token to
/// another expert now and then, which the mean shows and the median does not.
fn kl(expected: &Logits, found: &Logits) -> (f64, f64) {
    let one = |(expected, found): (&Vec<f32>, &Vec<f32>)| {
        let kl = divergence(std::slice::from_ref(expected), std::slice::from_ref(found));
        // `f64::max` drops what is not a number.
        if kl.is_nan() { f64::INFINITY } else { kl }
    };
    let mut all: Vec<f64> = expected.iter().zip(found).map(one).collect();
    all.sort_by(f64::total_cmp);
    (all[all.len() / 2], all.iter().sum::<f64>() / all.len() as f64)
}

/// Logits of single tokens, then of a prompt.
fn single_and_prompt<E: Evaluate>(engine: &mut E, clear: fn(&mut E)) -> Result<[Logits; 2]> {
    let single = one_by_one(engine, &text(24))?;
    clear(engine);
    Ok([single, engine.evaluate(&batch(0, &text(100)))?])
}

/// The unequal single tokens of a case with any size of cache, and the largest [`kl`] of a prompt.
fn compared(target: &Target, case: &Case) -> Result<(usize, f64, f64)> {
    let dir = tempfile::tempdir()?;
    let path = case.write(dir.path());
    let mut stock = open_stock(&path, &case.options, &Placed::on(&[&target.name]))?;
    let expected = single_and_prompt(&mut stock, Stock::clear)?;
    drop(stock);
    let (mut n_unequal, mut median, mut mean) = (0, 0.0_f64, 0.0_f64);
    // The last is run by llama.cpp alone, if it has room.
    for (cache, expert_cache) in [(ALL, HALF), (QUARTER, HALF), (WAVES, HALF), (ExpertCache::Auto, ExpertCache::Auto)] {
        let options = ModelOptions { device: target.options(cache), ..options(expert_cache) };
        let mut session = Model::open(&path, &options)?.session(&case.options)?;
        let found = single_and_prompt(&mut session, Session::reset)?;
        n_unequal += unequal(&expected[0], &found[0]);
        let apart = kl(&expected[1], &found[1]);
        (median, mean) = (median.max(apart.0), mean.max(apart.1));
    }
    Ok((n_unequal, median, mean))
}

#[test]
fn architectures() {
    let target = Target::new();
    let check = |case: Case| {
        record(&json!({ "begin": case.name }));
        let found = match compared(&target, &case) {
            Ok((unequal, median, mean)) => json!({
                "architecture": case.name, "pass": unequal == 0 && median < KL_MAX && mean.is_finite(),
                "unequal": unequal, "kl": median, "kl_mean": mean,
            }),
            Err(error) => {
                json!({ "architecture": case.name, "pass": false, "kl": null, "error": format!("{error:#}") })
            }
        };
        record(&found);
        (found["pass"] == false).then(|| found.to_string())
    };
    // Other tests have all of them on the tests' own device.
    let step = if std::env::var_os(VARIABLE).is_some() { 1 } else { 8 };
    assert_none(all_architectures().into_iter().chain(recent_q8_0()).step_by(step).filter_map(check));
    target.assert_sound();
}

/// A model with divided layers, and llama.cpp's logits of single tokens on the device.
struct Rig {
    target: Target,
    _dir: tempfile::TempDir,
    path: PathBuf,
    tokens: Vec<Token>,
    expected: Logits,
}

impl Rig {
    fn new() -> Rig {
        let (target, dir) = (Target::new(), tempfile::tempdir().unwrap());
        let path = write(dir.path(), &Spec { layers: 3, experts: 16, topk: 4, seed: 3, ..Spec::tiny("qwen3moe") });
        let tokens = chatter(300);
        let mut stock = open_stock(&path, &one_thread(512), &Placed::on(&[&target.name])).unwrap();
        let expected = one_by_one(&mut stock, &tokens).unwrap();
        Rig { target, _dir: dir, path, tokens, expected }
    }

    /// A device with slots of its own, also where it could compute in the host's memory.
    fn options(&self, cache: ExpertCache) -> DeviceOptions {
        DeviceOptions { unified: UnifiedMemory::Off, ..self.target.options(cache) }
    }

    fn open(&self, device: DeviceOptions) -> Result<Model, OpenError> {
        let caching = CachingOptions { policy: PolicyKind::Lru, fill: false, ..CachingOptions::default() };
        Model::open(&self.path, &ModelOptions { caching, device, ..options(ALL) })
    }

    /// hobbit's logits, and its counts. `before` is called before each token.
    fn run(&self, model: &Model, before: &mut dyn FnMut(usize)) -> Result<(Logits, DeviceCounters)> {
        let mut session = model.session(&one_thread(512))?;
        let mut found = Vec::new();
        for (at, token) in self.tokens.iter().enumerate() {
            before(at);
            found.extend(Evaluate::evaluate(&mut session, &batch(at, &[*token]))?);
        }
        self.target.assert_sound();
        Ok((found, session.stats().devices[0]))
    }

    fn exact(&self, model: &Model, before: &mut dyn FnMut(usize)) -> Result<DeviceCounters> {
        let (found, counters) = self.run(model, before)?;
        let differing = unequal(&self.expected, &found);
        ensure!(differing == 0, "{differing} of {} tokens have other logits than llama.cpp's", found.len());
        Ok(counters)
    }
}

/// Products that begin before the host knows the router's choice, and events that are recorded in every token.
#[test]
fn early_products_and_events() {
    let rig = Rig::new();
    for cache in [MOST, HALF] {
        let counters = rig.exact(&rig.open(rig.options(cache)).unwrap(), &mut |_| ()).unwrap();
        assert!(counters.hits > 0 && counters.misses > 0, "{counters:?}");
        record(&json!({ "note": format!("{} hits, {} misses", counters.hits, counters.misses) }));
    }
}

/// The CPU rounds unlike the device: near, not equal.
#[test]
fn promotions() {
    let rig = Rig::new();
    let device = DeviceOptions { cpu_helper: CpuHelper::On, ..rig.options(QUARTER) };
    let (found, counters) = rig.run(&rig.open(device).unwrap(), &mut |_| ()).unwrap();
    let (median, mean) = kl(&rig.expected, &found);
    let (helped, promoted) = (counters.helper_experts, counters.promoted);
    let note = format!("{helped} experts on the CPU, {promoted} promoted, KL {median:.1e}, mean {mean:.1e}");
    record(&json!({ "note": note }));
    assert!(median < KL_MAX && mean.is_finite() && helped > 0, "KL {median}, {counters:?}");
}

#[test]
fn unified_off() {
    let rig = Rig::new();
    let counters = rig.exact(&rig.open(rig.options(QUARTER)).unwrap(), &mut |_| ()).unwrap();
    assert!(counters.uploads > 0, "{counters:?}");
}

#[test]
fn unified_on() {
    let rig = Rig::new();
    match rig.open(DeviceOptions { unified: UnifiedMemory::On, ..rig.options(ALL) }) {
        Err(OpenError::Device(error @ DeviceError::NotUnified { .. })) => record(&json!({ "skip": error.to_string() })),
        model => assert_eq!(rig.exact(&model.unwrap(), &mut |_| ()).unwrap().uploads, 0),
    }
}

#[test]
fn shrinking() {
    let rig = Rig::new();
    let model = rig.open(rig.options(ExpertCache::Percent(60.0))).unwrap();
    let mut sizes = Vec::new();
    let mut shrink = |at: usize| {
        if at % 8 == 7 {
            let percent = [5.0, 60.0, 30.0, 0.0, 15.0][at / 8 % 5];
            sizes.push(model.set_device_cache(ExpertCache::Percent(percent)));
        }
    };
    rig.exact(&model, &mut shrink).unwrap();
    let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
    record(&json!({ "note": format!("{} sizes, {least} to {most} bytes", sizes.len()) }));
    assert!(least < most);
}

/// Tensors of one context in device memory.
struct Tensors {
    context: *mut llama::ggml_context,
    buffer: llama::ggml_backend_buffer_t,
}

impl Tensors {
    /// `make` makes tensors in the context; they get memory afterwards.
    fn new<T>(
        buft: llama::ggml_backend_buffer_type_t,
        make: impl FnOnce(*mut llama::ggml_context) -> T,
    ) -> (T, Tensors) {
        // SAFETY: plain calls of ggml's API, with a live buffer type.
        unsafe {
            let params = llama::ggml_init_params { mem_size: 1 << 20, mem_buffer: ptr::null_mut(), no_alloc: true };
            let context = llama::ggml_init(params);
            let made = make(context);
            let buffer = llama::ggml_backend_alloc_ctx_tensors_from_buft(context, buft);
            assert!(!buffer.is_null(), "no device memory");
            (made, Tensors { context, buffer })
        }
    }
}

impl Drop for Tensors {
    fn drop(&mut self) {
        // SAFETY: made by this type, freed once.
        unsafe {
            llama::ggml_backend_buffer_free(self.buffer);
            llama::ggml_free(self.context);
        }
    }
}

const COPY_BYTES: usize = 32 << 20;
const N_COPIES: usize = 2;
const N_NODES: usize = 256;

/// GB/s of copies from `bytes` to the device.
fn upload_speed(target: &Target, stream: ggml_backend_t, tensor: *mut ggml_tensor, bytes: *const u8) -> f64 {
    let copies = || {
        // SAFETY: `bytes` are as many as the tensor's and outlive the copies, which end here.
        unsafe {
            (0..N_COPIES).for_each(|_| {
                llama::ggml_backend_tensor_set_async(stream, tensor, bytes.cast(), 0, COPY_BYTES);
            });
            llama::ggml_backend_synchronize(stream);
        }
    };
    (N_COPIES * COPY_BYTES) as f64 / target.seconds(copies) / 1e9
}

/// Microseconds of a graph of this many small nodes, with the wait for its end.
fn graph_time(target: &Target, stream: ggml_backend_t, buft: llama::ggml_backend_buffer_type_t, n_nodes: usize) -> f64 {
    // SAFETY: the context has room for the nodes.
    let (graph, tensors) = Tensors::new(buft, |context| unsafe {
        let mut node = llama::ggml_new_tensor_1d(context, llama::GGML_TYPE_F32, 256);
        (0..n_nodes).for_each(|_| node = llama::ggml_scale(context, node, 0.5));
        let graph = llama::ggml_new_graph(context);
        llama::ggml_build_forward_expand(graph, node);
        graph
    });
    // SAFETY: tensors without a defined value would be NaN at worst, which is as fast.
    let compute = || unsafe {
        assert_eq!(llama::ggml_backend_graph_compute_async(stream, graph), llama::GGML_STATUS_SUCCESS);
        llama::ggml_backend_synchronize(stream);
    };
    let seconds = target.seconds(compute);
    drop(tensors);
    1e6 * seconds
}

/// The link, submissions and read-backs, beside what the tests' own device assumes (tests/lagging/src/profiles.rs).
#[test]
fn speeds() {
    let target = Target::new();
    let name = std::ffi::CString::new(&*target.name).unwrap();
    // SAFETY: a device of this name is there, and all that is made is freed below.
    let found = unsafe {
        let device = llama::ggml_backend_dev_by_name(name.as_ptr());
        let stream = llama::ggml_backend_dev_init(device, ptr::null());
        assert!(!stream.is_null());
        let buft = llama::ggml_backend_dev_buffer_type(device);
        let (tensor, tensors) = Tensors::new(buft, |context| {
            llama::ggml_new_tensor_1d(context, llama::GGML_TYPE_F32, COPY_BYTES as i64 / 4)
        });
        let pageable = vec![1_u8; COPY_BYTES];
        let pageable = upload_speed(&target, stream, tensor, pageable.as_ptr());
        let host = llama::ggml_backend_dev_host_buffer_type(device);
        let pinned = (!host.is_null()).then(|| {
            let buffer = llama::ggml_backend_buft_alloc_buffer(host, COPY_BYTES);
            assert!(!buffer.is_null(), "no pinned memory");
            let base: *mut u8 = llama::ggml_backend_buffer_get_base(buffer).cast();
            base.write_bytes(1, COPY_BYTES);
            let speed = upload_speed(&target, stream, tensor, base);
            llama::ggml_backend_buffer_free(buffer);
            speed
        });
        let mut value = 0_f32;
        let read_back = 1e6
            * target.seconds(|| {
                llama::ggml_backend_tensor_get(tensor, ptr::from_mut(&mut value).cast(), 0, size_of_val(&value));
            });
        let one = graph_time(&target, stream, buft, 1);
        let many = graph_time(&target, stream, buft, 1 + N_NODES);
        drop(tensors);
        llama::ggml_backend_free(stream);
        json!({
            "pinned_gb_s": pinned, "pageable_gb_s": pageable, "node_us": (many - one) / N_NODES as f64,
            "graph_us": one, "read_back_us": read_back,
        })
    };
    let profile = |options: &Options| {
        let [submit, wait] = [options.node_latency, options.wait_latency].map(|seconds| 1e6 * seconds);
        json!({
            "pinned_gb_s": options.link_bandwidth / 1e9,
            "pageable_gb_s": options.pageable_bandwidth.min(options.link_bandwidth) / 1e9,
            "node_us": submit,
            "graph_us": submit + wait,
            "read_back_us": 1e6 * options.link_latency + wait,
        })
    };
    let profiles = json!({ "RTX 4090": profile(&Options::rtx_4090()), "AGX Orin": profile(&Options::orin_64gb()) });
    record(&json!({ "speeds": found, "profiles": profiles }));
    target.assert_sound();
}
