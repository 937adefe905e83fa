//! Checkpoints: copies of the state that llama.cpp cannot rewind, to which a sequence goes back instead.
//!
//! llama.cpp keeps one recurrent state per sequence, after its last token, and a sliding window only as many cells as
//! its layers see. A checkpoint holds both; keys and values of other layers stay in the context. (`n_rs_seq` would keep
//! states of the last few tokens, at the price of as many states per sequence.)

use std::sync::Arc;

use ggml_sys::llama;

use super::sequences::{Sequence, Sequences};
use crate::engine::error::EvalError;
use crate::engine::ggml::context::Part;
use crate::engine::model::Model;
use hobbit_core::checkpoints::{self, Checkpoint, Checkpoints, Cut};
use hobbit_core::options::{SessionOptions, Token};

impl Model {
    /// Whether the model has layers whose state cannot be rewound.
    pub(crate) fn is_recurrent(&self) -> bool {
        let raw = self.shared.raw.as_ptr();
        // SAFETY: the model is live.
        unsafe { llama::llama_model_is_recurrent(raw) || llama::llama_model_is_hybrid(raw) }
    }

    /// Tokens that a sliding window holds; 0 without one.
    pub(crate) fn window(&self) -> u64 {
        // SAFETY: the model is live.
        u64::try_from(unsafe { llama::llama_model_n_swa(self.shared.raw.as_ptr()) }).unwrap_or(0)
    }

    /// Whether a session of this model takes checkpoints.
    pub(crate) fn takes_checkpoints(&self, options: &SessionOptions) -> bool {
        let has_window = self.window() > 0 && !options.swa_full;
        options.checkpoints > 0 && !options.embeddings && (self.is_recurrent() || has_window)
    }
}

impl Sequences {
    /// Where the evaluation of `prompt` pauses after its first `n_known` tokens: [`Sequences::evaluated_piece`] follows
    /// each piece. For callers of [`Session::evaluate`](crate::Session::evaluate).
    pub fn cuts(&self, prompt: &[Token], n_known: usize) -> Vec<Cut> {
        if self.checkpoints.is_empty() {
            return Vec::new();
        }
        checkpoints::cuts(prompt, n_known, |token| self.model.is_control(token))
    }

    /// Follows a piece of a prompt that was evaluated in `sequence`: its tokens belong to the text now. Takes a
    /// checkpoint at a cut, and if one is due ([`SessionOptions::checkpoint_step`]). For callers of
    /// [`Session::evaluate`](crate::Session::evaluate).
    ///
    /// # Errors
    /// llama.cpp fails; the sequence is then empty.
    pub fn evaluated_piece(&mut self, sequence: i32, cut: Option<Cut>) -> Result<(), EvalError> {
        self.check_sequence(sequence)?;
        let own = &mut self.all[sequence as usize];
        own.n_ahead = 0;
        let (n_tokens, step) = (own.tokens.len(), self.options.checkpoint_step as usize);
        match cut {
            Some(cut) => self.take_checkpoint(sequence, n_tokens, 1, cut.is_boundary),
            None => self.take_checkpoint(sequence, n_tokens, step, false),
        }
    }

    /// The number of tokens that [`Sequences::keep`] keeps of the first `n`.
    pub fn reach(&self, sequence: i32, n: usize) -> usize {
        if self.remembers(sequence, n) {
            return n;
        }
        let last = self.checkpoints.get(sequence as usize).and_then(|own| own.last_within(n));
        last.map_or(0, |own| own.n_tokens)
    }

    /// The checkpoints of a sequence, in the order of their tokens.
    pub fn checkpoints(&self, sequence: i32) -> &[Checkpoint] {
        self.checkpoints.get(sequence as usize).map_or(&[], Checkpoints::all)
    }

