//! Small graphs of ours on a device.

use std::ptr::{self, NonNull};

use ggml_sys::llama::{self, ggml_backend_buffer_t, ggml_status, ggml_tensor};

use crate::engine::tier::stream::Stream;

/// Nodes a graph may have.
const NODES_MAX: usize = 1024;

/// One reusable graph and the tensor structs of its nodes. They keep their addresses from graph to graph: backends that
/// record graphs know them again by these.
pub(super) struct Graph {
    context: NonNull<llama::ggml_context>,
    graph: *mut llama::ggml_cgraph,
    n_nodes: usize,
    #[allow(clippy::vec_box)]
    tensors: Vec<Box<ggml_tensor>>,
    n_tensors: usize,
}

impl Graph {
    /// `None` when ggml refuses a context.
    pub(super) fn new() -> Option<Self> {
        // SAFETY: plain constructors; the results are checked.
        unsafe {
            let params = llama::ggml_init_params {
                mem_size: llama::ggml_graph_overhead_custom(NODES_MAX, false) + llama::ggml_tensor_overhead(),
                mem_buffer: ptr::null_mut(),
                no_alloc: true,
            };
            let context = NonNull::new(llama::ggml_init(params))?;
            let graph = llama::ggml_new_graph_custom(context.as_ptr(), NODES_MAX, false);
            Some(Self { context, graph, n_nodes: 0, tensors: Vec::new(), n_tensors: 0 })
        }
    }

    /// Keeps a tensor struct until the graph has been submitted and returns its address.
    pub(super) fn tensor(&mut self, tensor: ggml_tensor) -> *mut ggml_tensor {
        match self.tensors.get_mut(self.n_tensors) {
            Some(place) => **place = tensor,
            None => self.tensors.push(Box::new(tensor)),
        }
        let place = &raw mut *self.tensors[self.n_tensors];
        self.n_tensors += 1;
        place
    }

    /// A copy of a tensor that is computed already: without the nodes that computed it, which backends that send graphs
    /// elsewhere would send along.
    ///
    /// # Safety
    /// What `tensor` is a view of is live.
    pub(super) unsafe fn leaf(&mut self, tensor: &ggml_tensor) -> *mut ggml_tensor {
        let mut leaf = *tensor;
        leaf.op = llama::GGML_OP_NONE;
        leaf.src.fill(ptr::null_mut());
        if !leaf.view_src.is_null() {
            // SAFETY: by the caller. A view's source is no view.
            leaf.view_src = unsafe { self.leaf(&*leaf.view_src) };
        }
        self.tensor(leaf)
    }

    /// Whether `n` more nodes fit.
    pub(super) fn has_room(&self, n: usize) -> bool {
        self.n_nodes + n <= NODES_MAX
    }

    /// Appends a node whose sources are computed already or appended before.
    ///
    /// # Safety
    /// `node`, one of this graph's structs, and its sources are live until the graph is submitted, and allocated on the stream's device.
    pub(super) unsafe fn add(&mut self, node: *mut ggml_tensor) {
        assert!(self.has_room(1), "room was checked");
        // SAFETY: by the caller; the graph has room.
        unsafe {
            (*node).flags |= llama::GGML_TENSOR_FLAG_COMPUTE as i32;
            llama::ggml_graph_add_node(self.graph, node);
        }
        self.n_nodes += 1;
    }

    /// Starts computing what was added; where the device has too little memory for that, once more if `relieve` has
    /// found some.
    pub(super) fn submit(&mut self, stream: &Stream, relieve: impl FnOnce() -> bool) -> ggml_status {
        // SAFETY: the nodes are live by the contract of `add`.
        let start = || unsafe { llama::ggml_backend_graph_compute_async(stream.raw(), self.graph) };
        let status = match self.n_nodes {
            0 => llama::GGML_STATUS_SUCCESS,
            _ => match start() {
                llama::GGML_STATUS_ALLOC_FAILED if relieve() => start(),
                status => status,
            },
        };
        self.discard();
        status
    }

    /// Forgets what was added and not submitted.
    pub(super) fn discard(&mut self) {
        // SAFETY: the graph is ours; clearing reads no node.
        unsafe { llama::ggml_graph_clear(self.graph) };
        self.n_nodes = 0;
        self.n_tensors = 0;
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once.
        unsafe { llama::ggml_free(self.context.as_ptr()) };
    }
}

/// A contiguous tensor at `data` in `buffer`, a part of `whole` if there is one.
pub(super) fn tensor_at(
    type_: llama::ggml_type,
    ne: [i64; 4],
    data: *mut u8,
    buffer: ggml_backend_buffer_t,
    whole: Option<*mut ggml_tensor>,
) -> ggml_tensor {
    // SAFETY: all-zero is a valid `ggml_tensor`: null pointers, empty name, op NONE.
    let mut tensor: ggml_tensor = unsafe { std::mem::zeroed() };
    tensor.type_ = type_;
    tensor.buffer = buffer;
    tensor.ne = ne;
    tensor.data = data.cast();
    if let Some(whole) = whole {
        tensor.view_src = whole;
        // SAFETY: `whole` is live; both addresses are of one buffer.
        tensor.view_offs = (data as usize).wrapping_sub(unsafe { (*whole).data } as usize);
    }
    // SAFETY: `type_` is one of ggml's.
    unsafe {
        tensor.nb[0] = llama::ggml_type_size(type_);
        tensor.nb[1] = llama::ggml_row_size(type_, ne[0]);
    }
    for d in 2..4 {
        tensor.nb[d] = tensor.nb[d - 1] * ne[d - 1] as usize;
    }
    tensor
}

/// Rows `first..first + n` of dimension 1 of `tensor`, in place.
pub(super) fn rows(tensor: &ggml_tensor, first: i64, n: i64) -> ggml_tensor {
    let mut part = *tensor;
    let skipped = first as usize * tensor.nb[1];
    part.ne[1] = n;
    part.data = part.data.cast::<u8>().wrapping_add(skipped).cast();
    if !part.view_src.is_null() {
        part.view_offs += skipped;
    }
    part
}
