//! A decoding step of all generating slots: their last tokens are evaluated together, and each slot chooses its next
//! token.

use std::time::Instant;

use hobbit::stats::PhaseStats;
use hobbit::{BatchToken, Error};

use super::Worker;
use super::slot::{LastRun, Phase, Run, Slot};
use crate::server::control::Nudge;
use crate::server::job::{Done, Event, Failure, FailureKind, Progress, Stop, TokenEvent, Traffic, Work};
use crate::server::probabilities;
use crate::server::slots::{self, Holder, Holding};

impl Worker {
    /// Evaluates the last tokens of all generating slots, in groups that may share a batch.
    pub(super) fn step(&mut self) {
        let generating: Vec<usize> = (0..self.slots.len()).filter(|at| self.slots[*at].is_generating()).collect();
        let began = Instant::now();
        let n_at_once = self.session.decodes_at_once().min(self.options.n_batch);
        for group in self.by_adapters(&generating) {
            group.chunks(n_at_once).for_each(|group| self.step_together(group));
        }
        if !generating.is_empty() {
            let seconds = began.elapsed().as_secs_f64();
            self.pace.stepped(seconds);
            self.status.stepped(generating.len(), seconds);
        }
    }

    /// Groups slots whose tokens may share a batch: those with equal adapter scales.
    pub(super) fn by_adapters(&self, slots: &[usize]) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for &at in slots {
            match groups.iter_mut().find(|group| self.slots[group[0]].lora == self.slots[at].lora) {
                Some(group) => group.push(at),
                None => groups.push(vec![at]),
            }
        }
        groups
    }

    fn step_together(&mut self, group: &[usize]) {
        // Making room for one slot may end others: collect the batch once all have room.
        let group: Vec<usize> = group.iter().copied().filter(|at| self.make_room(*at)).collect();
        let mut batch = Vec::new();
        let mut members = Vec::new();
        for at in group {
            let slot = &self.slots[at];
            let Some(token) = slot.run.as_ref().and_then(|run| run.pending) else { continue };
            let position = slot.tokens.len() as i32;
            batch.push(BatchToken { token, position, sequence: slot.sequence(), logits: true });
            members.push(at);
        }
        if batch.is_empty() {
            return;
        }
        self.session.set_adapters(&self.slots[members[0]].lora);
        let before = self.traffic();
        match self.evaluate(&batch) {
            Ok(true) => {}
            // The next step runs without the slot that gave way.
            Ok(false) => return,
            Err(error) => return self.failed(&members, &error),
        }
        let cost = self.traffic() - before;
        self.status.moved(&cost);
        if !members.iter().enumerate().all(|(index, &at)| self.is_finite(at, index, 1)) {
            self.purge(&members);
            if let [_, _, ..] = members[..] {
                members.iter().for_each(|at| self.step_together(&[*at]));
            }
            return;
        }
        for (index, &at) in members.iter().enumerate() {
            let slot = &mut self.slots[at];
            let Some(run) = slot.run.as_mut() else { continue };
            slot.tokens.extend(run.pending.take());
            add(run, &cost, members.len());
            self.choose(at, index);
        }
    }

    /// Evaluates a batch. If the context is full, other slots give way; false if one of those has a token in the
    /// batch.
    pub(super) fn evaluate(&mut self, batch: &[BatchToken]) -> Result<bool, Error> {
        loop {
            match self.session.evaluate(batch) {
                Err(Error::ContextFull { n_ctx }) => match self.give_way(None, batch)? {
                    None => return Err(Error::ContextFull { n_ctx }),
                    Some(at) if batch.iter().any(|entry| entry.sequence == self.slots[at].sequence()) => {
                        return Ok(false);
                    }
                    Some(_) => {}
                },
                other => return other.map(|()| true),
            }
        }
    }

    /// Makes room in the shared context for a batch: the slot that [`slots::gives_way`] names, except `but`, ends its
    /// request and drops its tokens. `None` if no slot gives way.
    pub(super) fn give_way(&mut self, but: Option<usize>, batch: &[BatchToken]) -> Result<Option<usize>, Error> {
        let n_ctx = self.session.n_ctx() as usize;
        let holding = |slot: &Slot| {
            let added = batch.iter().filter(|entry| entry.sequence == slot.sequence()).count();
            let holder = slot.run.as_ref().map_or(Holder::Idle { since: slot.last_used }, |run| match &run.job.work {
                Work::Generate(generate) if run.phase == Phase::Generating => Holder::Generation {
                    is_unlimited: generate.n_predict.is_none_or(|n| run.job.prompt.len() + n > n_ctx),
                },
                _ => Holder::Prompt,
            });
            Holding { n: slot.tokens.len() + added, holder }
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
                self.fail(at, &Failure { kind: FailureKind::Unavailable, message });
            }
        }
        self.forget(at)?;
        Ok(Some(at))
    }

    /// Empties the slot that has been idle the longest, except `but`. Returns the minimum number of freed cells;
    /// `None` if no idle slot holds tokens.
    pub(super) fn forget_oldest_idle(&mut self, but: Option<usize>) -> Result<Option<usize>, Error> {
        let idle = self.slots.iter().filter(|slot| slot.is_free() && !slot.tokens.is_empty() && Some(slot.id) != but);
        let Some(slot) = idle.min_by_key(|slot| slot.last_used) else { return Ok(None) };
        // Another slot may share the cells.
        let (at, n) = (slot.id, if slot.is_shared { 0 } else { slot.tokens.len() });
        self.forget(at)?;
        Ok(Some(n))
    }

    /// Empties a slot that has no request.
    fn forget(&mut self, at: usize) -> Result<(), Error> {
        let slot = &mut self.slots[at];
        slot.tokens.clear();
        slot.is_shared = false;
        let sequence = slot.sequence();
        self.session.keep_of(sequence, 0).map(drop)
    }

    /// Copies a slot's shared cells, so that only this slot has them; needs room for the copies.
    fn make_private(&mut self, at: usize) -> Result<(), Error> {
        if !self.slots[at].is_shared {
            return Ok(());
        }
        let sequence = self.slots[at].sequence();
        let state = self.session.sequence_state(sequence)?;
        while let Err(error) = self.session.set_sequence_state(sequence, &state) {
            if self.give_way(Some(at), &[])?.is_none() {
                self.slots[at].tokens.clear();
                return Err(error);
            }
        }
        self.slots[at].is_shared = false;
        Ok(())
    }

    /// Fails the requests in the batch. The session has removed their tokens, or lost the whole context.
    pub(super) fn failed(&mut self, members: &[usize], error: &Error) {
        let (kind, message) = match error {
            Error::ContextFull { .. } => (FailureKind::Server, "Context size has been exceeded.".to_owned()),
            Error::Interrupted => (FailureKind::Unavailable, "the server is shutting down".to_owned()),
            error => (FailureKind::Server, error.to_string()),
        };
        let failure = Failure { kind, message };
        let is_lost = matches!(error, Error::ContextLost(_) | Error::Interrupted);
        for at in 0..self.slots.len() {
            if is_lost {
                self.slots[at].tokens.clear();
            }
            if is_lost || members.contains(&at) {
                self.fail(at, &failure);
            }
        }
    }

    /// The session's traffic so far, both phases together.
    pub(super) fn traffic(&self) -> Moved {
        let (prompt, decode) = self.session.phases();
        Moved(prompt + decode)
    }

    /// Makes room for one more token, by a context shift if allowed. False if the text ends here.
    fn make_room(&mut self, at: usize) -> bool {
        let (n_ctx, shifts) = (self.options.n_ctx, self.options.context_shift && self.session.can_move_tokens());
        let adds_bos = self.model.adds_bos();
        let slot = &mut self.slots[at];
        if slot.tokens.len() < n_ctx {
            return true;
        }
        let Some(run) = slot.run.as_mut() else { return false };
        let Work::Generate(generate) = &run.job.work else { return false };
        let wanted = usize::try_from(generate.n_keep).unwrap_or(run.job.prompt.len()) + usize::from(adds_bos);
        let dropped = slots::shift(slot.tokens.len(), wanted.min(n_ctx.saturating_sub(4)), generate.n_discard);
        let Some((n_keep, n)) = dropped.filter(|_| shifts) else {
            self.end_full(at);
            return false;
        };
        let (from, end) = ((n_keep + n) as i32, slot.tokens.len() as i32);
        run.truncated = true;
        let sequence = slot.sequence();
        if let Err(error) = self.make_private(at) {
            self.failed(&[at], &error);
            return false;
        }
        self.slots[at].tokens.drain(n_keep..n_keep + n);
        match self.session.move_tokens(sequence, from..end, -(n as i32)) {
            Ok(()) => true,
            Err(error) => {
                self.failed(&[at], &error);
                false
            }
        }
    }

    /// Ends a generation whose context is full.
    fn end_full(&mut self, at: usize) {
        let Some(run) = self.slots[at].run.as_mut() else { return };
        run.truncated = true;
        let rest = run.text.finish();
        self.finish(at, Stop::Limit, rest, 0);
    }

    /// Chooses a slot's next token from the logits at `index` and sends it.
    pub(super) fn choose(&mut self, at: usize, index: usize) {
        let (n_ctx, shifts) = (self.options.n_ctx, self.options.context_shift && self.session.can_move_tokens());
        let slot = &mut self.slots[at];
        let run = slot.run.as_mut().expect("it generates");
        let Work::Generate(generate) = &run.job.work else { return };
        if generate.n_predict == Some(0) {
            run.prompted.get_or_insert_with(Instant::now);
            return self.finish(at, Stop::Limit, String::new(), 0);
        }
        let sampler = run.sampler.as_mut().expect("a generation has one");
        if generate.nudge.as_ref().is_some_and(Nudge::take) {
            sampler.end_reasoning();
        }
        let token = match self.session.sample(sampler, index as i32) {
            Ok(token) => token,
            Err(error) => {
                let message = error.to_string();
                return self.fail(
                    at,
                    &match error {
                        // The request's settings or grammar leave no candidate.
                        Error::Sampling(_) | Error::Grammar(_) => Failure::invalid(message),
                        _ => Failure::server(message),
                    },
                );
            }
        };
        let now = Instant::now();
        let prompted = *run.prompted.get_or_insert(now);
        run.n_decoded += 1;
        self.status.predicted();
        let is_end = self.model.is_eog(token);
        let is_spelled_out = generate.shows_special || sampler.preserved_tokens().contains(&token);
        let bytes = if is_end && !is_spelled_out { Vec::new() } else { self.model.piece(token, is_spelled_out) };
        let probabilities = probabilities::of(&self.model, sampler, token, generate);
        let piece = run.text.push(&bytes);
        let is_late = generate.time_limit.is_some_and(|limit| run.text.has_new_line && now - prompted > limit);
        let n_held = slot.tokens.len() + 1;
        let is_full = !shifts && n_held >= n_ctx;
        let stop = if let Some((word, n)) = piece.stop {
            Some((Stop::Word(word), n))
        } else if is_end {
            Some((Stop::Eos, 0))
        } else if generate.n_predict.is_some_and(|n| run.n_decoded >= n) || is_late || piece.is_outdented {
            Some((Stop::Limit, 0))
        } else if is_full {
            run.truncated = true;
            Some((Stop::Limit, 0))
        } else {
            None
        };
        let timings = run.timings();
        let event = TokenEvent { text: piece.text, token, probabilities, n_decoded: run.n_decoded, timings };
        let is_heard = run.job.events.send(Event::Token(Box::new(event)));
        run.pending = Some(token);
        run.phase = Phase::Generating;
        match stop {
            Some((stop, n_swallowed)) => {
                let rest = if matches!(stop, Stop::Word(_)) { String::new() } else { run.text.finish() };
                self.finish(at, stop, rest, n_swallowed);
            }
            None if !is_heard => {
                slot.run = None;
                self.freed(at);
            }
            None => {}
        }
    }

    /// Finishes a prompt without tokens.
    pub(super) fn finish_empty(&mut self, at: usize) {
        match self.slots[at].run.as_ref().map(|run| &run.job.work) {
            Some(Work::Generate(_)) => self.finish(at, Stop::Limit, String::new(), 0),
            _ => self.fail(at, &Failure::invalid("the input has no tokens")),
        }
    }

    /// Sends the end of a generation and frees its slot.
    pub(super) fn finish(&mut self, at: usize, stop: Stop, rest: String, n_swallowed: usize) {
        let slot = &mut self.slots[at];
        let Some(run) = slot.run.take() else { return };
        let timings = run.timings();
        let generate = match &run.job.work {
            Work::Generate(generate) => Some(std::sync::Arc::clone(generate)),
            Work::Embed => None,
        };
        slot.last = Some(LastRun {
            job: run.job.id,
            n_prompt: run.job.prompt.len(),
            n_cached: run.n_cached,
            n_processed: timings.n_prompt,
            n_decoded: run.n_decoded,
            n_predict: generate.as_ref().and_then(|own| own.n_predict),
            has_new_line: run.text.has_new_line,
            generate,
        });
        let done = Done {
            stop,
            rest,
            n_swallowed,
            slot: slot.id,
            n_prompt: run.job.prompt.len(),
            n_decoded: run.n_decoded,
            n_held: slot.tokens.len(),
            truncated: run.truncated,
            has_new_line: run.text.has_new_line,
            timings,
        };
        self.freed(at);
        self.publish();
        let _ = run.job.events.send(Event::Done(Box::new(done)));
    }
}

