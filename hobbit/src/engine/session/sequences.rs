//! Several sequences in one context, for a caller that places tokens itself ([`Session::evaluate`]): copying,
//! shortening and moving them.

use std::ops::Range;

use ggml_sys::llama;

use super::Session;
use crate::engine::error::EvalError;
use crate::engine::ggml::raw::{Part, RawContext};
use crate::engine::model::Model;
use hobbit_core::options::{KvValue, Pooling, SessionOptions};
use hobbit_core::stats::PhaseStats;

/// Why a context cannot be shifted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages are the documentation.
pub enum NoShift {
    #[error("its sliding window keeps fewer tokens than the context")]
    Window,
    #[error("its positions have several dimensions")]
    Dimensions,
    #[error("its layers have no rotary positions")]
    NoRotation,
    #[error("llama.cpp cannot move the positions in its cache")]
    Unsupported,
}

impl NoShift {
    /// The reason for a context of `model`; `None` if it can be shifted.
    pub(super) fn of(model: &Model, options: &SessionOptions, context: &RawContext) -> Option<Self> {
        let raw = model.shared.raw.as_ptr();
        // SAFETY: the model is live.
        let (kind, window) = unsafe { (llama::llama_model_rope_type(raw), llama::llama_model_n_swa(raw)) };
        if context.can_shift() {
            let is_rotated = kind == llama::LLAMA_ROPE_TYPE_NONE || rotates(model);
            return (!is_rotated).then_some(Self::NoRotation);
        }
        let kinds = [llama::LLAMA_ROPE_TYPE_MROPE, llama::LLAMA_ROPE_TYPE_IMROPE, llama::LLAMA_ROPE_TYPE_VISION];
        Some(match window > 0 && !options.swa_full {
            _ if kinds.contains(&kind) => Self::Dimensions,
            true => Self::Window,
            false => Self::Unsupported,
        })
    }
}

/// Whether each cache of the model has keys that are rotated. Granite's headers can turn rotation off, for all layers
/// or, in `granite_swa`, for some.
fn rotates(model: &Model) -> bool {
    let (gguf, arch) = (model.gguf(), &model.info().architecture);
    if !arch.starts_with("granite") {
        return true;
    }
    let key = format!("{arch}.rope.scaling.finetuned");
    let chosen = model.shared.options.kv_overrides.iter().find(|chosen| chosen.key == key);
    let of_header = || gguf.metadata.get_bool(&key) != Some(false);
    let is_on = match chosen.map(|chosen| &chosen.value) {
        Some(KvValue::Bool(is_on)) => *is_on,
        _ => of_header(),
    };
    let pattern = format!("{arch}.attention.rope_pattern");
    let by_layer = || gguf.metadata.get_u64_arr(&pattern).is_some_and(|layers| !layers.contains(&0));
    match arch.as_str() {
        "granite_swa" => gguf.metadata.get_arr_len(&pattern).is_none() || by_layer(),
        _ => is_on,
    }
}

impl Session {
    /// Replaces sequence `to` with a copy of sequence `from`: texts with a common beginning share its evaluation. Both
    /// are below `n_seq_max`. For callers of [`Session::evaluate`].
    ///
    /// # Errors
    /// A sequence that the session does not have; no room for another window. Sequence `to` is then empty.
    pub fn copy_sequence(&mut self, from: i32, to: i32) -> Result<(), EvalError> {
        self.check_sequence(from)?;
        self.check_sequence(to)?;
        if from == to {
            return Ok(());
        }
        // In a unified cache, copying alone would add to the content of `to`.
        self.context.forget(to, -1, -1)?;
        self.context.copy(from, to)?;
        // A sliding window reuses cells that only one sequence has: shared cells would fill the room of both.
        if self.has_window() && self.options.kv_unified {
            let state = self.context.state(from, Part::NotRewindable)?;
            if self.context.set_state(to, Part::NotRewindable, &state).is_err() {
                self.empty(to)?;
                return Err(EvalError::Decode("the context has no room for another sliding window".into()));
            }
        }
        if let Some(own) = self.checkpoints.get(from as usize).cloned() {
            self.checkpoints[to as usize] = own;
        }
        Ok(())
    }

    /// Shortens a sequence to its first `n` tokens (it must have that many), or to the last checkpoint within them if
    /// the model cannot go back that far. Returns the number of tokens left. For callers of [`Session::evaluate`];
    /// others use [`Session::keep`].
    ///
    /// # Errors
    /// A sequence that the session does not have.
    pub fn keep_of(&mut self, sequence: i32, n: usize) -> Result<usize, EvalError> {
        self.check_sequence(sequence)?;
        if !self.cut(sequence, n) {
            return self.go_back(sequence, n);
        }
        self.end_turn(sequence, n)?;
        Ok(n)
    }

    /// Shortens a sequence to its first `n` tokens. Returns false and changes nothing if logits at position `n` would
    /// differ from those in a fresh context: a recurrent state keeps only its end, and a sliding window has reused the
    /// cells before it for later tokens. Every caller that goes back uses this function.
    pub(crate) fn cut(&mut self, sequence: i32, n: usize) -> bool {
        let is_cut = self.remembers(sequence, n)
            && self.context.forget(sequence, i32::try_from(n).unwrap_or(i32::MAX), -1).unwrap_or(false);
        if let Some(own) = self.checkpoints.get_mut(sequence as usize).filter(|_| is_cut) {
            own.truncate(n);
        }
        is_cut
    }

