//! A decoding step of all generating slots: their last tokens are evaluated together, and each slot chooses its next
//! token.

use std::time::Instant;

use hobbit::options::Token;
use hobbit::stats::PhaseStats;
use hobbit::{BatchToken, EvalError, Model, Sampler};

use super::Worker;
use super::slot::{Phase, Slot};
use crate::server::app::EndReasoning;
use crate::server::error::ApiError;
use crate::server::job::{Candidate, Done, Event, Generate, Probabilities, Progress, Stop, TokenEvent, Traffic, Work};

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
            let n = generating.len();
            self.status.count(|totals| {
                totals.n_decode += 1;
                totals.n_busy += n as u64;
                totals.predicted_seconds += n as f64 * seconds;
            });
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
            Err(error) => return self.failed(&members, error),
        }
        let cost = self.traffic_since(&before, members.len());
        self.status.count(|totals| totals.traffic.add(&cost, 1.0));
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
            run.traffic.add(&cost, 1.0 / members.len() as f64);
            self.choose(at, index);
        }
    }

    /// Evaluates a batch. If the context is full, other slots give way; false if one of those has a token in the
    /// batch.
    pub(super) fn evaluate(&mut self, batch: &[BatchToken]) -> Result<bool, EvalError> {
        loop {
            match self.session.evaluate(batch) {
                Err(full @ EvalError::ContextFull { .. }) => match self.give_way(None, batch)? {
                    None => return Err(full),
                    Some(at) if batch.iter().any(|entry| entry.sequence == self.slots[at].sequence()) => {
                        return Ok(false);
                    }
                    Some(_) => {}
                },
                other => return other.map(|()| true),
            }
        }
    }

    /// Fails the requests in the batch. The session has removed their tokens, or lost the whole context.
    pub(super) fn failed(&mut self, members: &[usize], error: EvalError) {
        let is_lost = matches!(error, EvalError::ContextLost(_) | EvalError::Interrupted);
        let error = match error {
            EvalError::ContextFull { .. } => ApiError::server("Context size has been exceeded."),
            EvalError::Interrupted => ApiError::shutting_down(),
            error => ApiError::server(error.to_string()),
        };
        for at in 0..self.slots.len() {
            if is_lost {
                self.slots[at].tokens.clear();
            }
            if is_lost || members.contains(&at) {
                self.fail(at, error.clone());
            }
        }
    }

    /// The session's traffic so far, of prompts and generated tokens.
    pub(super) fn traffic(&self) -> PhaseStats {
        let (prompt, decode) = self.session.phases();
        prompt + decode
    }

    /// Traffic since `before`, of a step of `n` tokens.
    pub(super) fn traffic_since(&self, before: &PhaseStats, n: usize) -> Traffic {
        let now = self.traffic();
        Traffic {
            tokens: n as f64,
            hits: (now.hits - before.hits) as f64,
            misses: (now.misses - before.misses) as f64,
            bytes_read: (now.bytes_read - before.bytes_read) as f64,
            io_wait_ms: (now.io_wait_seconds - before.io_wait_seconds) * 1e3,
        }
    }

    /// Ends a generation whose context is full.
    pub(super) fn end_full(&mut self, at: usize) {
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
        let Some(generate) = run.generate().cloned() else { return };
        if generate.n_predict == Some(0) {
            run.prompted.get_or_insert_with(Instant::now);
            return self.finish(at, Stop::Limit, String::new(), 0);
        }
        let sampler = run.sampler.as_mut().expect("a generation has one");
        if generate.end_reasoning.as_ref().is_some_and(EndReasoning::take) {
            sampler.end_reasoning();
        }
        let token = match self.session.sample(sampler, index as i32) {
            Ok(token) => token,
            // The request's settings or grammar leave no candidate.
            Err(error @ EvalError::Sampler(_)) => {
                return self.fail(at, ApiError::invalid(error.to_string()));
            }
            Err(error) => return self.fail(at, ApiError::server(error.to_string())),
        };
        let now = Instant::now();
        let prompted = *run.prompted.get_or_insert(now);
        run.n_decoded += 1;
        self.status.count(|totals| totals.predicted_tokens += 1);
        let is_end = self.model.is_eog(token);
        let is_spelled_out = generate.shows_special || sampler.preserved_tokens().contains(&token);
        let bytes = if is_end && !is_spelled_out { Vec::new() } else { self.model.piece(token, is_spelled_out) };
        let probabilities = probabilities(&self.model, sampler, token, &generate);
        let piece = run.text.push(&bytes);
        let is_late = generate.time_limit.is_some_and(|limit| run.text.has_new_line && now - prompted > limit);
        let n_held = slot.tokens.len() + 1 + run.job.chunks.n_extra();
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
        let is_read = run.job.events.send(Event::Token(Box::new(event)));
        run.pending = Some(token);
        run.phase = Phase::Generating;
        match stop {
            Some((stop, n_swallowed)) => {
                let rest = if matches!(stop, Stop::Word(_)) { String::new() } else { run.text.finish() };
                self.finish(at, stop, rest, n_swallowed);
            }
            None if !is_read => {
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
            _ => self.fail(at, ApiError::invalid("the input has no tokens")),
        }
    }

    /// Sends the end of a generation and frees its slot.
    pub(super) fn finish(&mut self, at: usize, stop: Stop, rest: String, n_swallowed: usize) {
        let slot = &mut self.slots[at];
        let Some(run) = slot.run.take() else { return };
        slot.last = Some(run.as_last());
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
    let found = sampler.probabilities(generate.n_probs, generate.post_sampling_probs)?;
    let candidate =
        |token: Token, log: f32| Candidate { token, bytes: model.piece(token, true), probability: log.exp() };
    Some(Probabilities {
        // A token forced by a grammar may be missing among the earlier candidates: it counts as certain.
        chosen: candidate(token, if found.chosen == f32::NEG_INFINITY { 0.0 } else { found.chosen }),
        top: found.top.into_iter().map(|(token, log)| candidate(token, log)).collect(),
        is_post_sampling: generate.post_sampling_probs,
    })
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
