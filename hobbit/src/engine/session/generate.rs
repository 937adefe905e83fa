//! Prompts, evaluated in batches within the context's length, and generation: evaluates the last token, samples the
//! next.

use std::time::Instant;

#[cfg(doc)]
use super::Sequences;
use super::sequences::Sequence;
use super::{BatchToken, Session, StopReason};
use crate::engine::error::EvalError;
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
        let n_past = self.sequences.tokens(0).len();
        if n_keep < n_past && !self.sequences.cut(0, n_keep) {
            let reason =
                format!("the context of {n_past} tokens cannot go back to {n_keep}: reset it and feed them again");
            return Err(EvalError::Decode(reason));
        }
        // Removing only the pending token leaves the logits from which it was sampled.
        self.sequences.all[0].pending = None;
        Ok(())
    }

    /// Shortens the context to its first `n` tokens, or to the last checkpoint within them if that is impossible
    /// ([`Session::truncate`]). Returns the number of tokens left. Tokens evaluated next have the same logits as after
    /// those tokens in an empty context.
    pub fn keep(&mut self, n: usize) -> usize {
        let n_past = self.n_past();
        if n == n_past && self.sequences.pending(0).is_some() {
            return n;
        }
        match self.sequences.keep(0, n) {
            Ok(left @ 1..) if n <= n_past => left,
            _ => {
                self.reset();
                0
            }
        }
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
        self.sequences.set_checkpoints(0, checkpoints);
        self.sequences.all[0].n_prompt = tokens.len();
        Ok(())
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

    /// As [`Session::feed`], with the same bits: `progress` receives the number of evaluated tokens after each ubatch.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_with(&mut self, tokens: &[Token], mut progress: impl FnMut(usize)) -> Result<(), EvalError> {
        let fixed = if self.decoder.wide.is_some() { usize::MAX } else { self.context().n_ubatch() };
        self.feed_by(tokens, None, fixed, &mut progress)
    }

    /// Tokens of the next ubatch of a prompt of which `n_prompt` are left: `n_ubatch`, or more where that is expected
    /// to be faster ([`n_ubatch_max`](hobbit_core::options::SessionOptions::n_ubatch_max)).
    pub fn width_for(&self, n_prompt: usize) -> usize {
        self.decoder.wide.as_ref().map_or(self.context().n_ubatch(), |wide| wide.width(n_prompt))
    }

    /// As [`Session::feed`], with `at_once` tokens per batch. Without `cuts`, the tokens are a whole prompt.
    pub(super) fn feed_by(
        &mut self,
        tokens: &[Token],
        cuts: Option<&[Cut]>,
        at_once: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), EvalError> {
        let own = &mut self.sequences.all[0];
        let (before, waiting) = (own.text().len(), own.pending.take());
        let n_waiting = usize::from(waiting.is_some());
        let all: Vec<Token> = waiting.into_iter().chain(tokens.iter().copied()).collect();
        let cuts = match cuts {
            Some(cuts) => cuts.iter().map(|cut| Cut { at: cut.at + n_waiting, ..*cut }).collect(),
            None => self.sequences.cuts(&all, 0),
        };
        let result = self.feed_pieces(&all, &cuts, at_once, &mut |done| progress(done - n_waiting));
        if result.is_err() && self.sequences.tokens(0).len() > before {
            self.sequences.cut(0, before);
        }
        let own = &mut self.sequences.all[0];
        if result.is_err() && own.tokens.len() == before {
            own.pending = waiting;
        } else {
            own.n_prompt = own.tokens.len();
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
            for mut rest in tokens[done..end].chunks(self.context().n_batch()) {
                self.make_room(rest.len())?;
                while !rest.is_empty() {
                    // llama.cpp splits batches the same way; but a single token at the end would count as generated.
                    let at_once = match &self.decoder.wide {
                        Some(wide) => at_once.min(wide.width(rest.len())),
                        None => at_once,
                    };
                    let n = if rest.len() - 1 <= at_once { rest.len() } else { at_once };
                    let (now, left) = rest.split_at(n);
                    let wants_last = left.is_empty() && next.is_none();
                    let place = |(at, (position, &token)): (usize, (i32, &Token))| BatchToken {
                        token,
                        position,
                        sequence: 0,
                        logits: wants_last && at + 1 == n,
                    };
                    let positions = self.sequences.tokens(0).len() as i32..;
                    let batch: Vec<BatchToken> = positions.zip(now).enumerate().map(place).collect();
                    self.evaluate(&batch)?;
                    (rest, done) = (left, done + n);
                    progress(done);
                    self.sequences.evaluated_piece(0, next.filter(|cut| cut.at == done))?;
                }
            }
        }
        Ok(())
    }

    /// Makes room for `n` more tokens, by a context shift if it is enabled and possible.
    pub(super) fn make_room(&mut self, n: usize) -> Result<(), EvalError> {
        let (n_ctx, own) = (self.context().n_ctx_seq() as usize, &mut self.sequences);
        while own.tokens(0).len() + n > n_ctx {
            if !own.options.context_shift || own.no_shift().is_some() || n > n_ctx {
                return Err(own.context_full());
            }
            let n_past = own.tokens(0).len();
            let wanted = usize::try_from(own.options.n_keep).unwrap_or(own.all[0].n_prompt);
            let n_keep = (wanted + usize::from(self.model.adds_bos())).min(n_ctx.saturating_sub(4)).min(n_past);
            let n_discard = (n_past - n_keep) / 2;
            let (keep, discard) = (n_keep as i32, n_discard as i32);
            if n_discard == 0 {
                return Err(own.context_full());
            }
            match own.move_tokens(0, keep + discard..n_past as i32, -discard) {
                Err(error @ EvalError::ContextFull { .. }) => return Err(error),
                Err(error) => {
                    self.reset();
                    return Err(error);
                }
                Ok(()) => {}
            }
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
        // The token stays pending for another try unless the whole context was lost.
        if let Err(error) = self.go_on() {
            return match error {
                EvalError::ContextFull { .. } => Ok(Err(StopReason::ContextFull)),
                EvalError::Interrupted => Ok(Err(StopReason::Interrupted)),
                error => Err(error),
            };
        }
        let session = &mut *self.session;
        let token = session.sample(0, self.sampler)?;
        if session.model.is_eog(token) {
            return Ok(Err(StopReason::Eog(token)));
        }
        session.sequences.set_pending(0, token);
        self.left = self.left.map(|left| left - 1);
        Ok(Ok(token))
    }

    /// Makes logits follow the pending token, if there is one: evaluates it with drafts, unless it is one itself.
    fn go_on(&mut self) -> Result<(), EvalError> {
        let session = &mut *self.session;
        if session.sequences.pending(0).is_none() {
            return Ok(());
        }
        if session.decoder.interrupt.is_set() {
            return Err(EvalError::Interrupted);
        }
        if !session.sequences.take(0) {
            session.settle(0)?;
            session.make_room(1)?;
            let n_max = self.left.map_or(usize::MAX, |left| left - 1);
            session.draft(&[DraftRequest { sequence: 0, n_max, n_min: 0 }])?;
            session.advance(&[0])?;
            session.sequences.take(0);
        }
        Ok(())
    }
}

