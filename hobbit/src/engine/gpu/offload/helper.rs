//! The CPU helper: computes some of the missing experts of a batch of few tokens from host memory, while the device
//! computes the others (HOBBIT's cooperative mode; SMoE, Algorithm 2).
//!
//! The helper repeats the nodes of a layer's region as the CPU computes a layer of few tokens ([`Chain`]): the rows of
//! several experts in one graph. A region that is no chain is left to the device.

use std::collections::HashMap;
use std::ffi::c_int;
use std::ptr;

use ggml_sys::llama::{self, ggml_tensor};

use crate::engine::cpu::backend::{Chain, ExpertBackend};
use crate::engine::ggml::graph::{n_uses, tensor_at};
use crate::engine::ggml::{Buffer, Stream};
use crate::engine::memory::host_reads::ShareView;
use crate::engine::seam::layer_router::Failed;
use hobbit_core::expert::SliceKind;
use hobbit_core::residency::Used;
use hobbit_core::route::{Pair, Routing};

/// A node of a layer's region, and the matrix that it multiplies by, if it is a product. The last node is the last
/// product.
pub(super) type Node = (*mut ggml_tensor, Option<SliceKind>);

/// A CPU backend for the rows of some experts.
pub(super) struct Helper {
    backend: ExpertBackend,
    /// The buffer given for ordinary memory.
    buffer: Buffer,
    /// Copies of device tensors that regions read and that are never written: biases.
    leaves: HashMap<usize, Vec<u8>>,
}

// SAFETY: owned; used by one thread at a time.
unsafe impl Send for Helper {}

/// A region as a chain in host memory.
pub(super) struct HostChain {
    chain: Chain,
    /// Its nodes, and the tensors of biases.
    #[allow(clippy::vec_box)]
    _nodes: Vec<Box<ggml_tensor>>,
}

/// A region of a graph as a chain; `None` if the helper cannot compute it row by row.
///
/// # Safety
/// Nodes of the live graph, the first of which is a product.
pub(super) unsafe fn chain_of(graph: *const llama::ggml_cgraph, region: &[Node], routing: &Routing) -> Option<Chain> {
    let nodes: Vec<_> = region.iter().map(|(node, _)| *node).collect();
    let kind_of = |node| region.iter().find(|(own, _)| *own == node).and_then(|(_, kind)| *kind);
    let shape = [routing.n_used, routing.n_tokens];
    // SAFETY: by the caller; sources of live nodes are live.
    unsafe {
        let chain = Chain::of(&nodes, shape, kind_of, |node| n_uses(graph, node))?;
        let chain = Some(chain).filter(|chain| chain.reads_only((*nodes[0]).src[1]))?;
        let reads_leaf = |&node: &*mut ggml_tensor| {
            (*node).op != llama::GGML_OP_ADD_ID || (*(*node).src[1]).op == llama::GGML_OP_NONE
        };
        nodes.iter().all(reads_leaf).then_some(chain)
    }
}

impl Helper {
    /// `None` if ggml refuses a CPU backend.
    pub(super) fn new() -> Option<Self> {
        // SAFETY: takes nothing.
        let buffer = Buffer::new(unsafe { llama::ggml_backend_cpu_buffer_type() }, 64)?;
        let backend = ExpertBackend::new(ptr::null_mut(), Default::default())?;
        Some(Self { backend, buffer, leaves: HashMap::new() })
    }

    /// Moves a chain of [`chain_of`] to host memory.
    ///
    /// # Safety
    /// Its nodes are live; `stream` has run the nodes that made its biases.
    pub(super) unsafe fn on_host(&mut self, stream: &Stream, mut chain: Chain) -> HostChain {
        let mut nodes: Vec<Box<ggml_tensor>> = Vec::new();
        let mut keep = |tensor: ggml_tensor| {
            nodes.push(Box::new(tensor));
            &raw mut **nodes.last_mut().expect("just pushed")
        };
        chain.replace_nodes(|node| {
            // SAFETY: by the caller; sources of live nodes are live.
            unsafe {
                let mut copy = ggml_tensor { buffer: self.buffer.raw(), ..*node };
                if copy.op == llama::GGML_OP_ADD_ID {
                    copy.src[1] = keep(leaf(&mut self.leaves, &self.buffer, stream, &*copy.src[1]));
                }
                keep(copy)
            }
        });
        HostChain { chain, _nodes: nodes }
    }

    /// Computes the rows of a region's last product that some experts give. `input_of`: a pair's row of the first
    /// product's input. `view_of`: each matrix of an expert.
    ///
    /// # Safety
    /// The views are valid.
    pub(super) unsafe fn rows<'i, 'v>(
        &mut self,
        own: &HostChain,
        n_threads: c_int,
        routing: &Routing,
        experts: &[Used],
        input_of: impl Fn(Pair) -> &'i [f32],
        view_of: impl Fn(Used, SliceKind) -> ShareView<'v>,
    ) -> Result<Vec<(Pair, Vec<f32>)>, Failed> {
        self.backend.set_row_threads(n_threads);
        // SAFETY: by the caller; the chain's nodes and biases are ours.
        unsafe { self.backend.rows(&own.chain, routing, experts, input_of, view_of) }
    }
}

/// A copy in host memory of a leaf on the device of `stream`.
///
/// # Safety
/// `tensor` is live.
unsafe fn leaf(
    leaves: &mut HashMap<usize, Vec<u8>>,
    buffer: &Buffer,
    stream: &Stream,
    tensor: &ggml_tensor,
) -> ggml_tensor {
    let bytes = leaves.entry(ptr::from_ref(tensor) as usize).or_insert_with(|| {
        // SAFETY: by the caller; the stream is waited for before the bytes are used.
        unsafe {
            let mut bytes: Vec<u8> = vec![0; llama::ggml_nbytes(tensor)];
            stream.get(tensor, &mut bytes);
            stream.synchronize();
            bytes
        }
    });
    tensor_at(tensor.type_, tensor.ne, bytes.as_mut_ptr(), buffer.raw(), None)
}
