//! Measures a device, its link and the CPU through ggml's generic backend interface, for [`hobbit_core::calibrate`].
//!
//! The CPU is found through ggml's registry, as every device is: a build that loads its backends at run time offers no
//! other access to it.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use ggml_sys::llama;
use ggml_sys::llama::{ggml_backend_dev_t, ggml_tensor};

use super::device_error::DeviceError;
use super::ggml;
use super::ggml::{Buffer, Context, Cpu, Stream};
use super::params::default_threads;
use super::quantise::Ggml;
use hobbit_core::calibrate::Calibration;
use hobbit_core::gguf::{Catalog, GgmlType, Recode};
use hobbit_core::options::{CpuHelper, DeviceChoice, DeviceOptions};

/// Element types that a report measures: a K-quant, and a common high precision.
const USUAL_TYPES: [&str; 2] = ["q4_K", "q8_0"];
/// Time for one figure: enough for a steady value.
const FIGURE_BUDGET: Duration = Duration::from_millis(150);

/// Measures `dev` and the CPU's products of these element types. Takes about half a second, 64 MiB of host memory and
/// 32 MiB of the device's, all freed again.
pub(super) fn calibrate(dev: ggml_backend_dev_t, threads: u32, element_types: &[GgmlType]) -> Calibration {
    super::log::install();
    let mut found = Calibration {
        device: ggml::name(dev),
        device_description: ggml::description(dev),
        threads,
        ..Calibration::default()
    };
    // An upload is two bandwidths; its latency takes no time.
    match upload(dev, 2 * FIGURE_BUDGET) {
        Ok(Upload { pinned_bytes_per_s, pageable_bytes_per_s, latency_s }) => {
            found.upload_bytes_per_s = pinned_bytes_per_s.filter(is_figure);
            found.upload_pageable_bytes_per_s = Some(pageable_bytes_per_s).filter(is_figure);
            found.upload_latency_s = Some(latency_s).filter(is_figure);
        }
        Err(reason) => found.notes.push(format!("cannot measure copies to {}: {reason}", found.device)),
    }
    for dtype in element_types {
        match cpu_expert(*dtype, threads, FIGURE_BUDGET) {
            Ok(seconds) => _ = found.cpu_expert_seconds_per_byte.insert(dtype.name().to_owned(), seconds),
            Err(reason) => found.notes.push(format!("cannot measure {dtype} experts on the CPU: {reason}")),
        }
    }
    found
}

fn is_figure(value: &f64) -> bool {
    *value > 0.0 && value.is_finite()
}

/// Figures of the devices that `options` choose (with [`DeviceChoice::Auto`] every GPU, or the CPU if there is none),
/// measured in half a second per device. The caller must register devices of RPC servers first.
///
/// # Errors
/// An unknown device.
pub fn calibrate_report(options: &DeviceOptions) -> Result<Vec<Calibration>, DeviceError> {
    let types: Vec<GgmlType> = USUAL_TYPES.iter().filter_map(|name| GgmlType::from_name(name)).collect();
    let chosen = chosen(&options.devices)?;
    Ok(chosen.into_iter().map(|dev| calibrate(dev, helper_threads(options), &types)).collect())
}

fn chosen(choice: &DeviceChoice) -> Result<Vec<ggml_backend_dev_t>, DeviceError> {
    let (cpus, gpus): (Vec<_>, Vec<_>) = ggml::computing_devices().into_iter().partition(|dev| ggml::is_cpu(*dev));
    match choice {
        DeviceChoice::Auto if !gpus.is_empty() => Ok(gpus),
        DeviceChoice::Auto | DeviceChoice::None => Ok(cpus),
        DeviceChoice::Named(names) => {
            let all = [gpus, cpus].concat();
            let find = |name: &String| all.iter().copied().find(|dev| ggml::name(*dev) == *name);
            let known = || all.iter().copied().map(ggml::name).collect();
            let unknown = |name: &String| DeviceError::Unknown { name: name.clone(), known: known() };
            names.iter().map(|name| find(name).ok_or_else(|| unknown(name))).collect()
        }
    }
}

