//! Owners of what ggml makes here.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};

use ggml_sys::llama;

use super::not_null;

/// A backend: a stream of a device.
pub(super) struct Backend(NonNull<llama::ggml_backend>);

impl Backend {
    /// # Safety
    /// `dev` is a live device.
    pub(super) unsafe fn new(dev: llama::ggml_backend_dev_t) -> Result<Self, String> {
        // SAFETY: by the caller; no parameters.
        not_null(unsafe { llama::ggml_backend_dev_init(dev, ptr::null()) }, "a stream of the device").map(Self)
    }

    /// The CPU's, computing with so many threads.
    pub(super) fn cpu(threads: u32) -> Result<Self, String> {
        type SetThreads = unsafe extern "C" fn(llama::ggml_backend_t, c_int);
        // SAFETY: the registry's CPU device is live if there is one; what it calls `ggml_backend_set_n_threads` has the
        // type that ggml-backend.h gives it (`ggml_backend_set_n_threads_t`).
        unsafe {
            let backend = llama::ggml_backend_init_by_type(llama::GGML_BACKEND_DEVICE_TYPE_CPU, ptr::null());
            let backend = not_null(backend, "a CPU backend").map(Self)?;
            let reg = llama::ggml_backend_dev_backend_reg(llama::ggml_backend_get_device(backend.as_ptr()));
            let address = llama::ggml_backend_reg_get_proc_address(reg, c"ggml_backend_set_n_threads".as_ptr());
            let set: Option<SetThreads> = std::mem::transmute::<*mut c_void, Option<SetThreads>>(address);
            if let Some(set) = set {
                set(backend.as_ptr(), c_int::try_from(threads.max(1)).unwrap_or(c_int::MAX));
            }
            Ok(backend)
        }
    }

    pub(super) fn as_ptr(&self) -> llama::ggml_backend_t {
        self.0.as_ptr()
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: made in `new` or `cpu`, freed once.
        unsafe { llama::ggml_backend_free(self.0.as_ptr()) };
    }
}

/// Memory of a device, or pinned memory of the host.
pub(super) struct Buffer(NonNull<llama::ggml_backend_buffer>);

impl Buffer {
    /// # Safety
    /// `buft` is a live buffer type.
    pub(super) unsafe fn new(buft: llama::ggml_backend_buffer_type_t, bytes: usize) -> Result<Self, String> {
        // SAFETY: by the caller.
        let buffer = unsafe { llama::ggml_backend_buft_alloc_buffer(buft, bytes) };
        not_null(buffer, &format!("a buffer of {bytes} bytes")).map(Self)
    }

    /// Memory for every tensor of a context.
    pub(super) fn of_tensors(context: &Context, backend: &Backend) -> Result<Self, String> {
        // SAFETY: both are live, and the context's tensors have no memory yet.
        let buffer = unsafe { llama::ggml_backend_alloc_ctx_tensors(context.as_ptr(), backend.as_ptr()) };
        not_null(buffer, "memory for an expert").map(Self)
    }

    pub(super) fn as_ptr(&self) -> llama::ggml_backend_buffer_t {
        self.0.as_ptr()
    }

    pub(super) fn base(&self) -> *mut c_void {
        // SAFETY: the buffer is live.
        unsafe { llama::ggml_backend_buffer_get_base(self.as_ptr()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: made above, freed once; whoever uses it synchronises first.
        unsafe { llama::ggml_backend_buffer_free(self.0.as_ptr()) };
    }
}

/// A context for so many tensor structs and one graph, without memory for data.
pub(super) struct Context(NonNull<llama::ggml_context>);

impl Context {
    pub(super) fn new(n_tensors: usize) -> Result<Self, String> {
        // SAFETY: plain functions.
        let context = unsafe {
            llama::ggml_init(llama::ggml_init_params {
                mem_size: n_tensors * llama::ggml_tensor_overhead() + llama::ggml_graph_overhead(),
                mem_buffer: ptr::null_mut(),
                no_alloc: true,
            })
        };
        not_null(context, "a context").map(Self)
    }

    pub(super) fn as_ptr(&self) -> *mut llama::ggml_context {
        self.0.as_ptr()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once.
        unsafe { llama::ggml_free(self.0.as_ptr()) };
    }
}
