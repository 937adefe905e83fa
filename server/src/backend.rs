//! The engine as requests see it: facts of the model, its words, and work that is scheduled, cancelled and watched.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::Sender;
use hobbit::Model;
use hobbit::engine::{ChatTemplates, Chunks, Encoder, Projector};
use hobbit::options::{Pooling, Token};
use tokio::sync::oneshot;

use super::adapters::Adapters;
use super::error::ApiError;
use super::held::Held;
use super::job::{self, Command, Drafting, Job, Progress, Running, SlotAction, SlotAnswer, SlotCommand, Work};
use super::status::Status;

/// A loaded model, and the thread that computes it.
pub struct Backend {
    /// The name by which clients know the model.
    pub name: String,
    pub model: Model,
    pub commands: Sender<Command>,
    pub status: Arc<Status>,
    pub n_slots: usize,
    /// Maximum tokens in one slot.
    pub n_ctx: usize,
    pub n_batch: usize,
    pub drafting: Drafting,
    pub pooling: Option<Pooling>,
    /// Adapter scales for requests that give none.
    pub adapters: Adapters,
    pub templates: ChatTemplates,
    /// The encoder of images and sound, and the text that marks their places, which no client knows.
    pub projector: Option<(Projector, String)>,
}

/// The id of the next job.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl Backend {
    /// Schedules work on a prompt, in the slot `slot` or in any. Dropping the result cancels it.
    pub fn schedule(
        &self,
        (prompt, chunks, encoder): (Arc<[Token]>, Chunks, Option<Encoder>),
        work: Work,
        slot: Option<usize>,
        cache_prompt: bool,
        held: &Arc<Held>,
    ) -> Running {
        let (events, mut running) = job::events(prompt.len());
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (status, model) = (Arc::clone(&self.status), self.model.clone());
        running.follow(move |last| progress(&status, &model, id, last));
        let lora = match &work {
            Work::Generate(generate) => Arc::clone(&generate.lora),
            Work::Embed => self.adapters.scales(),
        };
        let job = Job { id, prompt, chunks, encoder, work, slot, lora, cache_prompt, events, _held: Arc::clone(held) };
        // If the thread has ended, the receiver reports it.
        let _ = self.commands.send(Command::Job(Box::new(job)));
        running
    }

    /// Schedules the embedding of a text.
    pub fn embed(&self, text: Arc<[Token]>, held: &Arc<Held>) -> Running {
        self.schedule((text, Chunks::default(), None), Work::Embed, None, false, held)
    }

    /// Runs an operation on a slot.
    pub async fn act(&self, slot: usize, action: SlotAction) -> Result<SlotAnswer, ApiError> {
        let (answer, incoming) = oneshot::channel();
        let _ = self.commands.send(Command::Slot(SlotCommand { slot, action, answer }));
        incoming.await.unwrap_or_else(|_| Err(ApiError::engine_ended()))
    }

    /// Begins no new requests; running ones have `grace` to finish.
    pub fn stop(&self, grace: Duration) {
        let _ = self.commands.send(Command::Stop(grace));
    }

    /// The text that tokens spell, special ones too.
    pub fn spelled(&self, tokens: &[Token]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| self.model.piece(*token, true)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether the chat template can do what llama.cpp calls `name`.
    pub fn template_can(&self, name: &str) -> bool {
        self.templates.capabilities().get(name).copied().unwrap_or(false)
    }

    /// Whether the model takes images, and sound.
    pub fn takes_media(&self) -> [bool; 2] {
        self.projector.as_ref().map_or([false; 2], |(encoder, _)| [encoder.takes_images(), encoder.takes_sound()])
    }
}

/// The progress of the prompt of a job by now, if it is more than `last`. Waits for the layer being computed.
fn progress(status: &Status, model: &Model, job: u64, last: &Progress) -> Option<Progress> {
    let share = model.evaluated_share();
    let state = status.get();
    let run = state.slots.iter().filter_map(|slot| slot.run.as_ref()).find(|run| run.job == job)?;
    let processed = run.counts.n_cached + run.n_processed_with(share);
    let time_ms = run.began.elapsed().as_secs_f64() * 1e3;
    (processed > last.processed).then_some(Progress { processed, time_ms, ..*last })
}
