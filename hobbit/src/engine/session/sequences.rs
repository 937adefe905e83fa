//! The sequences of a session's context: the text of each, its generation, and copying, shortening and moving its
//! tokens.

use std::ops::Range;

use ggml_sys::llama;

use crate::engine::error::EvalError;
use crate::engine::ggml::context::{Context, Part};
use crate::engine::ggml::raw::BatchToken;
use crate::engine::model::Model;
use hobbit_core::checkpoints::{Checkpoints, MESSAGE_TOKENS_MIN};
use hobbit_core::options::{KvValue, SessionOptions, Token};
use hobbit_core::route::DECODE_TOKENS_MAX;

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
    pub(super) fn of(model: &Model, options: &SessionOptions, context: &Context) -> Option<Self> {
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

/// llama.cpp's null token, at positions that were never evaluated.
const UNKNOWN: Token = -1;

/// One sequence: its tokens in the context, and the step of its generation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequence {
    /// Tokens in the context, one for each position; placeholders, which are negative, for images and sound.
    pub(crate) tokens: Vec<Token>,
    /// Tokens at the end that were evaluated but do not belong to the text yet: a piece of a prompt, or a sampled token
    /// and its drafts.
    pub(super) n_ahead: usize,
    /// Sampled, and not part of the text yet.
    pub(super) pending: Option<Token>,
    /// Drafts that are to be evaluated after it.
    pub(super) drafts: Vec<Token>,
    /// Entry of the last batch with the last token; `None` if that was evaluated earlier.
    pub(super) entry: Option<usize>,
    /// Tokens when the last prompt had been read.
    pub(super) n_prompt: usize,
}

impl Sequence {
    /// The tokens of the text, without a pending one.
    pub(super) fn text(&self) -> &[Token] {
        &self.tokens[..self.tokens.len().saturating_sub(self.n_ahead)]
    }

    /// The end of the text that drafters can read: images and sound have no tokens.
    pub(super) fn words(&self) -> &[Token] {
        let text = self.text();
        &text[text.iter().rposition(|token| *token < 0).map_or(0, |at| at + 1)..]
    }

    /// Follows the evaluation of a token as an entry of a batch.
    pub(super) fn add(&mut self, position: usize, token: Token, entry: usize) {
        if self.entry.is_none() {
            self.n_ahead = 0;
        }
        self.tokens.resize(position, UNKNOWN);
        self.tokens.push(token);
        (self.n_ahead, self.entry) = (self.n_ahead + 1, Some(entry));
    }

    /// Moves the pending token into the text, if it is the next token that was evaluated.
    pub(super) fn take(&mut self) -> bool {
        let is_next = self.pending.is_some() && self.pending == self.tokens[self.text().len()..].first().copied();
        if is_next {
            (self.pending, self.n_ahead) = (None, self.n_ahead - 1);
        }
        is_next
    }

    /// The entry of the last batch whose logits follow the text.
    pub(super) fn row(&self) -> Option<usize> {
        self.entry?.checked_sub(self.n_ahead)
    }

    /// Follows the forgetting of all but the first `n` tokens, which become the text.
    fn shorten(&mut self, n: usize) {
        let n_less = self.tokens.len().saturating_sub(n);
        self.entry = self.entry.filter(|_| n >= self.text().len()).and_then(|entry| entry.checked_sub(n_less));
        self.tokens.truncate(n);
        (self.n_ahead, self.n_prompt) = (0, self.n_prompt.min(n));
    }

    /// Follows a move of the tokens at positions `range`.
    fn shift(&mut self, range: Range<usize>, by: isize) {
        let (end, to) = (range.end.min(self.tokens.len()), range.start.saturating_add_signed(by));
        let (moves_end, n) = (end == self.tokens.len(), end.saturating_sub(range.start));
        self.tokens.resize(self.tokens.len().max(to + n), UNKNOWN);
        self.tokens.copy_within(range.start..range.start + n, to);
        if moves_end {
            self.tokens.truncate(to + n);
        }
    }
}

/// The sequences of a session's context.
pub struct Sequences {
    pub(super) context: Context,
    // Dropped after the context, which reads it.
    pub(super) model: Model,
    pub(super) options: SessionOptions,
    pub(crate) all: Vec<Sequence>,
    /// One entry per sequence; none if the session takes no checkpoints.
    pub(super) checkpoints: Vec<Checkpoints>,
    /// Most bytes of checkpoints.
    pub(super) checkpoint_bytes: u64,
    no_shift: Option<NoShift>,
}

impl Sequences {
    /// Those of a new context of `model`.
    pub(super) fn new(model: &Model, options: SessionOptions, context: Context, checkpoint_bytes: u64) -> Self {
        let n = options.n_seq_max.max(1) as usize;
        Self {
            no_shift: NoShift::of(model, &options, &context),
            context,
            model: model.clone(),
            all: vec![Sequence::default(); n],
            checkpoints: vec![Checkpoints::default(); if model.takes_checkpoints(&options) { n } else { 0 }],
            checkpoint_bytes,
            options,
        }
    }

