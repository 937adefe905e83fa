//! llama.cpp's context parameters from [`SessionOptions`].

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use ggml_sys::llama;

use crate::options::{FlashAttn, KvType, RopeScaling, SessionOptions};

/// The parameters of a context. `interrupted` must outlive it: computation stops when it becomes true.
pub(super) fn context_params(options: &SessionOptions, interrupted: *const AtomicBool) -> llama::llama_context_params {
    // SAFETY: returns a struct of plain values.
    let mut params = unsafe { llama::llama_context_default_params() };
    params.n_ctx = options.n_ctx;
    params.n_batch = options.n_batch.max(1);
    params.n_ubatch = options.n_ubatch.min(params.n_batch);
    params.n_seq_max = options.n_seq_max.max(1);
    // Every sequence has a last token.
    params.n_outputs_max = if options.n_outputs_max == 0 { 0 } else { options.n_outputs_max.max(params.n_seq_max) };
    let threads = options.threads.unwrap_or_else(default_threads);
    params.n_threads = threads;
    params.n_threads_batch = options.threads_batch.unwrap_or(threads);
    params.flash_attn_type = match options.flash_attn {
        FlashAttn::Auto => llama::LLAMA_FLASH_ATTN_TYPE_AUTO,
        FlashAttn::On => llama::LLAMA_FLASH_ATTN_TYPE_ENABLED,
        FlashAttn::Off => llama::LLAMA_FLASH_ATTN_TYPE_DISABLED,
    };
    params.type_k = kv_type(options.type_k);
    params.type_v = kv_type(options.type_v);
    params.offload_kqv = options.kv_offload;
    params.swa_full = options.swa_full;
    params.no_perf = false;
    params.abort_callback = Some(is_interrupted);
    params.abort_callback_data = interrupted.cast_mut().cast();
    let rope = &options.rope;
    if let Some(scaling) = rope.scaling {
        params.rope_scaling_type = match scaling {
            RopeScaling::None => llama::LLAMA_ROPE_SCALING_TYPE_NONE,
            RopeScaling::Linear => llama::LLAMA_ROPE_SCALING_TYPE_LINEAR,
            RopeScaling::Yarn => llama::LLAMA_ROPE_SCALING_TYPE_YARN,
        };
    }
    params.rope_freq_base = rope.freq_base;
    params.rope_freq_scale = rope.freq_scale;
    params.yarn_orig_ctx = rope.yarn_orig_ctx;
    params.yarn_ext_factor = rope.yarn_ext_factor;
    params.yarn_attn_factor = rope.yarn_attn_factor;
    params.yarn_beta_fast = rope.yarn_beta_fast;
    params.yarn_beta_slow = rope.yarn_beta_slow;
    params
}

/// llama.cpp's threads follow the cores; so do ours.
pub(super) fn default_threads() -> i32 {
    std::thread::available_parallelism().map_or(4, |n| n.get().min(i32::MAX as usize) as i32)
}

fn kv_type(kind: KvType) -> llama::ggml_type {
    match kind {
        KvType::F32 => llama::GGML_TYPE_F32,
        KvType::F16 => llama::GGML_TYPE_F16,
        KvType::Bf16 => llama::GGML_TYPE_BF16,
        KvType::Q8_0 => llama::GGML_TYPE_Q8_0,
        KvType::Q4_0 => llama::GGML_TYPE_Q4_0,
        KvType::Q4_1 => llama::GGML_TYPE_Q4_1,
        KvType::Iq4Nl => llama::GGML_TYPE_IQ4_NL,
        KvType::Q5_0 => llama::GGML_TYPE_Q5_0,
        KvType::Q5_1 => llama::GGML_TYPE_Q5_1,
    }
}

unsafe extern "C" fn is_interrupted(flag: *mut c_void) -> bool {
    // SAFETY: points at the flag of the session's `Interrupt`, which outlives the context.
    unsafe { (*flag.cast::<AtomicBool>()).load(Ordering::Relaxed) }
}
