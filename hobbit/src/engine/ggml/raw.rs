//! Objects of llama.cpp with an owner, models, and conversions of texts, tokens and batches.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::ptr::NonNull;

use ggml_sys::llama::{self, llama_batch, llama_context, llama_model, llama_model_params};
use ggml_sys::shim;

use crate::engine::error::EvalError;
use crate::engine::ggml;
use crate::engine::ggml::pre_tokenizer::Matches;
use hobbit_core::options::Token;

/// One entry of a batch for [`crate::Session::evaluate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchToken {
    /// The token.
    pub token: Token,
    /// Its position in its sequence.
    pub position: i32,
    /// Its sequence, `0..n_seq_max`.
    pub sequence: i32,
    /// Whether [`crate::Session::logits`] needs this entry.
    pub logits: bool,
}

/// The text with which the overrides replace `key`; `None` if they do not.
///
/// # Safety
/// The overrides are null, or end with an empty key.
unsafe fn overridden(params: &llama_model_params, key: &CStr) -> Option<String> {
    let mut next = params.kv_overrides;
    // SAFETY: by the caller; keys and texts are NUL-terminated.
    unsafe {
        while !next.is_null() && (*next).key[0] != 0 {
            let own = &*next;
            if own.tag == llama::LLAMA_KV_OVERRIDE_TYPE_STR && CStr::from_ptr(own.key.as_ptr()) == key {
                return Some(CStr::from_ptr(own.__bindgen_anon_1.val_str.as_ptr()).to_string_lossy().into_owned());
            }
            next = next.add(1);
        }
    }
    None
}

/// An object of llama.cpp, freed on drop.
#[derive(Debug)]
pub(crate) struct Owned<T: Freed>(pub(crate) NonNull<T>);

/// Objects that llama.cpp or the shim makes for their owner.
pub(crate) trait Freed {
    /// The function that frees one.
    const FREE: unsafe extern "C" fn(*mut Self);
}

impl<T: Freed> Owned<T> {
    /// `None` for null.
    pub(crate) fn new(made: *mut T) -> Option<Self> {
        NonNull::new(made).map(Self)
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T: Freed> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: made for its owner, who holds it here only; freed once.
        unsafe { T::FREE(self.as_ptr()) };
    }
}

macro_rules! freed {
    ($($object:ty => $free:path;)*) => {$(
        impl Freed for $object {
            const FREE: unsafe extern "C" fn(*mut Self) = $free;
        }
    )*};
}

freed! {
    llama_model => llama::llama_model_free;
    llama_context => llama::llama_free;
    llama::llama_sampler => llama::llama_sampler_free;
    llama::mtmd_bitmap => llama::mtmd_bitmap_free;
    llama::mtmd_context => llama::mtmd_free;
    llama::mtmd_input_chunk => llama::mtmd_input_chunk_free;
    llama::mtmd_input_chunks => llama::mtmd_input_chunks_free;
    shim::hobbit_chat_parser => shim::hobbit_chat_parser_free;
    shim::hobbit_pattern => shim::hobbit_pattern_free;
    shim::hobbit_speculative => shim::hobbit_speculative_free;
}

/// Room for a message from the shim, in bytes. Jinja errors quote the template around them.
pub(crate) const MESSAGE_BYTES: usize = 4096;

/// Calls a function of the shim that fills a message buffer when it returns null.
pub(crate) fn with_message<T>(call: impl FnOnce(*mut c_char, usize) -> *mut T) -> Result<NonNull<T>, String> {
    let mut message = [0u8; MESSAGE_BYTES];
    NonNull::new(call(message.as_mut_ptr().cast(), message.len())).ok_or_else(|| text_of(&message))
}

/// Calls a shim function and checks its result with `is_done`; the error begins with `doing`, followed by the shim's
/// message.
pub(crate) fn checked<T>(
    doing: &str,
    is_done: impl FnOnce(&T) -> bool,
    call: impl FnOnce(*mut c_char, usize) -> T,
) -> Result<T, EvalError> {
    let mut message = [0u8; MESSAGE_BYTES];
    let answer = call(message.as_mut_ptr().cast(), message.len());
    if is_done(&answer) {
        return Ok(answer);
    }
    let reason = text_of(&message);
    Err(EvalError::Decode(if reason.is_empty() { doing.to_owned() } else { format!("{doing}: {reason}") }))
}

/// The text of a NUL-terminated message buffer.
pub(crate) fn text_of(message: &[u8]) -> String {
    CStr::from_bytes_until_nul(message).map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
}

/// A loaded model, freed on drop, when every context of it is gone.
pub(crate) struct RawModel {
    model: Owned<llama_model>,
    /// Depth of its pre-tokenizer's matches.
    pub(crate) matches: Option<Matches>,
}

// SAFETY: a llama_model is immutable after loading; llama.cpp shares it among contexts on several threads.
unsafe impl Send for RawModel {}
// SAFETY: as above.
unsafe impl Sync for RawModel {}

impl RawModel {
    /// Loads a file by its name.
    ///
    /// # Errors
    /// llama.cpp's message, which may be empty.
    ///
    /// # Safety
    /// All that `params` point to is valid for the call.
    pub(crate) unsafe fn load_path(path: &Path, params: llama_model_params) -> Result<Self, String> {
        let name = ggml::c_path(path)?;
        // SAFETY: by the caller; the name outlives the call.
        let load =
            |message, capacity| unsafe { shim::hobbit_model_load_path(name.as_ptr(), params, message, capacity) };
        // SAFETY: by the caller.
        with_message(load).map(|model| unsafe { Self::new(model, &params) })
    }

