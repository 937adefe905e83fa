//! llama.cpp as it is: the reference.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use ggml_sys::llama;
use hobbit::{BatchToken, FlashAttn, KvType, SessionOptions};

use super::script::Evaluate;

/// A model and a context of plain llama.cpp.
pub struct Stock {
    model: NonNull<llama::llama_model>,
    context: NonNull<llama::llama_context>,
    n_vocab: usize,
}

/// Which layers and tensors are where.
pub struct Placed<'a> {
    /// By name; none for the CPU alone.
    pub devices: &'a [&'a str],
    pub n_gpu_layers: i32,
    pub tensor_split: &'a [f32],
    /// Tensors that stay on the CPU, as a pattern.
    pub on_cpu: &'a str,
}

impl Default for Placed<'_> {
    fn default() -> Self {
        Self { devices: &[], n_gpu_layers: 999, tensor_split: &[], on_cpu: "" }
    }
}

impl Stock {
    /// Loads `path` (of a split model, its first shard) completely.
    pub fn open(path: &Path, options: &SessionOptions) -> Result<Stock, String> {
        Self::open_on(path, options, &[])
    }

    /// As [`Stock::open`], with all layers on the devices of these names.
    pub fn open_on(path: &Path, options: &SessionOptions, devices: &[&str]) -> Result<Stock, String> {
        Self::open_placed(path, options, &Placed { devices, ..Placed::default() })
    }

    /// As [`Stock::open`], placed so.
    pub fn open_placed(path: &Path, options: &SessionOptions, placed: &Placed) -> Result<Stock, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        ggml_sys::register_backends();
        // SAFETY: plain constructors; `name` outlives the call, each result is checked before it is used.
        unsafe {
            llama::llama_backend_init();
            let mut params = llama::llama_model_default_params();
            params.load_mode = llama::LLAMA_LOAD_MODE_NONE;
            params.use_extra_bufts = false;
            let mut chosen = Vec::new();
            for device in placed.devices {
                let name = CString::new(*device).map_err(|error| error.to_string())?;
                let found = llama::ggml_backend_dev_by_name(name.as_ptr());
                chosen.push(NonNull::new(found).ok_or(format!("there is no device {device}"))?.as_ptr());
            }
            chosen.push(std::ptr::null_mut());
            params.devices = chosen.as_mut_ptr();
            params.n_gpu_layers = if placed.devices.is_empty() { 0 } else { placed.n_gpu_layers };
            let mut split = placed.tensor_split.to_vec();
            split.resize(llama::llama_max_devices(), 0.0);
            if !placed.tensor_split.is_empty() {
                params.tensor_split = split.as_ptr();
            }
            let pattern = CString::new(placed.on_cpu).map_err(|error| error.to_string())?;
            let override_of = |pattern, buft| llama::llama_model_tensor_buft_override { pattern, buft };
            let overrides = [
                override_of(pattern.as_ptr(), llama::ggml_backend_cpu_buffer_type()),
                override_of(std::ptr::null(), std::ptr::null_mut()),
            ];
            if !placed.on_cpu.is_empty() {
                params.tensor_buft_overrides = overrides.as_ptr();
            }
            let model = llama::llama_model_load_from_file(name.as_ptr(), params);
            let model = NonNull::new(model).ok_or("stock llama.cpp does not load it")?;
            let context = llama::llama_init_from_model(model.as_ptr(), context_params(options));
            let Some(context) = NonNull::new(context) else {
                llama::llama_model_free(model.as_ptr());
                return Err("stock llama.cpp makes no context for it".to_owned());
            };
            let n_vocab = llama::llama_vocab_n_tokens(llama::llama_model_get_vocab(model.as_ptr())) as usize;
            Ok(Stock { model, context, n_vocab })
        }
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        // SAFETY: made in `open`, freed once, the context first.
        unsafe {
            llama::llama_free(self.context.as_ptr());
            llama::llama_model_free(self.model.as_ptr());
        }
    }
}

impl Evaluate for Stock {
    fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    fn evaluate(&mut self, batch: &[BatchToken]) -> Result<Vec<Vec<f32>>, String> {
        self.decode(batch)?;
        (0..batch.len()).map(|i| self.logits(i)).collect()
    }
}

impl Stock {
    fn decode(&mut self, batch: &[BatchToken]) -> Result<(), String> {
        // SAFETY: the batch is made for as many entries as are written, each with one sequence.
        unsafe {
            let mut raw = llama::llama_batch_init(batch.len() as i32, 0, 1);
            raw.n_tokens = batch.len() as i32;
            for (i, entry) in batch.iter().enumerate() {
                *raw.token.add(i) = entry.token;
                *raw.pos.add(i) = entry.position;
                *raw.n_seq_id.add(i) = 1;
                **raw.seq_id.add(i) = entry.sequence;
                *raw.logits.add(i) = i8::from(entry.logits);
            }
            let code = llama::llama_decode(self.context.as_ptr(), raw);
            llama::llama_batch_free(raw);
            if code != 0 {
                return Err(format!("stock llama_decode answers {code}"));
            }
        }
        Ok(())
    }

    fn logits(&self, index: usize) -> Result<Vec<f32>, String> {
        // SAFETY: a row of logits is `n_vocab` floats and valid until the next call.
        unsafe {
            let row = llama::llama_get_logits_ith(self.context.as_ptr(), index as i32);
            let row = NonNull::new(row).ok_or(format!("no logits for entry {index}"))?;
            Ok(std::slice::from_raw_parts(row.as_ptr(), self.n_vocab).to_vec())
        }
    }
}

fn context_params(options: &SessionOptions) -> llama::llama_context_params {
    let kv_type = |kind| match kind {
        KvType::F16 => llama::GGML_TYPE_F16,
        KvType::Q8_0 => llama::GGML_TYPE_Q8_0,
        other => unimplemented!("no case uses a KV cache of {other}"),
    };
    // SAFETY: returns a struct of plain values.
    let mut params = unsafe { llama::llama_context_default_params() };
    params.n_ctx = options.n_ctx;
    params.n_batch = options.n_batch;
    params.n_ubatch = options.n_ubatch;
    params.n_seq_max = options.n_seq_max;
    params.n_threads = options.threads.expect("every case names its threads");
    params.n_threads_batch = params.n_threads;
    params.flash_attn_type = match options.flash_attn {
        FlashAttn::Auto => llama::LLAMA_FLASH_ATTN_TYPE_AUTO,
        FlashAttn::On => llama::LLAMA_FLASH_ATTN_TYPE_ENABLED,
        FlashAttn::Off => llama::LLAMA_FLASH_ATTN_TYPE_DISABLED,
    };
    params.type_k = kv_type(options.type_k);
    params.type_v = kv_type(options.type_v);
    params.swa_full = options.swa_full;
    params
}
