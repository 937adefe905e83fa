//! Prompts, evaluated in batches within the context's length, and generation: evaluates the last token, samples the
//! next.

use std::time::Instant;

use ggml_sys::llama;

use super::{Session, StopReason};
use crate::engine::error::EvalError;
use crate::engine::session::media::{Chunk, Projector};
use crate::engine::session::speculate::DraftRequest;
use crate::engine::text::sampling::{Sampler, are_finite};
use hobbit_core::checkpoints::{Checkpoint, Cut};
use hobbit_core::options::Token;

impl Session {
    /// Forgets everything from token `n_keep` on.
    ///
    /// # Errors
    /// Fewer than `n_keep` tokens in the context, or a context that cannot go back that far: a recurrent state cannot
    /// at all, a sliding window only while it holds the tokens before. The context is then unchanged; [`Session::keep`]
    /// empties it.
    pub fn truncate(&mut self, n_keep: usize) -> Result<(), EvalError> {
        if n_keep > self.n_past() {
            return Err(EvalError::Decode(format!("the context holds {} tokens, not {n_keep}", self.n_past())));
        }
        if n_keep == self.n_past() {
            return Ok(());
        }
        if n_keep < self.n_past && !self.cut(0, n_keep) {
            let n_past = self.n_past;
            let reason =
                format!("the context of {n_past} tokens cannot go back to {n_keep}: reset it and feed them again");
            return Err(EvalError::Decode(reason));
        }
        self.text.truncate(self.text.len().saturating_sub(self.n_past.saturating_sub(n_keep)));
        // Removing only the pending token leaves the logits from which it was sampled.
        self.is_current &= n_keep == self.n_past;
        self.pending = None;
        self.n_past = n_keep;
        self.n_prompt = self.n_prompt.min(n_keep);
        Ok(())
    }

    /// Shortens the context to its first `n` tokens, or to the last checkpoint within them if that is impossible
    /// ([`Session::truncate`]). Returns the number of tokens left. Tokens evaluated next have the same logits as after
    /// those tokens in an empty context.
    pub fn keep(&mut self, n: usize) -> usize {
        if n > 0 && self.truncate(n).is_ok() && self.end_turn(0, n).is_ok() {
            return n;
        }
        let left = if n < self.n_past { self.go_back(0, n).unwrap_or(0) } else { 0 };
        if left == 0 {
            self.reset();
            return 0;
        }
        self.text.truncate(self.text.len().saturating_sub(self.n_past - left));
        (self.n_past, self.n_prompt, self.pending, self.is_current) = (left, self.n_prompt.min(left), None, false);
        left
    }

    /// Restores the state and the checkpoints of sequence 0 with these tokens, which may come from a file with any
    /// content ([`Session::restore_sequence`]).
    ///
    /// # Errors
    /// A state that does not fit, or was changed; the context is then empty.
    pub fn restore(&mut self, tokens: &[Token], state: &[u8], checkpoints: Vec<Checkpoint>) -> Result<(), EvalError> {
        self.reset();
        if let Err(error) = self.restore_sequence(0, tokens, state, &checkpoints) {
            self.reset();
            return Err(error);
        }
        self.set_checkpoints(0, checkpoints);
        self.is_current = false;
        (self.n_past, self.n_prompt) = (tokens.len(), tokens.len());
        self.text.extend_from_slice(tokens);
        Ok(())
    }

    /// Tokens in the context, without a pending sampled one.
    pub fn n_evaluated(&self) -> usize {
        self.n_past
    }

    /// Evaluates `tokens` after the context's content, in batches of `n_batch`. Logits of the last token are kept for
    /// [`Session::generate`].
    ///
    /// # Errors
    /// A full context ([`EvalError::ContextFull`]), an interrupt, a failed read. The context is then as before, unless
    /// it was shifted or cannot go back that far ([`Session::truncate`]): it is then empty, or holds the part of the
    /// tokens that was evaluated, as [`Session::n_past`] reports.
    pub fn feed(&mut self, tokens: &[Token]) -> Result<(), EvalError> {
        self.feed_by(tokens, None, usize::MAX, &mut |_| {})
    }

