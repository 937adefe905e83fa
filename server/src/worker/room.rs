//! Room in the context that all slots share, and recovery from logits that are not finite.
//!
//! A masked cell still counts in attention (0 · NaN is NaN), and a forgotten one keeps its data: cells of one request
//! that are not finite would spoil all other and all later ones. So the tokens of the failed evaluation are removed,
//! and its requests are evaluated again one by one, without the cells of idle slots. A prompt that continued earlier
//! cells, which a file may have damaged, begins once more without them. The state of recurrent and hybrid models
//! cannot go back: there every request that shared the failed evaluation fails with 503.

use hobbit::EvalError;
use hobbit::engine::{Borrower, TakenOut, trim_heap};

use super::Worker;
use super::slot::{Run, Slot, Stage};
use crate::error::ApiError;
use crate::job::Work;
use crate::slots::{self, Holder, Holding};

impl Worker {
    /// Makes room for one more token, by a context shift if allowed. False if the text ends here.
    pub(super) fn make_room(&mut self, at: usize) -> bool {
        let (n_ctx, shifts) =
            (self.options.n_ctx, self.options.context_shift && self.session.sequences().can_move_tokens());
        let adds_bos = self.model.adds_bos();
        let n_held = self.tokens(at).len();
        let slot = &mut self.slots[at];
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
        let n_ctx = self.session.n_ctx() as usize;
        let holding = |slot: &Slot| {
            let added = entries.iter().filter(|entry| **entry == slot.sequence()).count();
            let holder = slot.run.as_ref().map_or(Holder::Idle { since: slot.last_used }, |run| match &run.job.work {
                Work::Generate(generate) if run.stage == Stage::Generating => Holder::Generation {
                    is_unlimited: generate.n_predict.is_none_or(|n| run.job.prompt.len() + n > n_ctx),
                },
                _ => Holder::Prompt,
            });
            Holding { n: self.tokens(slot.id).len() + added, holder }
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
        self.forget(at)?;
        Ok(Some(at))
    }

    /// Empties the slot that has been idle the longest, except `but`. Returns the minimum number of freed cells;
    /// `None` if no idle slot holds tokens.
    pub(super) fn forget_oldest_idle(&mut self, but: usize) -> Result<Option<usize>, EvalError> {
        let idle =
            self.slots.iter().filter(|slot| slot.is_free() && !self.tokens(slot.id).is_empty() && slot.id != but);
        let Some(slot) = idle.min_by_key(|slot| slot.last_used) else { return Ok(None) };
        // Another slot may share the cells.
        let (at, n) = (slot.id, if slot.is_shared { 0 } else { self.tokens(slot.id).len() });
        self.forget(at)?;
        Ok(Some(n))
    }

    /// Empties a slot that has no request.
    pub(super) fn forget(&mut self, at: usize) -> Result<(), EvalError> {
        self.slots[at].is_shared = false;
        self.session.sequences_mut().keep(self.slots[at].sequence(), 0).map(drop)
    }

    /// Copies a slot's shared cells, so that only this slot has them; needs room for the copies. False if the memory
    /// budget has none for their data meanwhile.
    fn make_private(&mut self, at: usize) -> Result<bool, EvalError> {
        if !self.slots[at].is_shared {
            return Ok(true);
        }
        let bytes = self.session.sequences_mut().state_bytes(self.slots[at].sequence())?;
        if !self.model.lend(Borrower::State, bytes as u64) {
            return Ok(false);
        }
        let copied = self.copy_cells(at);
        self.give_back(Borrower::State);
        copied.map(|()| true)
    }

    fn copy_cells(&mut self, at: usize) -> Result<(), EvalError> {
        let sequence = self.slots[at].sequence();
        let copy = self.session.sequences_mut().take_out(sequence)?;
        while let Err(error) = self.session.sequences_mut().put_back(sequence, &copy) {
            if self.give_way(Some(at), &[])?.is_none() {
                return Err(error);
            }
        }
        self.slots[at].is_shared = false;
        Ok(())
    }

    /// Whether the last evaluation's results for a slot, `n` entries from `first` on, are finite.
    pub(super) fn is_finite(&self, at: usize, first: usize, n: usize) -> bool {
        let slot = &self.slots[at];
        match slot.run.as_ref().map(|run| &run.job.work) {
            Some(Work::Embed) => super::prompt::rows(&self.session, slot.sequence(), first, n)
                .is_none_or(|rows| rows.iter().flatten().all(|value| value.is_finite())),
            _ if slot.run.as_ref().is_some_and(Run::scores_prompt) => {
                (first..first + n).all(|index| self.session.has_finite_logits(index))
            }
            _ => self.session.has_finite_logits(first + n - 1),
        }
    }

    /// Reverts an evaluation of `members` whose results are not finite, and clears the whole cache with its data.
    /// Other working slots get their state back bit for bit; idle slots lose theirs. Returns the members to evaluate
    /// again, one by one, which finds the one that fails. A single member fails, unless the cells of an idle slot may
    /// have been the cause. Without members, no request fails and idle slots keep their states, too.
    pub(super) fn purge(&mut self, members: &[usize]) -> Vec<usize> {
        let is_suspect = |slot: &Slot| slot.is_free() && !self.tokens(slot.id).is_empty() && !members.is_empty();
        let alone = if let [at] = members { Some(*at) } else { None };
        let mut begins_again = false;
        if let Some(at) = alone.filter(|_| !self.slots.iter().any(is_suspect)) {
            begins_again = self.fail_unless_again(at, ApiError::server(EvalError::NotFinite.to_string()));
        }
        let (mut kept, mut n_kept) = (Vec::new(), 0);
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            slot.is_shared = false;
            let (sequence, is_lost) = (slot.sequence(), slot.is_free() && !members.is_empty());
            if is_lost || self.tokens(at).is_empty() {
                continue;
            }
            let copy = match self.session.sequences_mut().take_back(sequence) {
                Ok(true) => self.copied(sequence, &mut n_kept),
                _ => None,
            };
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
        self.give_back(Borrower::States);
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
        let emptied = self.forget(at);
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

    /// A copy of a sequence, if the memory budget has room for it beside `n_kept` bytes of others.
    fn copied(&mut self, sequence: i32, n_kept: &mut u64) -> Option<TakenOut> {
        let sequences = self.session.sequences_mut();
        let n = *n_kept + sequences.state_bytes(sequence).ok()? as u64;
        if !self.model.lend(Borrower::States, n) {
            return None;
        }
        *n_kept = n;
        sequences.take_out(sequence).ok()
    }

    /// Gives lent memory back to the experts, after it was freed.
    pub(super) fn give_back(&self, borrower: Borrower) {
        trim_heap();
        self.model.lend(borrower, 0);
    }

    /// Fails a slot whose context could not be restored.
    fn lose(&mut self, at: usize) {
        let message =
            "the request's context was lost with that of another one, whose logits were not finite; send it again";
        self.fail(at, ApiError::unavailable(message));
    }
}
