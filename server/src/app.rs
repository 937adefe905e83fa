//! State shared by all requests.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crossbeam_channel::Sender;
use hobbit::engine::{ChatTemplates, Chunks, Encoder, Projector};
use hobbit::options::{Pooling, Token};
use hobbit::{Interrupt, Model};
use tokio::sync::oneshot;

use super::adapters::Adapters;
use super::error::ApiError;
use super::held::{Held, Memory};
use super::http::turns::Turns;
use super::job::{
    self, Command, Drafting, EndReasoning, Job, Reading, Running, SlotAction, SlotAnswer, SlotCommand, Work,
};
use super::kept::Kept;
use super::lock;
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
    /// Conversations of `/v1/responses`.
    pub kept: Kept,
    pub turns: Arc<Turns>,
}

/// The loaded model.
pub struct Loaded {
    pub model: Model,
    pub commands: Sender<Command>,
    pub status: Arc<Status>,
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
    pub next_id: AtomicU64,
    /// Interrupts a running evaluation.
    pub interrupt: Interrupt,
}

impl App {
    /// A server whose model is not loaded yet.
    pub fn new(settings: Settings, began: u64) -> Self {
        let memory = Memory::new(settings.http.max_body);
        let kept = Kept::new(settings.http.max_body);
        Self { settings, loaded: OnceLock::new(), began, controls: Arc::default(), memory, kept, turns: Turns::new() }
    }

    /// Runs slow work of a request, such as parsing JSON, applying a template or tokenizing, while another thread
    /// serves connections.
    pub async fn work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.turns.work(work).await
    }

    /// The model.
    pub fn loaded(&self) -> Result<&Loaded, ApiError> {
        self.loaded.get().ok_or_else(|| ApiError::unavailable("Loading model"))
    }

    /// The name by which clients know the model.
    pub fn model_name(&self) -> &str {
        self.settings.http.alias.first().map_or("hobbit", String::as_str)
    }
}

impl Loaded {
    /// Hands a prompt to the engine, for the slot `slot` or for any.
    pub fn start(
        &self,
        (prompt, chunks, encoder): (Arc<[Token]>, Chunks, Option<Encoder>),
        work: Work,
        slot: Option<usize>,
        cache_prompt: bool,
        held: &Arc<Held>,
    ) -> Running {
        let (events, mut running) = job::events(prompt.len());
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        running.follow(Reading { job: id, status: Arc::clone(&self.status), model: self.model.clone() });
        let lora = match &work {
            Work::Generate(generate) => Arc::clone(&generate.lora),
            Work::Embed => self.adapters.scales(),
        };
        let job = Job { id, prompt, chunks, encoder, work, slot, lora, cache_prompt, events, _held: Arc::clone(held) };
        // If the thread has ended, the receiver reports it.
        let _ = self.commands.send(Command::Job(Box::new(job)));
        running
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
}

/// Running streamed answers by client-visible id; `None` if their reasoning cannot be ended.
#[derive(Debug, Default)]
pub struct Controls(Mutex<BTreeMap<String, Option<EndReasoning>>>);

/// Keeps an answer in the list for as long as this lives.
#[derive(Debug)]
pub struct Listed {
    controls: Arc<Controls>,
    id: String,
}

impl Controls {
    /// Adds an answer.
    pub fn list(self: &Arc<Self>, id: &str, end_reasoning: Option<EndReasoning>) -> Listed {
        lock(&self.0).insert(id.to_owned(), end_reasoning);
        Listed { controls: Arc::clone(self), id: id.to_owned() }
    }

    /// Asks an answer to end its reasoning.
    ///
    /// # Errors
    /// The reason why it cannot, in llama-server's words.
    pub fn end_reasoning(&self, id: &str) -> Result<(), &'static str> {
        match lock(&self.0).get(id) {
            None => Err("no active completion for this id"),
            Some(None) => Err("reasoning control not enabled for this completion"),
            Some(Some(end)) => {
                end.ask();
                Ok(())
            }
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        lock(&self.controls.0).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_listed_while_they_last() {
        let controls = Arc::new(Controls::default());
        let end = EndReasoning::default();
        let listed = controls.list("a", Some(end.clone()));
        let _without = controls.list("b", None);
        assert_eq!(controls.end_reasoning("a"), Ok(()));
        assert!(end.take() && !end.take());
        assert!(controls.end_reasoning("b").unwrap_err().contains("not enabled"));
        drop(listed);
        assert!(controls.end_reasoning("a").unwrap_err().contains("no active"));
    }
}
