//! Room in the context that all slots share, and recovery from logits that are not finite.
//!
//! A masked cell still counts in attention (0 · NaN is NaN), and a forgotten one keeps its data: cells of one request
//! that are not finite would spoil all other and all later ones. So the tokens of the failed evaluation are removed,
//! and its requests are evaluated again one by one, without the cells of idle slots. A prompt that continued earlier
//! cells, which a file may have damaged, begins once more without them. The state of recurrent and hybrid models
//! cannot go back: there every request that shared the failed evaluation fails with 503.

use hobbit::engine::{Borrower, trim_heap};
use hobbit::{EvalError, Model};
use hobbit_core::units::Bytes;

use super::Worker;
use super::slot::{Run, Slot, Stage};
use crate::error::ApiError;
use crate::job::Work;
use crate::slots::{self, Holder, Holding};

impl Worker {
    /// Makes room for one more token, by a context shift if allowed. False if the text ends here.
    pub(super) fn make_room(&mut self, at: usize) -> bool {
        let (n_ctx, shifts) =
            (self.options.n_ctx, self.options.context_shift && self.session.sequences().no_shift().is_none());
        let adds_bos = self.model.adds_bos();
        let slot = &mut self.slots[at];
        let n_held = slot.tokens(&self.session).len();
        if n_held + slot.run.as_ref().map_or(0, |run| run.job.chunks.n_extra()) < n_ctx {
            return true;
        }
        let Some(run) = slot.run.as_mut() else { return false };
        let Some(generate) = run.generate() else { return false };
        let wanted = usize::try_from(generate.n_keep).unwrap_or(run.job.prompt.len()) + usize::from(adds_bos);
        let dropped = slots::shift(n_held, wanted.min(n_ctx.saturating_sub(4)), generate.n_discard);
        let Some((n_keep, n)) = dropped.filter(|_| shifts) else {
            self.end_full(at);
            return false;
        };
        run.truncated = true;
        let sequence = slot.sequence();
        let shifted = self.make_private(at).and_then(|is_private| {
            let range = (n_keep + n) as i32..n_held as i32;
            if is_private {
                self.session.sequences_mut().move_tokens(sequence, range, -(n as i32))?;
            }
            Ok(is_private)
        });
        match shifted {
            Ok(true) => return true,
            Ok(false) | Err(EvalError::ContextFull { .. }) => self.end_full(at),
            Err(error) => self.failed(&[at], error),
        }
        false
    }

    /// Makes room in the shared context for a batch with entries of these sequences: the slot that
    /// [`slots::gives_way`] names, except `but`, ends its request and drops its tokens. `None` if no slot gives way.
    pub(super) fn give_way(&mut self, but: Option<usize>, entries: &[i32]) -> Result<Option<usize>, EvalError> {
        let n_ctx = self.session.context().n_ctx() as usize;
        let holding = |slot: &Slot| {
            let added = entries.iter().filter(|entry| **entry == slot.sequence()).count();
            let holder = slot.run.as_ref().map_or(Holder::Idle { since: slot.last_used }, |run| match &run.job.work {
                Work::Generate(generate) if run.stage == Stage::Generating => Holder::Generation {
                    is_unlimited: generate.n_predict.is_none_or(|n| run.job.prompt.len() + n > n_ctx),
                },
                _ => Holder::Prompt,
            });
            Holding { n: slot.tokens(&self.session).len() + added, holder }
        };
        let holdings: Vec<Holding> = self.slots.iter().map(holding).collect();
        let fair_share = n_ctx / self.slots.len();
        let Some(at) = slots::gives_way(&holdings, fair_share, but) else { return Ok(None) };
        match holdings[at].holder {
            Holder::Idle { .. } => {}
            Holder::Generation { .. } => self.end_full(at),
            Holder::Prompt => {
                let message = format!(
                    "the context of {n_ctx} tokens is full, and this prompt takes more of it than its share of \
                     {fair_share}: send it again later, or give the server a larger -c"
                );
                self.fail(at, ApiError::unavailable(message));
            }
        }
        self.slots[at].forget(&mut self.session)?;
        Ok(Some(at))
    }

    /// Empties the slot that has been idle the longest, except `but`. Returns the minimum number of freed cells;
    /// `None` if no idle slot holds tokens.
    pub(super) fn forget_oldest_idle(&mut self, but: usize) -> Result<Option<usize>, EvalError> {
        let holds = |slot: &&mut Slot| slot.is_free() && !slot.tokens(&self.session).is_empty() && slot.id != but;
        let Some(slot) = self.slots.iter_mut().filter(holds).min_by_key(|slot| slot.last_used) else { return Ok(None) };
        // Another slot may share the cells.
        let n = if slot.is_shared { 0 } else { slot.tokens(&self.session).len() };
        slot.forget(&mut self.session)?;
        Ok(Some(n))
    }

    /// Copies a slot's shared cells, so that only this slot has them; needs room for the copies. False if the memory
    /// budget has none for their data meanwhile.
    fn make_private(&mut self, at: usize) -> Result<bool, EvalError> {
        if !self.slots[at].is_shared {
            return Ok(true);
        }
        let sequence = self.slots[at].sequence();
        let sequences = self.session.sequences_mut();
        // Lent until the copy is dropped.
        let mut loan = Loan { borrower: Borrower::State, model: self.model.clone(), bytes: 0 };
        if !loan.add(sequences.state_bytes(sequence)? as u64) {
            return Ok(false);
        }
        let copy = sequences.take_out(sequence)?;
        while let Err(error) = self.session.sequences_mut().put_back(sequence, &copy) {
            if self.give_way(Some(at), &[])?.is_none() {
                return Err(error);
            }
        }
        self.slots[at].is_shared = false;
        Ok(true)
    }

