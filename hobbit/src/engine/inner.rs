//! The inner graph: small graphs of ours on the backend that does the computation.

use std::ffi::{c_int, c_void};

use ggml_sys::llama::{self, ggml_status, ggml_tensor};

use super::ggml::Cpu;
use super::graph::Graph;

/// Maximum nodes of an inner graph. A split of one MoE layer has about ten.
const NODES_MAX: usize = 512;

/// A CPU backend and one reusable graph.
pub(super) struct Inner {
    cpu: Cpu,
    graph: Graph,
}

impl Inner {
    /// `None` when ggml refuses a CPU backend or a context.
    pub(super) fn new() -> Option<Inner> {
        Some(Inner { cpu: Cpu::new()?, graph: Graph::new(NODES_MAX)? })
    }

    pub(super) fn set_n_threads(&mut self, n_threads: c_int) {
        self.cpu.set_n_threads(n_threads);
    }

    pub(super) fn set_abort_callback(&mut self, callback: llama::ggml_abort_callback, data: *mut c_void) {
        self.cpu.set_abort_callback(callback, data);
    }

    /// As [`Graph::tensor`].
    pub(super) fn tensor(&mut self, tensor: ggml_tensor) -> *mut ggml_tensor {
        self.graph.tensor(tensor)
    }

    /// Makes room for one node: runs the graph when it is full. Must be called before storing the node's own structs,
    /// because a run discards them.
    pub(super) fn reserve(&mut self) -> ggml_status {
        if self.graph.has_room(1) { llama::GGML_STATUS_SUCCESS } else { self.run() }
    }

    /// Appends a node whose sources are computed already or appended before, after [`Inner::reserve`].
    ///
    /// # Safety
    /// `node` and its sources are live and have their data until [`Inner::run`] returns.
    pub(super) unsafe fn add(&mut self, node: *mut ggml_tensor) {
        // SAFETY: by the caller.
        unsafe { self.graph.add(node) };
    }

    /// Discards nodes that were added and not run.
    pub(super) fn discard(&mut self) {
        self.graph.discard();
    }

    /// Computes the nodes added since the last run.
    pub(super) fn run(&mut self) -> ggml_status {
        self.graph.submit(&self.cpu.stream, || false)
    }
}
