//! How wide a prompt's ubatches are best: what [`hobbit_core::plan`] chooses from, as known before a session is opened.

use super::compute::scratch;
use super::model::Model;
use super::regime::{bounds, room, tensor_bytes};
use hobbit_core::options::{FlashAttn, SessionOptions};
use hobbit_core::plan::{ExpertCache, MemoryLimits, UbatchInput};

impl Model {
    /// How many tokens of a prompt of `n_prompt` tokens are best computed at once in a session with `options`, whose own number
    /// stands where nothing is gained: where no less is read of experts that are not resident. Another number gives other last
    /// bits, so it stands as well where results are to be llama.cpp's, or must not depend on the memory there is.
    #[doc(hidden)]
    pub fn ubatch_for(&self, n_prompt: usize, options: &SessionOptions) -> u32 {
        let shared = &self.shared;
        let is_exact = shared.options.precision.demands_exactness();
        if is_exact || shared.regime.stands_aside() || !shared.placement.is_empty() || !self.info().is_moe() {
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

    /// What a token of a ubatch takes: activations in llama.cpp's buffers, and rows that products gather.
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
        // As found in llama.cpp's compute buffers, within a tenth.
        let of_experts = n_used.saturating_mul(n_ff.saturating_mul(2).saturating_add(n_embd));
        let activations = n_embd.saturating_mul(10).saturating_add(of_experts).saturating_add(attention);
        let one = SessionOptions { n_ubatch: 1, ..options.clone() };
        let products = scratch::products_bytes(self.shared.experts.map(), n_used, &one);
        activations.saturating_mul(4).saturating_add(products)
    }
}