    /// Gives a sequence checkpoints that [`Sequences::checkpoints`] returned for the same tokens, as far as there is
    /// room. One that does not fit is found when the sequence goes back to it, and empties it.
    pub fn set_checkpoints(&mut self, sequence: i32, all: Vec<Checkpoint>) {
        let at = sequence as usize;
        if self.checkpoints.len() <= at {
            return;
        }
        let n_tokens = self.context.n_tokens(sequence);
        for checkpoint in all.into_iter().filter(|own| (1..=n_tokens).contains(&own.n_tokens)) {
            if self.make_room_for(at, checkpoint.n_tokens, checkpoint.state.len()) {
                self.checkpoints[at].insert(checkpoint);
            }
        }
    }

    /// Returns a sequence to its last checkpoint within the first `n` tokens, and returns the number of its tokens; 0,
    /// with an empty sequence, if there is none.
    ///
    /// # Errors
    /// llama.cpp fails.
    pub(super) fn go_back(&mut self, sequence: i32, n: usize) -> Result<usize, EvalError> {
        let found = self.checkpoints.get(sequence as usize).and_then(|own| own.last_within(n)).cloned();
        if let Some(Checkpoint { n_tokens, state, .. }) = found
            && self.context.set_state(sequence, Part::NotRewindable, &state).is_ok()
            && self.context.forget(sequence, n_tokens as i32, -1).unwrap_or(false)
            && self.context.n_tokens(sequence) == n_tokens
        {
            self.checkpoints[sequence as usize].truncate(n_tokens);
            self.shortened(sequence, n_tokens);
            return Ok(n_tokens);
        }
        self.empty(sequence)?;
        Ok(0)
    }

    /// Takes a checkpoint at the end of a sequence of `n_tokens` tokens, unless it has one within the last `every`.
    /// None directly behind an image with positions of several dimensions: its last cell is at its first position, so
    /// llama.cpp cannot say where such a state ends.
    pub(super) fn take_checkpoint(
        &mut self,
        sequence: i32,
        n_tokens: usize,
        every: usize,
        is_boundary: bool,
    ) -> Result<(), EvalError> {
        let at = sequence as usize;
        if self.context.n_tokens(sequence) != n_tokens {
            return Ok(());
        }
        if !self.checkpoints.get(at).is_some_and(|own| own.is_due(n_tokens, every)) {
            return Ok(());
        }
        let Ok(bytes) = self.context.state_bytes(sequence, Part::NotRewindable) else { return Ok(()) };
        if !self.make_room_for(at, n_tokens, bytes) {
            return Ok(());
        }
        let Ok(state) = self.context.state(sequence, Part::NotRewindable) else { return Ok(()) };
        // Restoring moves a window's cells, and attention sums in their order. The sequence that goes on now must have
        // the same bits as the one that will go on from the checkpoint.
        if self.has_window() && self.context.set_state(sequence, Part::NotRewindable, &state).is_err() {
            self.empty(sequence)?;
            return Err(EvalError::Decode("llama.cpp does not take the state that it has just saved".into()));
        }
        self.checkpoints[at].insert(Checkpoint { n_tokens, is_boundary, state: Arc::new(state) });
        Ok(())
    }

    fn make_room_for(&mut self, at: usize, n_tokens: usize, bytes: usize) -> bool {
        let limits = (self.options.checkpoints as usize, self.checkpoint_bytes as usize);
        checkpoints::make_room(&mut self.checkpoints, at, n_tokens, bytes, limits)
    }

    /// Forgets a sequence and its checkpoints.
    pub(crate) fn empty(&mut self, sequence: i32) -> Result<(), EvalError> {
        self.forget_checkpoints(sequence);
        if let Some(own) = self.get_mut(sequence) {
            *own = Sequence::default();
        }
        self.context.forget(sequence, 0, -1).map(drop)
    }

    /// Forgets the checkpoints of a sequence, whose tokens are at other positions now.
    pub(super) fn forget_checkpoints(&mut self, sequence: i32) {
        if let Some(own) = self.checkpoints.get_mut(sequence as usize) {
            own.truncate(0);
        }
    }
}
