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

impl Stock {
    /// Loads `path` (of a split model, its first shard) completely.
    pub fn open(path: &Path, options: &SessionOptions) -> Result<Stock, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: plain constructors; `name` outlives the call, each result is checked before it is used.
        unsafe {
            llama::llama_backend_init();
            let mut params = llama::llama_model_default_params();
            params.load_mode = llama::LLAMA_LOAD_MODE_NONE;
            params.use_extra_bufts = false;
            params.n_gpu_layers = 0;
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
        // SAFETY: the batch is made for as many entries as are written, each with one sequence; a row of logits is
        // `n_vocab` floats and valid until the next call.
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
            let row = |i| llama::llama_get_logits_ith(self.context.as_ptr(), i as i32);
            Ok((0..batch.len()).map(|i| std::slice::from_raw_parts(row(i), self.n_vocab).to_vec()).collect())
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
