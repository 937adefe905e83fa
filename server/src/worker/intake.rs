//! Takes commands, assigns prompts to slots, and runs operations on free slots.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError};
use hobbit::{EvalError, Sampler};

use super::Worker;
use super::room::Loan;
use super::slot::{Run, Slot, Stage};
use crate::adapters::Scales;
use crate::error::ApiError;
use crate::job::{Command, Event, Job, SlotAction, SlotAnswer, SlotCommand, Started, Stop, Timings, Work};
use crate::slots::{self, SlotView};
use crate::text::Text;
use hobbit_programs::saved::{self, Saved, SavedFile};

/// Interval between checks for cancelled requests while the engine is idle.
const IDLE: Duration = Duration::from_millis(500);

/// Requests waiting for a slot, in order of arrival.
#[derive(Default)]
pub struct Queue {
    pub jobs: VecDeque<Job>,
    pub actions: Vec<SlotCommand>,
    /// Maximum number of each.
    pub n_max: usize,
    /// Begin nothing new; end what still runs at this time.
    pub ends_at: Option<Instant>,
}

impl Queue {
    /// Takes all queued commands. If there is no work, calls `idle` and waits for one. False once the thread must end.
    pub fn take_in(&mut self, commands: &Receiver<Command>, is_busy: bool, idle: impl FnOnce()) -> bool {
        let has_work = is_busy || !self.jobs.is_empty();
        if self.ends_at.is_some() && !has_work {
            return false;
        }
        if !has_work && self.actions.is_empty() {
            idle();
            match commands.recv_timeout(IDLE) {
                Ok(command) => self.take(command),
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        loop {
            match commands.try_recv() {
                Ok(command) => self.take(command),
                Err(TryRecvError::Empty) => return true,
                // Running requests end first.
                Err(TryRecvError::Disconnected) => {
                    self.ends_at.get_or_insert_with(Instant::now);
                    self.refuse();
                    return true;
                }
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Job(job) if self.ends_at.is_some() => job.events.fail(ApiError::shutting_down()),
            Command::Job(job) if self.jobs.len() >= self.n_max => {
                let message = format!("{} requests wait already; try again later", self.jobs.len());
                job.events.fail(ApiError::unavailable(message));
            }
            Command::Job(job) => self.jobs.push_back(*job),
            Command::Slot(command) if self.ends_at.is_some() => command.refuse(ApiError::shutting_down()),
            Command::Slot(command) if self.actions.len() >= self.n_max => {
                let message = format!("{} operations on slots wait already; try again later", self.actions.len());
                command.refuse(ApiError::unavailable(message));
            }
            Command::Slot(command) => self.actions.push(command),
            Command::Stop(grace) => {
                self.ends_at = Some(Instant::now() + grace);
                self.refuse();
            }
        }
    }

    /// Refuses all waiting requests and operations.
    pub fn refuse(&mut self) {
        self.jobs.drain(..).for_each(|job| job.events.fail(ApiError::shutting_down()));
        self.actions.drain(..).for_each(|command| command.refuse(ApiError::shutting_down()));
    }
}

impl Worker {
    /// Drops requests and operations whose clients have gone.
    pub(super) fn drop_cancelled(&mut self) {
        self.queue.jobs.retain(|job| !job.events.is_cancelled());
        self.queue.actions.retain(|command| !command.answer.is_closed());
        for at in 0..self.slots.len() {
            if self.slots[at].run.take_if(|run| run.job.events.is_cancelled()).is_some() {
                self.freed(at);
            }
        }
    }

    /// Gives waiting requests to free slots, in order; a request for a busy slot is passed over.
    pub(super) fn assign(&mut self) {
        let mut at = 0;
        while at < self.queue.jobs.len() {
            if !self.slots.iter().any(Slot::is_free) {
                return;
            }
            let job = &self.queue.jobs[at];
            let views: Vec<SlotView<'_>> = self
                .slots
                .iter()
                .map(|slot| SlotView {
                    is_free: slot.is_free(),
                    tokens: if slot.lora == job.lora { slot.tokens(&self.session) } else { &[] },
                    last_used: slot.last_used,
                })
                .collect();
            let reach = |at: usize, n| self.session.sequences().reach(self.slots[at].sequence(), n);
            match slots::place(&views, &job.prompt, job.slot, self.options.similarity, job.cache_prompt, reach) {
                None => at += 1,
                Some(placement) => {
                    let job = self.queue.jobs.remove(at).expect("it was looked at");
                    self.begin(job, placement);
                }
            }
        }
    }

    /// Starts a request in a slot.
    fn begin(&mut self, job: Job, placement: slots::Placement) {
        let (n_prompt, events) = (job.prompt.len(), job.events.clone());
        let (sampler, text) = match self.sampler_for(&job) {
            Ok(made) => made,
            Err(error) => return events.fail(error),
        };
        let n_cached = match self.prepare(placement, &job) {
            Ok(n_cached) => n_cached,
            Err(error) => return events.fail(ApiError::server(error.to_string())),
        };
        let cuts = match &job.work {
            Work::Generate(_) => self.session.sequences().cuts(&job.prompt, n_cached),
            Work::Embed => Vec::new(),
        };
        let (is_alone, is_embedding) = (!self.is_busy(), matches!(job.work, Work::Embed));
        let slot = &mut self.slots[placement.slot];
        slot.lora = std::sync::Arc::clone(&job.lora);
        let mut run = Run {
            cuts,
            counts: Timings { n_cached, ..Timings::default() },
            n_reading: 0,
            began: Instant::now(),
            prompted: None,
            sampler,
            text,
            truncated: false,
            stage: Stage::Prompt,
            job,
        };
        run.release_encoder();
        if let Some(sampler) = &mut run.sampler {
            run.job.prompt[..n_cached].iter().for_each(|token| sampler.accept(*token));
        }
        let _ = run.job.events.send(Event::Started(Started { slot: slot.id, n_prompt, n_cached }));
        slot.run = Some(run);
        super::step::progress(slot);
        self.status.count(|totals| {
            totals.requests += 1;
            totals.cached_tokens += n_cached as u64;
        });
        self.session.begin_text(is_alone);
        // Neither a prefix to continue nor a token to evaluate.
        match (n_prompt, is_embedding) {
            (0, true) => self.fail(placement.slot, ApiError::invalid("the input has no tokens")),
            (0, false) => self.finish(placement.slot, Stop::Limit, String::new(), 0),
            _ => {}
        }
    }

    /// The sampler and the text of a request, if a slot can hold its prompt.
    pub(super) fn sampler_for(&self, job: &Job) -> Result<(Option<Sampler>, Text), ApiError> {
        let (n_prompt, n_ctx, n_batch) =
            (job.prompt.len() + job.chunks.n_extra(), self.options.n_ctx, self.options.n_batch);
        let generates = matches!(job.work, Work::Generate(_));
        if n_prompt >= n_ctx + usize::from(!generates) {
            return Err(ApiError::exceeds_context(n_prompt, n_ctx, self.model.info().n_ctx_train as usize));
        }
        match &job.work {
            Work::Embed if n_prompt > n_batch => Err(ApiError::server(format!(
                "input ({n_prompt} tokens) is too large to process. increase the physical batch size (current batch \
                 size: {n_batch})"
            ))),
            Work::Embed => Ok((None, Text::new(&[], 0))),
            Work::Generate(generate) => match Sampler::new(&self.model, &generate.sampling()) {
                Ok(sampler) => Ok((Some(sampler), Text::new(&generate.stops, generate.n_indent))),
                Err(error) => Err(ApiError::invalid(format!("Failed to initialize samplers: {error}"))),
            },
        }
    }

    /// Gives a slot the evaluated beginning of a prompt; returns its length in tokens.
    fn prepare(&mut self, placement: slots::Placement, job: &Job) -> Result<usize, EvalError> {
        let at = placement.slot;
        let sequence = self.slots[at].sequence();
        let sequences = self.session.sequences_mut();
        if let Some(from) = placement.from {
            sequences.keep(sequence, 0)?;
            if sequences.copy(self.slots[from].sequence(), sequence).is_err() {
                return sequences.keep(sequence, 0);
            }
            // From here on both slots share cells.
            self.slots[at].is_shared = true;
            self.slots[from].is_shared = true;
        }
        let reuse = match &job.work {
            Work::Generate(generate) if placement.n_shared > 0 && self.projector.is_none() => generate.cache_reuse,
            _ => 0,
        };
        let mut n = job.chunks.whole(placement.n_shared);
        // Moving a cell moves it for all slots that share it. A state that needs checkpoints cannot be moved.
        let is_movable = !self.slots[at].is_shared && sequences.checkpoints(sequence).is_empty();
        if reuse > 0 && sequences.no_shift().is_none() && is_movable {
            for run in slots::reusable(sequences.tokens(sequence), &job.prompt, n, reuse) {
                let (from, end) = (run.from as i32, (run.from + run.n) as i32);
                match sequences.move_tokens(sequence, from..end, run.to as i32 - from) {
                    Err(EvalError::ContextFull { .. }) => break,
                    other => other?,
                }
                n = run.to + run.n;
            }
        }
        n = sequences.keep(sequence, n)?;
        if n == 0 {
            self.slots[at].is_shared = false;
        }
        Ok(n)
    }

    /// Runs the first queued operation whose slot is free. One in each round, so that streams go on in between.
    pub(super) fn act_on_slot(&mut self) {
        let is_due = |command: &SlotCommand| self.slots.get(command.slot).is_none_or(Slot::is_free);
        let Some(at) = self.queue.actions.iter().position(is_due) else { return };
        let SlotCommand { slot, action, answer } = self.queue.actions.remove(at);
        let is_known = slot < self.slots.len();
        let done = if is_known { self.act(slot, action) } else { Err(ApiError::invalid("Invalid slot ID")) };
        let _ = answer.send(done);
    }

    fn act(&mut self, at: usize, action: SlotAction) -> Result<SlotAnswer, ApiError> {
        let began = Instant::now();
        let server = |error: EvalError| ApiError::server(error.to_string());
        let slot = &mut self.slots[at];
        let (n_tokens, n_bytes) = match action {
            SlotAction::Erase => {
                let n = slot.tokens(&self.session).len();
                slot.forget(&mut self.session).map_err(server)?;
                (n, 0)
            }
            SlotAction::Save(_) if slot.tokens(&self.session).iter().any(|token| *token < 0) => {
                return Err(ApiError::unsupported("the slot holds an image or sound, which cannot be saved"));
            }
            SlotAction::Save(path) => {
                let n = self.session.sequences_mut().state_bytes(slot.sequence()).map_err(server)?;
                let _loan = Loan::to("save", &self.model, n as u64)?;
                slot.save(&mut self.session, self.options.mark, &path)?
            }
            SlotAction::Restore(path, lora) => {
                slot.forget(&mut self.session).map_err(server)?;
                let file = saved::open(&path, saved::mark_with(self.options.mark, &lora)).map_err(not_restored)?;
                let _loan = Loan::to("restore", &self.model, file.n_bytes())?;
                self.restore(at, file, lora)?
            }
        };
        Ok(SlotAnswer { n_tokens, n_bytes, ms: began.elapsed().as_secs_f64() * 1e3 })
    }

    /// Gives an empty slot the tokens and the state of a file. Returns their number and the bytes of the file.
    fn restore(&mut self, at: usize, file: SavedFile, lora: Scales) -> Result<(usize, u64), ApiError> {
        let (sequence, n_bytes) = (self.slots[at].sequence(), file.n_bytes());
        let Saved { tokens, state, checkpoints } = file.read().map_err(not_restored)?;
        let (n, n_ctx) = (tokens.len(), self.options.n_ctx);
        if n > n_ctx {
            return Err(not_restored(format!("it holds {n} tokens, and a slot {n_ctx}")));
        }
        self.session.set_adapters(&lora);
        // If the context has no room, idle slots make room.
        let mut n_freed = 0;
        while let Err(error) = self.session.restore_sequence(sequence, &tokens, &state, &checkpoints) {
            if let lost @ (EvalError::ContextLost(_) | EvalError::Interrupted) = error {
                let refused = not_restored(lost.to_string());
                self.failed(&[], lost);
                return Err(refused);
            }
            // If as many cells are free as the state has tokens, more room does not help.
            let may_fit = n_freed < n && !matches!(error, EvalError::State(_));
            let freed = if may_fit { self.forget_oldest_idle(at) } else { Ok(None) };
            match freed.map_err(|error| ApiError::server(error.to_string()))? {
                Some(more) => n_freed += more,
                None => {
                    // Cells that the state has damaged may outlive their sequence.
                    self.purge(&[]);
                    return Err(not_restored(error.to_string()));
                }
            }
        }
        self.session.sequences_mut().set_checkpoints(sequence, checkpoints);
        self.slots[at].lora = lora;
        Ok((n, n_bytes))
    }
}

/// The file cannot be restored.
fn not_restored(why: String) -> ApiError {
    ApiError::invalid(format!("Unable to restore slot: {why}"))
}
