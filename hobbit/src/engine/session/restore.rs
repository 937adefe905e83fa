//! A sequence's state as bytes: saved, and restored from memory or from a file with any content.

use super::sequences::Sequences;
use super::{BatchToken, Session};
use crate::engine::error::EvalError;
use crate::engine::ggml::context::Part;
use hobbit_core::checkpoints::Checkpoint;
use hobbit_core::options::Token;

/// A sequence outside of its context, for [`Sequences::put_back`].
pub struct TakenOut {
    text: Vec<Token>,
    pending: Option<Token>,
    state: Vec<u8>,
}

impl Sequences {
    /// Bytes of [`Sequences::state`].
    ///
    /// # Errors
    /// As there.
    pub fn state_bytes(&mut self, sequence: i32) -> Result<usize, EvalError> {
        self.check_sequence(sequence)?;
        self.context.state_bytes(sequence, Part::Whole)
    }

    /// A sequence's state in llama.cpp's format, for [`Session::restore_sequence`] of a session of the same model with
    /// the same types of KV cache.
    ///
    /// # Errors
    /// A sequence that the session does not have; llama.cpp's refusal.
    pub fn state(&mut self, sequence: i32) -> Result<Vec<u8>, EvalError> {
        self.check_sequence(sequence)?;
        self.context.state(sequence, Part::Whole)
    }

    /// A copy of a sequence.
    ///
    /// # Errors
    /// As [`Sequences::state`].
    pub fn take_out(&mut self, sequence: i32) -> Result<TakenOut, EvalError> {
        let state = self.state(sequence)?;
        Ok(TakenOut { text: self.tokens(sequence).to_vec(), pending: self.pending(sequence), state })
    }

    /// Replaces a sequence by the copy of [`Sequences::take_out`].
    ///
    /// # Errors
    /// An unknown sequence, or a state that does not fit; the sequence is then empty.
    pub fn put_back(&mut self, sequence: i32, copy: &TakenOut) -> Result<(), EvalError> {
        self.set_state(sequence, &copy.text, &copy.state)?;
        self.all[sequence as usize].pending = copy.pending;
        Ok(())
    }

    /// Restores the state of a sequence with these tokens; the bytes must be unchanged.
    ///
    /// # Errors
    /// An unknown sequence, or a state that does not fit; the sequence is then empty.
    fn set_state(&mut self, sequence: i32, tokens: &[Token], state: &[u8]) -> Result<(), EvalError> {
        self.check_sequence(sequence)?;
        self.empty(sequence)?;
        if self.context.set_state(sequence, Part::Whole, state).is_err() {
            self.context.forget(sequence, 0, -1)?;
            return Err(EvalError::Decode(
                "the saved state does not fit this context: another model, other types of KV cache, or a context that \
                 is too short"
                    .into(),
            ));
        }
        self.all[sequence as usize].tokens = tokens.to_vec();
        Ok(())
    }
}

impl Session {
    /// Restores a sequence with a state and checkpoints from a file, which may have any content. The sequence must hold
    /// `tokens` at their positions, leave no cell behind when it is forgotten, and give finite logits after its last
    /// token and after each checkpoint, for which one token each is evaluated. It gets no checkpoint yet.
    ///
    /// # Errors
    /// An unknown sequence, or a state that does not fit. [`EvalError::State`]: a check fails. Cells of the shared
    /// cache may then be damaged until [`Session::reset`] clears them all.
    pub fn restore_sequence(
        &mut self,
        sequence: i32,
        tokens: &[Token],
        state: &[u8],
        checkpoints: &[Checkpoint],
    ) -> Result<(), EvalError> {
        let stats = self.decoder.stats.clone();
        let restored = Restoring { session: self, sequence, tokens }.run(state, checkpoints);
        self.decoder.stats = stats;
        if restored.is_err() {
            self.sequences.shortened(sequence, 0);
        }
        restored
    }
}

/// The check of a state before its sequence uses it.
struct Restoring<'a> {
    session: &'a mut Session,
    sequence: i32,
    tokens: &'a [Token],
}