    /// As [`Session::feed`], with a part of a prompt and its cuts.
    pub(crate) fn feed_cut(&mut self, tokens: &[Token], cuts: &[Cut]) -> Result<(), EvalError> {
        self.feed_by(tokens, Some(cuts), usize::MAX, &mut |_| {})
    }

    /// As [`Session::feed`], with the same bits: `progress` receives the number of evaluated tokens after each ubatch.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_with(&mut self, tokens: &[Token], mut progress: impl FnMut(usize)) -> Result<(), EvalError> {
        self.feed_by(tokens, None, self.n_ubatch(), &mut progress)
    }

    /// Evaluates a chunk of an image or sound after the context's content.
    ///
    /// # Errors
    /// A full context; as [`Session::evaluate_media`].
    pub fn feed_media(&mut self, projector: &Projector, chunk: &Chunk) -> Result<(), EvalError> {
        if let Some(waiting) = self.pending.take() {
            self.feed(&[waiting])?;
        }
        let n_ctx = self.n_ctx_seq();
        if self.n_past + chunk.n_tokens() > n_ctx as usize {
            return Err(self.context_full());
        }
        let before = self.n_past;
        self.evaluate_media(projector, chunk, 0, before as i32)?;
        self.n_past = before + chunk.n_positions();
        self.text.clear();
        self.n_prompt = self.n_past;
        Ok(())
    }

    /// As [`Session::feed`], with `at_once` tokens per batch. Without `cuts`, the tokens are a whole prompt.
    fn feed_by(
        &mut self,
        tokens: &[Token],
        cuts: Option<&[Cut]>,
        at_once: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), EvalError> {
        let waiting = self.pending.take();
        let (before, n_waiting) = (self.n_past, usize::from(waiting.is_some()));
        let all: Vec<Token> = waiting.into_iter().chain(tokens.iter().copied()).collect();
        let cuts = match cuts {
            Some(cuts) => cuts.iter().map(|cut| Cut { at: cut.at + n_waiting, ..*cut }).collect(),
            None => self.cuts(&all, 0),
        };
        let result = self.feed_pieces(&all, &cuts, at_once, &mut |done| progress(done - n_waiting));
        if result.is_err() && self.n_past > before && self.cut(0, before) {
            self.text.truncate(self.text.len().saturating_sub(self.n_past - before));
            (self.n_past, self.is_current) = (before, false);
        }
        if result.is_err() && self.n_past == before {
            self.pending = waiting;
        } else {
            self.n_prompt = self.n_past;
        }
        result
    }

    fn feed_pieces(
        &mut self,
        tokens: &[Token],
        cuts: &[Cut],
        at_once: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), EvalError> {
        let mut done = 0;
        while done < tokens.len() {
            let next = cuts.iter().copied().find(|cut| cut.at > done && cut.at <= tokens.len());
            let end = next.map_or(tokens.len(), |cut| cut.at);
            for mut rest in tokens[done..end].chunks(self.n_batch()) {
                self.make_room(rest.len())?;
                while !rest.is_empty() {
                    // llama.cpp splits batches the same way; but a single token at the end would count as generated.
                    let n = if rest.len() - 1 <= at_once { rest.len() } else { at_once };
                    let (now, left) = rest.split_at(n);
                    let mut now = now.to_vec();
                    let mut logits = vec![0; n];
                    logits[n - 1] = i8::from(left.is_empty() && next.is_none());
                    // SAFETY: the batch borrows both vectors, which outlive its evaluation.
                    let mut batch = unsafe { llama::llama_batch_get_one(now.as_mut_ptr(), n as i32) };
                    // llama.cpp would count on from an image's first position.
                    let mut positions: Vec<i32> = (self.n_past as i32..).take(n).collect();
                    (batch.logits, batch.pos) = (logits.as_mut_ptr(), positions.as_mut_ptr());
                    self.decode(batch, &[(0, self.n_past as i32)])?;
                    self.n_past += n;
                    self.text.extend_from_slice(&now);
                    (rest, done) = (left, done + n);
                    progress(done);
                    let cut = next.filter(|cut| cut.at == done);
                    if let Err(error) = self.evaluated_piece(0, self.n_past, cut) {
                        self.n_past = 0;
                        self.text.clear();
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// The error of a full context.
    pub(super) fn context_full(&self) -> EvalError {
        let shift_helps = !self.options.context_shift && self.can_move_tokens();
        EvalError::ContextFull { n_ctx: self.n_ctx_seq(), shift_helps }
    }

    /// Makes room for `n` more tokens, by a context shift if it is enabled and possible.
    pub(super) fn make_room(&mut self, n: usize) -> Result<(), EvalError> {
        let n_ctx = self.n_ctx_seq() as usize;
        if self.n_past + n <= n_ctx {
            return Ok(());
        }
        if !self.options.context_shift || !self.can_move_tokens() || n > n_ctx {
            return Err(self.context_full());
        }
        while self.n_past + n > n_ctx {
            let wanted = usize::try_from(self.options.n_keep).unwrap_or(self.n_prompt);
            let n_keep = (wanted + usize::from(self.model.adds_bos())).min(n_ctx.saturating_sub(4)).min(self.n_past);
            let n_discard = (self.n_past - n_keep) / 2;
            if n_discard == 0 {
                return Err(self.context_full());
            }
            self.forget_checkpoints(0);
            let (keep, past) = (n_keep as i32, self.n_past as i32);
            let discard = n_discard as i32;
            if !self.context.forget(0, keep, keep + discard)? {
                return Err(self.context_full());
            }
            // A gap would leave the later tokens at wrong positions.
            if let Err(error) = self.context.shift(0, keep + discard..past, -discard) {
                self.reset();
                return Err(error);
            }
            // The text may be known in part: of the end.
            let unknown = self.n_past - self.text.len().min(self.n_past);
            self.text.drain(n_keep.saturating_sub(unknown)..(n_keep + n_discard).saturating_sub(unknown));
            self.n_past -= n_discard;
        }
        Ok(())
    }
}

/// The tokens of a generation. See [`Session::generate`].
pub struct Generation<'a> {
    pub(super) session: &'a mut Session,
    pub(super) sampler: &'a mut Sampler,
    pub(super) left: Option<usize>,
    pub(super) stop: Option<StopReason>,
    pub(super) failed: bool,
}

impl Generation<'_> {
    /// Why the iterator ended; `None` before its end and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop
    }

    fn step(&mut self) -> Result<Result<Token, StopReason>, EvalError> {
        if self.left == Some(0) {
            return Ok(Err(StopReason::Length));
        }
        let session = &mut *self.session;
        if let Some(token) = session.pending.take() {
            // Without speculation, the token stays pending for another try unless the whole context was lost.
            if let Err(error) = session.advance(token, self.left) {
                return match error {
                    EvalError::ContextFull { .. } => Ok(Err(StopReason::ContextFull)),
                    EvalError::Interrupted => Ok(Err(StopReason::Interrupted)),
                    error => Err(error),
                };
            }
        }
        let token = session.sample(self.sampler, session.row)?;
        if session.model.is_eog(token) {
            return Ok(Err(StopReason::Eog(token)));
        }
        session.pending = Some(token);
        self.left = self.left.map(|left| left - 1);
        Ok(Ok(token))
    }
}

/// Drafts that were not taken leave the context: outside of a generation it has none.
impl Drop for Generation<'_> {
    fn drop(&mut self) {
        if self.session.settle().is_err() {
            self.session.reset();
        }
    }
}

