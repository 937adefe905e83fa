//! Host memory that llama.cpp and the allocator hold.

use std::ffi::c_void;

use ggml_sys::llama::ggml_backend_dev_t;
use ggml_sys::{llama, shim};

use crate::engine::error::OpenError;
use crate::engine::ggml;
use crate::engine::ggml::context::Context;

/// Host memory that llama.cpp holds for a model and a context, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryUse {
    /// Weights, mapped or not.
    pub(crate) weights: u64,
    /// Part of the weights that was repacked for the CPU.
    pub(crate) repacked: u64,
    /// Keys, values and states, also those of multi-token prediction.
    pub(crate) kv: u64,
    pub(crate) compute: u64,
    /// Buffers for multi-token prediction.
    pub(crate) mtp: u64,
    /// Compute buffers in the memory of devices.
    pub(crate) compute_on_devices: u64,
}

impl MemoryUse {
    pub(crate) fn of(context: &Context) -> Result<Self, OpenError> {
        Self::shared_by(context, 1)
    }

    /// As [`MemoryUse::of`], for a context that was made without allocating: there llama.cpp counts a compute buffer
    /// once for each backend that shares it.
    pub(crate) fn of_estimate(context: &Context) -> Result<Self, OpenError> {
        // SAFETY: registered devices; their buffer types, and the CPU's, live as long as the process.
        let shares = |dev: &llama::ggml_backend_dev_t| unsafe {
            llama::ggml_backend_dev_type(*dev) == llama::GGML_BACKEND_DEVICE_TYPE_ACCEL
                && llama::ggml_backend_dev_buffer_type(*dev) == llama::ggml_backend_cpu_buffer_type()
        };
        Self::shared_by(context, 1 + ggml::devices().filter(shares).count() as u64)
    }

    /// A batch's hidden states: the target's output, two copies, and the batch of the second context.
    pub(crate) fn of_hidden_states(n_batch: u64, n_embd: u64) -> u64 {
        4 * n_batch * n_embd * 4
    }

    /// Bytes of weights, context and compute buffers in the memory of each device.
    pub(crate) fn by_device(context: &Context) -> Result<Vec<(ggml_backend_dev_t, u64)>, OpenError> {
        let mut found: Vec<(ggml_backend_dev_t, u64)> = Vec::new();
        let mut add = |part: Part, has_weights: bool| {
            if part.is_host {
                return;
            }
            let bytes = part.kv + part.compute + if has_weights { part.weights } else { 0 };
            // SAFETY: llama.cpp passed a live buffer type.
            let dev = unsafe { llama::ggml_backend_buft_get_device(part.buft) };
            match found.iter_mut().find(|known| known.0 == dev) {
                Some(known) => known.1 += bytes,
                None => found.push((dev, bytes)),
            }
        };
        parts(context, &mut |part| add(part, true))?;
        if let Some(own) = context.follower() {
            parts(own, &mut |part| add(part, false))?;
        }
        Ok(found)
    }

    fn shared_by(context: &Context, n_backends: u64) -> Result<Self, OpenError> {
        let mut found = MemoryUse::default();
        parts(context, &mut |part: Part| {
            if !part.is_host {
                found.compute_on_devices += part.compute;
                return;
            }
            found.weights += part.weights;
            found.repacked += if part.is_repacked { part.weights } else { 0 };
            found.kv += part.kv;
            found.compute += part.compute;
        })?;
        found.compute /= n_backends;
        if let Some(own) = context.follower() {
            let MemoryUse { kv, compute, compute_on_devices, .. } = Self::shared_by(own, n_backends)?;
            found.kv += kv;
            found.compute_on_devices += compute_on_devices;
            // SAFETY: the context and its model are live.
            let (n_batch, n_embd) = unsafe {
                let model = llama::llama_get_model(own.as_ptr());
                (llama::llama_n_batch(own.as_ptr()), llama::llama_model_n_embd_out(model).max(0) as u64)
            };
            found.mtp = compute + Self::of_hidden_states(n_batch.into(), n_embd);
        }
        Ok(found)
    }
}

/// llama.cpp's memory in buffers of one type, in bytes.
struct Part {
    buft: llama::ggml_backend_buffer_type_t,
    is_host: bool,
    /// Host memory in an order of the CPU's own.
    is_repacked: bool,
    weights: u64,
    kv: u64,
    compute: u64,
}

/// Gives `take` a context's memory and that of its model, by type of buffer.
fn parts(context: &Context, mut take: &mut dyn FnMut(Part)) -> Result<(), OpenError> {
    unsafe extern "C" fn add(
        take: *mut c_void,
        buft: llama::ggml_backend_buffer_type_t,
        weights: usize,
        kv: usize,
        compute: usize,
    ) {
        // SAFETY: `parts` passes its closure; llama.cpp passes a live buffer type.
        let (take, is_host, is_cpus) = unsafe {
            (&mut *take.cast::<&mut dyn FnMut(Part)>(), llama::ggml_backend_buft_is_host(buft), is_the_cpus(buft))
        };
        let (weights, kv, compute) = (weights as u64, kv as u64, compute as u64);
        take(Part { buft, is_host: is_host || is_cpus, is_repacked: !is_host, weights, kv, compute });
    }
    // SAFETY: the context is live; the closure outlives the call.
    let known = unsafe { shim::hobbit_memory_breakdown(context.as_ptr(), Some(add), (&raw mut take).cast()) };
    match known {
        true => Ok(()),
        false => Err(OpenError::Unsupported("llama.cpp does not report the memory it holds".into())),
    }
}

/// Returns unused memory of the allocator to the system: glibc keeps most of what is freed. Takes milliseconds if there
/// is much.
pub fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it may be called at any time, from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Whether a buffer type belongs to the CPU. Its extra types do not count as host memory in ggml, because other
/// backends cannot read them.
///
/// # Safety
/// A live buffer type.
unsafe fn is_the_cpus(buft: llama::ggml_backend_buffer_type_t) -> bool {
    // SAFETY: by the caller; a device outlives its buffer types.
    unsafe {
        let dev = llama::ggml_backend_buft_get_device(buft);
        !dev.is_null() && llama::ggml_backend_dev_type(dev) == llama::GGML_BACKEND_DEVICE_TYPE_CPU
    }
}
