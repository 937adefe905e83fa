//! ggml's registry of devices, and what ggml makes, each thing freed with its owner.
//!
//! Devices are handles: they are registered, and live as long as the process.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use ggml_sys::backend as ffi;
use ggml_sys::llama::{
    self, ggml_backend_buffer_t, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_backend_t, ggml_tensor,
};

/// Every device, in ggml's order.
pub(super) fn devices() -> impl Iterator<Item = ggml_backend_dev_t> {
    // SAFETY: the registry only grows, and indices below its count are valid.
    unsafe { (0..llama::ggml_backend_dev_count()).map(|index| llama::ggml_backend_dev_get(index)) }
}

/// Whether a device is the processor itself.
pub(super) fn is_cpu(dev: ggml_backend_dev_t) -> bool {
    // SAFETY: a registered device.
    unsafe { llama::ggml_backend_dev_type(dev) == llama::GGML_BACKEND_DEVICE_TYPE_CPU }
}

/// Devices that compute products of their own, in ggml's order: neither ours nor other helpers of the CPU.
pub(super) fn computing_devices() -> Vec<ggml_backend_dev_t> {
    // SAFETY: a registered device.
    let is_helper = |&dev: &_| unsafe { llama::ggml_backend_dev_type(dev) == llama::GGML_BACKEND_DEVICE_TYPE_ACCEL };
    devices().filter(|dev| !is_helper(dev)).collect()
}

/// What a device says of itself.
pub(super) fn properties(dev: ggml_backend_dev_t) -> llama::ggml_backend_dev_props {
    // SAFETY: zero is a valid value of every property; the device fills them in.
    unsafe {
        let mut properties: llama::ggml_backend_dev_props = mem::zeroed();
        llama::ggml_backend_dev_get_props(dev, &raw mut properties);
        properties
    }
}

/// Bytes of a device that are free now, and in all; 0 if it does not tell.
pub(super) fn memory(dev: ggml_backend_dev_t) -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the places are valid.
    unsafe { llama::ggml_backend_dev_memory(dev, &raw mut free, &raw mut total) };
    (free as u64, total as u64)
}

/// ggml's name of a device, such as `CUDA0`.
pub(super) fn name(dev: ggml_backend_dev_t) -> String {
    // SAFETY: a registered device.
    text(unsafe { llama::ggml_backend_dev_name(dev) })
}

/// What a device is; of an RPC server's, its endpoint, known without the server.
pub(super) fn description(dev: ggml_backend_dev_t) -> String {
    // SAFETY: a registered device.
    text(unsafe { llama::ggml_backend_dev_description(dev) })
}

/// ggml's name of the backend that a device belongs to.
pub(super) fn backend_name(dev: ggml_backend_dev_t) -> String {
    // SAFETY: a registered device, and so is its backend.
    unsafe {
        let backend = llama::ggml_backend_dev_backend_reg(dev);
        if backend.is_null() { String::new() } else { text(llama::ggml_backend_reg_name(backend)) }
    }
}

/// Whether a device is an RPC server's.
pub(super) fn is_remote(dev: ggml_backend_dev_t) -> bool {
    backend_name(dev) == "RPC"
}

/// ggml's text about a device; empty for none.
pub(super) fn text(found: *const c_char) -> String {
    if found.is_null() {
        return String::new();
    }
    // SAFETY: ggml answers with NUL-terminated text that lives as long as the device.
    unsafe { CStr::from_ptr(found) }.to_string_lossy().into_owned()
}

/// Tensor structs, and a graph's, without memory for data.
pub(super) struct Context(NonNull<llama::ggml_context>);

impl Context {
    /// With room for so many tensors, and for a graph if it is to have nodes. `None` when ggml refuses.
    pub(super) fn new(n_tensors: usize, n_nodes: usize) -> Option<Self> {
        // SAFETY: plain constructors; the result is checked.
        unsafe {
            let graph_bytes = if n_nodes > 0 { llama::ggml_graph_overhead_custom(n_nodes, false) } else { 0 };
            NonNull::new(llama::ggml_init(llama::ggml_init_params {
                mem_size: n_tensors * llama::ggml_tensor_overhead() + graph_bytes,
                mem_buffer: ptr::null_mut(),
                no_alloc: true,
            }))
            .map(Self)
        }
    }

    pub(super) fn raw(&self) -> *mut llama::ggml_context {
        self.0.as_ptr()
    }

