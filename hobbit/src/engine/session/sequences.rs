//! Several sequences in one context, for a caller that places tokens itself ([`Session::evaluate`]): what each holds, and what is
//! kept of it.

use std::ops::Range;

use ggml_sys::llama;

use super::Session;
use crate::engine::error::Error;
use crate::options::Pooling;
use crate::stats::PhaseStats;

impl Session {
    /// Makes sequence `to` begin with all that sequence `from` holds, in place of what it held: texts that begin alike share
    /// the evaluation of their beginning. Both are below `n_seq_max`. For callers of [`Session::evaluate`].
    ///
    /// # Errors
    /// A sequence that the session does not have.
    pub fn copy_sequence(&mut self, from: i32, to: i32) -> Result<(), Error> {
        self.check_sequence(from)?;
        self.check_sequence(to)?;
        if from == to {
            return Ok(());
        }
        // SAFETY: the context is live and has both sequences. Where they share one cache, copying alone would add to what is there.
        unsafe {
            llama::llama_memory_seq_rm(self.context.memory(), to, -1, -1);
            llama::llama_memory_seq_cp(self.context.memory(), from, to, -1, -1);
        }
        Ok(())
    }

    /// Forgets what a sequence holds from position `from` on. False where the model cannot forget a part (a recurrent one):
    /// nothing is changed then, and only forgetting all of it (`from` 0) will do.
    ///
    /// # Errors
    /// A sequence that the session does not have.
    #[doc(hidden)]
    pub fn forget_from(&mut self, sequence: i32, from: i32) -> Result<bool, Error> {
        self.check_sequence(sequence)?;
        // SAFETY: the context is live and has the sequence.
        Ok(unsafe { llama::llama_memory_seq_rm(self.context.memory(), sequence, from.max(0), -1) })
    }

    /// Whether a sequence still holds what the token at position `n` looks back at: a sliding window forgets, and a recurrent state
    /// knows its end alone.
    #[doc(hidden)]
    pub fn remembers(&self, sequence: i32, n: usize) -> bool {
        // SAFETY: the context and its model are live; a sequence that is not there is empty.
        let (first, window) = unsafe {
            let first = llama::llama_memory_seq_pos_min(self.context.memory(), sequence);
            (first, llama::llama_model_n_swa(self.model.shared.raw.as_ptr()))
        };
        let wanted = i64::try_from(n).unwrap_or(i64::MAX).saturating_sub(window.into()).max(0);
        first >= 0 && i64::from(first) <= wanted
    }

    /// Whether the model's layers look back through a window whose cells are used anew behind it.
    #[doc(hidden)]
    pub fn has_window(&self) -> bool {
        // SAFETY: the model is live.
        !self.options.swa_full && unsafe { llama::llama_model_n_swa(self.model.shared.raw.as_ptr()) } > 0
    }

    /// Whether tokens can be moved to other positions ([`Session::move_tokens`]).
    #[doc(hidden)]
    pub fn can_move_tokens(&self) -> bool {
        // SAFETY: the context is live.
        unsafe { llama::llama_memory_can_shift(self.context.memory()) }
    }

