//! Small graphs of ours, and the tensors of their nodes.

use std::ffi::{c_int, c_void};
use std::ptr;

use ggml_sys::llama::{self, ggml_backend_buffer_t, ggml_status, ggml_tensor};
use ggml_sys::shim;

use crate::engine::ggml::{Context, Cpu, Stream};

/// One reusable graph and the tensor structs of its nodes. The structs keep their addresses between graphs: backends
/// that record graphs recognise them by these.
pub(crate) struct Graph {
    graph: *mut llama::ggml_cgraph,
    n_nodes: usize,
    n_nodes_max: usize,
    #[allow(clippy::vec_box)]
    tensors: Vec<Box<ggml_tensor>>,
    n_tensors: usize,
    _context: Context,
}

impl Graph {
    /// With room for at most `n_nodes_max` nodes. `None` when ggml refuses a context.
    pub(crate) fn new(n_nodes_max: usize) -> Option<Self> {
        let context = Context::new(1, n_nodes_max)?;
        // SAFETY: the context has room for it.
        let graph = unsafe { llama::ggml_new_graph_custom(context.raw(), n_nodes_max, false) };
        Some(Self { graph, n_nodes: 0, n_nodes_max, tensors: Vec::new(), n_tensors: 0, _context: context })
    }

    /// Stores a tensor struct until the graph has been submitted, and returns its address.
    pub(crate) fn tensor(&mut self, tensor: ggml_tensor) -> *mut ggml_tensor {
        match self.tensors.get_mut(self.n_tensors) {
            Some(place) => **place = tensor,
            None => self.tensors.push(Box::new(tensor)),
        }
        let place = &raw mut *self.tensors[self.n_tensors];
        self.n_tensors += 1;
        place
    }

