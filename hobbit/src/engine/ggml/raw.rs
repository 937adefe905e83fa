//! Owned llama.cpp models and contexts, and conversions of texts, tokens and batches.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use ggml_sys::llama::{self, llama_batch, llama_context, llama_context_params, llama_model, llama_model_params};
use ggml_sys::shim;

use crate::engine::error::EvalError;
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
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| "its name contains a NUL byte".to_owned())?;
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

/// The part of a sequence's state that is saved or restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    /// The part that [`RawContext::forget`] cannot rewind: recurrent states, and cells of sliding windows. Keys and
    /// values of other layers stay where they are.
    NotRewindable,
}

/// A context, freed on drop, which must precede that of its model and of all that its parameters point to.
pub(crate) struct RawContext {
    /// Dropped before the context that it reads.
    mtp: Option<Box<RawContext>>,
    context: Owned<llama_context>,
}

// SAFETY: a context may move between threads as long as one uses it at a time, which its owners' `&mut` ensures.
unsafe impl Send for RawContext {}

impl RawContext {
    /// # Errors
    /// llama.cpp's message, which may be empty.
    ///
    /// # Safety
    /// The model, and all that `params` point to, outlive the context.
    pub(crate) unsafe fn new(model: &RawModel, params: llama_context_params) -> Result<Self, String> {
        // SAFETY: by the caller.
        let make = |message, capacity| unsafe { shim::hobbit_context_init(model.as_ptr(), params, message, capacity) };
        with_message(make).map(|context| Self { mtp: None, context: Owned(context) })
    }

    /// As [`Self::new`], with a second context for the model's layers for multi-token prediction, which forgets, copies
    /// and moves the same tokens.
    ///
    /// # Errors
    /// llama.cpp's message, which may be empty.
    ///
    /// # Safety
    /// As [`Self::new`].
    pub(crate) unsafe fn with_mtp(model: &RawModel, params: llama_context_params) -> Result<Self, String> {
        // SAFETY: by the caller; the second context is dropped first.
        unsafe {
            let mut own = Self::new(model, params)?;
            let params = llama_context_params {
                ctx_type: llama::LLAMA_CONTEXT_TYPE_MTP,
                ctx_other: own.as_ptr(),
                n_ctx: llama::llama_n_ctx(own.as_ptr()),
                n_rs_seq: 0,
                // The next token of each sequence.
                n_outputs_max: params.n_seq_max,
                cb_eval: None,
                ..params
            };
            own.mtp = Some(Box::new(Self::new(model, params)?));
            Ok(own)
        }
    }

    /// The context for multi-token prediction.
    pub(crate) fn mtp(&self) -> Option<&RawContext> {
        self.mtp.as_deref()
    }

    pub(crate) fn as_ptr(&self) -> *mut llama_context {
        self.context.as_ptr()
    }

    /// The memory that holds the sequences.
    fn memory(&self) -> llama::llama_memory_t {
        // SAFETY: the context is live.
        unsafe { llama::llama_get_memory(self.as_ptr()) }
    }

    /// Forgets all sequences. llama.cpp asserts nothing here.
    pub(crate) fn clear(&mut self) {
        // SAFETY: the context is live.
        unsafe { llama::llama_memory_clear(self.memory(), true) };
        self.mtp.iter_mut().for_each(|own| own.clear());
    }

    /// Forgets a sequence's tokens at positions `from..to` (-1: to its end). False, without a change, if the model
    /// cannot forget a part.
    ///
    /// # Errors
    /// llama.cpp fails.
    pub(crate) fn forget(&mut self, sequence: i32, from: i32, to: i32) -> Result<bool, EvalError> {
        // SAFETY: the context is live, the message buffer valid for its capacity; so below.
        let remove = |message, capacity| unsafe {
            shim::hobbit_memory_remove(self.as_ptr(), sequence, from, to, message, capacity)
        };
        let done =
            checked(&format!("llama.cpp cannot forget a part of sequence {sequence}"), |code| *code >= 0, remove)
                .map(|code| code == 1)?;
        // Before it reads tokens, it forgets those from their position on: a failure here does no harm.
        let _ = self.mtp.as_mut().filter(|_| done).map(|own| own.forget(sequence, from, to));
        Ok(done)
    }