    /// Puts the tokens at positions `range` of a sequence `by` positions further (back where negative); what was at the positions
    /// that they come to is forgotten. Their keys are rotated, values stay: an approximation, as every context shift.
    ///
    /// # Errors
    /// A sequence that the session does not have, or a model whose tokens cannot be moved.
    #[doc(hidden)]
    pub fn move_tokens(&mut self, sequence: i32, range: Range<i32>, by: i32) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        if !self.can_move_tokens() {
            return Err(Error::Decode("this model's tokens cannot be moved in their context".into()));
        }
        let cleared = if by < 0 { (range.start + by).max(0)..range.start } else { range.end..range.end + by };
        // SAFETY: the context is live and has the sequence.
        unsafe {
            if !cleared.is_empty() {
                llama::llama_memory_seq_rm(self.context.memory(), sequence, cleared.start, cleared.end);
            }
            llama::llama_memory_seq_add(self.context.memory(), sequence, range.start, range.end, by);
        }
        Ok(())
    }

    /// A new text begins: policies that count by sequence begin again.
    #[doc(hidden)]
    pub fn begin_text(&mut self) {
        if let Some(memories) = self.model.shared.experts.memories().as_mut() {
            memories.begin_sequence();
        }
    }

    /// What a sequence holds, as llama.cpp writes it: for [`Session::set_sequence_state`] of a session of the same model with the
    /// same types of KV cache.
    ///
    /// # Errors
    /// A sequence that the session does not have; llama.cpp's refusal.
    #[doc(hidden)]
    pub fn sequence_state(&mut self, sequence: i32) -> Result<Vec<u8>, Error> {
        self.check_sequence(sequence)?;
        // SAFETY: the context is live; at most as many bytes are written as there are.
        unsafe {
            let n = llama::llama_state_seq_get_size(self.context.as_ptr(), sequence);
            let mut bytes = vec![0u8; n];
            let written = llama::llama_state_seq_get_data(self.context.as_ptr(), bytes.as_mut_ptr(), n, sequence);
            if written == 0 {
                return Err(Error::Decode(format!("llama.cpp cannot tell what sequence {sequence} holds")));
            }
            bytes.truncate(written);
            Ok(bytes)
        }
    }

    /// Makes a sequence hold what [`Session::sequence_state`] gave; the bytes must be those, unchanged.
    ///
    /// # Errors
    /// A sequence that the session does not have, a state that does not fit; the sequence is then empty.
    #[doc(hidden)]
    pub fn set_sequence_state(&mut self, sequence: i32, state: &[u8]) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        // SAFETY: the context is live; the bytes are valid for their length.
        unsafe {
            llama::llama_memory_seq_rm(self.context.memory(), sequence, 0, -1);
            let read = llama::llama_state_seq_set_data(self.context.as_ptr(), state.as_ptr(), state.len(), sequence);
            if read == 0 {
                llama::llama_memory_seq_rm(self.context.memory(), sequence, 0, -1);
                return Err(Error::Decode(
                    "the saved state does not fit this context: another model, other types of KV \
                                          cache, or a context that is too short"
                        .into(),
                ));
            }
        }
        Ok(())
    }

    /// The embedding, `[n_embd]`, of entry `index` of the last batch; of sessions without pooling.
    #[doc(hidden)]
    pub fn embedding_of(&self, index: usize) -> Option<&[f32]> {
        let index = i32::try_from(index).ok()?;
        // SAFETY: the context is live; a non-null answer is one row of its output.
        unsafe { self.embedding(llama::llama_get_embeddings_ith(self.context.as_ptr(), index), self.model.n_embd()) }
    }

    /// The embedding, `[n_embd]`, of a sequence of the last batch; of sessions that pool. Of those that rank
    /// ([`Pooling::Rank`]), the scores of the model's classes.
    #[doc(hidden)]
    pub fn embedding_of_sequence(&self, sequence: i32) -> Option<&[f32]> {
        // SAFETY: the model is live; the context is, and a non-null answer is one row of its output, of as many numbers.
        unsafe {
            let n = match self.pooling() {
                Some(Pooling::Rank) => llama::llama_model_n_cls_out(self.model.shared.raw.as_ptr()) as usize,
                _ => self.model.n_embd(),
            };
            self.embedding(llama::llama_get_embeddings_seq(self.context.as_ptr(), sequence), n)
        }
    }

    /// # Safety
    /// Null, or a row of `n` numbers of the context's output.
    unsafe fn embedding(&self, row: *const f32, n: usize) -> Option<&[f32]> {
        // SAFETY: by the caller; the row lives until the next evaluation, which needs `&mut`.
        (!row.is_null()).then(|| unsafe { std::slice::from_raw_parts(row, n) })
    }

    /// How the embeddings of a sequence's tokens become one: what was asked for, or the model's way. `None`: not at all.
    #[doc(hidden)]
    pub fn pooling(&self) -> Option<Pooling> {
        // SAFETY: the context is live.
        let kind = unsafe { llama::llama_pooling_type(self.context.as_ptr()) };
        Some(match kind {
            llama::LLAMA_POOLING_TYPE_MEAN => Pooling::Mean,
            llama::LLAMA_POOLING_TYPE_CLS => Pooling::Cls,
            llama::LLAMA_POOLING_TYPE_LAST => Pooling::Last,
            llama::LLAMA_POOLING_TYPE_RANK => Pooling::Rank,
            _ => return None,
        })
    }

    /// What was counted so far in prompts and while decoding: the first two fields of [`Session::stats`], at no cost.
    #[doc(hidden)]
    pub fn phases(&self) -> (PhaseStats, PhaseStats) {
        (self.stats.prompt, self.stats.decode)
    }

    /// The most tokens, of as many sequences, that may be decoded at once without changing by which rules: those of generated
    /// tokens differ from those of prompts where results are approximate.
    #[doc(hidden)]
    pub fn decodes_at_once(&self) -> usize {
        let shared = &self.model.shared;
        let is_exact = shared.precisions.is_exact() && shared.options.routing.is_off();
        if is_exact { usize::MAX } else { crate::route::DECODE_TOKENS_MAX }
    }

    fn check_sequence(&self, sequence: i32) -> Result<(), Error> {
        let n_seq_max = self.options.n_seq_max.max(1);
        if u32::try_from(sequence).map_or(true, |sequence| sequence >= n_seq_max) {
            return Err(Error::Decode(format!("sequence {sequence} of a session with {n_seq_max}")));
        }
        Ok(())
    }
}