impl Session {
    /// Makes logits follow `token`, which was just generated: evaluates it with drafts, unless it is one itself. At
    /// most `left` more tokens are wanted. On errors the token is pending, unless the whole context was lost.
    fn advance(&mut self, token: Token, left: Option<usize>) -> Result<(), EvalError> {
        let before = self.n_past;
        let result = self.try_to_advance(token, left);
        if result.is_ok() {
            self.text.push(token);
            self.n_past += 1;
        } else if self.n_past == before {
            self.pending = Some(token);
        }
        result
    }

    fn try_to_advance(&mut self, token: Token, left: Option<usize>) -> Result<(), EvalError> {
        if self.ahead.front() == Some(&token) {
            if self.interrupt.is_set() {
                return Err(EvalError::Interrupted);
            }
            self.ahead.pop_front();
            self.row += 1;
            return Ok(());
        }
        self.settle()?;
        self.make_room(1)?;
        let n_max = self.room_for_drafts(self.n_past).min(left.map_or(usize::MAX, |left| left - 1));
        let text = std::mem::take(&mut self.text);
        let position = self.n_past as i32;
        let request = DraftRequest { sequence: 0, tokens: &text, last: token, position, n_max, n_min: 0 };
        let drafts = self.draft(&[request]);
        self.text = text;
        let drafts = drafts?.remove(0);
        let mut tokens: Vec<Token> = [token].into_iter().chain(drafts.iter().copied()).collect();
        let mut positions: Vec<i32> = (self.n_past as i32..).take(tokens.len()).collect();
        let mut logits = vec![1; tokens.len()];
        // SAFETY: the batch borrows the vectors, which outlive its evaluation.
        let mut batch = unsafe { llama::llama_batch_get_one(tokens.as_mut_ptr(), tokens.len() as i32) };
        (batch.pos, batch.logits) = (positions.as_mut_ptr(), logits.as_mut_ptr());
        self.decode(batch, &[(0, self.n_past as i32)])?;
        self.row = 0;
        self.ahead = drafts.into();
        Ok(())
    }