/// Bytes per second of weights of a type that the CPU multiplies with one row, on a session's default number of
/// threads. Measured now, within `budget` without set-up. `None` for a type without a product.
pub fn cpu_bytes_per_second(element_type: GgmlType, budget: Duration) -> Option<f64> {
    super::log::install();
    let threads = u32::try_from(default_threads()).unwrap_or(1).max(1);
    let seconds = cpu_expert(element_type, threads, budget).ok()?;
    (seconds.is_finite() && seconds > 0.0).then(|| 1.0 / seconds)
}

/// Threads that compute experts on the CPU.
pub(super) fn helper_threads(options: &DeviceOptions) -> u32 {
    match options.cpu_helper {
        CpuHelper::Threads(threads) => u32::from(threads),
        _ => u32::try_from(default_threads()).unwrap_or(1).max(1),
    }
}

/// Element types of the slices in a catalog, most bytes first; ties in the order of their ids.
pub(super) fn by_bytes(catalog: &Catalog) -> Vec<GgmlType> {
    let mut bytes: BTreeMap<GgmlType, u64> = BTreeMap::new();
    for slice in catalog.classes.iter().flat_map(|class| &class.slices) {
        *bytes.entry(slice.dtype).or_default() += slice.bytes;
    }
    let mut types: Vec<_> = bytes.into_iter().collect();
    types.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    types.into_iter().map(|(dtype, _)| dtype).collect()
}

/// Largest test buffer, on the device and on the host.
const BYTES_MAX: usize = 32 << 20;
/// Smallest buffer that gives a useful measurement.
const BYTES_MIN: usize = 1 << 20;
/// Divisor of a device's free memory: the part the measurement may use.
const FREE_SHARE: usize = 8;
/// Size of one copy, close to an expert's slice.
const CHUNK_BYTES: usize = 1 << 20;
/// Size of a copy that measures latency.
const TINY_BYTES: usize = 64;
/// Number of latency copies. The fastest counts; the others were disturbed.
const TINY_COPIES: usize = 8;

/// Measures copies from pinned memory, where the device offers it, and from ordinary memory, with half of `budget`
/// each.
fn upload(dev: ggml_backend_dev_t, budget: Duration) -> Result<Upload, String> {
    let started = Instant::now();
    let link = Link::new(dev)?;
    // SAFETY: a registered device. Null where it has no pinned memory.
    let pinned_type = unsafe { llama::ggml_backend_dev_host_buffer_type(dev) };
    let pinned = (!pinned_type.is_null()).then(|| Buffer::new(pinned_type, link.bytes)).flatten();
    let pinned_bytes_per_s = pinned.filter(|pinned| pinned.is_of(pinned_type)).map(|pinned| {
        pinned.fill(1);
        // SAFETY: host memory of `bytes` bytes; `rate` waits for every copy.
        unsafe { link.rate(pinned.base(), started + budget / 2) }
    });
    let pageable = vec![1_u8; link.bytes];
    // SAFETY: the vector has `bytes` bytes and outlives the copies; both calls wait for every copy.
    let (pageable_bytes_per_s, latency_s) = unsafe {
        let latency_s = link.latency(pageable.as_ptr().cast());
        (link.rate(pageable.as_ptr().cast(), started + budget), latency_s)
    };
    Ok(Upload { pinned_bytes_per_s, pageable_bytes_per_s, latency_s })
}

/// Speed of copies to a device.
struct Upload {
    /// From pinned host memory, in bytes per second; `None` where the device offers none.
    pinned_bytes_per_s: Option<f64>,
    /// From ordinary host memory, in bytes per second.
    pageable_bytes_per_s: f64,
    latency_s: f64,
}

/// A stream to a device, and a tensor there.
struct Link {
    stream: Stream,
    tensor: *mut ggml_tensor,
    bytes: usize,
    /// Keeps the tensor's memory alive.
    _memory: (Buffer, Context),
}

impl Link {
    fn new(dev: ggml_backend_dev_t) -> Result<Self, String> {
        let stream = Stream::new(dev).ok_or("ggml refuses a stream of the device")?;
        // SAFETY: a registered device.
        let buft = unsafe { llama::ggml_backend_dev_buffer_type(dev) };
        let mut bytes = match ggml::memory(dev) {
            // Not every device reports its memory.
            (_, 0) => BYTES_MAX,
            (free, _) => (free as usize / FREE_SHARE).clamp(BYTES_MIN, BYTES_MAX) / CHUNK_BYTES * CHUNK_BYTES,
        };
        loop {
            let context = Context::new(1, 0).ok_or("ggml refuses a context")?;
            let tensor = context.tensor(llama::GGML_TYPE_I8, [bytes as i64, 1, 1]);
            match context.allocate(buft) {
                Some(buffer) => return Ok(Self { stream, tensor, bytes, _memory: (buffer, context) }),
                None if bytes / 2 < BYTES_MIN => return Err(format!("ggml refuses a buffer of {bytes} bytes")),
                None => bytes = (bytes / 2).next_multiple_of(CHUNK_BYTES),
            }
        }
    }

