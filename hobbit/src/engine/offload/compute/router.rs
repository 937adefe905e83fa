//! What a layer's router chose: read back from the device, told to policies and to whoever looks ahead.

use super::*;
use crate::engine::compute::{read_weights, write_route};
use crate::engine::hierarchy::Routers;
use crate::trace::Walk;

impl Offload {
    /// Reads the router's choice, its weights and what it saw of a single token, and waits for all that was submitted.
    ///
    /// # Safety
    /// The tensors are live and allocated on the device.
    pub(super) unsafe fn read_back(
        &mut self,
        ids: &ggml_tensor,
        weights: Option<*mut ggml_tensor>,
        input: Option<&ggml_tensor>,
    ) {
        self.input.resize(input.map_or(0, |input| input.ne[0] as usize), 0.0);
        // SAFETY: by the caller; the buffers are not touched before the stream has been waited for.
        unsafe {
            self.ids.resize(llama::ggml_nbytes(ids), 0);
            self.compute.get(ids, self.ids.as_mut_ptr().cast(), 0, self.ids.len());
            if let Some(weights) = weights {
                self.weight_bytes.resize(llama::ggml_nbytes(weights), 0);
                self.compute.get(weights, self.weight_bytes.as_mut_ptr().cast(), 0, self.weight_bytes.len());
            }
            if let Some(input) = input {
                self.compute.get(input, self.input.as_mut_ptr().cast(), 0, size_of_val(&self.input[..]));
            }
        }
        self.compute.synchronize();
        self.launch.settled();
    }

    /// A single token's layer has been submitted: reads and copies for the next ones.
    pub(super) fn look_ahead(
        &self,
        tier: &mut Tier,
        (host, others): (&mut Host, &mut Tiers),
        routers: &mut Routers,
        step: &LayerStep,
    ) {
        let input = (!self.input.is_empty()).then_some(&self.input[..]);
        let mut later = |layer: u16| routers.of_later(layer, input);
        let is_on_device = |version| tier.is_resident(version) || others.have(version);
        self.chosen.foresee(host, step, &mut later, &is_on_device);
        tier.upload_ahead(host, step, &self.chosen);
    }

    /// Sends the layer's tokens along recorded routes: ids and weights are written over the router's.
    ///
    /// # Safety
    /// `ids` and `weights` are what was read back last, and on the device until the ubatch is done.
    pub(super) unsafe fn follow(
        &mut self,
        experts: &Experts,
        walk: &mut Walk,
        ids: &ggml_tensor,
        weights: Option<*mut ggml_tensor>,
    ) -> Result<(), Failed> {
        let layer = self.chosen.layer();
        let routing = &self.chosen.routing;
        let (n_used, n_tokens) = (routing.n_used, routing.n_tokens);
        // SAFETY: by the caller.
        let on_host = weights.map(|tensor| (tensor, unsafe { self.host_weights(tensor) }));
        let Some((tensor, on_host)) = on_host.filter(|(_, w)| (w.n_used, w.n_tokens) == (n_used, n_tokens)) else {
            experts.fail(format!(
                "layer {layer}: this architecture's router weights were not found on the device; recorded routes \
                 cannot be followed"
            ));
            return Err(GGML_STATUS_FAILED);
        };
        let mut host_ids = *ids;
        host_ids.data = self.ids.as_mut_ptr().cast();
        // SAFETY: inside what was read back; the tensors have as many bytes, which are kept until the stream is waited for.
        unsafe {
            write_route(&walk.enter(layer, n_tokens), &host_ids, on_host);
            self.launch.set(&self.compute, std::ptr::from_ref(ids).cast_mut(), self.ids.clone(), 0);
            self.launch.set(&self.compute, tensor, self.weight_bytes.clone(), 0);
            let set = self.chosen.routing.set(read_ids(&host_ids), n_used, self.chosen.n_expert());
            set.expect("routes are checked to be the model's when they are read");
        }
        Ok(())
    }

    /// Asks for a precision for each expert of the layer.
    ///
    /// # Safety
    /// `weights` are what was read back last.
    pub(super) unsafe fn ask(
        &mut self,
        experts: &Experts,
        host: &mut Host,
        weights: Option<*mut ggml_tensor>,
    ) -> Result<(), Failed> {
        if host.precisions.is_exact() {
            self.chosen.ask(&mut host.precisions, []);
            return Ok(());
        }
        // SAFETY: by the caller.
        let weights = weights.map(|tensor| unsafe { self.host_weights(tensor) });
        let (layer, routing) = (self.chosen.layer(), &self.chosen.routing);
        let Some(weights) = weights.filter(|w| (w.n_used, w.n_tokens) == (routing.n_used, routing.n_tokens)) else {
            experts.fail(format!(
                "layer {layer}: this architecture's router weights were not found on the device, which dynamic \
                 precision needs; use --precision exact"
            ));
            return Err(GGML_STATUS_FAILED);
        };
        // SAFETY: inside what was read back.
        self.chosen.ask(&mut host.precisions, unsafe { read_weights(weights) });
        Ok(())
    }

    /// # Safety
    /// `tensor` is what was read back last.
    unsafe fn host_weights(&mut self, tensor: *mut ggml_tensor) -> RouterWeights {
        // SAFETY: live by the caller.
        let mut host = unsafe { *tensor };
        host.data = self.weight_bytes.as_mut_ptr().cast();
        RouterWeights::of(&host, 1)
    }

    /// Takes skipped experts out of the router's weights, token by token.
    ///
    /// # Safety
    /// `tensor` is what was read back last, and on the device until the ubatch is done.
    pub(super) unsafe fn leave_out(&mut self, step: &LayerStep, host: &Host, tensor: *mut ggml_tensor) {
        // SAFETY: by the caller.
        let on_host = unsafe { self.host_weights(tensor) };
        self.chosen.leave_out(step, &host.precisions, |token, rank, weight| {
            // SAFETY: inside what was read back.
            unsafe { on_host.at(token, rank).write_unaligned(weight) };
        });
        // SAFETY: the tensor has as many bytes; they are kept until the stream is waited for.
        unsafe { self.launch.set(&self.compute, tensor, self.weight_bytes.clone(), 0) };
    }
}