/// A session's traffic so far.
#[derive(Clone, Copy)]
pub(super) struct Moved(PhaseStats);

impl std::ops::Sub for Moved {
    type Output = Traffic;

    /// Traffic since `before`, of all requests.
    fn sub(self, before: Self) -> Traffic {
        let (now, before) = (self.0, before.0);
        Traffic {
            tokens: 0.0,
            hits: (now.hits - before.hits) as f64,
            misses: (now.misses - before.misses) as f64,
            bytes_read: (now.bytes_read - before.bytes_read) as f64,
            io_wait_ms: (now.io_wait_seconds - before.io_wait_seconds) * 1e3,
        }
    }
}

/// Adds a request's share of a step of `n` slots; the wait for reads counts in full for each.
fn add(run: &mut Run, cost: &Traffic, n: usize) {
    let share = 1.0 / n as f64;
    run.traffic.tokens += 1.0;
    run.traffic.hits += cost.hits * share;
    run.traffic.misses += cost.misses * share;
    run.traffic.bytes_read += cost.bytes_read * share;
    run.traffic.io_wait_ms += cost.io_wait_ms;
}

/// Sends the progress of a prompt.
pub(super) fn progress(slot: &Slot) {
    let Some(run) = &slot.run else { return };
    let progress = Progress {
        total: run.job.prompt.len(),
        cache: run.n_cached,
        processed: run.n_prompt_done,
        time_ms: run.began.elapsed().as_secs_f64() * 1e3,
        timings: run.timings(),
    };
    let _ = run.job.events.send(Event::Progress(progress));
}
