//! Tokens after tokens: prompts in batches, within the context's length.

use ggml_sys::llama;

use super::Session;
use crate::engine::error::Error;
use crate::options::Token;

impl Session {
    /// Forgets everything from token `n_keep` on.
    ///
    /// # Errors
    /// Fewer than `n_keep` tokens in the context, or a model that cannot forget a part (a recurrent one): the context
    /// is then unchanged.
    pub fn truncate(&mut self, n_keep: usize) -> Result<(), Error> {
        if n_keep > self.n_past() {
            return Err(Error::Decode(format!("the context holds {} tokens, not {n_keep}", self.n_past())));
        }
        if n_keep == self.n_past() {
            return Ok(());
        }
        // SAFETY: the context is live.
        if n_keep < self.n_past && !unsafe { llama::llama_memory_seq_rm(self.context.memory(), 0, n_keep as i32, -1) } {
            return Err(Error::Decode("this model cannot forget a part of its context".into()));
        }
        // Without the pending token alone, the logits are those from which it was sampled.
        self.is_current &= n_keep == self.n_past;
        self.pending = None;
        self.n_past = n_keep;
        self.n_prompt = self.n_prompt.min(n_keep);
        Ok(())
    }

    /// Evaluates `tokens` after what is in the context, in batches of `n_batch`. Logits of the last are kept for
    /// [`Session::generate`].
    ///
    /// # Errors
    /// A full context ([`Error::ContextFull`]), an interrupt, a failed read. The context is then as before, unless it
    /// was shifted or the model cannot forget a part of it (a recurrent one: it is then empty).
    pub fn feed(&mut self, tokens: &[Token]) -> Result<(), Error> {
        self.feed_by(tokens, Session::feed_pieces)
    }

    /// As [`Session::feed`], with the same bits: after each ubatch `progress` is told how many of the tokens are evaluated.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_with(&mut self, tokens: &[Token], mut progress: impl FnMut(usize)) -> Result<(), Error> {
        self.feed_by(tokens, |session, all| session.feed_ubatches(all, all.len() - tokens.len(), &mut progress))
    }

    fn feed_by(
        &mut self,
        tokens: &[Token],
        feed: impl FnOnce(&mut Session, &[Token]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let waiting = self.pending.take();
        let before = self.n_past;
        let all: Vec<Token> = waiting.into_iter().chain(tokens.iter().copied()).collect();
        let result = feed(self, &all);
        if result.is_err() && self.n_past > before {
            // SAFETY: the context is live.
            if unsafe { llama::llama_memory_seq_rm(self.context.memory(), 0, before as i32, -1) } {
                (self.n_past, self.is_current) = (before, false);
            }
        }
        if result.is_err() && self.n_past == before {
            self.pending = waiting;
        } else {
            self.n_prompt = self.n_past;
        }
        result
    }

    fn feed_pieces(&mut self, tokens: &[Token]) -> Result<(), Error> {
        for piece in tokens.chunks(self.n_batch()) {
            self.make_room(piece.len())?;
            let mut piece = piece.to_vec();
            // SAFETY: the batch borrows `piece`, which outlives its evaluation.
            let batch = unsafe { llama::llama_batch_get_one(piece.as_mut_ptr(), piece.len() as i32) };
            self.decode(batch, &[(0, self.n_past as i32)])?;
            self.n_past += piece.len();
        }
        Ok(())
    }

    /// As [`Session::feed_pieces`], a ubatch at a time; `n_before` of the tokens are no news to `progress`.
    fn feed_ubatches(
        &mut self,
        tokens: &[Token],
        n_before: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), Error> {
        let n_ubatch = self.n_ubatch();
        let mut done = 0;
        for piece in tokens.chunks(self.n_batch()) {
            self.make_room(piece.len())?;
            let mut rest = piece;
            while !rest.is_empty() {
                // llama.cpp cuts a batch like this; but a last single token would pass for a generated one.
                let n = if rest.len() <= n_ubatch + 1 { rest.len() } else { n_ubatch };
                let (ubatch, left) = rest.split_at(n);
                let has_logits = left.is_empty();
                self.feed_ubatch(ubatch, has_logits)?;
                (rest, done) = (left, done + n);
                progress(done.saturating_sub(n_before));
            }
        }
        Ok(())
    }

    /// Evaluates tokens for which there is room, with logits of the last if `has_logits`.
    fn feed_ubatch(&mut self, tokens: &[Token], has_logits: bool) -> Result<(), Error> {
        let mut tokens = tokens.to_vec();
        let mut logits = vec![0; tokens.len()];
        if let Some(last) = logits.last_mut() {
            *last = i8::from(has_logits);
        }
        // SAFETY: the batch borrows both vectors, which outlive its evaluation.
        let mut batch = unsafe { llama::llama_batch_get_one(tokens.as_mut_ptr(), tokens.len() as i32) };
        batch.logits = logits.as_mut_ptr();
        self.decode(batch, &[(0, self.n_past as i32)])?;
        self.n_past += tokens.len();
        Ok(())
    }

    /// Makes room for `n` more tokens, by a context shift where that is wanted and possible.
    pub(super) fn make_room(&mut self, n: usize) -> Result<(), Error> {
        let n_ctx = self.n_ctx_seq() as usize;
        if self.n_past + n <= n_ctx {
            return Ok(());
        }
        let full = Error::ContextFull { n_ctx: n_ctx as u32 };
        // SAFETY: the context is live.
        let can_shift = unsafe { llama::llama_memory_can_shift(self.context.memory()) };
        if !self.options.context_shift || !can_shift || n > n_ctx {
            return Err(full);
        }
        while self.n_past + n > n_ctx {
            let wanted = usize::try_from(self.options.n_keep).unwrap_or(self.n_prompt);
            let n_keep = (wanted + usize::from(self.model.adds_bos())).min(n_ctx.saturating_sub(4)).min(self.n_past);
            let n_discard = (self.n_past - n_keep) / 2;
            if n_discard == 0 {
                return Err(full);
            }
            let (keep, past) = (n_keep as i32, self.n_past as i32);
            let discard = n_discard as i32;
            // SAFETY: the context is live.
            unsafe {
                if !llama::llama_memory_seq_rm(self.context.memory(), 0, keep, keep + discard) {
                    return Err(full);
                }
                llama::llama_memory_seq_add(self.context.memory(), 0, keep + discard, past, -discard);
            }
            self.n_past -= n_discard;
        }
        Ok(())
    }
}
