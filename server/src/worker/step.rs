//! A decoding step of all generating slots: their last tokens are evaluated together, with drafts of those that may
//! follow, and each slot chooses its next tokens.

use std::time::Instant;

use hobbit::engine::DraftRequest;
use hobbit::options::Token;
use hobbit::stats::PhaseStats;
use hobbit::{EvalError, Model, Sampler, Session};
use hobbit_core::route::DECODE_TOKENS_MAX;

use super::Worker;
use super::slot::{Slot, Stage};
use crate::error::ApiError;
use crate::job::EndReasoning;
use crate::job::{Candidate, Done, Event, Generate, Probabilities, Progress, Stop, TokenEvent, Traffic};

impl Worker {
    /// Evaluates the last tokens of all generating slots, in groups that may share a batch.
    pub(super) fn step(&mut self) {
        let generating: Vec<usize> = (0..self.slots.len()).filter(|at| self.slots[*at].is_generating()).collect();
        if generating.is_empty() {
            return;
        }
        // Before answers end: a client that has one may read the counts.
        let n = generating.len() as u64;
        self.status.count(|totals| {
            totals.n_decode += 1;
            totals.n_busy += n;
            totals.steps += 1;
        });
        let began = Instant::now();
        let n_at_once = self.session.decodes_at_once().min(self.options.n_batch);
        for group in self.by_adapters(&generating) {
            group.chunks(n_at_once).for_each(|group| self.step_together(group));
        }
        let seconds = began.elapsed().as_secs_f64();
        self.pace.stepped(seconds);
        self.status.count(|totals| {
            totals.step_seconds += seconds;
            totals.predicted_seconds += n as f64 * seconds;
        });
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
        let is_pending =
            |at: &usize| self.session.sequences().pending(*at as i32).is_some() && !self.slots[*at].is_free();
        let members: Vec<usize> = group.into_iter().filter(is_pending).collect();
        if members.is_empty() {
            return;
        }
        self.session.set_adapters(&self.slots[members[0]].lora);
        let before = traffic(&self.session);
        match self.advance(&members) {
            Ok(true) => {}
            // The next step runs without the slot that gave way.
            Ok(false) => return,
            Err(error) => return self.failed(&members, error),
        }
        // Each slot's token, and its drafts.
        let n_ahead: Vec<usize> =
            members.iter().map(|at| self.session.sequences().n_ahead(self.slots[*at].sequence())).collect();
        let n_evaluated: usize = n_ahead.iter().sum();
        let cost = Traffic::between(&before, &traffic(&self.session));
        self.status.count(|totals| totals.traffic.add(&cost, 1.0));
        if !(0..n_evaluated).all(|index| self.session.has_finite_logits(index)) {
            let _ = self.session.drop_drafts();
            let again = self.purge(&members);
            return again.iter().for_each(|at| self.step_together(&[*at]));
        }
        for (at, n_ahead) in members.into_iter().zip(n_ahead) {
            if let Some(run) = &mut self.slots[at].run {
                run.counts.traffic.add(&cost, n_ahead as f64 / n_evaluated as f64);
                run.counts.n_drafted += n_ahead - 1;
            }
            let n_accepted = self.choose_along(at);
            if let Err(error) = self.session.settle(self.slots[at].sequence()) {
                self.failed(&[at], error);
                let _ = self.slots[at].forget(&mut self.session);
            }
            self.status.count(|totals| totals.drafts.add(n_ahead - 1, n_accepted));
        }
    }

    /// Evaluates the pending tokens of slots and drafts after them. The result is that of [`Self::evaluate`].
    fn advance(&mut self, members: &[usize]) -> Result<bool, EvalError> {
        let wanted = |at: &usize| {
            let slot = &self.slots[*at];
            slot.run.as_ref().map_or(0, |run| run.n_drafts(slot.tokens(&self.session).len(), self.options.n_ctx))
        };
        // Every slot has the same share of a batch that is still decoded, not read like a prompt.
        let n_room = DECODE_TOKENS_MAX.min(self.options.n_batch).saturating_sub(members.len());
        let share = n_room / members.iter().filter(|at| wanted(at) > 0).count().max(1);
        let request = |at: &usize| {
            let slot = &self.slots[*at];
            let n_min = slot.run.as_ref().and_then(|run| run.generate()).map_or(0, |own| own.drafting.n_min);
            DraftRequest { sequence: slot.sequence(), n_max: wanted(at).min(share), n_min }
        };
        let requests: Vec<DraftRequest> = members.iter().map(request).collect();
        // Otherwise the text goes on without them.
        if let Err(error @ EvalError::Interrupted) = self.session.draft(&requests) {
            let _ = self.session.drop_drafts();
            return Err(error);
        }
        let sequences: Vec<i32> = requests.iter().map(|request| request.sequence).collect();
        self.evaluate(&sequences, |session| session.advance(&sequences))
    }