    /// Seconds of `copies` copies of `copy_bytes` bytes each, queued together.
    ///
    /// # Safety
    /// `host` has `self.bytes` bytes.
    unsafe fn copy(&self, host: *const c_void, copies: usize, copy_bytes: usize) -> f64 {
        let started = Instant::now();
        for i in 0..copies {
            let offset = i * copy_bytes % self.bytes;
            // SAFETY: by the caller; `offset + copy_bytes <= bytes`, since sizes are powers of two times each other or
            // `bytes` is whole chunks. The stream is awaited below.
            unsafe { self.stream.set(self.tensor, host.cast::<u8>().add(offset).cast(), offset, copy_bytes) };
        }
        self.stream.synchronize();
        started.elapsed().as_secs_f64()
    }

    /// Bytes per second until `deadline`, in bursts of growing length; at least one burst after the first.
    ///
    /// # Safety
    /// `host` has `self.bytes` bytes.
    unsafe fn rate(&self, host: *const c_void, deadline: Instant) -> f64 {
        // SAFETY: by the caller, here and below.
        unsafe { self.copy(host, 1, CHUNK_BYTES) };
        let (mut bytes, mut seconds) = (0, 0.0);
        let mut copies = 1;
        loop {
            // SAFETY: as above.
            let burst = unsafe { self.copy(host, copies, CHUNK_BYTES) };
            bytes += copies * CHUNK_BYTES;
            seconds += burst;
            copies = (copies * 2).min(self.bytes / CHUNK_BYTES);
            // The next burst takes up to twice as long.
            if Instant::now() + Duration::from_secs_f64(2.0 * burst) >= deadline {
                return bytes as f64 / seconds;
            }
        }
    }

    /// Seconds of the fastest tiny copy.
    ///
    /// # Safety
    /// `host` has `self.bytes` bytes.
    unsafe fn latency(&self, host: *const c_void) -> f64 {
        // SAFETY: by the caller.
        let seconds = (0..TINY_COPIES).map(|_| unsafe { self.copy(host, 1, TINY_BYTES) });
        // A zero duration is below the clock's resolution.
        seconds.fold(f64::INFINITY, f64::min).max(1e-9)
    }
}

/// Row length and rows of a matrix: those of an expert of a large model.
const SHAPE: [u64; 2] = [4096, 2048];
/// Bytes of all matrices together: too large for a core's caches, because experts come from memory.
const BYTES: u64 = 32 << 20;
/// Fill byte of the weights. As a scale or value of any type it is a small number, neither zero nor NaN.
const WEIGHT_BYTE: u8 = 0x11;