    /// As [`Session::cut`], for drafts of the last batch: a recurrent state keeps those before its last tokens
    /// ([`SessionOptions::rollback`](hobbit_core::options::SessionOptions::rollback)).
    pub(crate) fn cut_drafts(&mut self, sequence: i32, n: usize) -> bool {
        if self.model.is_recurrent() {
            self.context.forget(sequence, i32::try_from(n).unwrap_or(i32::MAX), -1).unwrap_or(false)
        } else {
            self.cut(sequence, n)
        }
    }

    /// Tokens of the last batch that a recurrent state can go back.
    pub(crate) fn rollback(&self) -> u32 {
        // SAFETY: the context is live.
        unsafe { llama::llama_n_rs_seq(self.context.as_ptr()) }
    }

    /// Whether the context holds all that evaluation after the first `n` tokens of a sequence needs.
    pub(super) fn remembers(&self, sequence: i32, n: usize) -> bool {
        let n = i32::try_from(n).unwrap_or(i32::MAX);
        let window = i32::try_from(self.model.window()).unwrap_or(i32::MAX).max(1);
        let first_wanted = (n - window + 1).max(0);
        n == 0
            || n > self.context.last_position(sequence)
            || !self.model.is_recurrent() && self.context.first_position(sequence) <= first_wanted
    }

    /// Whether the model's layers have a sliding window whose older cells are reused.
    pub fn has_window(&self) -> bool {
        !self.options.swa_full && self.model.window() > 0
    }

    /// Whether tokens can be moved to other positions ([`Session::move_tokens`]).
    pub fn can_move_tokens(&self) -> bool {
        self.no_shift.is_none()
    }

    /// Why tokens cannot be moved to other positions; `None` if they can.
    pub fn no_shift(&self) -> Option<NoShift> {
        self.no_shift
    }

    /// Moves the tokens at positions `range` of a sequence by `by` positions (backwards if negative); tokens at the
    /// target positions are forgotten. Keys are rotated and values stay, so this is an approximation, as every context
    /// shift.
    ///
    /// # Errors
    /// A sequence that the session does not have, or a model whose tokens cannot be moved.
    pub fn move_tokens(&mut self, sequence: i32, range: Range<i32>, by: i32) -> Result<(), EvalError> {
        self.check_sequence(sequence)?;
        if !self.can_move_tokens() {
            return Err(EvalError::Decode("this model's tokens cannot be moved in their context".into()));
        }
        let cleared = if by < 0 { (range.start + by).max(0)..range.start } else { range.end..range.end + by };
        if !cleared.is_empty() {
            self.context.forget(sequence, cleared.start, cleared.end)?;
        }
        self.forget_checkpoints(sequence);
        self.context.shift(sequence, range, by)
    }

    /// Announces a new text: policies that count by sequence start over. They do not for a text that begins beside
    /// others (`is_alone`: false), whose experts they would forget.
    pub fn begin_text(&mut self, is_alone: bool) {
        if let Some(memories) = self.model.shared.experts.memories().as_mut() {
            memories.begin_sequence(is_alone);
        }
    }

    /// The embedding, `[n_embd]`, of entry `index` of the last batch, for sessions without pooling.
    pub fn embedding_of(&self, index: usize) -> Option<&[f32]> {
        let index = i32::try_from(index).ok()?;
        // SAFETY: the context is live; a non-null answer is one row of its output.
        unsafe { self.embedding(llama::llama_get_embeddings_ith(self.context.as_ptr(), index), self.model.n_embd()) }
    }

    /// The embedding, `[n_embd]`, of a sequence of the last batch, for sessions that pool. For those that rank
    /// ([`Pooling::Rank`]), the scores of the model's classes.
    pub fn embedding_of_sequence(&self, sequence: i32) -> Option<&[f32]> {
        // SAFETY: the model is live; the context is, and a non-null answer is one row of its output, of as many
        // numbers.
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

    /// The pooling of a sequence's embeddings: the requested one, or the model's. `None`: no pooling.
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

    /// Counters of prompts and decoding so far: the first two fields of [`Session::stats`], at no cost.
    pub fn phases(&self) -> (PhaseStats, PhaseStats) {
        (self.stats.prompt, self.stats.decode)
    }

    /// Maximum number of tokens, each of its own sequence, that may be decoded at once under the rules for generated
    /// tokens. Those differ from the rules for prompts where results are approximate.
    pub fn decodes_at_once(&self) -> usize {
        let shared = &self.model.shared;
        let is_exact = shared.precisions.is_exact() && shared.options.routing.is_off();
        if is_exact { usize::MAX } else { hobbit_core::route::DECODE_TOKENS_MAX }
    }

    pub(super) fn check_sequence(&self, sequence: i32) -> Result<(), EvalError> {
        let n_seq_max = self.options.n_seq_max.max(1);
        if u32::try_from(sequence).map_or(true, |sequence| sequence >= n_seq_max) {
            return Err(EvalError::Decode(format!("sequence {sequence} of a session with {n_seq_max}")));
        }
        Ok(())
    }
}
