//! The inner graph: small graphs of ours run on the backend that really computes.

use std::ffi::{CStr, c_int, c_void};
use std::mem;
use std::ptr::{self, NonNull};

use ggml_sys::llama::{self, ggml_status, ggml_tensor};

/// Nodes an inner graph may have. A split of one MoE layer has about ten.
const NODES_MAX: usize = 512;

/// A CPU backend, one reusable graph, and the tensor structs of the graph being built.
///
/// The CPU is reached through ggml's registry only: where backends are loaded at run time, nothing exports its symbols.
pub(super) struct Inner {
    backend: llama::ggml_backend_t,
    set_n_threads: unsafe extern "C" fn(llama::ggml_backend_t, c_int),
    set_abort_callback: unsafe extern "C" fn(llama::ggml_backend_t, llama::ggml_abort_callback, *mut c_void),
    context: NonNull<llama::ggml_context>,
    graph: *mut llama::ggml_cgraph,
    n_nodes: usize,
    /// Boxed: the graph points at them.
    #[allow(clippy::vec_box)]
    tensors: Vec<Box<ggml_tensor>>,
}

impl Inner {
    /// `None` when ggml refuses a CPU backend or a context.
    pub(super) fn new() -> Option<Inner> {
        // SAFETY: plain constructors; each result is checked before it is used. ggml fixes the types of the procedures
        // that have these names (ggml-backend.h), and null is `None`.
        unsafe {
            let device = llama::ggml_backend_dev_by_type(llama::GGML_BACKEND_DEVICE_TYPE_CPU);
            if device.is_null() {
                return None;
            }
            let reg = llama::ggml_backend_dev_backend_reg(device);
            let address = |name: &CStr| llama::ggml_backend_reg_get_proc_address(reg, name.as_ptr());
            let set_n_threads: llama::ggml_backend_set_n_threads_t =
                mem::transmute(address(c"ggml_backend_set_n_threads"));
            let set_abort_callback: llama::ggml_backend_set_abort_callback_t =
                mem::transmute(address(c"ggml_backend_set_abort_callback"));
            let (set_n_threads, set_abort_callback) = (set_n_threads?, set_abort_callback?);
            let backend = llama::ggml_backend_dev_init(device, ptr::null());
            if backend.is_null() {
                return None;
            }
            let params = llama::ggml_init_params {
                mem_size: llama::ggml_graph_overhead_custom(NODES_MAX, false) + llama::ggml_tensor_overhead(),
                mem_buffer: ptr::null_mut(),
                no_alloc: true,
            };
            let Some(context) = NonNull::new(llama::ggml_init(params)) else {
                llama::ggml_backend_free(backend);
                return None;
            };
            let graph = llama::ggml_new_graph_custom(context.as_ptr(), NODES_MAX, false);
            Some(Inner { backend, set_n_threads, set_abort_callback, context, graph, n_nodes: 0, tensors: Vec::new() })
        }
    }

    pub(super) fn set_n_threads(&mut self, n_threads: c_int) {
        // SAFETY: the backend is a live CPU backend.
        unsafe { (self.set_n_threads)(self.backend, n_threads) };
    }

    pub(super) fn set_abort_callback(&mut self, callback: llama::ggml_abort_callback, data: *mut c_void) {
        // SAFETY: the backend is a live CPU backend; the caller keeps callback and data valid.
        unsafe { (self.set_abort_callback)(self.backend, callback, data) };
    }

    /// Keeps a tensor struct until the graph has run and returns its address.
    pub(super) fn tensor(&mut self, tensor: ggml_tensor) -> *mut ggml_tensor {
        self.tensors.push(Box::new(tensor));
        let last = self.tensors.last_mut().expect("just pushed");
        &raw mut **last
    }

    /// Makes room for one node: runs the graph when it is full. To be called before the node's own structs are kept,
    /// which a run forgets.
    pub(super) fn reserve(&mut self) -> ggml_status {
        if self.n_nodes == NODES_MAX { self.run() } else { llama::GGML_STATUS_SUCCESS }
    }

    /// Appends a node whose sources are computed already or appended before, after [`Inner::reserve`].
    ///
    /// # Safety
    /// `node` and its sources are live and have their data until [`Inner::run`] returns.
    pub(super) unsafe fn add(&mut self, node: *mut ggml_tensor) {
        assert!(self.n_nodes < NODES_MAX, "room was reserved");
        // SAFETY: by the caller; the graph has room.
        unsafe { llama::ggml_graph_add_node(self.graph, node) };
        self.n_nodes += 1;
    }

    /// Forgets what was added and not run.
    pub(super) fn discard(&mut self) {
        // SAFETY: the graph is ours; clearing reads no node.
        unsafe { llama::ggml_graph_clear(self.graph) };
        self.n_nodes = 0;
        self.tensors.clear();
    }

    /// Computes what was added since the last run.
    pub(super) fn run(&mut self) -> ggml_status {
        if self.n_nodes == 0 {
            self.tensors.clear();
            return llama::GGML_STATUS_SUCCESS;
        }
        // SAFETY: the nodes are live by the contract of `add`.
        let status = unsafe {
            let status = llama::ggml_backend_graph_compute(self.backend, self.graph);
            llama::ggml_graph_clear(self.graph);
            status
        };
        self.n_nodes = 0;
        self.tensors.clear();
        status
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once.
        unsafe {
            llama::ggml_free(self.context.as_ptr());
            llama::ggml_backend_free(self.backend);
        }
    }
}