/// Seconds per weight byte of `MUL_MAT` with one row, on `threads` threads.
fn cpu_expert(dtype: GgmlType, threads: u32, budget: Duration) -> Result<f64, String> {
    let started = Instant::now();
    // ggml's own check accepts types without a product, such as i64.
    Ggml.supports(dtype).map_err(|error| error.to_string())?;
    let bytes = dtype.tensor_bytes(&SHAPE).ok_or("no expert has rows of such a type")?;
    let n_matrices = (BYTES / bytes).max(1) as usize;
    let mut cpu = Cpu::new().ok_or("ggml refuses a CPU backend")?;
    cpu.set_n_threads(c_int::try_from(threads.max(1)).unwrap_or(c_int::MAX));
    let backend = cpu.stream.raw();
    // A graph also counts weights and the row as nodes.
    let n_nodes = 2 * n_matrices + 1;
    let context = Context::new(n_nodes, n_nodes).ok_or("ggml refuses a context")?;
    let [ne0, ne1] = SHAPE.map(|ne| ne as i64);
    let row = context.tensor(llama::GGML_TYPE_F32, [ne0, 1, 1]);
    // SAFETY: the context has room for these tensors and the graph; shapes match; the type id is one of current
    // llama.cpp, and its rows are whole blocks.
    let (graph, buft) = unsafe {
        let graph = llama::ggml_new_graph_custom(context.raw(), n_nodes, false);
        for _ in 0..n_matrices {
            let product = llama::ggml_mul_mat(context.raw(), context.tensor(dtype.id(), [ne0, ne1, 1]), row);
            if !llama::ggml_backend_supports_op(backend, product) {
                return Err("the CPU backend does not multiply it".to_owned());
            }
            llama::ggml_build_forward_expand(graph, product);
        }
        (graph, llama::ggml_backend_get_default_buffer_type(backend))
    };
    let buffer = context.allocate(buft).ok_or("ggml refuses memory for an expert")?;
    buffer.fill(WEIGHT_BYTE);
    let ones = [1.0_f32; SHAPE[0] as usize];
    // SAFETY: the row lies in the buffer and has as many elements as `ones`.
    unsafe { llama::ggml_backend_tensor_set(row, ones.as_ptr().cast(), 0, size_of_val(&ones)) };

    let run = || {
        let started = Instant::now();
        // SAFETY: every tensor of the graph has memory in `buffer`, which is live.
        let status = unsafe { llama::ggml_backend_graph_compute(backend, graph) };
        match status {
            llama::GGML_STATUS_SUCCESS => Ok(started.elapsed()),
            status => Err(format!("ggml failed with status {status}")),
        }
    };
    // The first run wakes the threads. The fastest run counts: beside a busy program, runs with waiting threads take
    // many times as long now and then, and that program may be gone when experts are multiplied.
    let mut last = run()?;
    let mut best = Duration::MAX;
    while best == Duration::MAX || started.elapsed() + last < budget {
        last = run()?;
        best = best.min(last);
    }
    Ok(best.as_secs_f64() / (bytes * n_matrices as u64) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weight_byte_is_valid_in_every_type() {
        for dtype in GgmlType::all().filter(|dtype| Ggml.supports(*dtype).is_ok()) {
            let words = vec![u64::from_ne_bytes([WEIGHT_BYTE; 8]); dtype.row_bytes(4096).unwrap() as usize / 8];
            // SAFETY: as many bytes as said, aligned for every block type.
            let valid = unsafe { llama::ggml_validate_row_data(dtype.id(), words.as_ptr().cast(), words.len() * 8) };
            assert!(valid, "{dtype:?}");
        }
    }

    #[test]
    fn types_without_a_product_are_named() {
        for name in ["f32", "f16", "q8_0", "q4_K", "iq2_xxs", "mxfp4"] {
            let seconds = cpu_expert(GgmlType::from_name(name).unwrap(), 2, Duration::ZERO).unwrap();
            assert!(seconds > 0.0 && seconds.is_finite(), "{name}: {seconds}");
        }
        for dtype in [GgmlType::I64, GgmlType::I8, GgmlType::from_name("q8_1").unwrap()] {
            let error = cpu_expert(dtype, 1, Duration::ZERO).unwrap_err();
            assert!(error.contains(dtype.name()), "{error}");
        }
    }

    #[test]
    fn this_machines_cpu_is_measured() {
        let [cpu] = chosen(&DeviceChoice::None).unwrap()[..] else { panic!("one CPU device was expected") };
        let found = calibrate(cpu, 2, &[GgmlType::F16, GgmlType::Q8_0]);
        assert_eq!((found.device.as_str(), found.threads, found.notes.len()), ("CPU", 2, 0), "{found:?}");
        let figures = [found.upload_pageable_bytes_per_s, found.upload_latency_s];
        assert!(figures.iter().all(Option::is_some) && found.cpu_expert_seconds_per_byte.len() == 2, "{found:?}");
        assert!(found.cpu_expert_seconds_per_byte.values().all(is_figure), "{found:?}");
    }

    #[test]
    fn an_unknown_device_is_named() {
        let options = DeviceOptions { devices: DeviceChoice::Named(vec!["CUDA9".into()]), ..DeviceOptions::default() };
        let error = calibrate_report(&options).unwrap_err().to_string();
        assert!(error.contains("'CUDA9'") && error.contains("CPU"), "{error}");
        assert_eq!(chosen(&DeviceChoice::Named(vec!["CPU".into()])).unwrap().len(), 1);
    }
}
