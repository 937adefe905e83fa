//! llama.cpp's models and contexts as values that own them, and what passes between it and us: texts, tokens, batches.

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use ggml_sys::llama::{self, llama_batch, llama_context, llama_context_params, llama_model, llama_model_params};
use ggml_sys::shim;

use crate::options::Token;

/// One entry of a batch for [`crate::Session::evaluate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchToken {
    /// The token.
    pub token: Token,
    /// Its position in its sequence.
    pub position: i32,
    /// Its sequence, `0..n_seq_max`.
    pub sequence: i32,
    /// Whether [`crate::Session::logits`] will be asked for this entry.
    pub logits: bool,
}

/// Room for a message from the shim, in bytes.
pub(super) const MESSAGE_BYTES: usize = 1024;

/// Calls a function of the shim that fills a message buffer when it returns null.
pub(super) fn with_message<T>(call: impl FnOnce(*mut c_char, usize) -> *mut T) -> Result<NonNull<T>, String> {
    let mut message = [0u8; MESSAGE_BYTES];
    NonNull::new(call(message.as_mut_ptr().cast(), message.len())).ok_or_else(|| text_of(&message))
}

/// The text of a NUL-terminated message buffer.
pub(super) fn text_of(message: &[u8]) -> String {
    CStr::from_bytes_until_nul(message).map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
}

/// A loaded model, freed on drop.
pub(super) struct RawModel(NonNull<llama_model>);

// SAFETY: a llama_model is immutable after loading; llama.cpp shares it among contexts on several threads.
unsafe impl Send for RawModel {}
// SAFETY: as above.
unsafe impl Sync for RawModel {}

