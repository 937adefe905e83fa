//! A few tensors in one memory, and a graph over them.

use std::ffi::c_void;
use std::ptr;

use ggml_sys::llama::{self, ggml_backend_t, ggml_tensor};
use lagging_device::{Device, Options, register};

/// A backend that is freed at the end.
pub struct Stream(pub ggml_backend_t);

impl Stream {
    pub fn of(device: &Device) -> Stream {
        // SAFETY: a registered device.
        let backend = unsafe { llama::ggml_backend_dev_init(device.raw(), ptr::null()) };
        assert!(!backend.is_null());
        Stream(backend)
    }

    pub fn cpu() -> Stream {
        // The first device changes ggml's list, which is read below.
        register(Options::default());
        // SAFETY: no state; the CPU backend is built in.
        Stream(unsafe { llama::ggml_backend_init_by_type(llama::GGML_BACKEND_DEVICE_TYPE_CPU, ptr::null()) })
    }

    pub fn submit(&self, tensors: &Tensors) -> llama::ggml_status {
        // SAFETY: backend and graph are live.
        unsafe { llama::ggml_backend_graph_compute_async(self.0, tensors.graph) }
    }

    pub fn upload<T>(&self, tensor: *mut ggml_tensor, values: &[T]) {
        // SAFETY: the tests keep `values` until the copy has run, or mean not to.
        unsafe { llama::ggml_backend_tensor_set_async(self.0, tensor, values.as_ptr().cast(), 0, size_of_val(values)) };
    }

    pub fn synchronize(&self) {
        // SAFETY: the backend is live.
        unsafe { llama::ggml_backend_synchronize(self.0) };
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by this type, freed once.
        unsafe { llama::ggml_backend_free(self.0) };
    }
}

/// An event that is freed at the end.
pub struct Event(llama::ggml_backend_event_t);

impl Event {
    pub fn of(device: &Device) -> Event {
        // SAFETY: a registered device.
        Event(unsafe { llama::ggml_backend_event_new(device.raw()) })
    }

    pub fn record(&self, stream: &Stream) {
        // SAFETY: both are live.
        unsafe { llama::ggml_backend_event_record(self.0, stream.0) };
    }

    pub fn hold(&self, stream: &Stream) {
        // SAFETY: both are live.
        unsafe { llama::ggml_backend_event_wait(stream.0, self.0) };
    }

    pub fn synchronize(&self) {
        // SAFETY: the event is live.
        unsafe { llama::ggml_backend_event_synchronize(self.0) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by this type, freed once.
        unsafe { llama::ggml_backend_event_free(self.0) };
    }
}

/// Tensors of one context, in one buffer.
pub struct Tensors {
    pub context: *mut llama::ggml_context,
    pub graph: *mut llama::ggml_cgraph,
    buffer: llama::ggml_backend_buffer_t,
}

impl Tensors {
    pub fn new() -> Tensors {
        let mem_size = 1 << 20;
        // SAFETY: plain calls of ggml's API.
        unsafe {
            let params = llama::ggml_init_params { mem_size, mem_buffer: ptr::null_mut(), no_alloc: true };
            let context = llama::ggml_init(params);
            Tensors { context, graph: llama::ggml_new_graph(context), buffer: ptr::null_mut() }
        }
    }

    pub fn tensor(&self, type_: llama::ggml_type, shape: [i64; 3]) -> *mut ggml_tensor {
        // SAFETY: the context is live and has room.
        unsafe { llama::ggml_new_tensor_3d(self.context, type_, shape[0], shape[1], shape[2]) }
    }

    pub fn floats(&self, shape: [i64; 3]) -> *mut ggml_tensor {
        self.tensor(llama::GGML_TYPE_F32, shape)
    }

    /// Adds the node, and what it needs, to the graph.
    pub fn compute(&self, node: *mut ggml_tensor) {
        // SAFETY: the graph and the node are of this context.
        unsafe { llama::ggml_build_forward_expand(self.graph, node) };
    }

    /// Whether there was memory for all tensors.
    pub fn allocate(&mut self, buft: llama::ggml_backend_buffer_type_t) -> bool {
        // SAFETY: context and buffer type are live.
        self.buffer = unsafe { llama::ggml_backend_alloc_ctx_tensors_from_buft(self.context, buft) };
        !self.buffer.is_null()
    }

    pub fn on(mut self, stream: &Stream) -> Tensors {
        // SAFETY: the backend is live.
        assert!(self.allocate(unsafe { llama::ggml_backend_get_default_buffer_type(stream.0) }));
        self
    }
}

impl Drop for Tensors {
    fn drop(&mut self) {
        // SAFETY: made by this type, freed once; null is nothing.
        unsafe {
            llama::ggml_backend_buffer_free(self.buffer);
            llama::ggml_free(self.context);
        }
    }
}

pub fn set<T>(tensor: *mut ggml_tensor, values: &[T]) {
    // SAFETY: ggml checks the size.
    unsafe { llama::ggml_backend_tensor_set(tensor, values.as_ptr().cast(), 0, size_of_val(values)) };
}

/// A tensor's bytes, read synchronously.
pub fn bytes(tensor: *const ggml_tensor) -> Vec<u8> {
    // SAFETY: room for all of the tensor.
    unsafe {
        let mut bytes = vec![0u8; llama::ggml_nbytes(tensor)];
        llama::ggml_backend_tensor_get(tensor, bytes.as_mut_ptr().cast::<c_void>(), 0, bytes.len());
        bytes
    }
}

pub fn floats(tensor: *const ggml_tensor) -> Vec<f32> {
    bytes(tensor).chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
}
