//! Several sequences in one context, for a caller that places tokens itself ([`Session::evaluate`]): what each holds, and what is
//! kept of it.

use std::ops::Range;

use ggml_sys::llama;

use super::Session;
use crate::engine::error::Error;
use hobbit_core::options::Pooling;
use hobbit_core::stats::PhaseStats;

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
        // In a unified cache, copying alone would add to what `to` holds.
        self.context.forget(to, -1, -1)?;
        self.context.copy(from, to)
    }

    /// Shortens a sequence to its first `n` tokens (it must have that many). Empties it where the model cannot go back
    /// to there. Returns how many tokens are left. For callers of [`Session::evaluate`]; others use [`Session::keep`].
    ///
    /// # Errors
    /// A sequence that the session does not have.
    #[doc(hidden)]
    pub fn keep_of(&mut self, sequence: i32, n: usize) -> Result<usize, Error> {
        self.check_sequence(sequence)?;
        if self.cut(sequence, n) {
            return Ok(n);
        }
        self.context.forget(sequence, 0, -1)?;
        Ok(0)
    }

    /// Shortens a sequence to its first `n` tokens. Returns false and changes nothing if logits at position `n` would
    /// differ from those in a fresh context: a recurrent state knows its end alone, and a sliding window has given the
    /// cells behind it to later tokens. Every caller that goes back comes through here.
    pub(super) fn cut(&mut self, sequence: i32, n: usize) -> bool {
        let n = i32::try_from(n).unwrap_or(i32::MAX);
        // SAFETY: the model is live.
        let window = unsafe { llama::llama_model_n_swa(self.model.shared.raw.as_ptr()) }.max(1);
        let first_wanted = (n - window + 1).max(0);
        let remembers =
            n == 0 || n > self.context.last_position(sequence) || self.context.first_position(sequence) <= first_wanted;
        remembers && self.context.forget(sequence, n, -1).unwrap_or(false)
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
        self.context.can_shift()
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
        if !cleared.is_empty() {
            self.context.forget(sequence, cleared.start, cleared.end)?;
        }
        self.context.shift(sequence, range, by)
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
        self.context.state(sequence)
    }

    /// Makes a sequence hold what [`Session::sequence_state`] gave; the bytes must be those, unchanged.
    ///
    /// # Errors
    /// A sequence that the session does not have, a state that does not fit; the sequence is then empty.
    #[doc(hidden)]
    pub fn set_sequence_state(&mut self, sequence: i32, state: &[u8]) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        self.context.forget(sequence, 0, -1)?;
        if self.context.set_state(sequence, state).is_err() {
            self.context.forget(sequence, 0, -1)?;
            return Err(Error::Decode(
                "the saved state does not fit this context: another model, other types of KV cache, or a context that is \
                 too short"
                    .into(),
            ));
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
        if is_exact { usize::MAX } else { hobbit_core::route::DECODE_TOKENS_MAX }
    }

    fn check_sequence(&self, sequence: i32) -> Result<(), Error> {
        let n_seq_max = self.options.n_seq_max.max(1);
        if u32::try_from(sequence).map_or(true, |sequence| sequence >= n_seq_max) {
            return Err(Error::Decode(format!("sequence {sequence} of a session with {n_seq_max}")));
        }
        Ok(())
    }
}
