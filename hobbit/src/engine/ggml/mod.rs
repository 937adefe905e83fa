//! Safe wrappers of ggml's device registry and of the objects ggml allocates, which are freed on drop.
//!
//! Devices are plain handles: the registry keeps them for the life of the process.

pub(crate) mod context;
pub(crate) mod cpu_speed;
pub(crate) mod graph;
pub(crate) mod limits;
pub(crate) mod log;
pub(crate) mod memory_use;
pub(crate) mod params;
pub(crate) mod pre_tokenizer;
pub(crate) mod quantise;
pub(crate) mod raw;
pub(crate) mod repack;
pub(crate) mod vocabulary;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Once;

use ggml_sys::backend as ffi;
use ggml_sys::llama::{
    self, ggml_backend_buffer_t, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_backend_t, ggml_tensor,
};

/// Registers every backend of this build with ggml. To be called before any other use of ggml's registry or of
/// llama.cpp; works once per process.
pub(crate) fn ready() {
    // Loaded libraries write to the log.
    log::install();
    ggml_sys::register_backends();
    static INIT: Once = Once::new();
    // SAFETY: called once per process, with the backends registered.
    INIT.call_once(|| unsafe {
        llama::llama_backend_init();
        // Before any file is read: a draft's is read before the model's.
        ggml_sys::shim::hobbit_guard_aborts();
    });
}

/// A path as llama.cpp takes it.
///
/// # Errors
/// Words for a name that no file can have.
pub(crate) fn c_path(path: &Path) -> Result<CString, String> {
    #[cfg(windows)]
    let path = &hobbit_core::windows::openable(path);
    CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| "its name contains a NUL byte".to_owned())
}

/// A registered device, for other threads and for comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device(pub(crate) ggml_backend_dev_t);

// SAFETY: a handle: ggml's functions on devices may be called from any thread, and devices are never freed.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Every device, in ggml's order.
pub(crate) fn devices() -> impl Iterator<Item = ggml_backend_dev_t> {
    // SAFETY: the registry only grows, and indices below its count are valid.
    unsafe { (0..llama::ggml_backend_dev_count()).map(|index| llama::ggml_backend_dev_get(index)) }
}

/// A device's properties, as it reports them.
pub(crate) fn properties(dev: ggml_backend_dev_t) -> llama::ggml_backend_dev_props {
    // SAFETY: zero is a valid value of every property; the device fills them in.
    unsafe {
        let mut properties: llama::ggml_backend_dev_props = mem::zeroed();
        llama::ggml_backend_dev_get_props(dev, &raw mut properties);
        properties
    }
}

/// A device's free and total memory in bytes; 0 if unknown.
pub(crate) fn memory(dev: ggml_backend_dev_t) -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the places are valid.
    unsafe { llama::ggml_backend_dev_memory(dev, &raw mut free, &raw mut total) };
    (free as u64, total as u64)
}

/// ggml's name of a device, such as `CUDA0`.
pub(crate) fn name(dev: ggml_backend_dev_t) -> String {
    // SAFETY: a registered device.
    text(unsafe { llama::ggml_backend_dev_name(dev) })
}

/// A device's description; for an RPC server's device the endpoint, which needs no connection.
pub(crate) fn description(dev: ggml_backend_dev_t) -> String {
    // SAFETY: a registered device.
    text(unsafe { llama::ggml_backend_dev_description(dev) })
}

/// ggml's name of the backend that a device belongs to.
pub(crate) fn backend_name(dev: ggml_backend_dev_t) -> String {
    // SAFETY: a registered device, and so is its backend.
    unsafe {
        let backend = llama::ggml_backend_dev_backend_reg(dev);
        if backend.is_null() { String::new() } else { text(llama::ggml_backend_reg_name(backend)) }
    }
}

/// Whether a device belongs to an RPC server.
pub(crate) fn is_remote(dev: ggml_backend_dev_t) -> bool {
    backend_name(dev) == "RPC"
}

/// ggml's text about a device; empty for null.
pub(crate) fn text(found: *const c_char) -> String {
    if found.is_null() {
        return String::new();
    }
    // SAFETY: ggml answers with NUL-terminated text that lives as long as the device.
    unsafe { CStr::from_ptr(found) }.to_string_lossy().into_owned()
}