    /// Chooses a slot's next tokens, as long as they are those that were evaluated. Returns the number of drafts that
    /// the slot's text has taken.
    fn choose_along(&mut self, at: usize) -> usize {
        let (mut n_taken, sequence) = (0usize, self.slots[at].sequence());
        while self.session.sequences_mut().take(sequence) {
            let Some(run) = self.slots[at].run.as_mut() else { break };
            run.counts.n_accepted += usize::from(n_taken > 0);
            run.counts.traffic.tokens += 1.0;
            n_taken += 1;
            self.choose(at);
        }
        n_taken.saturating_sub(1)
    }

    /// Evaluates a batch with entries of these sequences. If the context is full, other slots give way; false if one of
    /// those has a token in the batch.
    pub(super) fn evaluate(
        &mut self,
        entries: &[i32],
        evaluate: impl Fn(&mut Session) -> Result<(), EvalError>,
    ) -> Result<bool, EvalError> {
        loop {
            match evaluate(&mut self.session) {
                Err(full @ EvalError::ContextFull { .. }) => match self.give_way(None, entries)? {
                    None => return Err(full),
                    Some(at) if entries.contains(&self.slots[at].sequence()) => return Ok(false),
                    Some(_) => {}
                },
                other => return other.map(|()| true),
            }
        }
    }

    /// Fails the requests in the batch. The session has removed their tokens, or lost the whole context.
    pub(super) fn failed(&mut self, members: &[usize], error: EvalError) {
        let is_lost = matches!(error, EvalError::ContextLost(_) | EvalError::Interrupted);
        // The context may not hold what the slot believes, as after a restored state with gaps.
        let is_doubtful = matches!(error, EvalError::Decode(_));
        let error = match error {
            EvalError::ContextFull { .. } => ApiError::server("Context size has been exceeded."),
            EvalError::Interrupted => ApiError::shutting_down(),
            error => ApiError::server(error.to_string()),
        };
        for at in 0..self.slots.len() {
            let is_doubtful = is_doubtful && members.contains(&at);
            if is_doubtful {
                self.fail_unless_again(at, error.clone());
                let _ = self.slots[at].forget(&mut self.session);
            } else if is_lost || members.contains(&at) {
                self.fail(at, error.clone());
            }
        }
    }

    /// Ends a generation whose context is full.
    pub(super) fn end_full(&mut self, at: usize) {
        let Some(run) = self.slots[at].run.as_mut() else { return };
        run.truncated = true;
        let rest = run.text.finish();
        self.finish(at, Stop::Limit, rest, 0);
    }