impl Restoring<'_> {
    fn run(&mut self, state: &[u8], checkpoints: &[Checkpoint]) -> Result<(), EvalError> {
        let Self { sequence, tokens, .. } = *self;
        let own = &mut self.session.sequences;
        own.check_sequence(sequence)?;
        own.empty(sequence)?;
        let empty = [Part::Whole, Part::NotRewindable].map(|part| own.context.state_bytes(sequence, part));
        let [empty, empty_part] = empty.map(|bytes| bytes.unwrap_or(0));
        own.set_state(sequence, tokens, state)?;
        let (first, last) = (own.context.first_position(sequence), own.context.last_position(sequence));
        if own.context.n_tokens(sequence) != tokens.len() || !tokens.is_empty() && first < 0 {
            return Err(EvalError::State(format!("holds positions {first} to {last}, not {} tokens", tokens.len())));
        }
        let takes_checkpoints = !own.checkpoints.is_empty();
        // llama.cpp takes any positions, forgets none below 0, and saves none at -1.
        self.check_holds(Part::Whole, state)?;
        self.try_next()?;
        self.check_empties(Part::Whole, empty)?;
        for checkpoint in checkpoints.iter().filter(|_| takes_checkpoints) {
            if self.session.sequences.context.set_state(sequence, Part::NotRewindable, &checkpoint.state).is_err() {
                return Err(EvalError::State("has a checkpoint that does not fit".into()));
            }
            self.check_holds(Part::NotRewindable, &checkpoint.state)?;
            self.check_empties(Part::NotRewindable, empty_part)?;
        }
        self.session.sequences.set_state(sequence, tokens, state)?;
        if takes_checkpoints && !checkpoints.is_empty() {
            self.try_checkpoints(checkpoints)?;
            self.session.sequences.set_state(sequence, tokens, state)?;
        }
        Ok(())
    }

    /// Checks that the sequence has just the cells of `state`.
    fn check_holds(&mut self, part: Part, state: &[u8]) -> Result<(), EvalError> {
        match self.session.sequences.context.state_bytes(self.sequence, part) {
            Ok(bytes) if bytes == state.len() => Ok(()),
            _ => Err(EvalError::State("has cells that it does not name".into())),
        }
    }

    /// Empties the sequence, and checks that its state has `bytes` then.
    fn check_empties(&mut self, part: Part, bytes: usize) -> Result<(), EvalError> {
        let own = &mut self.session.sequences;
        own.empty(self.sequence)?;
        match own.context.state_bytes(self.sequence, part) {
            Ok(left) if left != bytes => Err(EvalError::State("has cells at positions below 0".into())),
            _ => Ok(()),
        }
    }

    /// Goes back to each checkpoint, from the last one on, evaluates the next token, and checks the logits.
    fn try_checkpoints(&mut self, checkpoints: &[Checkpoint]) -> Result<(), EvalError> {
        for Checkpoint { n_tokens, state, .. } in checkpoints.iter().rev() {
            let (context, sequence) = (&mut self.session.sequences.context, self.sequence);
            context.set_state(sequence, Part::NotRewindable, state)?;
            if !context.forget(sequence, *n_tokens as i32, -1)? || context.n_tokens(sequence) != *n_tokens {
                return Err(EvalError::State(format!("has a checkpoint that is not after {n_tokens} tokens")));
            }
            match self.try_token(*n_tokens) {
                // The sequence fills the context.
                Err(EvalError::ContextFull { .. }) => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Evaluates a token after those of the sequence, or its last one again, and checks the logits.
    fn try_next(&mut self) -> Result<(), EvalError> {
        let n = self.tokens.len();
        match self.try_token(n) {
            // Evaluated again it needs no further cell.
            Err(EvalError::ContextFull { .. }) if self.session.sequences.cut(self.sequence, n - 1) => {
                self.try_token(n - 1)
            }
            // The sequence fills the context, and cannot go back by a token.
            Err(EvalError::ContextFull { .. }) => Ok(()),
            other => other,
        }
    }

    /// Evaluates the sequence's token at a position, or its last one, and checks the logits.
    fn try_token(&mut self, position: usize) -> Result<(), EvalError> {
        let token = self.tokens.get(position).or(self.tokens.last()).copied();
        let n_vocab = self.session.model.n_vocab() as Token;
        let Some(token) = token.filter(|token| (0..n_vocab).contains(token)) else {
            return Ok(());
        };
        let entry = BatchToken { token, position: position as i32, sequence: self.sequence, logits: true };
        match self.session.evaluate(&[entry]) {
            Ok(()) if self.session.has_finite_logits(0) => Ok(()),
            Ok(()) => Err(EvalError::State("gives logits that are not finite".into())),
            Err(EvalError::Decode(reason)) => Err(EvalError::State(format!("cannot be continued ({reason})"))),
            Err(error) => Err(error),
        }
    }
}
