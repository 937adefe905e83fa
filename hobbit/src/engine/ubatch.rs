//! Choice of the ubatch size for a prompt: input for [`hobbit_core::plan`], as known before a session is opened.

use super::compute;
use super::model::Model;
use super::run_mode::{bounds, room, tensor_bytes};
use hobbit_core::options::{FlashAttn, SessionOptions};
use hobbit_core::plan::{ExpertCache, MemoryLimits, UbatchInput};

impl Model {
    /// Best ubatch size for a prompt of `n_prompt` tokens in a session with `options`. Keeps the session's own size if
    /// another one would read no fewer bytes of non-resident experts. Also keeps it if results must match llama.cpp's
    /// or must not depend on available memory, because another size changes the last bits.
    #[doc(hidden)]
    pub fn ubatch_for(&self, n_prompt: usize, options: &SessionOptions) -> u32 {
        let shared = &self.shared;
        let is_exact = shared.options.precision.demands_exactness();
        if is_exact || shared.run_mode.is_passthrough() || !shared.placement.is_empty() || !self.info().is_moe() {
            return options.n_ubatch;
        }
        let expert_bytes = self.info().expert_bytes;
        let (_, most) = bounds(self.gguf(), options);
        let limits = MemoryLimits::read();
        let left = || {
            let ordinary = tensor_bytes(self.gguf()).saturating_sub(expert_bytes);
            let fixed = [ordinary, most.kv, most.runtime, u64::from(options.n_ubatch) * self.token_bytes(options)];
            fixed.into_iter().fold(room(&shared.options, &limits).unwrap_or(0), u64::saturating_sub)
        };
        let cache_bytes = match shared.options.expert_cache {
            ExpertCache::Auto => left(),
            ExpertCache::Bytes(bytes) => bytes,
            ExpertCache::Percent(percent) => (expert_bytes as f64 * percent / 100.0) as u64,
        };
        let input = UbatchInput {
            n_prompt: n_prompt as u64,
            n_batch: options.n_batch,
            usual: options.n_ubatch,
            expert_bytes,
            cache_bytes: cache_bytes.min(expert_bytes),
            token_bytes: self.token_bytes(options),
        };
        input.choose()
    }

    /// Memory per token of a ubatch: activations in llama.cpp's buffers, and rows that products gather.
    fn token_bytes(&self, options: &SessionOptions) -> u64 {
        let gguf = self.gguf();
        let number = |key: &str| gguf.metadata.get_u64(&format!("{}.{key}", gguf.architecture())).unwrap_or(0);
        let n_embd = number("embedding_length");
        let n_used = u64::from(self.info().n_expert_used);
        let n_ff = number("expert_feed_forward_length").max(number("feed_forward_length"));
        let attention = match options.flash_attn {
            FlashAttn::Off => number("attention.head_count").saturating_mul(options.n_ctx.into()),
            _ => 0,
        };
        // As measured in llama.cpp's compute buffers, within a tenth.
        let of_experts = n_used.saturating_mul(n_ff.saturating_mul(2).saturating_add(n_embd));
        let activations = n_embd.saturating_mul(10).saturating_add(of_experts).saturating_add(attention);
        let one = SessionOptions { n_ubatch: 1, ..options.clone() };
        let products = compute::products_bytes(self.shared.experts.map(), n_used, &one);
        activations.saturating_mul(4).saturating_add(products)
    }
}