    /// One of the tensors that there is room for.
    pub(super) fn tensor(&self, type_: llama::ggml_type, ne: [i64; 3]) -> *mut ggml_tensor {
        // SAFETY: the context is live.
        unsafe { llama::ggml_new_tensor_3d(self.raw(), type_, ne[0], ne[1], ne[2]) }
    }

    /// Memory for its tensors, none of which has any yet. `None` when it is refused.
    pub(super) fn allocate(&self, buft: ggml_backend_buffer_type_t) -> Option<Buffer> {
        // SAFETY: context and buffer type are live; the buffer is nobody else's.
        NonNull::new(unsafe { llama::ggml_backend_alloc_ctx_tensors_from_buft(self.raw(), buft) }).map(Buffer)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { llama::ggml_free(self.raw()) };
    }
}

/// Memory of a device, or of the host for one.
pub(super) struct Buffer(pub(super) NonNull<llama::ggml_backend_buffer>);

// SAFETY: owned; ggml's buffers may be freed on any thread.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` gives out an address only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `None` when it is refused.
    pub(super) fn new(buft: ggml_backend_buffer_type_t, bytes: usize) -> Option<Self> {
        // SAFETY: a registered device's buffer type; the buffer is nobody else's.
        NonNull::new(unsafe { llama::ggml_backend_buft_alloc_buffer(buft, bytes) }).map(Self)
    }

    pub(super) fn raw(&self) -> ggml_backend_buffer_t {
        self.0.as_ptr()
    }

    pub(super) fn base(&self) -> *mut c_void {
        // SAFETY: the buffer is live.
        unsafe { llama::ggml_backend_buffer_get_base(self.raw()) }
    }

    /// Whether it is of this type: backends that cannot pin answer with ordinary memory, without a word.
    pub(super) fn is_of(&self, buft: ggml_backend_buffer_type_t) -> bool {
        // SAFETY: the buffer is live.
        unsafe { llama::ggml_backend_buffer_get_type(self.raw()) == buft }
    }

    /// Sets every byte.
    pub(super) fn fill(&self, byte: u8) {
        // SAFETY: the buffer is live.
        unsafe { llama::ggml_backend_buffer_clear(self.raw(), byte) };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: owned, freed once; whoever lets it be used synchronises first.
        unsafe { llama::ggml_backend_buffer_free(self.raw()) };
    }
}

/// An instance of a device's backend: what is submitted to it runs in order. Two streams of a device run side by side;
/// events order them.
pub(super) struct Stream(ggml_backend_t);

// SAFETY: a backend may move between threads as long as one uses it at a time, which `&mut` and the owner's lock ensure.
unsafe impl Send for Stream {}

impl Stream {
    /// `None` when the device refuses another stream.
    pub(super) fn new(dev: ggml_backend_dev_t) -> Option<Self> {
        // SAFETY: a registered device.
        let backend = unsafe { llama::ggml_backend_dev_init(dev, ptr::null()) };
        (!backend.is_null()).then_some(Self(backend))
    }

    pub(super) fn raw(&self) -> ggml_backend_t {
        self.0
    }

    pub(super) fn interface(&self) -> &ffi::ggml_backend_i {
        // SAFETY: the backend is live.
        unsafe { &(*self.0.cast::<ffi::ggml_backend>()).iface }
    }

    /// Copies host bytes into a tensor.
    ///
    /// # Safety
    /// `data` is valid for `bytes` bytes until the stream has run the copy; the tensor is allocated on the device and
    /// has `offset + bytes` bytes.
    pub(super) unsafe fn set(&self, tensor: *mut ggml_tensor, data: *const c_void, offset: usize, bytes: usize) {
        // SAFETY: by the caller.
        unsafe { llama::ggml_backend_tensor_set_async(self.0, tensor, data, offset, bytes) };
    }

    /// Copies the bytes at a tensor's start to the host, as many as there is room for.
    ///
    /// # Safety
    /// As [`Stream::set`], for writing.
    pub(super) unsafe fn get<T>(&self, tensor: *const ggml_tensor, to: &mut [T]) {
        // SAFETY: by the caller.
        unsafe { llama::ggml_backend_tensor_get_async(self.0, tensor, to.as_mut_ptr().cast(), 0, size_of_val(to)) };
    }

    /// Waits until everything submitted has run.
    pub(super) fn synchronize(&self) {
        // SAFETY: the backend is live.
        unsafe { llama::ggml_backend_synchronize(self.0) };
    }

