//! State shared by all requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam_channel::Sender;
use hobbit::engine::ChatTemplates;
use hobbit::options::{Pooling, SamplingOptions, Token};
use hobbit::{Interrupt, Model};
use tokio::sync::oneshot;

use super::adapters::Adapters;
use super::control::Controls;
use super::http::error::ApiError;
use super::http::memory::{Held, Memory};
use super::http::workers::Workers;
use super::job::{self, Cancelled, Command, Event, Failure, Heard, Job, SlotAction, SlotAnswer, SlotCommand, Work};
use super::settings::Settings;
use super::status::Status;

/// The server.
pub struct App {
    pub settings: Settings,
    /// Set once the model is loaded.
    pub loaded: OnceLock<Loaded>,
    /// Start of the server, in seconds since 1970.
    pub began: u64,
    /// Streamed answers that accept control requests.
    pub controls: Arc<Controls>,
    pub memory: Memory,
    workers: Workers,
}

/// The loaded model.
pub struct Loaded {
    pub model: Model,
    pub commands: Sender<Command>,
    pub status: Arc<Status>,
    pub n_slots: usize,
    /// Maximum tokens in one slot.
    pub n_ctx: usize,
    pub n_batch: usize,
    pub n_ctx_train: u32,
    /// Defaults for fields that a request leaves out.
    pub sampling: SamplingOptions,
    pub pooling: Option<Pooling>,
    /// Adapter scales for requests that give none.
    pub adapters: Adapters,
    /// The chat templates.
    pub templates: ChatTemplates,
    pub next_id: AtomicU64,
    /// Interrupts a running evaluation.
    pub interrupt: Interrupt,
}

impl App {
    /// A server whose model is not loaded yet.
    pub fn new(settings: Settings, began: u64) -> Self {
        let memory = Memory::new(settings.max_body);
        Self { settings, loaded: OnceLock::new(), began, controls: Arc::default(), memory, workers: Workers::default() }
    }

    /// See [`Workers::work`].
    pub async fn work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.workers.work(work).await
    }

    /// The model.
    ///
    /// # Errors
    /// The model is not loaded yet.
    pub fn loaded(&self) -> Result<&Loaded, ApiError> {
        self.loaded.get().ok_or_else(|| ApiError::unavailable("Loading model"))
    }

    /// The name by which clients know the model.
    pub fn model_name(&self) -> &str {
        self.settings.aliases.first().map_or("hobbit", String::as_str)
    }
}

/// One unit of work for the engine.
pub struct Asked {
    pub prompt: Arc<[Token]>,
    pub work: Work,
    pub slot: Option<usize>,
    pub cache_prompt: bool,
    pub held: Arc<Held>,
}

impl Loaded {
    /// Hands a request to the engine.
    pub fn start(&self, asked: Asked) -> Running {
        let (events, incoming) = job::events();
        let cancelled = Cancelled::default();
        let Asked { prompt, work, slot, cache_prompt, held } = asked;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let n_prompt = prompt.len();
        let lora = match &work {
            Work::Generate(generate) => Arc::clone(&generate.lora),
            Work::Embed => self.adapters.scales(),
        };
        let job = Job { id, prompt, work, slot, lora, cache_prompt, events, cancelled: cancelled.clone(), _held: held };
        // If the thread has ended, the receiver reports it.
        let _ = self.commands.send(Command::Job(Box::new(job)));
        Running { n_prompt, incoming, cancelled, has_ended: false }
    }

    /// Runs an operation on a slot.
    ///
    /// # Errors
    /// The engine's failure.
    pub async fn act(&self, slot: usize, action: SlotAction) -> Result<SlotAnswer, ApiError> {
        let (answer, incoming) = oneshot::channel();
        let _ = self.commands.send(Command::Slot(SlotCommand { slot, action, answer }));
        let answer = incoming.await.unwrap_or_else(|_| Err(Failure::server("the engine has ended")));
        Ok(answer?)
    }

    /// Begins no new requests; running ones have `grace` to finish.
    pub fn stop(&self, grace: Duration) {
        let _ = self.commands.send(Command::Stop(grace));
    }
}

/// A request that the engine works on; dropping it cancels it.
pub struct Running {
    pub n_prompt: usize,
    incoming: Heard,
    cancelled: Cancelled,
    has_ended: bool,
}

impl Running {
    /// The next event; `None` if the engine has ended.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.incoming.next().await;
        self.note(event.as_ref());
        event
    }

    /// The next event if one is queued already.
    pub fn next_now(&mut self) -> Option<Event> {
        let event = self.incoming.next_now()?;
        self.note(Some(&event));
        Some(event)
    }

    /// Whether the last event has arrived.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    fn note(&mut self, event: Option<&Event>) {
        self.has_ended = matches!(event, None | Some(Event::Done(_) | Event::Embedding(_) | Event::Failed(_)));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.cancelled.set();
    }
}