/// Tensor structs, and a graph's, without memory for data.
pub(crate) struct Context(NonNull<llama::ggml_context>);

impl Context {
    /// With room for `n_tensors` tensors, and for a graph if `n_nodes` is not 0. `None` when ggml refuses.
    pub(crate) fn new(n_tensors: usize, n_nodes: usize) -> Option<Self> {
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

    pub(crate) fn raw(&self) -> *mut llama::ggml_context {
        self.0.as_ptr()
    }

    /// A new tensor, within the reserved number.
    pub(crate) fn tensor(&self, type_: llama::ggml_type, ne: [i64; 3]) -> *mut ggml_tensor {
        // SAFETY: the context is live.
        unsafe { llama::ggml_new_tensor_3d(self.raw(), type_, ne[0], ne[1], ne[2]) }
    }

    /// Allocates memory for all tensors, none of which has any yet. `None` when it is refused.
    pub(crate) fn allocate(&self, buft: ggml_backend_buffer_type_t) -> Option<Buffer> {
        // SAFETY: context and buffer type are live; the buffer has no other owner.
        NonNull::new(unsafe { llama::ggml_backend_alloc_ctx_tensors_from_buft(self.raw(), buft) }).map(Buffer)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { llama::ggml_free(self.raw()) };
    }
}

/// Memory of a device, or host memory allocated for one.
pub(crate) struct Buffer(pub(crate) NonNull<llama::ggml_backend_buffer>);

// SAFETY: owned; ggml's buffers may be freed on any thread.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` gives out an address only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `None` when ggml refuses the allocation.
    pub(crate) fn new(buft: ggml_backend_buffer_type_t, bytes: usize) -> Option<Self> {
        // SAFETY: a registered device's buffer type; the buffer has no other owner.
        NonNull::new(unsafe { llama::ggml_backend_buft_alloc_buffer(buft, bytes) }).map(Self)
    }

    pub(crate) fn raw(&self) -> ggml_backend_buffer_t {
        self.0.as_ptr()
    }

    pub(crate) fn base(&self) -> *mut c_void {
        // SAFETY: the buffer is live.
        unsafe { llama::ggml_backend_buffer_get_base(self.raw()) }
    }

    /// Whether the buffer has this type: backends that cannot pin silently return ordinary memory.
    pub(crate) fn is_of(&self, buft: ggml_backend_buffer_type_t) -> bool {
        // SAFETY: the buffer is live.
        unsafe { llama::ggml_backend_buffer_get_type(self.raw()) == buft }
    }

    /// Sets every byte.
    pub(crate) fn fill(&self, byte: u8) {
        // SAFETY: the buffer is live.
        unsafe { llama::ggml_backend_buffer_clear(self.raw(), byte) };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: owned, freed once; users of the buffer are synchronised before it is dropped.
        unsafe { llama::ggml_backend_buffer_free(self.raw()) };
    }
}

/// A stream of a device's backend: submitted work runs in order. Two streams of a device run concurrently; events order
/// them.
pub(crate) struct Stream(ggml_backend_t);

// SAFETY: a backend may move between threads as long as one uses it at a time, which `&mut` and the owner's lock
// ensure.
unsafe impl Send for Stream {}

impl Stream {
    /// `None` when the device refuses another stream.
    pub(crate) fn new(dev: ggml_backend_dev_t) -> Option<Self> {
        // SAFETY: a registered device.
        let backend = unsafe { llama::ggml_backend_dev_init(dev, ptr::null()) };
        (!backend.is_null()).then_some(Self(backend))
    }

    pub(crate) fn raw(&self) -> ggml_backend_t {
        self.0
    }

    pub(crate) fn interface(&self) -> &ffi::ggml_backend_i {
        // SAFETY: the backend is live.
        unsafe { &(*self.0.cast::<ffi::ggml_backend>()).iface }
    }

