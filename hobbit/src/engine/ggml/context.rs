//! Contexts of llama.cpp.

use std::ops::Range;

use ggml_sys::llama::{self, llama_batch, llama_context, llama_context_params};
use ggml_sys::shim;

use crate::engine::error::EvalError;
use crate::engine::ggml::raw::{MESSAGE_BYTES, Owned, RawModel, checked, text_of, with_message};
use hobbit_core::options::Pooling;

/// The part of a sequence's state that is saved or restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    /// The part that [`Context::forget`] cannot rewind: recurrent states, and cells of sliding windows. Keys and
    /// values of other layers stay where they are.
    NotRewindable,
}

/// llama.cpp's context of a session: its sizes, and the outputs of the last batch.
// Dropped before its model and all that its parameters point to.
pub struct Context {
    // Dropped before the context that it reads.
    follower: Option<Box<Context>>,
    context: Owned<llama_context>,
    /// The model, if no one else has it. Dropped after the context.
    _model: Option<Box<RawModel>>,
}

// SAFETY: a context may move between threads as long as one uses it at a time, which its owners' `&mut` ensures.
unsafe impl Send for Context {}

impl Context {
    /// # Errors
    /// llama.cpp's message, which may be empty.
    ///
    /// # Safety
    /// The model, and all that `params` point to, outlive the context.
    pub(crate) unsafe fn new(model: &RawModel, params: llama_context_params) -> Result<Self, String> {
        // SAFETY: by the caller.
        let make = |message, capacity| unsafe { shim::hobbit_context_init(model.as_ptr(), params, message, capacity) };
        with_message(make).map(|context| Self { follower: None, context: Owned(context), _model: None })
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
            own.follower = Some(Box::new(Self::new(model, own.params_of_mtp(params))?));
            Ok(own)
        }
    }

    /// Parameters of the second context of one that was made with `params`.
    pub(crate) fn params_of_mtp(&self, params: llama_context_params) -> llama_context_params {
        let own = Self::params_of_head(params);
        llama_context_params { ctx_other: self.as_ptr(), n_ctx: self.n_ctx(), n_batch: self.n_batch() as u32, ..own }
    }

    /// Parameters of a context of layers for multi-token prediction alone, beside one with `params`.
    pub(crate) fn params_of_head(params: llama_context_params) -> llama_context_params {
        llama_context_params {
            ctx_type: llama::LLAMA_CONTEXT_TYPE_MTP,
            n_rs_seq: 0,
            // The next token of each sequence.
            n_outputs_max: params.n_seq_max,
            cb_eval: None,
            ..params
        }
    }

    /// Makes the second context with a model of its own.
    ///
    /// # Errors
    /// llama.cpp's message, which may be empty.
    ///
    /// # Safety
    /// All that `params` point to outlives the context; the second one may point to this one.
    pub(crate) unsafe fn add_follower(&mut self, model: RawModel, params: llama_context_params) -> Result<(), String> {
        // SAFETY: by the caller; the model is dropped after the context.
        let mut own = unsafe { Self::new(&model, params)? };
        own._model = Some(Box::new(model));
        self.follower = Some(Box::new(own));
        Ok(())
    }

    /// The context that reads this one's hidden states.
    pub(crate) fn follower(&self) -> Option<&Context> {
        self.follower.as_deref()
    }

    pub(crate) fn as_ptr(&self) -> *mut llama_context {
        self.context.as_ptr()
    }

    /// Context length of all sequences in tokens.
    pub fn n_ctx(&self) -> u32 {
        // SAFETY: the context is live; so below.
        unsafe { llama::llama_n_ctx(self.as_ptr()) }
    }

    /// Context length of one sequence in tokens.
    pub(crate) fn n_ctx_seq(&self) -> u32 {
        // SAFETY: as above.
        unsafe { llama::llama_n_ctx_seq(self.as_ptr()) }
    }

    /// Maximum tokens per call of [`Session::evaluate`](crate::Session::evaluate).
    pub fn n_batch(&self) -> usize {
        // SAFETY: as above.
        unsafe { llama::llama_n_batch(self.as_ptr()) as usize }
    }

    /// Tokens of a prompt that are computed at once (the ubatch size).
    pub fn n_ubatch(&self) -> usize {
        // SAFETY: as above.
        unsafe { llama::llama_n_ubatch(self.as_ptr()).max(1) as usize }
    }

    /// Tokens of the last batch that a recurrent state can go back.
    pub(crate) fn rollback(&self) -> usize {
        // SAFETY: as above.
        unsafe { llama::llama_n_rs_seq(self.as_ptr()) as usize }
    }

    /// The pooling of a sequence's embeddings: the requested one, or the model's. `None`: no pooling.
    pub fn pooling(&self) -> Option<Pooling> {
        // SAFETY: as above.
        Some(match unsafe { llama::llama_pooling_type(self.as_ptr()) } {
            llama::LLAMA_POOLING_TYPE_MEAN => Pooling::Mean,
            llama::LLAMA_POOLING_TYPE_CLS => Pooling::Cls,
            llama::LLAMA_POOLING_TYPE_LAST => Pooling::Last,
            llama::LLAMA_POOLING_TYPE_RANK => Pooling::Rank,
            _ => return None,
        })
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
        self.follower.iter_mut().for_each(|own| own.clear());
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
        let _ = self.follower.as_mut().filter(|_| done).map(|own| own.forget(sequence, from, to));
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
        let _ = self.follower.as_mut().map(|own| own.copy(from, to));
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
        let _ = self.follower.as_mut().filter(|own| own.can_shift()).map(|own| own.shift(sequence, range, by));
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

    /// Positions in a sequence up to its last one.
    pub(crate) fn n_tokens(&self, sequence: i32) -> usize {
        usize::try_from(i64::from(self.last_position(sequence)) + 1).unwrap_or(0)
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
        // SAFETY: the context is live; a non-null answer is one row of its output.
        unsafe { self.output(llama::llama_get_logits_ith(self.as_ptr(), index), n_vocab) }
    }

    /// The embedding, `[n_embd]`, of entry `index` of the last batch, for sessions without pooling.
    pub fn embedding_of(&self, index: usize) -> Option<&[f32]> {
        let index = i32::try_from(index).ok()?;
        // SAFETY: as above.
        unsafe { self.output(llama::llama_get_embeddings_ith(self.as_ptr(), index), self.n_embd()) }
    }

    /// The embedding, `[n_embd]`, of a sequence of the last batch, for sessions that pool. For those that rank
    /// ([`Pooling::Rank`]), the scores of the model's classes.
    pub fn embedding_of_sequence(&self, sequence: i32) -> Option<&[f32]> {
        // SAFETY: the model is live; the context is, and a non-null answer is one row of its output, of as many
        // numbers.
        unsafe {
            let n = match self.pooling() {
                Some(Pooling::Rank) => llama::llama_model_n_cls_out(llama::llama_get_model(self.as_ptr())) as usize,
                _ => self.n_embd(),
            };
            self.output(llama::llama_get_embeddings_seq(self.as_ptr(), sequence), n)
        }
    }

    /// Values per embedding.
    fn n_embd(&self) -> usize {
        // SAFETY: the context is live, and its model lives longer.
        usize::try_from(unsafe { llama::llama_model_n_embd_out(llama::llama_get_model(self.as_ptr())) }).unwrap_or(0)
    }

    /// # Safety
    /// Null, or a row of `n` numbers of the context's output.
    unsafe fn output(&self, row: *const f32, n: usize) -> Option<&[f32]> {
        // SAFETY: by the caller; the row lives until the next evaluation, which needs `&mut` of the context's owner.
        (!row.is_null()).then(|| unsafe { std::slice::from_raw_parts(row, n) })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::engine::cpu::expert_device::Device;
    use crate::engine::ggml;
    use crate::engine::ggml::params::{NEVER_INTERRUPTED, context_params};
    use crate::engine::ggml::raw::{BatchToken, with_batch};
    use hobbit_core::options::SessionOptions;

    /// The demo model and a context of two sequences, as a session has them.
    fn loaded() -> (Context, RawModel) {
        ggml::ready();
        Device::get().unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf");
        let session = SessionOptions { n_ctx: 64, n_seq_max: 2, threads: Some(1), ..SessionOptions::default() };
        // SAFETY: the parameters point to nothing but a static flag; the context is dropped first.
        unsafe {
            let model = RawModel::load_path(&path, llama::llama_model_default_params()).unwrap();
            let context = Context::new(&model, context_params(&session, &raw const NEVER_INTERRUPTED)).unwrap();
            (context, model)
        }
    }

    /// The logits after three tokens in an empty sequence 0.
    fn logits(context: &mut Context, model: &RawModel) -> Vec<f32> {
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
