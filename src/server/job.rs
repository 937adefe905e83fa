//! What a request wants of the engine, and what it is told: the words that HTTP and the engine's thread have in common.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

use hobbit::options::{SamplingOptions, Token};

use super::adapters::Scales;
use super::control::Nudge;
use super::http::memory::Held;

/// Whoever asked has gone: nothing more is computed for them. Set when the last handle outside of the engine is dropped.
#[derive(Clone, Debug, Default)]
pub struct Cancelled(Arc<AtomicBool>);

impl Cancelled {
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// One sequence of tokens and what is to become of it.
pub struct Job {
    /// Unique in the life of the server.
    pub id: u64,
    pub prompt: Arc<[Token]>,
    pub work: Work,
    /// The slot that must take it; `None`: any.
    pub slot: Option<usize>,
    /// How much of each LoRA adapter is used.
    pub lora: Scales,
    /// Begin with what the slot, or another one, has evaluated of the same beginning.
    pub cache_prompt: bool,
    pub events: Events,
    pub cancelled: Cancelled,
    /// The memory that is counted for the request, while any of its jobs is there.
    pub _held: Arc<Held>,
}

/// Bytes of events that may wait for a client that does not read.
const BACKLOG_BYTES_MAX: usize = 4 << 20;

/// Where what happens is told.
#[derive(Clone, Debug)]
pub struct Events {
    sender: mpsc::UnboundedSender<Event>,
    unread: Arc<AtomicUsize>,
}

/// Where it is heard.
#[derive(Debug)]
pub struct Heard {
    receiver: mpsc::UnboundedReceiver<Event>,
    unread: Arc<AtomicUsize>,
}

/// Two ends of one.
pub fn events() -> (Events, Heard) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let unread = Arc::<AtomicUsize>::default();
    (Events { sender, unread: Arc::clone(&unread) }, Heard { receiver, unread })
}

impl Events {
    /// Tells an event. False where nobody hears it any more, or too many were not heard.
    pub fn send(&self, event: Event) -> bool {
        self.unread.fetch_add(event.bytes(), Ordering::Relaxed) < BACKLOG_BYTES_MAX && self.sender.send(event).is_ok()
    }
}

impl Heard {
    /// The next event; `None` where the engine has ended.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.receiver.recv().await;
        self.unread.fetch_sub(event.as_ref().map_or(0, Event::bytes), Ordering::Relaxed);
        event
    }

    /// One that has happened already.
    pub fn next_now(&mut self) -> Option<Event> {
        let event = self.receiver.try_recv().ok()?;
        self.unread.fetch_sub(event.bytes(), Ordering::Relaxed);
        Some(event)
    }
}

/// What is to become of a prompt.
pub enum Work {
    Generate(Arc<Generate>),
    Embed,
}

/// A text to generate.
#[derive(Clone, Debug)]
pub struct Generate {
    /// Shared by all answers to a request, but for the seed.
    pub sampling: Arc<SamplingOptions>,
    /// In place of that of the options.
    pub seed: u32,
    /// Tokens at most; `None`: until the model or the context ends.
    pub n_predict: Option<usize>,
    /// Tokens of the prompt that a context shift keeps; -1 all.
    pub n_keep: i32,
    /// Tokens that a context shift drops; 0: half of what may be dropped.
    pub n_discard: usize,
    /// Runs of at least so many tokens are moved from elsewhere in the slot's context instead of evaluated again; 0: none.
    pub cache_reuse: usize,
    /// Texts that end the generation.
    pub stops: Arc<[String]>,
    /// Probabilities of so many candidates are told with every token.
    pub n_probs: usize,
    /// They are those after sampling.
    pub post_sampling_probs: bool,
    /// Spell out all of them.
    pub shows_special: bool,
    /// From the first token on; looked at once a line has ended.
    pub time_limit: Option<Duration>,
    /// Spaces that every line must begin with; a line with fewer ends the text. 0: no matter.
    pub n_indent: usize,
    /// Through which the thought of the moment can be ended.
    pub nudge: Option<Nudge>,
    /// How much of each LoRA adapter is used.
    pub lora: Scales,
}

impl Generate {
    /// How tokens are chosen, with the seed of this answer.
    pub fn sampling(&self) -> Cow<'_, SamplingOptions> {
        match self.seed == self.sampling.seed {
            true => Cow::Borrowed(&self.sampling),
            false => Cow::Owned(SamplingOptions { seed: self.seed, ..SamplingOptions::clone(&self.sampling) }),
        }
    }
}

/// What the engine tells about a job, in this order: `Started`, `Progress`…, then `Token`… and `Done`, or `Embedding`; `Failed` ends it
/// at any time.
#[derive(Debug)]
pub enum Event {
    /// A slot has it, and the prompt fits: whatever happens now is told within the stream.
    Started(Started),
    /// A piece of the prompt is evaluated.
    Progress(Progress),
    Token(Box<TokenEvent>),
    Done(Box<Done>),
    /// One row, of a pooled sequence, or one for each token.
    Embedding(Vec<Vec<f32>>),
    Failed(Failure),
}