    /// What this stream runs from here on waits for `event`.
    pub(super) fn wait(&self, event: &Event) {
        // SAFETY: both are live and of one device.
        unsafe { llama::ggml_backend_event_wait(self.0, event.0.as_ptr()) };
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { llama::ggml_backend_free(self.0) };
    }
}

/// A CPU backend. It is reached through ggml's registry only: where backends are loaded at run time, nothing exports its
/// symbols.
pub(super) struct Cpu {
    pub(super) stream: Stream,
    set_n_threads: unsafe extern "C" fn(ggml_backend_t, c_int),
    set_abort_callback: unsafe extern "C" fn(ggml_backend_t, llama::ggml_abort_callback, *mut c_void),
}

impl Cpu {
    /// `None` when ggml has none to give.
    pub(super) fn new() -> Option<Self> {
        // SAFETY: each result is checked before it is used. ggml fixes the types of the procedures that have these names
        // (ggml-backend.h), and null is `None`.
        unsafe {
            let dev = llama::ggml_backend_dev_by_type(llama::GGML_BACKEND_DEVICE_TYPE_CPU);
            if dev.is_null() {
                return None;
            }
            let reg = llama::ggml_backend_dev_backend_reg(dev);
            let address = |name: &CStr| llama::ggml_backend_reg_get_proc_address(reg, name.as_ptr());
            let set_n_threads: llama::ggml_backend_set_n_threads_t =
                mem::transmute(address(c"ggml_backend_set_n_threads"));
            let set_abort_callback: llama::ggml_backend_set_abort_callback_t =
                mem::transmute(address(c"ggml_backend_set_abort_callback"));
            let (set_n_threads, set_abort_callback) = (set_n_threads?, set_abort_callback?);
            Some(Self { stream: Stream::new(dev)?, set_n_threads, set_abort_callback })
        }
    }

    pub(super) fn set_n_threads(&mut self, n_threads: c_int) {
        // SAFETY: the backend is a live CPU backend.
        unsafe { (self.set_n_threads)(self.stream.raw(), n_threads) };
    }

    pub(super) fn set_abort_callback(&mut self, callback: llama::ggml_abort_callback, data: *mut c_void) {
        // SAFETY: the backend is a live CPU backend; the caller keeps callback and data valid.
        unsafe { (self.set_abort_callback)(self.stream.raw(), callback, data) };
    }
}

/// A point in a stream.
pub(super) struct Event(NonNull<llama::ggml_backend_event>);

impl Event {
    /// Waits on the host.
    pub(super) fn synchronize(&self) {
        // SAFETY: the event is live and was recorded.
        unsafe { llama::ggml_backend_event_synchronize(self.0.as_ptr()) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `Events::record`, freed once.
        unsafe { llama::ggml_backend_event_free(self.0.as_ptr()) };
    }
}

/// Makes events, and uses those again that nobody waits for any more.
pub(super) struct Events {
    dev: ggml_backend_dev_t,
    known: Vec<Rc<Event>>,
}

// SAFETY: the counted events never leave the tier that owns this value, which one thread uses at a time.
unsafe impl Send for Events {}

impl Events {
    pub(super) fn new(dev: ggml_backend_dev_t) -> Self {
        Self { dev, known: Vec::new() }
    }

    /// Waits on the host for every event that was recorded. Not for one that nobody is sure will be reached.
    pub(super) fn synchronize(&self) {
        self.known.iter().for_each(|event| event.synchronize());
    }

    /// The point that `stream` has been told to reach. `None` on devices without events: the stream has then been waited
    /// for instead.
    pub(super) fn record(&mut self, stream: &Stream) -> Option<Rc<Event>> {
        let free = self.known.iter().position(|event| Rc::strong_count(event) == 1);
        let index = free.unwrap_or(self.known.len());
        if free.is_none() {
            // SAFETY: a registered device.
            let Some(raw) = NonNull::new(unsafe { llama::ggml_backend_event_new(self.dev) }) else {
                stream.synchronize();
                return None;
            };
            self.known.push(Rc::new(Event(raw)));
        }
        let event = Rc::clone(&self.known[index]);
        // SAFETY: both are live and of one device.
        unsafe { llama::ggml_backend_event_record(event.0.as_ptr(), stream.raw()) };
        Some(event)
    }
}