    /// Loads from a `FILE*`.
    ///
    /// # Errors
    /// llama.cpp's message, which may be empty.
    ///
    /// # Safety
    /// The stream, and all that `params` point to, are valid for the call.
    pub(crate) unsafe fn load_stream(file: *mut c_void, params: llama_model_params) -> Result<Self, String> {
        // SAFETY: by the caller.
        let model =
            with_message(|message, capacity| unsafe { shim::hobbit_model_load(file, params, message, capacity) })?;
        // SAFETY: by the caller.
        Ok(unsafe { Self::new(model, &params) })
    }

    /// # Safety
    /// The model was loaded with `params`, whose overrides are valid for the call.
    unsafe fn new(model: NonNull<llama_model>, params: &llama_model_params) -> Self {
        let mut own = Self { model: Owned(model), matches: None };
        // SAFETY: the vocabulary lives as long as the model; the overrides are valid by the caller.
        let (kind, overridden) =
            unsafe { (llama::llama_vocab_type(own.vocab()), overridden(params, c"tokenizer.ggml.pre")) };
        if kind == llama::LLAMA_VOCAB_TYPE_BPE {
            let pre = overridden.or_else(|| own.metadata(c"tokenizer.ggml.pre"));
            own.matches = Matches::of(pre.as_deref().unwrap_or("default"));
        }
        own
    }

    pub(crate) fn as_ptr(&self) -> *mut llama_model {
        self.model.as_ptr()
    }

    pub(crate) fn vocab(&self) -> *const llama::llama_vocab {
        // SAFETY: the model is live; its vocabulary lives as long.
        unsafe { llama::llama_model_get_vocab(self.as_ptr()) }
    }

    /// Number of tokens in the vocabulary.
    pub(crate) fn n_vocab(&self) -> usize {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_n_tokens(self.vocab()).max(0) as usize }
    }

    /// A metadata value, text or number, as text; `None` if it is missing or longer than 255 bytes.
    pub(crate) fn metadata(&self, key: &CStr) -> Option<String> {
        let mut text = [0u8; 256];
        // SAFETY: the model is live; writes at most `buffer`'s length, NUL included.
        let length = unsafe {
            llama::llama_model_meta_val_str(self.as_ptr(), key.as_ptr(), text.as_mut_ptr().cast(), text.len())
        };
        usize::try_from(length).ok().filter(|length| *length < text.len()).map(|_| text_of(&text))
    }

    /// The bytes a token stands for; empty for an id outside the vocabulary. `special` spells out control tokens.
    pub(crate) fn piece(&self, token: Token, special: bool) -> Vec<u8> {
        if token < 0 || token >= self.n_vocab() as Token {
            return Vec::new();
        }
        let mut piece = vec![0u8; 32];
        loop {
            let (into, room) = (piece.as_mut_ptr().cast(), piece.len() as i32);
            // SAFETY: the token is in the vocabulary and the buffer valid for its length.
            let n = unsafe { llama::llama_token_to_piece(self.vocab(), token, into, room, 0, special) };
            // If there is no room, the result is minus the required size.
            piece.resize(n.unsigned_abs() as usize, 0);
            if n >= 0 {
                return piece;
            }
        }
    }

    /// A token of the vocabulary as a whole text: without the space that some tokenizers put before the first word.
    /// Control tokens are spelled out.
    pub(crate) fn word(&self, token: Token) -> Vec<u8> {
        let mut word = vec![0u8; 32];
        loop {
            let (into, room) = (word.as_mut_ptr().cast(), word.len() as i32);
            // SAFETY: one token of the vocabulary, and a buffer that is valid for its length.
            let n = unsafe { llama::llama_detokenize(self.vocab(), &raw const token, 1, into, room, false, true) };
            // If there is no room, the result is minus the required size.
            word.resize(n.unsigned_abs() as usize, 0);
            if n >= 0 {
                return word;
            }
        }
    }

    /// llama.cpp's description of the model, bytes of its tensors, and parameters.
    pub(crate) fn describe(&self) -> (String, u64, u64) {
        let mut text = [0u8; 256];
        let model = self.as_ptr();
        // SAFETY: the model is live; at most as many bytes are written as there are, NUL included.
        let (size, n_params) = unsafe {
            llama::llama_model_desc(model, text.as_mut_ptr().cast(), text.len());
            (llama::llama_model_size(model), llama::llama_model_n_params(model))
        };
        (text_of(&text), size, n_params)
    }
}

/// Calls `evaluate` with `entries` as a llama.cpp batch, which is valid for the call.
pub(crate) fn with_batch<T>(entries: &[BatchToken], evaluate: impl FnOnce(llama_batch) -> T) -> T {
    let mut tokens: Vec<Token> = entries.iter().map(|entry| entry.token).collect();
    let mut positions: Vec<i32> = entries.iter().map(|entry| entry.position).collect();
    let mut counts: Vec<i32> = vec![1; entries.len()];
    let mut sequences: Vec<i32> = entries.iter().map(|entry| entry.sequence).collect();
    let mut sequence_lists: Vec<*mut i32> = sequences.iter_mut().map(|sequence| &raw mut *sequence).collect();
    let mut logits: Vec<i8> = entries.iter().map(|entry| i8::from(entry.logits)).collect();
    evaluate(llama_batch {
        n_tokens: entries.len() as i32,
        token: tokens.as_mut_ptr(),
        embd: std::ptr::null_mut(),
        pos: positions.as_mut_ptr(),
        n_seq_id: counts.as_mut_ptr(),
        seq_id: sequence_lists.as_mut_ptr(),
        logits: logits.as_mut_ptr(),
    })
}
