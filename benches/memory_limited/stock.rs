//! Plain llama.cpp at its best under a memory limit.
//!
//! * `mmap`: every other way of loading copies the weights to memory, which the limit does not have.
//! * No extra buffer types: they copy weights as well, to repack them (no Q8_0 on x86, so nothing is lost there), and
//!   the kernels stay those that hobbit's results are compared with.
//! * More threads than cores: those that wait for a page need none (`--tune` compares).
//! * No warm-up: llama.cpp's touches every expert.

use std::ffi::{CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use ggml_sys::llama;
use hobbit::Token;

use super::child::{Evaluate, N_BATCH, Task};

/// A model and a context.
pub struct Stock {
    model: NonNull<llama::llama_model>,
    context: NonNull<llama::llama_context>,
}

impl Stock {
    pub fn open(task: &Task) -> Result<Self> {
        let name = path_to_c(&task.files.model)?;
        ggml_sys::register_backends();
        // SAFETY: plain constructors; `name` outlives the call, each result is checked before it is used.
        unsafe {
            llama::llama_log_set(Some(discard), std::ptr::null_mut());
            llama::llama_backend_init();
            let mut params = llama::llama_model_default_params();
            params.load_mode = llama::LLAMA_LOAD_MODE_MMAP;
            if let Some(mode) = &task.load_mode {
                let mode = CString::new(mode.as_str())?;
                params.load_mode = llama::llama_load_mode_from_str(mode.as_ptr());
            }
            params.use_extra_bufts = task.extra_bufts;
            params.n_gpu_layers = 0;
            let model = llama::llama_model_load_from_file(name.as_ptr(), params);
            let model = NonNull::new(model).context("llama.cpp does not load the model")?;
            let mut params = llama::llama_context_default_params();
            params.n_ctx = task.n_ctx();
            params.n_batch = N_BATCH;
            params.n_ubatch = N_BATCH;
            params.n_threads = task.threads;
            params.n_threads_batch = task.threads;
            params.flash_attn_type = llama::LLAMA_FLASH_ATTN_TYPE_AUTO;
            let context = NonNull::new(llama::llama_init_from_model(model.as_ptr(), params));
            let Some(context) = context else {
                llama::llama_model_free(model.as_ptr());
                anyhow::bail!("llama.cpp makes no context for the model");
            };
            Ok(Self { model, context })
        }
    }

    fn vocab(&self) -> *const llama::llama_vocab {
        // SAFETY: the model is live; its vocabulary lives as long.
        unsafe { llama::llama_model_get_vocab(self.model.as_ptr()) }
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
    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        let mut tokens: Vec<Token> = vec![0; text.len() + 8];
        // SAFETY: text and tokens are valid for the lengths passed; a token stands for at least a byte.
        let n = unsafe {
            let (text, text_len) = (text.as_ptr().cast::<c_char>(), text.len() as i32);
            llama::llama_tokenize(self.vocab(), text, text_len, tokens.as_mut_ptr(), tokens.len() as i32, true, false)
        };
        ensure!(n >= 0, "llama_tokenize answers {n}");
        tokens.truncate(n as usize);
        Ok(tokens)
    }

    fn evaluate(&mut self, tokens: &[Token]) -> Result<()> {
        for piece in tokens.chunks(N_BATCH as usize) {
            let mut piece = piece.to_vec();
            // SAFETY: the batch borrows `piece`, which outlives its evaluation.
            let code = unsafe {
                let batch = llama::llama_batch_get_one(piece.as_mut_ptr(), piece.len() as i32);
                let code = llama::llama_decode(self.context.as_ptr(), batch);
                llama::llama_synchronize(self.context.as_ptr());
                code
            };
            ensure!(code == 0, "llama_decode answers {code}");
        }
        Ok(())
    }

    fn last_logits(&self) -> Result<&[f32]> {
        // SAFETY: the context is live; a non-null answer points at a row of `n_vocab` floats, valid until the next
        // evaluation, which needs `&mut self`.
        unsafe {
            let row = llama::llama_get_logits_ith(self.context.as_ptr(), -1);
            ensure!(!row.is_null(), "llama.cpp has no logits");
            Ok(std::slice::from_raw_parts(row, llama::llama_vocab_n_tokens(self.vocab()) as usize))
        }
    }

    fn begin_again(&mut self) {
        // SAFETY: the context is live.
        unsafe { llama::llama_memory_clear(llama::llama_get_memory(self.context.as_ptr()), true) };
    }
}

fn path_to_c(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).context("the model's name contains a NUL byte")
}

unsafe extern "C" fn discard(_: llama::ggml_log_level, _: *const c_char, _: *mut c_void) {}