    /// Adds the content of sequence `from` to sequence `to`.
    ///
    /// # Errors
    /// llama.cpp fails.
    pub(crate) fn copy(&mut self, from: i32, to: i32) -> Result<(), EvalError> {
        // SAFETY: as in `forget`.
        let copy = |message, capacity| unsafe { shim::hobbit_memory_copy(self.as_ptr(), from, to, message, capacity) };
        checked(&format!("llama.cpp cannot copy sequence {from} to {to}"), |done| *done, copy)?;
        let _ = self.mtp.as_mut().map(|own| own.copy(from, to));
        Ok(())
    }

    /// Moves a sequence's tokens at positions `range` by `by` positions.
    ///
    /// # Errors
    /// llama.cpp fails.
    pub(crate) fn shift(&mut self, sequence: i32, range: Range<i32>, by: i32) -> Result<(), EvalError> {
        // SAFETY: as in `forget`.
        let shift = |message, capacity| unsafe {
            shim::hobbit_memory_move(self.as_ptr(), sequence, range.start, range.end, by, message, capacity)
        };
        checked(&format!("llama.cpp cannot move the tokens of sequence {sequence}"), |done| *done, shift)?;
        let _ = self.mtp.as_mut().filter(|own| own.can_shift()).map(|own| own.shift(sequence, range, by));
        Ok(())
    }

    /// Whether tokens can be moved to other positions. llama.cpp asserts nothing here.
    pub(crate) fn can_shift(&self) -> bool {
        // SAFETY: the context is live.
        unsafe { llama::llama_memory_can_shift(self.memory()) }
    }

    /// First position in a sequence; -1 if it is empty or unknown.
    pub(crate) fn first_position(&self, sequence: i32) -> i32 {
        // SAFETY: the context is live.
        unsafe { shim::hobbit_memory_first(self.as_ptr(), sequence) }
    }

    /// Last position in a sequence; -1 if it is empty or unknown.
    pub(crate) fn last_position(&self, sequence: i32) -> i32 {
        // SAFETY: the context is live.
        unsafe { shim::hobbit_memory_last(self.as_ptr(), sequence) }
    }

    /// The size of [`Self::state`].
    ///
    /// # Errors
    /// llama.cpp refuses.
    pub(crate) fn state_bytes(&mut self, sequence: i32, part: Part) -> Result<usize, EvalError> {
        let is_partial = part == Part::NotRewindable;
        // SAFETY: as in `forget`.
        let size = |message, capacity| unsafe {
            shim::hobbit_state_size(self.as_ptr(), sequence, is_partial, message, capacity)
        };
        checked(&format!("llama.cpp cannot save the state of sequence {sequence}"), |n| *n > 0, size)
    }

    /// The state of a sequence, in llama.cpp's format.
    ///
    /// # Errors
    /// llama.cpp refuses.
    pub(crate) fn state(&mut self, sequence: i32, part: Part) -> Result<Vec<u8>, EvalError> {
        let doing = format!("llama.cpp cannot save the state of sequence {sequence}");
        let (n, is_partial) = (self.state_bytes(sequence, part)?, part == Part::NotRewindable);
        let mut bytes = vec![0u8; n];
        // SAFETY: as in `forget`; at most as many bytes are written as there are.
        let get = |message, capacity| unsafe {
            shim::hobbit_state_get(self.as_ptr(), sequence, is_partial, bytes.as_mut_ptr(), n, message, capacity)
        };
        let written = checked(&doing, |written| *written > 0, get)?;
        bytes.truncate(written);
        Ok(bytes)
    }

    /// Restores a state from [`Self::state`].
    ///
    /// # Errors
    /// llama.cpp refuses; the sequence's content is then undefined.
    pub(crate) fn set_state(&mut self, sequence: i32, part: Part, state: &[u8]) -> Result<(), EvalError> {
        let is_partial = part == Part::NotRewindable;
        // SAFETY: as in `forget`; the bytes are valid for their length.
        let set = |message, capacity| unsafe {
            shim::hobbit_state_set(self.as_ptr(), sequence, is_partial, state.as_ptr(), state.len(), message, capacity)
        };
        checked("llama.cpp does not take the saved state", |read| *read > 0, set).map(drop)
    }

    /// Evaluates a batch and waits for it. Returns llama.cpp's code, and a message if it threw. `announces` as in
    /// [`shim::hobbit_decode`].
    ///
    /// # Safety
    /// The batch's arrays are valid for the call.
    pub(crate) unsafe fn decode(&mut self, batch: llama_batch, announces: bool) -> (i32, String) {
        let mut message = [0u8; MESSAGE_BYTES];
        // SAFETY: the context is live, the message buffer valid for its length; by the caller.
        let code = unsafe {
            let (text, capacity) = (message.as_mut_ptr().cast(), message.len());
            let code = shim::hobbit_decode(self.as_ptr(), batch, announces, text, capacity);
            llama::llama_synchronize(self.as_ptr());
            code
        };
        (code, text_of(&message))
    }