    /// A copy of a computed tensor, without the nodes that computed it, which backends that send graphs elsewhere would
    /// send along.
    ///
    /// # Safety
    /// If `tensor` is a view, its source is live.
    pub(crate) unsafe fn leaf(&mut self, tensor: &ggml_tensor) -> *mut ggml_tensor {
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
    pub(crate) fn has_room(&self, n: usize) -> bool {
        self.n_nodes + n <= self.n_nodes_max
    }

    /// Appends a node whose sources are computed already or appended before.
    ///
    /// # Safety
    /// `node` and its sources are live until the graph is submitted, and allocated where the stream can use them.
    pub(crate) unsafe fn add(&mut self, node: *mut ggml_tensor) {
        assert!(self.has_room(1), "room was checked");
        // SAFETY: by the caller; the graph has room.
        unsafe { llama::ggml_graph_add_node(self.graph, node) };
        self.n_nodes += 1;
    }

    /// Starts computing the added nodes. If the device lacks memory, tries once more after `relieve` has freed some.
    pub(crate) fn submit(&mut self, stream: &Stream, relieve: impl FnOnce() -> bool) -> ggml_status {
        if self.n_nodes == 0 {
            self.n_tensors = 0;
            return llama::GGML_STATUS_SUCCESS;
        }
        // SAFETY: the nodes are live by the contract of `add`.
        let start = || unsafe { llama::ggml_backend_graph_compute_async(stream.raw(), self.graph) };
        let status = match start() {
            llama::GGML_STATUS_ALLOC_FAILED if relieve() => start(),
            status => status,
        };
        self.discard();
        status
    }

    /// Discards nodes that were added and not submitted.
    pub(crate) fn discard(&mut self) {
        // SAFETY: the graph is ours; clearing reads no node.
        unsafe { llama::ggml_graph_clear(self.graph) };
        self.n_nodes = 0;
        self.n_tensors = 0;
    }
}

/// A contiguous tensor at `data` in `buffer`, a view of `whole` if given.
pub(crate) fn tensor_at(
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
pub(crate) fn rows(tensor: &ggml_tensor, first: i64, n: i64) -> ggml_tensor {
    let mut part = *tensor;
    let skipped = first as usize * tensor.nb[1];
    part.ne[1] = n;
    part.data = part.data.cast::<u8>().wrapping_add(skipped).cast();
    if !part.view_src.is_null() {
        part.view_offs += skipped;
    }
    part
}

/// Maximum nodes of an inner graph. A split of one MoE layer has about ten.
const NODES_MAX: usize = 512;

/// A CPU backend and one reusable graph.
pub(crate) struct Inner {
    cpu: Cpu,
    graph: Graph,
}

impl Inner {
    /// `None` when ggml refuses a CPU backend or a context.
    pub(crate) fn new() -> Option<Inner> {
        Some(Inner { cpu: Cpu::new()?, graph: Graph::new(NODES_MAX)? })
    }

    pub(crate) fn set_n_threads(&mut self, n_threads: c_int) {
        self.cpu.set_n_threads(n_threads);
    }

    pub(crate) fn set_abort_callback(&mut self, callback: llama::ggml_abort_callback, data: *mut c_void) {
        self.cpu.set_abort_callback(callback, data);
    }

    /// As [`Graph::tensor`].
    pub(crate) fn tensor(&mut self, tensor: ggml_tensor) -> *mut ggml_tensor {
        self.graph.tensor(tensor)
    }

    /// Makes room for one node: runs the graph when it is full. Must be called before storing the node's own structs,
    /// because a run discards them.
    pub(crate) fn reserve(&mut self) -> Result<(), ggml_status> {
        if self.graph.has_room(1) { Ok(()) } else { self.run() }
    }

    /// Appends a node whose sources are computed already or appended before, after [`Inner::reserve`].
    ///
    /// # Safety
    /// `node` and its sources are live and have their data until [`Inner::run`] returns.
    pub(crate) unsafe fn add(&mut self, node: *mut ggml_tensor) {
        // SAFETY: by the caller.
        unsafe { self.graph.add(node) };
    }

    /// Discards nodes that were added and not run.
    pub(crate) fn discard(&mut self) {
        self.graph.discard();
    }

    /// Computes the nodes added since the last run.
    pub(crate) fn run(&mut self) -> Result<(), ggml_status> {
        match self.graph.submit(&self.cpu.stream, || false) {
            llama::GGML_STATUS_SUCCESS => Ok(()),
            status => Err(status),
        }
    }
}

/// How many times nodes read a tensor, those outside of a split included; `None` if the graph does not know.
///
/// # Safety
/// A live graph, or a live part of one.
pub(crate) unsafe fn n_uses(graph: *const llama::ggml_cgraph, tensor: *const ggml_tensor) -> Option<usize> {
    // SAFETY: by the caller; a tensor of another graph is not found.
    usize::try_from(unsafe { shim::hobbit_n_uses(graph, tensor) }).ok()
}

/// Whether two nodes may be computed in either order: neither writes memory that the other reads or writes. ggml plans
/// memory for one order, in which a later result may take the memory of an earlier one.
///
/// # Safety
/// Live nodes of one graph, allocated with their sources on one device.
pub(crate) unsafe fn may_swap(a: *mut ggml_tensor, b: *mut ggml_tensor) -> bool {
    // SAFETY: by the caller.
    unsafe {
        if is_view((*a).op) || is_view((*b).op) {
            return true;
        }
        let writes_over = |writer, reader: *mut ggml_tensor| {
            (*reader).src.iter().any(|&source| !source.is_null() && overlap(writer, source))
        };
        !overlap(a, b) && !writes_over(a, b) && !writes_over(b, a)
    }
}

/// Whether two tensors share memory.
///
/// # Safety
/// Live, allocated tensors.
pub(crate) unsafe fn overlap(a: *mut ggml_tensor, b: *mut ggml_tensor) -> bool {
    // SAFETY: by the caller. Addresses of different buffers may be of different machines.
    if unsafe { (*a).buffer != (*b).buffer } {
        return false;
    }
    let bytes_of = |tensor: *mut ggml_tensor| {
        // SAFETY: by the caller.
        let (start, bytes) = unsafe { ((*tensor).data as usize, llama::ggml_nbytes(tensor)) };
        start..start + bytes
    };
    let (a, b) = (bytes_of(a), bytes_of(b));
    a.start < b.end && b.start < a.end
}

/// Whether a node computes nothing.
pub(crate) fn is_view(op: llama::ggml_op) -> bool {
    matches!(
        op,
        llama::GGML_OP_NONE
            | llama::GGML_OP_VIEW
            | llama::GGML_OP_RESHAPE
            | llama::GGML_OP_PERMUTE
            | llama::GGML_OP_TRANSPOSE
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node with `n` floats at `at` that reads `sources`.
    fn node(op: llama::ggml_op, at: usize, n: i64, sources: &[*mut ggml_tensor]) -> Box<ggml_tensor> {
        let data = std::ptr::without_provenance_mut(at);
        let mut node = tensor_at(llama::GGML_TYPE_F32, [n, 1, 1, 1], data, ptr::null_mut(), None);
        node.op = op;
        node.src[..sources.len()].copy_from_slice(sources);
        Box::new(node)
    }

    #[test]
    fn nodes_may_swap_unless_one_writes_memory_of_the_other() {
        use llama::{GGML_OP_MUL, GGML_OP_MUL_MAT_ID, GGML_OP_RESHAPE};
        let mut input = node(llama::GGML_OP_NONE, 0x1000, 16, &[]);
        let mut gate = node(GGML_OP_MUL_MAT_ID, 0x2000, 16, &[&raw mut *input]);
        let mut scaled = node(GGML_OP_MUL, 0x3000, 16, &[&raw mut *gate]);
        let mut in_place = node(GGML_OP_MUL, 0x3000, 16, &[&raw mut *input]);
        let may_swap = |a: &mut ggml_tensor, at, op, source: *mut ggml_tensor| {
            let mut later = node(op, at, 16, &[source]);
            // SAFETY: the nodes are live; their memory is not touched.
            unsafe { super::may_swap(a, &raw mut *later) }
        };
        let input = &raw mut *input;
        assert!(may_swap(&mut scaled, 0x4000, GGML_OP_MUL_MAT_ID, input));
        assert!(!may_swap(&mut scaled, 0x303c, GGML_OP_MUL_MAT_ID, input), "writes the other's result");
        assert!(!may_swap(&mut scaled, 0x2000, GGML_OP_MUL_MAT_ID, input), "writes what the other reads");
        let in_place = &raw mut *in_place;
        assert!(!may_swap(&mut scaled, 0x4000, GGML_OP_MUL_MAT_ID, in_place), "reads memory that the other writes");
        assert!(may_swap(&mut scaled, 0x3000, GGML_OP_RESHAPE, input), "views compute nothing");
    }
}
