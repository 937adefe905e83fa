//! An owned `llama_sampler`.

use std::ptr::NonNull;

use ggml_sys::llama::{self, llama_sampler, llama_token_data_array};
use ggml_sys::shim;

use crate::engine::error::Error;
use crate::engine::raw::{MESSAGE_BYTES, text_of};
use hobbit_core::options::Token;

/// A sampler of llama.cpp, freed on drop.
pub(super) struct Raw(NonNull<llama_sampler>);

// SAFETY: a sampler is memory without ties to a thread; it is used only through `&mut Sampler`.
unsafe impl Send for Raw {}

impl Raw {
    pub(super) fn new(made: *mut llama_sampler, name: &str) -> Result<Raw, Error> {
        NonNull::new(made).map(Raw).ok_or_else(|| Error::Sampling(format!("llama.cpp refused the sampler '{name}'")))
    }

    pub(super) fn as_ptr(&self) -> *mut llama_sampler {
        self.0.as_ptr()
    }

    /// False where llama.cpp fails.
    pub(super) fn accept(&mut self, token: Token) -> bool {
        // SAFETY: the sampler is live.
        unsafe { shim::hobbit_sampler_accept(self.as_ptr(), token) }
    }

    /// # Errors
    /// [`Error::Sampling`]: llama.cpp fails; the candidates must not be used.
    pub(super) fn apply(&mut self, candidates: &mut llama_token_data_array) -> Result<(), Error> {
        let mut message = [0u8; MESSAGE_BYTES];
        // SAFETY: the sampler is live; the array's data is valid for its size and stays in place.
        let is_done = unsafe {
            shim::hobbit_sampler_apply(self.as_ptr(), candidates, message.as_mut_ptr().cast(), message.len())
        };
        if is_done { Ok(()) } else { Err(Error::Sampling(format!("llama.cpp's samplers fail: {}", text_of(&message)))) }
    }

    pub(super) fn reset(&mut self) {
        // SAFETY: the sampler is live, and so is the vocabulary a grammar refers to.
        let is_done = unsafe { shim::hobbit_sampler_reset(self.as_ptr()) };
        debug_assert!(is_done, "a sampler begins anew as it began");
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: owned by us, freed once. A chain frees its links.
        unsafe { llama::llama_sampler_free(self.as_ptr()) };
    }
}
