//! The engine's thread: it alone has the session. Round by round it takes what came in, gives free slots their prompts, has all that
//! generate take a step together, and evaluates a piece of the prompts that wait.

mod intake;
mod prompt;
mod purge;
pub mod slot;
mod step;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use hobbit::{Model, Session};

use super::job::{Command, Failure, FailureKind, Job, SlotCommand};
use super::schedule::{Pace, Turn};
use super::status::Status;
use slot::Slot;

/// How the engine's thread works.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    pub n_slots: usize,
    /// Tokens that one slot may hold.
    pub n_ctx: usize,
    pub context_shift: bool,
    /// The share of a prompt that a slot must hold of it to be preferred.
    pub similarity: f32,
    /// The longest that a stream should wait for prompts of others.
    pub stall_limit: Duration,
    /// Requests that may wait for a slot.
    pub n_waiting_max: usize,
    /// Tokens of a prompt that are evaluated at once.
    pub n_ubatch: usize,
    pub n_batch: usize,
    /// What saved slots are marked with, so that another model refuses them.
    pub mark: u64,
}

/// All that the thread has.
pub struct Worker {
    session: Session,
    model: Model,
    options: WorkerOptions,
    slots: Vec<Slot>,
    waiting: VecDeque<Job>,
    actions: Vec<SlotCommand>,
    pace: Pace,
    /// Which prompts went on last.
    turn: Turn,
    status: Arc<Status>,
    /// Counts what ended, for the age of slots.
    clock: u64,
    /// Nothing new is begun; whatever runs then is ended.
    ends_at: Option<Instant>,
}

impl Worker {
    pub fn new(session: Session, options: WorkerOptions, status: Arc<Status>) -> Self {
        let slots = (0..options.n_slots).map(Slot::new).collect();
        let pace = Pace::new(options.stall_limit.as_secs_f64());
        let model = session.model().clone();
        let (waiting, actions) = (VecDeque::new(), Vec::new());
        let mut worker = Self {
            session,
            model,
            options,
            slots,
            waiting,
            actions,
            pace,
            turn: Turn::Long,
            status,
            clock: 0,
            ends_at: None,
        };
        worker.publish();
        worker
    }

    /// Works until everybody who could ask is gone, or until it was told to stop.
    pub fn run(mut self, commands: &Receiver<Command>) {
        loop {
            if !self.take_in(commands) {
                break;
            }
            self.drop_cancelled();
            self.act_on_slots();
            self.assign();
            self.step();
            self.evaluate_prompts();
            self.publish();
            if self.ends_at.is_some_and(|end| Instant::now() >= end) {
                self.end_all();
            }
        }
        self.publish();
    }

    /// Whether anything is being done.
    fn is_busy(&self) -> bool {
        self.slots.iter().any(|slot| !slot.is_free())
    }

    /// Ends what still runs, because the server ends.
    fn end_all(&mut self) {
        let failure = Failure { kind: FailureKind::Unavailable, message: "the server is shutting down".to_owned() };
        for at in 0..self.slots.len() {
            self.fail(at, &failure);
        }
        self.refuse_waiting();
    }

    /// Nothing is begun any more: who waits may ask elsewhere.
    fn refuse_waiting(&mut self) {
        let failure = Failure { kind: FailureKind::Unavailable, message: "the server is shutting down".to_owned() };
        for job in self.waiting.drain(..) {
            let _ = job.events.send(super::job::Event::Failed(failure.clone()));
        }
    }

    /// Tells a slot's request that it has failed, and frees the slot. What the slot holds stays as the session has it.
    fn fail(&mut self, at: usize, failure: &Failure) {
        let slot = &mut self.slots[at];
        if let Some(run) = slot.run.take() {
            let _ = run.job.events.send(super::job::Event::Failed(failure.clone()));
            self.freed(at);
        }
    }

    /// A slot has nothing to do any more.
    fn freed(&mut self, at: usize) {
        self.clock += 1;
        self.slots[at].last_used = self.clock;
    }

    /// Shows what is going on to those who ask.
    fn publish(&mut self) {
        self.status.set(&self.slots, self.waiting.len(), self.options.n_ctx);
    }
}
