//! Layers that are wholly on the device, and the streams that compute with them.

use ggml_sys::llama::ggml_tensor;

use std::rc::Rc;

use super::Tier;
use crate::engine::ggml::{Event, Stream};
use hobbit_core::expert::SliceKind;

/// A stream that computes with layers that are wholly on the device.
pub(super) struct Loan {
    user: usize,
    is_running: bool,
    /// Event after the last work it submitted.
    fence: Option<Rc<Event>>,
}

impl Tier {
    /// The tensor of all experts of a layer, if it is wholly on the device.
    pub(in crate::engine) fn complete(&self, layer: u16, kind: SliceKind) -> Option<*mut ggml_tensor> {
        if self.complete.contains(&layer) { self.memory.only_tensor(layer, kind) } else { None }
    }

    /// `user` computes with [`Tier::complete`] tensors until [`Tier::returned`].
    pub(in crate::engine) fn lend(&mut self, user: &Stream) {
        let user = user.raw() as usize;
        self.loans.retain(|loan| loan.user != user);
        self.loans.push(Loan { user, is_running: true, fence: None });
    }

    /// `user` has submitted all work that reads these tensors.
    pub(in crate::engine) fn returned(&mut self, user: &Stream) {
        let fence = self.events.record(user);
        let user = user.raw() as usize;
        if let Some(loan) = self.loans.iter_mut().find(|loan| loan.user == user) {
            *loan = Loan { user, is_running: false, fence };
        }
    }

    /// A layer is no longer wholly on the device. Returns `false`, and changes nothing, while a graph is being submitted
    /// that reads its tensors.
    pub(super) fn dissolve(&mut self, layer: u16) -> bool {
        if !self.complete.contains(&layer) {
            return true;
        }
        if self.loans.iter().any(|loan| loan.is_running) {
            return false;
        }
        self.loans.drain(..).filter_map(|loan| loan.fence).for_each(|fence| fence.synchronize());
        self.complete.remove(&layer)
    }
}
