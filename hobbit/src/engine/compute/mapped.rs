//! Products of experts in llama.cpp's own memory: if it runs a model alone, the backend takes batches for the faster
//! kernels.

use super::*;
use crate::engine::host_reads::ShareView;
use hobbit_core::expert::Precision;

impl ExpertBackend {
    /// Computes nodes whose weights, if any, are wholly in host memory.
    ///
    /// # Safety
    /// As [`ExpertBackend::graph_compute`].
    pub(super) unsafe fn of_llama_cpp(&mut self, nodes: &[*mut ggml_tensor]) -> Result<(), Failed> {
        for &node in nodes {
            // SAFETY: by the caller.
            unsafe {
                match (*node).op {
                    llama::GGML_OP_MUL_MAT_ID => self.mapped(node)?,
                    _ => self.plain(node)?,
                }
            }
        }
        self.run()
    }

    /// Computes a product with weights in host memory. Experts with enough rows for the plain kernels are multiplied
    /// separately.
    ///
    /// # Safety
    /// As [`ExpertBackend::graph_compute`].
    unsafe fn mapped(&mut self, node: *mut ggml_tensor) -> Result<(), Failed> {
        // The choice and the rows must be computed, and a trial must not run nodes that were added before.
        self.run()?;
        // SAFETY: by the caller: sources of a live node are live.
        let (weights, ids) = unsafe { (&*(*node).src[0], &*(*node).src[2]) };
        // SAFETY: nothing waits in the inner graph.
        let from = unsafe { self.kernels.plain_from(&mut self.inner, &*node, weights.type_, None) };
        let ids = RouterValues::of(ids, 0);
        // SAFETY: computed by an earlier split of this ubatch into host memory.
        let is_known = unsafe { self.routing.set(ids.read(), ids.n_used, weights.ne[2] as usize) }.is_ok();
        let routing = &self.routing;
        // ggml reports an id that is no expert. Experts are sorted by falling popularity.
        if !is_known || routing.needed.first().is_none_or(|&most| routing.pairs_of(most).len() < from) {
            // SAFETY: by the caller.
            return unsafe { self.plain(node) };
        }
        let view = ShareView {
            base: weights.data.cast(),
            stride: weights.nb[2],
            n_slots: weights.ne[2] as u32,
            type_id: weights.type_,
            row: (weights.nb[0], weights.nb[1]),
            interleaving: None,
        };
        let used = |&index: &u16| {
            let used =
                Used { index, precision: Precision::High, share: 0, row: Some(index.into()), is_on_device: false };
            (used, None)
        };
        let experts: Vec<_> = routing.needed.iter().map(used).collect();
        // SAFETY: by the caller; rows are of floats, as llama.cpp plans them.
        let row_bytes = unsafe { ((*(*node).src[1]).ne[0] + (*node).ne[0]) as usize * size_of::<f32>() };
        let routing = std::mem::take(&mut self.routing);
        let mut rest = experts.as_slice();
        let mut result = Ok(());
        while !rest.is_empty() && result.is_ok() {
            let (now, later) = rest.split_at(groups::fitting(&routing, rest, row_bytes));
            // SAFETY: by the caller; the weights are llama.cpp's, and stay.
            result = unsafe { self.groups(node, &routing, now, |_| view) };
            rest = later;
        }
        self.routing = routing;
        result
    }
}