    /// Chooses the next token after a slot's text and sends it.
    pub(super) fn choose(&mut self, at: usize) {
        let sequences = self.session.sequences();
        let (n_ctx, shifts) = (self.options.n_ctx, self.options.context_shift && sequences.no_shift().is_none());
        let slot = &mut self.slots[at];
        let n_held = slot.tokens(&self.session).len();
        let run = slot.run.as_mut().expect("it generates");
        let Some(generate) = run.generate().cloned() else { return };
        if generate.n_predict == Some(0) {
            run.prompted.get_or_insert_with(Instant::now);
            return self.finish(at, Stop::Limit, String::new(), 0);
        }
        let sampler = run.sampler.as_mut().expect("a generation has one");
        if generate.end_reasoning.as_ref().is_some_and(EndReasoning::take) {
            sampler.end_reasoning();
        }
        let token = match self.session.sample(slot.id as i32, sampler) {
            Ok(token) => token,
            // The request's settings or grammar leave no candidate.
            Err(error @ EvalError::Sampler(_)) => {
                return self.fail(at, ApiError::invalid(error.to_string()));
            }
            Err(error) => return self.fail(at, ApiError::server(error.to_string())),
        };
        let now = Instant::now();
        let prompted = *run.prompted.get_or_insert(now);
        run.counts.n_predicted += 1;
        self.status.count(|totals| totals.predicted_tokens += 1);
        let is_end = self.model.is_eog(token);
        let is_spelled_out = generate.shows_special || sampler.preserved_tokens().contains(&token);
        let bytes = if is_end && !is_spelled_out { Vec::new() } else { self.model.piece(token, is_spelled_out) };
        let probabilities = probabilities(&self.model, sampler, token, &generate);
        let piece = run.text.push(&bytes);
        let is_late = generate.time_limit.is_some_and(|limit| run.text.has_new_line && now - prompted > limit);
        let is_full = !shifts && n_held + 1 + run.job.chunks.n_extra() >= n_ctx;
        let stop = if let Some((word, n)) = piece.stop {
            Some((Stop::Word(word), n))
        } else if is_end {
            Some((Stop::Eos, 0))
        } else if generate.n_predict.is_some_and(|n| run.counts.n_predicted >= n) || is_late || piece.is_outdented {
            Some((Stop::Limit, 0))
        } else if is_full {
            run.truncated = true;
            Some((Stop::Limit, 0))
        } else {
            None
        };
        let timings = run.timings();
        let event = TokenEvent { text: piece.text, token, probabilities, timings };
        let is_read = run.job.events.send(Event::Token(Box::new(event)));
        run.stage = Stage::Generating;
        match stop {
            Some((stop, n_swallowed)) => {
                let rest = if matches!(stop, Stop::Word(_)) { String::new() } else { run.text.finish() };
                self.finish(at, stop, rest, n_swallowed);
            }
            None if !is_read => {
                slot.run = None;
                self.freed(at);
            }
            None => self.session.sequences_mut().set_pending(at as i32, token),
        }
    }

    /// Sends the end of a generation and frees its slot.
    pub(super) fn finish(&mut self, at: usize, stop: Stop, rest: String, n_swallowed: usize) {
        let slot = &mut self.slots[at];
        let n_held = slot.tokens(&self.session).len();
        let Some(run) = slot.run.take() else { return };
        slot.last = Some(run.as_last());
        let done = Done {
            stop,
            rest,
            n_swallowed,
            slot: slot.id,
            n_prompt: run.job.prompt.len(),
            n_held,
            truncated: run.truncated,
            has_new_line: run.text.has_new_line,
            timings: run.timings(),
        };
        self.freed(at);
        self.publish();
        let _ = run.job.events.send(Event::Done(Box::new(done)));
    }
}

/// The candidates of the last choice, `token`; `None` if the request asked for none. Probabilities before sampling
/// need a sampler that keeps logits.
fn probabilities(model: &Model, sampler: &Sampler, token: Token, generate: &Generate) -> Option<Probabilities> {
    if generate.n_probs == 0 {
        return None;
    }
    let mut found = sampler.probabilities(generate.n_probs, generate.post_sampling_probs)?;
    // A token forced by a grammar may be missing among the earlier candidates: it counts as certain.
    if found.chosen == f32::NEG_INFINITY {
        found.chosen = 0.0;
    }
    Some(Probabilities { is_post_sampling: generate.post_sampling_probs, ..spelled(model, token, found) })
}

/// The candidates for the place of `token`, with their texts.
pub(super) fn spelled(model: &Model, token: Token, found: hobbit::engine::Probabilities) -> Probabilities {
    let candidate = |token: Token, log: f32| Candidate { token, bytes: model.piece(token, true), log };
    Probabilities {
        chosen: candidate(token, found.chosen),
        top: found.top.into_iter().map(|(token, log)| candidate(token, log)).collect(),
        is_post_sampling: false,
    }
}

/// The session's traffic so far, of prompts and generated tokens.
pub(super) fn traffic(session: &Session) -> PhaseStats {
    let (prompt, decode) = session.phases();
    prompt + decode
}

/// Sends the progress of a prompt.
pub(super) fn progress(slot: &Slot) {
    let Some(run) = &slot.run else { return };
    let progress = Progress {
        total: run.job.prompt.len(),
        cache: run.counts.n_cached,
        processed: run.counts.n_done(),
        time_ms: run.began.elapsed().as_secs_f64() * 1e3,
        timings: run.timings(),
    };
    let _ = run.job.events.send(Event::Progress(progress));
}
