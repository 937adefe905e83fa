//! A router's choice: read back from the device for policies and prefetching.

use super::*;
use crate::engine::hierarchy::Routers;
use crate::engine::split::Router;

impl Offload {
    /// Reads the router's choice, its weights and its input, and waits for all submitted work.
    ///
    /// # Safety
    /// The tensors are live and allocated on the device.
    pub(super) unsafe fn read_back(
        &mut self,
        ids: &ggml_tensor,
        weights: Option<*mut ggml_tensor>,
        input: Option<&ggml_tensor>,
    ) {
        self.input.resize(input.map_or(0, |input| (input.ne[0] * input.ne[2]) as usize), 0.0);
        // SAFETY: by the caller; the buffers are not touched before the stream has been waited for.
        unsafe {
            self.ids.resize(llama::ggml_nbytes(ids), 0);
            self.launch.stream.get(ids, &mut self.ids);
            if let Some(weights) = weights {
                self.weight_bytes.resize(llama::ggml_nbytes(weights), 0);
                self.launch.stream.get(weights, &mut self.weight_bytes);
            }
            if let Some(input) = input {
                self.launch.stream.get(input, &mut self.input);
            }
        }
        self.launch.synchronize();
    }

    /// As [`split::reroute`], for a choice and weights that have been read back. Changes are written to the device.
    ///
    /// # Safety
    /// The nodes are live and allocated on the device, and were read back last.
    pub(super) unsafe fn reroute(
        &mut self,
        experts: &Experts,
        host: &mut Host,
        routers: &mut Routers,
        elsewhere: &Elsewhere,
        [product, ids]: [*mut ggml_tensor; 2],
        weights: Option<*mut ggml_tensor>,
    ) -> Result<(), Failed> {
        let Some(weights) = weights else {
            return split::no_weights(experts, self.chosen.layer(), " on the device");
        };
        // SAFETY: by the caller; the bytes are kept until the stream is waited for.
        unsafe {
            let mut host_ids = *ids;
            host_ids.data = self.ids.as_mut_ptr().cast();
            let values = [RouterValues::of(&host_ids, 0), host_weights(weights, &mut self.weight_bytes)];
            let input = (!self.input.is_empty()).then_some(&self.input[..]);
            let router = Router { product, ids, weights, values, input };
            if split::reroute(&mut self.chosen, host, routers, elsewhere, &router) {
                self.launch.set(ids, self.ids.clone(), 0);
                self.launch.set(weights, self.weight_bytes.clone(), 0);
            }
        }
        Ok(())
    }

    /// The router's input, token by token; empty if it was not needed.
    pub(super) fn inputs(&self) -> Vec<&[f32]> {
        let n_tokens = self.chosen.routing.n_tokens.max(1);
        self.input.chunks_exact((self.input.len() / n_tokens).max(1)).collect()
    }

    /// A layer of a decode batch has been submitted: starts reads and copies for the next ones.
    pub(super) fn look_ahead(&self, tier: &mut Tier, beside: &mut Beside, step: &LayerStep) {
        let Beside { host, routers, others, .. } = beside;
        let inputs = self.inputs();
        let mut later = |layers: &[u16]| routers.of_later(layers, &inputs);
        let is_on_device = |version| tier.is_resident(version) || others.have(version);
        self.chosen.predict(host, step, &mut later, &is_on_device);
        tier.upload_ahead(host, step, &self.chosen);
    }

    /// Removes skipped experts from the router's weights, token by token.
    ///
    /// # Safety
    /// `tensor` was read back last, and is on the device until the ubatch is done.
    pub(super) unsafe fn leave_out(&mut self, step: &LayerStep, host: &Host, tensor: *mut ggml_tensor) {
        // SAFETY: by the caller.
        let on_host = unsafe { host_weights(tensor, &mut self.weight_bytes) };
        self.chosen.leave_out(step, &host.precisions, |token, rank, weight| {
            // SAFETY: inside what was read back.
            unsafe { on_host.at::<f32>(token, rank).write_unaligned(weight) };
        });
        // SAFETY: the tensor has as many bytes; they are kept until the stream is waited for.
        unsafe { self.launch.set(tensor, self.weight_bytes.clone(), 0) };
    }
}

/// The router's weights among the bytes read back.
///
/// # Safety
/// `tensor` is live, and has as many bytes.
pub(super) unsafe fn host_weights(tensor: *mut ggml_tensor, bytes: &mut [u8]) -> RouterValues {
    // SAFETY: live by the caller.
    let mut host = unsafe { *tensor };
    host.data = bytes.as_mut_ptr().cast();
    RouterValues::of(&host, 1)
}