impl RawModel {
    /// Loads a file by its name.
    ///
    /// # Errors
    /// What llama.cpp says, which may be nothing.
    ///
    /// # Safety
    /// All that `params` point to is valid for the call.
    pub(super) unsafe fn load_path(path: &Path, params: llama_model_params) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| "its name contains a NUL byte".to_owned())?;
        // SAFETY: by the caller; the name outlives the call.
        let load =
            |message, capacity| unsafe { shim::hobbit_model_load_path(name.as_ptr(), params, message, capacity) };
        with_message(load).map(Self)
    }

    /// Loads from a `FILE*`.
    ///
    /// # Errors
    /// What llama.cpp says, which may be nothing.
    ///
    /// # Safety
    /// The stream, and all that `params` point to, are valid for the call.
    pub(super) unsafe fn load_stream(file: *mut c_void, params: llama_model_params) -> Result<Self, String> {
        // SAFETY: by the caller.
        with_message(|message, capacity| unsafe { shim::hobbit_model_load(file, params, message, capacity) }).map(Self)
    }

    pub(super) fn as_ptr(&self) -> *mut llama_model {
        self.0.as_ptr()
    }

    pub(super) fn vocab(&self) -> *const llama::llama_vocab {
        // SAFETY: the model is live; its vocabulary lives as long.
        unsafe { llama::llama_model_get_vocab(self.as_ptr()) }
    }

    /// Number of tokens in the vocabulary.
    pub(super) fn n_vocab(&self) -> usize {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_n_tokens(self.vocab()).max(0) as usize }
    }

    /// The tokens of a text. `add_special` adds BOS and the like where the model wants them, `parse_special` reads
    /// special tokens written in the text.
    ///
    /// # Errors
    /// Text that the vocabulary cannot encode: why.
    pub(super) fn tokenize(&self, text: &[u8], add_special: bool, parse_special: bool) -> Result<Vec<Token>, String> {
        let text_len = i32::try_from(text.len()).map_err(|_| "text of 2 GiB or more".to_owned())?;
        let mut tokens: Vec<Token> = vec![0; text.len() + 8];
        loop {
            let capacity = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
            let mut message = [0u8; MESSAGE_BYTES];
            // SAFETY: text and tokens are valid for the lengths passed.
            let n = unsafe {
                shim::hobbit_tokenize(
                    self.vocab(),
                    text.as_ptr().cast(),
                    text_len,
                    tokens.as_mut_ptr(),
                    capacity,
                    add_special,
                    parse_special,
                    message.as_mut_ptr().cast(),
                    message.len(),
                )
            };
            let wanted = n.unsigned_abs() as usize;
            match n {
                0.. => {
                    tokens.truncate(wanted);
                    return Ok(tokens);
                }
                // Minus what it takes.
                _ if n > i32::MIN && wanted > tokens.len() => tokens.resize(wanted, 0),
                _ => return Err(text_of(&message)),
            }
        }
    }

    /// The bytes a token stands for; none for what is no token. `special` spells out control tokens.
    pub(super) fn piece(&self, token: Token, special: bool) -> Vec<u8> {
        if token < 0 || token >= self.n_vocab() as Token {
            return Vec::new();
        }
        let mut piece = vec![0u8; 32];
        loop {
            let (into, room) = (piece.as_mut_ptr().cast(), piece.len() as i32);
            // SAFETY: the token is in the vocabulary and the buffer valid for its length.
            let n = unsafe { llama::llama_token_to_piece(self.vocab(), token, into, room, 0, special) };
            // Where there is no room, minus what it takes.
            piece.resize(n.unsigned_abs() as usize, 0);
            if n >= 0 {
                return piece;
            }
        }
    }

    /// llama.cpp's description of the model, bytes of its tensors, and parameters.
    pub(super) fn describe(&self) -> (String, u64, u64) {
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

impl Drop for RawModel {
    fn drop(&mut self) {
        // SAFETY: loaded by us; every context of it is gone.
        unsafe { llama::llama_model_free(self.as_ptr()) };
    }
}

/// A context, freed on drop: before its model and all that its parameters point to.
pub(super) struct RawContext(NonNull<llama_context>);

// SAFETY: a context may move between threads as long as one uses it at a time, which its owners' `&mut` ensures.
unsafe impl Send for RawContext {}

impl RawContext {
    /// # Errors
    /// What llama.cpp says, which may be nothing.
    ///
    /// # Safety
    /// The model, and all that `params` point to, outlive the context.
    pub(super) unsafe fn new(model: &RawModel, params: llama_context_params) -> Result<Self, String> {
        // SAFETY: by the caller.
        let make = |message, capacity| unsafe { shim::hobbit_context_init(model.as_ptr(), params, message, capacity) };
        with_message(make).map(Self)
    }

    pub(super) fn as_ptr(&self) -> *mut llama_context {
        self.0.as_ptr()
    }

    /// The sequences.
    pub(super) fn memory(&self) -> llama::llama_memory_t {
        // SAFETY: the context is live.
        unsafe { llama::llama_get_memory(self.as_ptr()) }
    }

    /// Forgets all sequences.
    pub(super) fn clear(&mut self) {
        // SAFETY: the context is live.
        unsafe { llama::llama_memory_clear(self.memory(), true) };
    }

    /// Logits, `[n_vocab]`, of an entry of the last batch (-1: the last); `None` where it has asked for none.
    pub(super) fn logits(&self, index: i32, n_vocab: usize) -> Option<&[f32]> {
        // SAFETY: the context is live; a non-null answer points at one row of its output buffer, valid until the next
        // evaluation, which needs `&mut` of the context's owner.
        unsafe {
            let row = llama::llama_get_logits_ith(self.as_ptr(), index);
            (!row.is_null()).then(|| std::slice::from_raw_parts(row, n_vocab))
        }
    }
}

impl Drop for RawContext {
    fn drop(&mut self) {
        // SAFETY: made by us, freed once.
        unsafe { llama::llama_free(self.as_ptr()) };
    }
}

/// Has `evaluate` see `entries` as llama.cpp takes them; the batch is valid for the call.
pub(super) fn with_batch<T>(entries: &[BatchToken], evaluate: impl FnOnce(llama_batch) -> T) -> T {
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