impl Event {
    /// About what it takes in memory.
    fn bytes(&self) -> usize {
        let candidates = match self {
            Self::Token(token) => token.probabilities.as_ref().map_or(0, |own| own.top.len()),
            _ => 0,
        };
        256 + candidates * 80
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    pub slot: usize,
    pub n_prompt: usize,
    /// Tokens of the prompt that need no evaluation.
    pub n_cached: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Progress {
    pub total: usize,
    pub cache: usize,
    pub processed: usize,
    pub time_ms: f64,
    #[serde(skip)]
    pub timings: Timings,
}

/// A token that was chosen.
#[derive(Debug)]
pub struct TokenEvent {
    /// What of the text is certain now; may be empty.
    pub text: String,
    pub token: Token,
    /// Where they were asked for.
    pub probabilities: Option<Probabilities>,
    pub n_decoded: usize,
    pub timings: Timings,
}

/// What a token was chosen from.
#[derive(Clone, Debug, PartialEq)]
pub struct Probabilities {
    pub chosen: Candidate,
    pub top: Vec<Candidate>,
    pub is_post_sampling: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub token: Token,
    /// The bytes that it stands for, special tokens spelled out.
    pub bytes: Vec<u8>,
    /// 0..=1
    pub probability: f32,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The model ended it.
    Eos,
    /// A stop text, which is not part of the text.
    Word(String),
    /// So many tokens were asked for, the context is full, or the time is over.
    Limit,
}

#[derive(Debug)]
pub struct Done {
    pub stop: Stop,
    /// What was held back until the end.
    pub rest: String,
    /// Tokens whose text the stop text has swallowed, at the end.
    pub n_swallowed: usize,
    pub slot: usize,
    pub n_prompt: usize,
    pub n_decoded: usize,
    /// Tokens that the slot holds now.
    pub n_held: usize,
    /// A part of the text was dropped, or would have been.
    pub truncated: bool,
    pub has_new_line: bool,
    pub timings: Timings,
}

/// How long a request took, and what its tokens found in memory. Batches are shared: of what one cost, each of its tokens is told an
/// equal part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    pub n_cached: usize,
    pub n_prompt: usize,
    pub prompt_ms: f64,
    pub n_predicted: usize,
    pub predicted_ms: f64,
    pub traffic: Traffic,
}

/// What a request's generated tokens moved.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    pub tokens: f64,
    pub hits: f64,
    pub misses: f64,
    pub bytes_read: f64,
    pub io_wait_ms: f64,
}

impl Timings {
    /// llama-server's fields and ours; every value is a number, 0 and above.
    pub fn json(&self) -> serde_json::Value {
        let per = |n: usize, ms: f64| if n > 0 { ms / n as f64 } else { 0.0 };
        let rate = |n: usize, ms: f64| if ms > 0.0 { n as f64 * 1e3 / ms } else { 0.0 };
        // The first token comes with the prompt.
        let n_steps = self.n_predicted.saturating_sub(1);
        let traffic = &self.traffic;
        let ratio = |of: f64, all: f64| if all > 0.0 { of / all } else { 0.0 };
        serde_json::json!({
            "cache_n": self.n_cached,
            "prompt_n": self.n_prompt,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": per(self.n_prompt, self.prompt_ms),
            "prompt_per_second": rate(self.n_prompt, self.prompt_ms),
            "predicted_n": self.n_predicted,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": per(n_steps, self.predicted_ms),
            "predicted_per_second": rate(n_steps, self.predicted_ms),
            "hit_rate": ratio(traffic.hits, traffic.hits + traffic.misses),
            "bytes_per_token": ratio(traffic.bytes_read, traffic.tokens),
            "io_wait_ms": traffic.io_wait_ms,
        })
    }
}

/// What went wrong, in OpenAI's kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The request makes no sense.
    Invalid,
    /// The prompt does not fit.
    ExceedsContext { n_prompt: usize, n_ctx: usize },
    /// The server cannot now.
    Unavailable,
    /// The engine failed.
    Server,
}

/// An end that is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub kind: FailureKind,
    pub message: String,
}

impl Failure {
    pub fn server(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Server, message: message.into() }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Invalid, message: message.into() }
    }
}

/// What the engine's thread is told.
pub enum Command {
    Job(Box<Job>),
    Slot(SlotCommand),
    /// Nothing new is begun; what runs has this long.
    Stop(Duration),
}

/// Something to be done with a slot once it is free.
pub struct SlotCommand {
    pub slot: usize,
    pub action: SlotAction,
    pub answer: oneshot::Sender<Result<SlotAnswer, Failure>>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum SlotAction {
    Save(std::path::PathBuf),
    /// Of a file that was saved with so much of each adapter.
    Restore(std::path::PathBuf, Scales),
    Erase,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlotAnswer {
    pub n_tokens: usize,
    pub n_bytes: u64,
    pub ms: f64,
}
