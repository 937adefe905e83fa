//! What a layer's router chose: read back from the device, told to policies and to whoever looks ahead.

use super::*;

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

    /// Tells the policies, the host's and the device's, what the router thinks of all experts for a single token, and takes
    /// the weights of the chosen ones from that where they are not known better.
    ///
    /// # Safety
    /// `ids` is a live node that was computed: the router's choice, which was read back last.
    pub(super) unsafe fn tell_scores(
        &mut self,
        residency: &mut Residency,
        tier: &mut Tier,
        layer: u16,
        ids: *mut ggml_tensor,
        n_expert: usize,
    ) -> Option<Vec<f32>> {
        if self.input.is_empty() {
            return None;
        }
        // SAFETY: by the caller.
        let scores = unsafe { residency.scores(layer, ids, &self.input, n_expert) }?;
        tier.scores(layer, &scores);
        self.known.extend(self.routing.ids.iter().map(|&id| scores[usize::from(id)]));
        Some(scores)
    }

    /// The router's weights, `[n_tokens][n_used]`, as far as they are known.
    pub(super) fn router_weights(&self) -> &[f32] {
        if self.weights.is_empty() { &self.known } else { &self.weights }
    }

    /// A single token's layer has been submitted: reads and copies for the next ones.
    pub(super) fn look_ahead(&self, residency: &mut Residency, tier: &mut Tier, step: &Step) {
        let share = |index| self.routing.share(index, self.router_weights());
        let chosen: Vec<(u16, f32)> = self.routing.needed.iter().map(|&index| (index, share(index))).collect();
        let input = (!self.input.is_empty()).then_some(&self.input[..]);
        residency.foresee(step, &chosen, input, &|version| tier.is_resident(version));
        tier.upload_ahead(residency, step, &chosen);
    }

    /// Asks for a precision for each expert of the layer (`self.demands`).
    ///
    /// # Safety
    /// `weights` are what was read back last.
    pub(super) unsafe fn decide(
        &mut self,
        experts: &Experts,
        residency: &mut Residency,
        layer: u16,
        n_expert: usize,
        weights: Option<*mut ggml_tensor>,
    ) -> Result<(), Failed> {
        self.weights.clear();
        let exact = residency.precisions.is_exact();
        // SAFETY: by the caller.
        let weights = weights.map(|tensor| unsafe { self.host_weights(tensor) });
        match weights.filter(|w| (w.n_used, w.n_tokens) == (self.routing.n_used, self.routing.n_tokens)) {
            Some(weights) => {
                for token in 0..weights.n_tokens {
                    // SAFETY: inside what was read back.
                    self.weights
                        .extend((0..weights.n_used).map(|rank| unsafe { weights.at(token, rank).read_unaligned() }));
                }
            }
            None if !exact => {
                experts.fail(format!(
                    "layer {layer}: this architecture's router weights were not found on the device, which dynamic \
                     precision needs; use --precision exact"
                ));
                return Err(GGML_STATUS_FAILED);
            }
            None => {}
        }
        residency.precisions.demands(&self.routing, &self.weights, n_expert, &mut self.demands);
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
    pub(super) unsafe fn leave_out(&mut self, skipped: &[u16], residency: &mut Residency, tensor: *mut ggml_tensor) {
        // SAFETY: by the caller.
        let on_host = unsafe { self.host_weights(tensor) };
        let without = |weights: &mut [f32], left_out: &[bool]| residency.precisions.without_skipped(weights, left_out);
        self.routing.leave_out(skipped, &mut self.weights, without, |token, rank, weight| {
            // SAFETY: inside what was read back.
            unsafe { on_host.at(token, rank).write_unaligned(weight) };
        });
        // SAFETY: the tensor has as many bytes; they are kept until the stream is waited for.
        unsafe { self.launch.set(&self.compute, tensor, self.weight_bytes.clone(), 0) };
    }
}