    /// Logits, `[n_vocab]`, of an entry of the last batch (-1: the last); `None` if it asked for none.
    pub(crate) fn logits(&self, index: i32, n_vocab: usize) -> Option<&[f32]> {
        // SAFETY: the context is live; a non-null answer points at one row of its output buffer, valid until the next
        // evaluation, which needs `&mut` of the context's owner.
        unsafe {
            let row = llama::llama_get_logits_ith(self.as_ptr(), index);
            (!row.is_null()).then(|| std::slice::from_raw_parts(row, n_vocab))
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::expert_device::Device;
    use crate::engine::ggml;
    use crate::engine::ggml::params::{NEVER_INTERRUPTED, context_params};
    use hobbit_core::options::SessionOptions;

    /// The demo model and a context of two sequences, as a session has them.
    fn loaded() -> (RawContext, RawModel) {
        ggml::ready();
        Device::get().unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf");
        let session = SessionOptions { n_ctx: 64, n_seq_max: 2, threads: Some(1), ..SessionOptions::default() };
        // SAFETY: the parameters point to nothing but a static flag; the context is dropped first.
        unsafe {
            let model = RawModel::load_path(&path, llama::llama_model_default_params()).unwrap();
            let context = RawContext::new(&model, context_params(&session, &raw const NEVER_INTERRUPTED)).unwrap();
            (context, model)
        }
    }

    /// The logits after three tokens in an empty sequence 0.
    fn logits(context: &mut RawContext, model: &RawModel) -> Vec<f32> {
        let entry = |at: i32| BatchToken { token: 5 + at, position: at, sequence: 0, logits: at == 2 };
        // SAFETY: the batch is valid for the call.
        let decoded = with_batch(&[0, 1, 2].map(entry), |batch| unsafe { context.decode(batch, true) });
        assert_eq!(decoded, (0, String::new()));
        context.logits(2, model.n_vocab()).unwrap().to_vec()
    }

    /// Bypasses the checks of sessions to reach llama.cpp's assertions, which would otherwise end the process.
    #[test]
    fn a_failed_assertion_is_an_error_and_the_context_goes_on() {
        let (mut context, model) = loaded();
        let before = logits(&mut context, &model);
        for sequence in [-7, 1 << 20] {
            let reasons = [
                context.forget(sequence, 0, -1).map(drop),
                context.copy(0, sequence),
                context.copy(sequence, 0),
                context.shift(sequence, 0..1, 1),
            ];
            for reason in reasons.map(|result| result.unwrap_err().to_string()) {
                assert!(reason.contains("GGML_ASSERT"), "{reason}");
            }
            assert_eq!((context.first_position(sequence), context.last_position(sequence)), (-1, -1));
            assert!(context.state(sequence, Part::Whole).is_err());
        }
        assert_eq!((context.first_position(0), context.last_position(0)), (0, 2));
        assert!(context.forget(0, 0, -1).unwrap());
        assert_eq!(logits(&mut context, &model), before);
    }

    /// A file with a saved sequence may have any content: its checksum is not a signature.
    #[test]
    fn a_state_that_was_altered_ends_no_process_and_harms_no_later_sequence() {
        let (mut context, model) = loaded();
        let before = logits(&mut context, &model);
        let state = context.state(0, Part::Whole).unwrap();
        let words = state.len().min(512) / 4;
        for (at, word) in (0..words).flat_map(|at| [0, 1, 1 << 24, -1, i32::MIN, i32::MAX].map(|word| (at * 4, word))) {
            let mut altered = state.clone();
            altered[at..at + 4].copy_from_slice(&word.to_le_bytes());
            // Both acceptance and refusal are fine.
            let _ = context.set_state(0, Part::Whole, &altered);
        }
        for len in (0..state.len()).step_by(state.len() / 32) {
            assert!(context.set_state(0, Part::Whole, &state[..len]).is_err(), "cut to {len} of {} bytes", state.len());
        }
        context.clear();
        assert_eq!(logits(&mut context, &model), before);
        context.forget(0, 0, -1).unwrap();
        context.set_state(0, Part::Whole, &state).unwrap();
        assert_eq!(context.last_position(0), 2);
    }
}
