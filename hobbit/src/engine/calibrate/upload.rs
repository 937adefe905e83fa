//! Measures the bandwidth and latency of uploads from host memory to a device.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use ggml_sys::llama::{self, ggml_backend_dev_t, ggml_tensor};

use crate::engine::ggml::{self, Buffer, Context, Stream};
use hobbit_core::calibrate::Upload;

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
pub(super) fn measure(dev: ggml_backend_dev_t, budget: Duration) -> Result<Upload, String> {
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
