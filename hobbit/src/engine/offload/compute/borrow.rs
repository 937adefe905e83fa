//! Layers that are wholly on the device: their products are ordinary nodes while a graph runs.

use super::*;

impl Offload {
    /// Gives products of layers that are wholly on the device the weights there, until [`Offload::return_complete`]:
    /// these products are then ordinary nodes.
    ///
    /// # Safety
    /// Nodes of a live graph.
    pub(super) unsafe fn borrow_complete(&mut self, nodes: &[*mut ggml_tensor]) {
        // SAFETY: by the caller.
        let mut products = nodes.iter().filter_map(|&node| unsafe { Some((node, self.product(node)?)) }).peekable();
        let Some((_, first)) = products.peek() else { return };
        let experts = Arc::clone(&first.experts);
        let mut guard = experts.memories();
        // Recorded routes overwrite the router's choice, which must be read for that.
        let Some(memories) = guard.as_mut().filter(|memories| !memories.follows_routes()) else { return };
        let mut borrowed = Vec::new();
        for (node, tag) in products {
            let tier = memories.tier(self.wrapper.inner);
            if let Some(weights) = tier.and_then(|tier| tier.complete(tag.layer, tag.kind)) {
                memories.unseen.remove(&(tag.layer, tag.kind));
                // SAFETY: by the caller.
                unsafe {
                    borrowed.push((node, (*node).src[0]));
                    (*node).src[0] = weights;
                }
            }
        }
        if let Some(tier) = memories.tier(self.wrapper.inner).filter(|_| !borrowed.is_empty()) {
            tier.lend(&self.launch.stream);
        }
        drop(guard);
        self.borrowed = borrowed;
        self.experts = Some(experts);
    }

    /// Undoes [`Offload::borrow_complete`].
    ///
    /// # Safety
    /// The graph is still live.
    pub(super) unsafe fn return_complete(&mut self) {
        if self.borrowed.is_empty() {
            return;
        }
        for (node, weights) in self.borrowed.drain(..) {
            // SAFETY: by the caller.
            unsafe { (*node).src[0] = weights };
        }
        let mut guard = self.experts.as_ref().map(|experts| experts.memories());
        let memories = guard.as_mut().and_then(|guard| guard.as_mut());
        if let Some(tier) = memories.and_then(|memories| memories.tier(self.wrapper.inner)) {
            tier.returned(&self.launch.stream);
        }
    }

    /// Frees device memory of slots, between two regions. Returns whether there was any to free.
    ///
    /// # Safety
    /// The graph that is being computed is live.
    pub(super) unsafe fn relieve(&mut self) -> bool {
        // SAFETY: by the caller.
        unsafe { self.return_complete() };
        let Some(experts) = &self.experts else { return false };
        let mut guard = experts.memories();
        let memories = guard.as_mut().and_then(|memories| memories.for_device(self.wrapper.inner));
        let Some((tier, beside)) = memories else { return false };
        self.launch.synchronize();
        tier.enter(&self.launch.stream, None);
        tier.settled(beside.host);
        let freed = tier.shrink(&self.launch.stream, 0);
        tier.leave(&self.launch.stream);
        freed > 0
    }
}