    /// Reverts an evaluation of `members` whose results are not finite, and clears the whole cache with its data.
    /// Other working slots get their state back bit for bit; idle slots lose theirs. Returns the members to evaluate
    /// again, one by one, which finds the one that fails. A single member fails, unless the cells of an idle slot may
    /// have been the cause. Without members, no request fails and idle slots keep their states, too.
    pub(super) fn purge(&mut self, members: &[usize]) -> Vec<usize> {
        let is_suspect = |slot: &Slot| slot.is_free() && !slot.tokens(&self.session).is_empty() && !members.is_empty();
        let alone = if let [at] = members { Some(*at) } else { None };
        let mut begins_again = false;
        if let Some(at) = alone.filter(|_| !self.slots.iter().any(is_suspect)) {
            begins_again = self.fail_unless_again(at, ApiError::server(EvalError::NotFinite.to_string()));
        }
        // Lent until the copies are dropped.
        let mut loan = Loan { borrower: Borrower::States, model: self.model.clone(), bytes: 0 };
        let mut kept = Vec::new();
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            slot.is_shared = false;
            let (sequence, is_lost) = (slot.sequence(), slot.is_free() && !members.is_empty());
            if is_lost || slot.tokens(&self.session).is_empty() {
                continue;
            }
            let sequences = self.session.sequences_mut();
            let is_whole = matches!(sequences.take_back(sequence), Ok(true));
            let fits = is_whole && sequences.state_bytes(sequence).is_ok_and(|bytes| loan.add(bytes as u64));
            let copy = if fits { sequences.take_out(sequence).ok() } else { None };
            match copy {
                Some(copy) => kept.push((at, copy)),
                None if alone == Some(at) => {
                    begins_again = self.fail_unless_again(at, ApiError::server(EvalError::NotFinite.to_string()));
                }
                None => self.lose(at),
            }
        }
        self.session.reset();
        for (at, copy) in kept {
            while self.session.sequences_mut().put_back(self.slots[at].sequence(), &copy).is_err() {
                // Cells that were shared are separate copies now.
                if !matches!(self.give_way(Some(at), &[]), Ok(Some(_))) {
                    self.lose(at);
                    break;
                }
            }
        }
        members.iter().copied().filter(|at| !begins_again && !self.slots[*at].is_free()).collect()
    }

    /// Fails a request, unless its prompt continued cells of an earlier request or of a file, whose data may be
    /// damaged: then the prompt begins again without them, which happens once. True if it does.
    pub(super) fn fail_unless_again(&mut self, at: usize, error: ApiError) -> bool {
        let slot = &mut self.slots[at];
        let continues = |run: &&mut Run| {
            // Its images and sound may be closed.
            run.stage == Stage::Prompt && run.counts.n_cached > 0 && run.job.chunks.is_empty()
        };
        let Some(run) = slot.run.as_mut().filter(continues) else {
            self.fail(at, error);
            return false;
        };
        run.sampler = None;
        let made = self.slots[at].run.as_ref().map(|run| self.sampler_for(&run.job));
        let emptied = self.slots[at].forget(&mut self.session);
        match (self.slots[at].run.as_mut(), made, emptied) {
            (Some(run), Some(Ok((sampler, _))), Ok(())) => {
                (run.sampler, run.cuts) = (sampler, self.session.sequences().cuts(&run.job.prompt, 0));
                (run.counts.n_cached, run.counts.n_prompt) = (0, 0);
                true
            }
            _ => {
                self.fail(at, error);
                false
            }
        }
    }

    /// Fails a slot whose context could not be restored.
    fn lose(&mut self, at: usize) {
        let message =
            "the request's context was lost with that of another one, whose logits were not finite; send it again";
        self.fail(at, ApiError::unavailable(message));
    }
}

/// Memory that experts lend for copies of states, until this is dropped. Each borrower has one loan at a time.
pub(super) struct Loan {
    borrower: Borrower,
    model: Model,
    bytes: u64,
}

impl Loan {
    /// For a slot's state of `bytes`, to `verb` it.
    pub fn to(verb: &str, model: &Model, bytes: u64) -> Result<Self, ApiError> {
        let mut loan = Self { borrower: Borrower::State, model: model.clone(), bytes: 0 };
        if !loan.add(bytes) {
            return Err(ApiError::unavailable(format!(
                "Unable to {verb} slot: its state takes {} of memory, which the memory budget cannot spare: give the \
                 server a larger --mem-budget or a smaller --expert-cache",
                Bytes(bytes)
            )));
        }
        Ok(loan)
    }

    /// Lends `bytes` more; false if the memory budget has no room for them.
    fn add(&mut self, bytes: u64) -> bool {
        let is_lent = self.model.lend(self.borrower, self.bytes + bytes);
        self.bytes += if is_lent { bytes } else { 0 };
        is_lent
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        trim_heap();
        self.model.lend(self.borrower, 0);
    }
}