    /// Tokens of a sequence's text in the context, one for each position, without a pending one: images and sound have
    /// negative placeholders. Tokens of [`Session::evaluate`](crate::Session::evaluate) belong to the text after
    /// [`Sequences::evaluated_piece`].
    pub fn tokens(&self, sequence: i32) -> &[Token] {
        self.get(sequence).map_or(&[], Sequence::text)
    }

    /// The token that follows the text: it was sampled, and is evaluated next.
    pub fn pending(&self, sequence: i32) -> Option<Token> {
        self.get(sequence).and_then(|own| own.pending)
    }

    /// Continues a text with a token, which [`Session::advance`](crate::Session::advance) evaluates.
    pub fn set_pending(&mut self, sequence: i32, token: Token) {
        if let Some(own) = self.get_mut(sequence) {
            own.pending = Some(token);
        }
    }

    /// Tokens that [`Session::advance`](crate::Session::advance) evaluated and the text has not taken.
    pub fn n_ahead(&self, sequence: i32) -> usize {
        self.get(sequence).map_or(0, |own| own.n_ahead)
    }

    /// Moves the pending token into the text if it was evaluated: as such, or as the next draft. Then
    /// [`Session::sample`](crate::Session::sample) returns the one after it.
    pub fn take(&mut self, sequence: i32) -> bool {
        self.get_mut(sequence).is_some_and(Sequence::take)
    }

    pub(super) fn get(&self, sequence: i32) -> Option<&Sequence> {
        self.all.get(usize::try_from(sequence).ok()?)
    }

    pub(super) fn get_mut(&mut self, sequence: i32) -> Option<&mut Sequence> {
        self.all.get_mut(usize::try_from(sequence).ok()?)
    }

    /// Forgets all sequences, with the data of their cells.
    pub(super) fn clear(&mut self) {
        self.context.clear();
        self.checkpoints.iter_mut().for_each(|own| own.truncate(0));
        self.all.fill_with(Sequence::default);
    }

    /// Follows the evaluation of a batch.
    pub(super) fn add(&mut self, batch: &[BatchToken]) {
        for (entry, &BatchToken { token, position, sequence, .. }) in batch.iter().enumerate() {
            if let (Some(own), Ok(position)) = (self.get_mut(sequence), usize::try_from(position)) {
                own.add(position, token, entry);
            }
        }
    }

    /// Replaces sequence `to` with a copy of sequence `from`: texts with a common beginning share its evaluation. Both
    /// are below `n_seq_max`.
    ///
    /// # Errors
    /// A sequence that the session does not have; no room for another window. Sequence `to` is then empty.
    pub fn copy(&mut self, from: i32, to: i32) -> Result<(), EvalError> {
        self.check_sequence(from)?;
        self.check_sequence(to)?;
        if from == to {
            return Ok(());
        }
        // In a unified cache, copying alone would add to the content of `to`.
        self.context.forget(to, -1, -1)?;
        self.all[to as usize] = Sequence::default();
        if self.model.info().architecture == "deepseek4" {
            // llama.cpp copies its compressor's state with the next batch: over a checkpoint, if `to` goes back to one.
            let state = self.context.state(from, Part::Whole)?;
            self.set_copied(to, Part::Whole, &state)?;
        } else {
            self.context.copy(from, to)?;
            // A sliding window reuses cells that only one sequence has: shared cells would fill the room of both.
            if self.has_window() && self.options.kv_unified {
                let state = self.context.state(from, Part::NotRewindable)?;
                self.set_copied(to, Part::NotRewindable, &state)?;
            }
        }
        if let Some(own) = self.checkpoints.get(from as usize).cloned() {
            self.checkpoints[to as usize] = own;
        }
        self.all[to as usize].tokens = self.all[from as usize].text().to_vec();
        Ok(())
    }

    fn set_copied(&mut self, to: i32, part: Part, state: &[u8]) -> Result<(), EvalError> {
        if self.context.set_state(to, part, state).is_err() {
            self.empty(to)?;
            return Err(EvalError::Decode("the context has no room for a copy of this text".into()));
        }
        Ok(())
    }

    /// Shortens a sequence to its first `n` tokens (it must have that many), or to the last checkpoint within them if
    /// the model cannot go back that far. Returns the number of tokens left. A pending token is forgotten.
    ///
    /// # Errors
    /// A sequence that the session does not have.
    pub fn keep(&mut self, sequence: i32, n: usize) -> Result<usize, EvalError> {
        let left = self.go_to(sequence, n);
        if let Some(own) = self.get_mut(sequence) {
            own.pending = None;
        }
        left
    }

    /// Forgets the tokens that were evaluated after a sequence's text. Returns false if the model cannot go back to the
    /// text's end; the sequence then keeps a shorter text, or none.
    ///
    /// # Errors
    /// A sequence that the session does not have.
    pub fn take_back(&mut self, sequence: i32) -> Result<bool, EvalError> {
        let n = self.tokens(sequence).len();
        self.go_to(sequence, n).map(|left| left == n)
    }