/// Drafts that were not taken leave the context: outside of a generation it has none.
impl Drop for Generation<'_> {
    fn drop(&mut self) {
        if self.session.settle(0).is_err() {
            self.session.reset();
        }
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
    /// A step of generation: evaluates the pending tokens of `sequences` together, each with its drafts
    /// ([`Session::draft`]), which are left out where the context has no room for them. For each sequence follow, as
    /// long as [`Sequences::take`] returns true, [`Session::sample`] and [`Sequences::set_pending`]; then
    /// [`Session::settle`].
    ///
    /// # Errors
    /// As [`Session::evaluate`]. The tokens are pending still, and have no drafts.
    pub fn advance(&mut self, sequences: &[i32]) -> Result<(), EvalError> {
        let (mut batch, mut n_drafts) = (Vec::new(), 0);
        for &sequence in sequences {
            let Some(own) = self.sequences.get_mut(sequence) else { continue };
            let drafts = std::mem::take(&mut own.drafts);
            n_drafts += drafts.len();
            let entry = |(position, token)| BatchToken { token, position, sequence, logits: true };
            batch.extend((own.tokens.len() as i32..).zip(own.pending.into_iter().chain(drafts)).map(entry));
        }
        let evaluated = self.evaluate(&batch);
        if evaluated.is_err() {
            let dropped = self.drop_drafts();
            if n_drafts > 0 && matches!(evaluated, Err(EvalError::ContextFull { .. })) {
                dropped?;
                return self.advance(sequences);
            }
        }
        evaluated
    }

    /// Samples a token from the logits after a sequence's text, and records it in the sampler as generated.
    ///
    /// # Errors
    /// [`EvalError::NothingEvaluated`] if the last batch did not end the text, [`EvalError::Decode`] if no logits were
    /// asked for, [`EvalError::NotFinite`] if they are not finite, [`EvalError::Sampler`] if no token can be chosen.
    pub fn sample(&mut self, sequence: i32, sampler: &mut Sampler) -> Result<Token, EvalError> {
        let row = self.sequences.get(sequence).and_then(Sequence::row).ok_or(EvalError::NothingEvaluated)?;
        let started = Instant::now();
        let token = sampler.sample(&self.sequences.context, row as i32)?;
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
