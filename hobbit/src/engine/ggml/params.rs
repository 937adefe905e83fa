//! llama.cpp's parameters of models and contexts.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use ggml_sys::llama::{
    self, ggml_backend_buffer_type_t, ggml_backend_dev_t, llama_model_kv_override,
    llama_model_kv_override__bindgen_ty_1 as Value, llama_model_tensor_buft_override,
};

use crate::engine::error::DeviceError;
use hobbit_core::options::{
    FlashAttn, KvType, KvValue, ModelOptions, Pooling, RopeScaling, SessionOptions, TensorOverride,
};

/// Metadata values that replace a model file's, ended by an empty key.
pub(crate) fn kv_overrides(options: &ModelOptions) -> Vec<llama_model_kv_override> {
    let chosen = options.kv_overrides.iter().map(|chosen| {
        // The tag selects the union's field.
        let (tag, value) = match &chosen.value {
            KvValue::Int(value) => (llama::LLAMA_KV_OVERRIDE_TYPE_INT, Value { val_i64: *value }),
            KvValue::Float(value) => (llama::LLAMA_KV_OVERRIDE_TYPE_FLOAT, Value { val_f64: *value }),
            KvValue::Bool(value) => (llama::LLAMA_KV_OVERRIDE_TYPE_BOOL, Value { val_bool: *value }),
            KvValue::Str(value) => (llama::LLAMA_KV_OVERRIDE_TYPE_STR, Value { val_str: c_text(value) }),
        };
        llama_model_kv_override { tag, key: c_text(&chosen.key), __bindgen_anon_1: value }
    });
    let end = llama_model_kv_override { tag: 0, key: c_text(""), __bindgen_anon_1: Value { val_i64: 0 } };
    chosen.chain([end]).collect()
}

/// `text`, truncated so that a terminating NUL remains.
fn c_text(text: &str) -> [c_char; 128] {
    let mut all = [0; 128];
    for (byte, place) in text.bytes().zip(&mut all[..127]) {
        *place = byte as c_char;
    }
    all
}

/// Placement of tensors by name: patterns with buffer types; the first matching pattern decides.
#[derive(Default)]
pub(crate) struct Overrides {
    all: Vec<(CString, ggml_backend_buffer_type_t)>,
    /// Points to the patterns.
    raw: Vec<llama_model_tensor_buft_override>,
}

impl Overrides {
    /// Appends a pattern.
    pub(crate) fn push(&mut self, pattern: CString, buft: ggml_backend_buffer_type_t) {
        self.all.push((pattern, buft));
    }

    /// Appends the user's overrides. `devices` end with null or with the slice.
    ///
    /// # Errors
    /// [`DeviceError::NoBufferType`]: a buffer type that neither the CPU nor one of the devices has.
    pub(crate) fn add(&mut self, wanted: &[TensorOverride], devices: &[ggml_backend_dev_t]) -> Result<(), DeviceError> {
        if wanted.is_empty() {
            return Ok(());
        }
        let known = buffer_types(devices);
        for one in wanted {
            let found = known.iter().find(|(name, _)| *name == one.buffer_type);
            let pattern = CString::new(one.pattern.as_str()).ok();
            let (Some((_, buft)), Some(pattern)) = (found, pattern) else {
                let known = known.into_iter().map(|(name, _)| name).collect();
                return Err(DeviceError::NoBufferType { found: one.buffer_type.clone(), known });
            };
            self.push(pattern, *buft);
        }
        Ok(())
    }

    /// All of them, null-terminated: valid until one is added, and as long as `self`.
    pub(crate) fn end(&mut self) -> *const llama_model_tensor_buft_override {
        // Only now, because moving a `CString` invalidates pointers to its text.
        let texts = self.all.iter().map(|(pattern, buft)| (pattern.as_ptr(), *buft));
        let entries = texts.chain([(ptr::null(), ptr::null_mut())]);
        self.raw = entries.map(|(pattern, buft)| llama_model_tensor_buft_override { pattern, buft }).collect();
        self.raw.as_ptr()
    }
}

/// The CPU's buffer type and those of the devices, by name.
fn buffer_types(devices: &[ggml_backend_dev_t]) -> Vec<(String, ggml_backend_buffer_type_t)> {
    let named = devices.iter().take_while(|device| !device.is_null());
    // SAFETY: devices are registered and live as long as the process; so do buffer types and their names.
    unsafe {
        let types = named.map(|device| llama::ggml_backend_dev_buffer_type(*device));
        std::iter::once(llama::ggml_backend_cpu_buffer_type())
            .chain(types)
            .map(|buft| (CStr::from_ptr(llama::ggml_backend_buft_name(buft)).to_string_lossy().into_owned(), buft))
            .collect()
    }
}

/// The flag of contexts that are never interrupted.
pub(crate) static NEVER_INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// The parameters of a context. `interrupted` must outlive it: computation stops when it becomes true.
pub(crate) fn context_params(options: &SessionOptions, interrupted: *const AtomicBool) -> llama::llama_context_params {
    // SAFETY: returns a struct of plain values.
    let mut params = unsafe { llama::llama_context_default_params() };
    params.n_ctx = options.n_ctx;
    params.n_batch = options.n_batch.max(1);
    params.n_ubatch = options.n_ubatch.min(params.n_batch);
    params.n_seq_max = options.n_seq_max.max(1);
    params.n_rs_seq = options.rollback;
    // Every sequence has a last token.
    params.kv_unified = options.kv_unified;
    if options.embeddings {
        params.embeddings = true;
        params.pooling_type = match options.pooling {
            None => llama::LLAMA_POOLING_TYPE_UNSPECIFIED,
            Some(Pooling::None) => llama::LLAMA_POOLING_TYPE_NONE,
            Some(Pooling::Mean) => llama::LLAMA_POOLING_TYPE_MEAN,
            Some(Pooling::Cls) => llama::LLAMA_POOLING_TYPE_CLS,
            Some(Pooling::Last) => llama::LLAMA_POOLING_TYPE_LAST,
            Some(Pooling::Rank) => llama::LLAMA_POOLING_TYPE_RANK,
        };
    }
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

/// llama.cpp's thread count follows the cores; ours does, too.
pub(crate) fn default_threads() -> i32 {
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