    /// Takes the drafts out of the context that are not part of the text.
    fn settle(&mut self) -> Result<(), EvalError> {
        // A text that ends here may end with a draft.
        self.ahead.clear();
        self.accept(0, usize::try_from(self.row).unwrap_or(0))
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Token, EvalError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.stop.is_some() || self.failed {
            return None;
        }
        match self.step() {
            Ok(Ok(token)) => Some(Ok(token)),
            Ok(Err(reason)) => {
                self.stop = Some(reason);
                self.session.idle();
                None
            }
            Err(error) => {
                self.failed = true;
                Some(Err(error))
            }
        }
    }
}

impl Session {
    /// Samples a token from the logits of entry `index` of the last batch (-1: the last), and records it in the sampler
    /// as generated. For callers of [`Session::evaluate`], who must evaluate the token themselves.
    ///
    /// # Errors
    /// [`EvalError::NothingEvaluated`] if the last evaluation failed or there was none, [`EvalError::Decode`] if the
    /// entry asked for no logits, [`EvalError::NotFinite`] if they are not finite, [`EvalError::Sampler`] if no token
    /// can be chosen.
    pub fn sample(&mut self, sampler: &mut Sampler, index: i32) -> Result<Token, EvalError> {
        if !self.is_current {
            return Err(EvalError::NothingEvaluated);
        }
        let started = Instant::now();
        let token = sampler.sample(&self.context, index)?;
        self.sample_ms += started.elapsed().as_secs_f64() * 1e3;
        self.sample_count += 1;
        Ok(token)
    }

    /// Whether the logits of an entry of the last batch, if it asked for any, are finite. If not, its keys and values
    /// corrupt all sequences of a shared cache, even through masked or freed cells, until [`Session::reset`] clears the
    /// data.
    pub fn has_finite_logits(&self, index: usize) -> bool {
        self.logits(index).is_none_or(are_finite)
    }
}

/// The text of a generation. See [`Session::generate_text`].
pub struct GeneratedText<'a> {
    pub(super) tokens: Generation<'a>,
    /// The beginning of a character.
    pub(super) bytes: Vec<u8>,
}

impl GeneratedText<'_> {
    /// Why the iterator ended; `None` before its end and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.tokens.stop_reason()
    }
}

/// Whole characters of one or several tokens. Bytes that are no UTF-8 become replacement characters.
impl Iterator for GeneratedText<'_> {
    type Item = Result<String, EvalError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.tokens.next() {
                Some(Ok(token)) => self.bytes.extend(self.tokens.session.model.piece(token, false)),
                Some(Err(error)) => return Some(Err(error)),
                None if self.bytes.is_empty() => return None,
                None => return Some(Ok(String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned())),
            }
            // An incomplete character at the end waits for its other bytes.
            let whole = match std::str::from_utf8(&self.bytes) {
                Err(error) if error.error_len().is_none() => error.valid_up_to(),
                _ => self.bytes.len(),
            };
            if whole > 0 {
                let rest = self.bytes.split_off(whole);
                let text = String::from_utf8_lossy(&self.bytes).into_owned();
                self.bytes = rest;
                return Some(Ok(text));
            }
        }
    }
}
