//! Measures the bandwidth and latency of uploads from host memory to a device, and how fast the CPU multiplies one row by
//! an expert.

use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use ggml_sys::llama;
use ggml_sys::llama::{ggml_backend_dev_t, ggml_tensor};

use crate::engine::ggml;
use crate::engine::ggml::{Buffer, Context, Cpu, Stream};
use crate::engine::quantise::Ggml;
use hobbit_core::calibrate::Upload;
use hobbit_core::gguf::{GgmlType, Recode};

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
pub(super) fn upload(dev: ggml_backend_dev_t, budget: Duration) -> Result<Upload, String> {
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
pub(super) fn cpu_expert(dtype: GgmlType, threads: u32, budget: Duration) -> Result<f64, String> {
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
}
