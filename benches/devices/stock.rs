//! Plain llama.cpp with its experts on the CPU and everything else on the device.

use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{self, NonNull};

use anyhow::{Context, Result, bail, ensure};
use ggml_sys::llama;
use hobbit::Token;
use lagging_device::Device;

use super::run::{Evaluate, Settings};

/// A model and a context.
pub struct Stock {
    model: NonNull<llama::llama_model>,
    context: NonNull<llama::llama_context>,
}

impl Stock {
    pub fn open(settings: &Settings, device: &Device) -> Result<Self> {
        let name = CString::new(settings.path.as_os_str().as_bytes()).context("--model: a name with a NUL byte")?;
        ggml_sys::register_backends();
        // SAFETY: plain constructors; what is passed by address outlives the call, each result is checked.
        unsafe {
            llama::llama_backend_init();
            let mut devices = [device.raw(), ptr::null_mut()];
            let cpu = llama::ggml_backend_cpu_buffer_type();
            let overrides = [
                llama::llama_model_tensor_buft_override { pattern: c"ffn_.*_exps".as_ptr(), buft: cpu },
                llama::llama_model_tensor_buft_override { pattern: ptr::null(), buft: ptr::null_mut() },
            ];
            let mut params = llama::llama_model_default_params();
            params.load_mode = llama::LLAMA_LOAD_MODE_NONE;
            params.use_extra_bufts = false;
            params.devices = devices.as_mut_ptr();
            params.n_gpu_layers = 999;
            params.tensor_buft_overrides = overrides.as_ptr();
            let model = llama::llama_model_load_from_file(name.as_ptr(), params);
            let model = NonNull::new(model).context("llama.cpp does not load the model")?;
            let mut params = llama::llama_context_default_params();
            params.n_ctx = settings.n_ctx();
            params.n_batch = settings.n_batch();
            params.n_ubatch = settings.n_batch();
            params.n_threads = settings.threads;
            params.n_threads_batch = settings.threads;
            let Some(context) = NonNull::new(llama::llama_init_from_model(model.as_ptr(), params)) else {
                llama::llama_model_free(model.as_ptr());
                bail!("llama.cpp makes no context for the model");
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
        let mut tokens = tokens.to_vec();
        // SAFETY: the batch borrows `tokens`, which outlives its evaluation.
        let code = unsafe {
            let batch = llama::llama_batch_get_one(tokens.as_mut_ptr(), tokens.len() as i32);
            let code = llama::llama_decode(self.context.as_ptr(), batch);
            llama::llama_synchronize(self.context.as_ptr());
            code
        };
        ensure!(code == 0, "llama_decode answers {code}");
        Ok(())
    }

    fn begin_again(&mut self) {
        // SAFETY: the context is live.
        unsafe { llama::llama_memory_clear(llama::llama_get_memory(self.context.as_ptr()), true) };
    }
}