    /// Copies host bytes into a tensor.
    ///
    /// # Safety
    /// `data` is valid for `bytes` bytes until the stream has run the copy; the tensor is allocated on the device and
    /// has `offset + bytes` bytes.
    pub(crate) unsafe fn set(&self, tensor: *mut ggml_tensor, data: *const c_void, offset: usize, bytes: usize) {
        // SAFETY: by the caller.
        unsafe { llama::ggml_backend_tensor_set_async(self.0, tensor, data, offset, bytes) };
    }

    /// Copies bytes from a tensor's start to the host until `to` is full.
    ///
    /// # Safety
    /// As [`Stream::set`], for writing.
    pub(crate) unsafe fn get<T>(&self, tensor: *const ggml_tensor, to: &mut [T]) {
        // SAFETY: by the caller.
        unsafe { llama::ggml_backend_tensor_get_async(self.0, tensor, to.as_mut_ptr().cast(), 0, size_of_val(to)) };
    }

    /// Waits until everything submitted has run.
    pub(crate) fn synchronize(&self) {
        // SAFETY: the backend is live.
        unsafe { llama::ggml_backend_synchronize(self.0) };
    }

    /// Makes later work of this stream wait for `event`.
    pub(crate) fn wait(&self, event: &Event) {
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

/// A CPU backend. It is reached only through ggml's registry: where backends are loaded at run time, its symbols are
/// not exported.
pub(crate) struct Cpu {
    pub(crate) stream: Stream,
    set_n_threads: unsafe extern "C" fn(ggml_backend_t, c_int),
    set_abort_callback: unsafe extern "C" fn(ggml_backend_t, llama::ggml_abort_callback, *mut c_void),
}

impl Cpu {
    /// `None` when ggml has no CPU backend.
    pub(crate) fn new() -> Option<Self> {
        // SAFETY: each result is checked before it is used. ggml fixes the types of the procedures that have these
        // names (ggml-backend.h), and null is `None`.
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

    pub(crate) fn set_n_threads(&mut self, n_threads: c_int) {
        // SAFETY: the backend is a live CPU backend.
        unsafe { (self.set_n_threads)(self.stream.raw(), n_threads) };
    }

    pub(crate) fn set_abort_callback(&mut self, callback: llama::ggml_abort_callback, data: *mut c_void) {
        // SAFETY: the backend is a live CPU backend; the caller keeps callback and data valid.
        unsafe { (self.set_abort_callback)(self.stream.raw(), callback, data) };
    }
}

/// A point in a stream.
pub(crate) struct Event(NonNull<llama::ggml_backend_event>);

impl Event {
    /// Blocks the host until the event is reached.
    pub(crate) fn synchronize(&self) {
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

/// Records after which events are synchronised with; the second one if that may take a wait.
const TIDY_RECORDS: u32 = 256;
const TIDY_RECORDS_MAX: u32 = 4096;

/// Makes events, and reuses those without remaining waiters.
pub(crate) struct Events {
    dev: ggml_backend_dev_t,
    known: Vec<Rc<Event>>,
    /// Records since the last tidying.
    n_records: u32,
}

// SAFETY: the counted events never leave the tier that owns this value, which one thread uses at a time.
unsafe impl Send for Events {}

impl Events {
    pub(crate) fn new(dev: ggml_backend_dev_t) -> Self {
        Self { dev, known: Vec::new(), n_records: 0 }
    }

    /// Synchronises with all events after many records: Vulkan keeps an object for each record until then. Costs next
    /// to nothing if all have been reached.
    pub(crate) fn tidy(&mut self, are_reached: bool) {
        if self.n_records >= if are_reached { TIDY_RECORDS } else { TIDY_RECORDS_MAX } {
            self.n_records = 0;
            self.known.iter().for_each(|event| event.synchronize());
        }
    }

    /// Records an event at the end of `stream`'s work. `None` on devices without events: the stream is then
    /// synchronised instead.
    pub(crate) fn record(&mut self, stream: &Stream) -> Option<Rc<Event>> {
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
        self.n_records += 1;
        let event = Rc::clone(&self.known[index]);
        // SAFETY: both are live and of one device.
        unsafe { llama::ggml_backend_event_record(event.0.as_ptr(), stream.raw()) };
        Some(event)
    }
}
