//! The engine thread, which alone owns the session. Each round takes new commands, runs one operation on a free slot,
//! assigns prompts to free slots, runs one decoding step of all generating slots, and evaluates a piece of the waiting
//! prompts.

mod intake;
mod prompt;
mod room;
pub mod slot;
mod step;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use hobbit::engine::Projector;
use hobbit::{Model, Session};

use super::error::ApiError;
use super::job::Command;
use super::schedule::{Pace, Turn};
use super::status::Status;
use intake::Queue;
use slot::Slot;

/// Settings of the engine thread.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    pub n_slots: usize,
    /// Maximum tokens in one slot.
    pub n_ctx: usize,
    pub context_shift: bool,
    /// Minimum share of a prompt that a slot must hold to be preferred.
    pub similarity: f32,
    /// Longest time that a stream should wait for other prompts.
    pub stall_limit: Duration,
    /// Maximum number of requests that wait for a slot.
    pub n_waiting_max: usize,
    /// Prompt tokens computed at once.
    pub n_batch: usize,
    /// Attention sums many rows in another order than few ([`super::schedule::ATTENTION_ROWS`]).
    pub has_fused_attention: bool,
    /// Tokens of an evaluation that may have logits.
    pub n_outputs: usize,
    /// Mark of saved slots; another model refuses them.
    pub mark: u64,
}

/// State of the engine thread.
pub struct Worker {
    session: Session,
    model: Model,
    projector: Option<Projector>,
    options: WorkerOptions,
    slots: Vec<Slot>,
    queue: Queue,
    pace: Pace,
    /// The kind of prompts that was evaluated last.
    turn: Turn,
    status: Arc<Status>,
    /// Counts freed slots, to order them by age.
    clock: u64,
}

impl Worker {
    pub fn new(session: Session, projector: Option<Projector>, options: WorkerOptions, status: Arc<Status>) -> Self {
        let slots = (0..options.n_slots).map(Slot::new).collect();
        let pace = Pace::new(options.stall_limit.as_secs_f64());
        let model = session.model().clone();
        let (queue, turn, clock) = (Queue { n_max: options.n_waiting_max, ..Queue::default() }, Turn::Long, 0);
        let mut worker = Self { session, model, projector, options, slots, queue, pace, turn, status, clock };
        worker.publish();
        worker
    }

    /// Runs until all senders are gone or a stop command arrives.
    pub fn run(mut self, commands: &Receiver<Command>) {
        while self.queue.take_in(commands, self.is_busy(), || self.session.idle()) {
            self.drop_cancelled();
            self.act_on_slot();
            self.assign();
            self.step();
            self.evaluate_prompts();
            self.publish();
            if self.queue.ends_at.is_some_and(|end| Instant::now() >= end) {
                self.end_all();
            }
        }
        self.publish();
    }

    /// Whether any slot works.
    fn is_busy(&self) -> bool {
        self.slots.iter().any(|slot| !slot.is_free())
    }

    /// Ends running requests because the server stops.
    fn end_all(&mut self) {
        (0..self.slots.len()).for_each(|at| self.fail(at, ApiError::shutting_down()));
        self.queue.refuse();
    }

    /// Fails a slot's request and frees the slot. The slot's tokens stay as the session holds them.
    fn fail(&mut self, at: usize, error: ApiError) {
        if let Some(run) = self.slots[at].run.take() {
            run.job.events.fail(error);
            self.freed(at);
        }
    }

    /// Records that a slot has become free.
    fn freed(&mut self, at: usize) {
        self.clock += 1;
        self.slots[at].last_used = self.clock;
    }

    /// Publishes the state for status requests.
    fn publish(&mut self) {
        let slots = self.slots.iter().map(|slot| slot.state(&self.session, self.options.n_ctx)).collect();
        self.status.set(slots, self.queue.jobs.len());
    }
}