    fn go_to(&mut self, sequence: i32, n: usize) -> Result<usize, EvalError> {
        self.check_sequence(sequence)?;
        if !self.cut(sequence, n) {
            return self.go_back(sequence, n);
        }
        // The next text may not continue from here.
        self.take_checkpoint(sequence, n, MESSAGE_TOKENS_MIN, false)?;
        Ok(n)
    }

    /// Shortens a sequence to its first `n` tokens. Returns false and changes nothing if logits at position `n` would
    /// differ from those in a fresh context: a recurrent state keeps only its end, and a sliding window has reused the
    /// cells before it for later tokens. Every caller that goes back uses this function.
    pub(crate) fn cut(&mut self, sequence: i32, n: usize) -> bool {
        let is_cut = self.remembers(sequence, n)
            && self.context.forget(sequence, i32::try_from(n).unwrap_or(i32::MAX), -1).unwrap_or(false);
        if is_cut {
            if let Some(own) = self.checkpoints.get_mut(sequence as usize) {
                own.truncate(n);
            }
            self.shortened(sequence, n);
        }
        is_cut
    }

    /// Follows the forgetting of a sequence's tokens but the first `n`.
    pub(super) fn shortened(&mut self, sequence: i32, n: usize) {
        if let Some(own) = self.get_mut(sequence) {
            own.shorten(n);
        }
    }

    /// As [`Sequences::cut`], for drafts of the last batch: a recurrent state keeps those before its last tokens
    /// ([`SessionOptions::rollback`](hobbit_core::options::SessionOptions::rollback)).
    pub(crate) fn cut_drafts(&mut self, sequence: i32, n: usize) -> bool {
        if !self.model.is_recurrent() {
            return self.cut(sequence, n);
        }
        let is_cut = self.context.forget(sequence, i32::try_from(n).unwrap_or(i32::MAX), -1).unwrap_or(false);
        if is_cut {
            self.shortened(sequence, n);
        }
        is_cut
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

    /// Why tokens cannot be moved to other positions ([`Sequences::move_tokens`]); `None` if they can.
    pub fn no_shift(&self) -> Option<NoShift> {
        self.no_shift
    }

    /// Moves the tokens at positions `range` of a sequence by `by` positions (backwards if negative); tokens at the
    /// target positions are forgotten. Keys are rotated and values stay, so this is an approximation, as every context
    /// shift.
    ///
    /// # Errors
    /// A sequence that the session does not have, or a model whose tokens cannot be moved.
    /// [`EvalError::ContextFull`], without a change, if it cannot forget a part of its state.
    pub fn move_tokens(&mut self, sequence: i32, range: Range<i32>, by: i32) -> Result<(), EvalError> {
        self.check_sequence(sequence)?;
        if self.no_shift.is_some() {
            return Err(EvalError::Decode("this model's tokens cannot be moved in their context".into()));
        }
        let cleared = if by < 0 { (range.start + by).max(0)..range.start } else { range.end..range.end + by };
        // A gap would leave the later tokens at wrong positions.
        if !cleared.is_empty() && !self.context.forget(sequence, cleared.start, cleared.end)? {
            return Err(self.context_full());
        }
        self.forget_checkpoints(sequence);
        self.context.shift(sequence, range.clone(), by)?;
        self.all[sequence as usize].shift(range.start.max(0) as usize..range.end.max(0) as usize, by as isize);
        Ok(())
    }

    /// The error of a full context.
    pub(super) fn context_full(&self) -> EvalError {
        let shift_helps = !self.options.context_shift && self.no_shift.is_none();
        EvalError::ContextFull { n_ctx: self.context.n_ctx_seq(), shift_helps }
    }

    /// Entries of a batch whose logits may be requested at once.
    pub(super) fn n_outputs_max(&self) -> usize {
        match self.options.n_outputs_max {
            0 => usize::MAX,
            n => (n as usize).max(self.all.len()),
        }
    }

    /// Most tokens that a sequence of `n_tokens` tokens may have drafted after its next one.
    pub(super) fn room_for_drafts(&self, n_tokens: usize) -> usize {
        let n_outputs = self.n_outputs_max().min(self.context.n_batch()).min(DECODE_TOKENS_MAX);
        let n_max = if self.model.is_recurrent() { self.context.rollback() } else { usize::MAX };
        let n_free = (self.context.n_ctx_seq() as usize).saturating_sub(n_tokens + 1);
        n_free.min(n_outputs.saturating_sub(1)).min(n_max)
    }

    pub(super) fn check_sequence(&self, sequence: i32) -> Result<(), EvalError> {
        match self.get(sequence) {
            Some(_) => Ok(()),
            None => Err(EvalError::Decode(format!("sequence {sequence} of a session with {}", self.all.len()))),
        }
    }
}
