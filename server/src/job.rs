//! Messages between HTTP handlers and the engine thread: what a request asks for, and the events it receives.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hobbit::engine::{Chunks, Encoder};
use hobbit::options::{SamplingOptions, SpeculationOptions, Token};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

use super::adapters::Scales;
use super::error::ApiError;
use super::held::Held;
use super::record::{self, Record};
pub use super::timings::{Timings, Traffic};

/// One sequence of tokens, and the work to do on it.
pub struct Job {
    /// Unique for the server's lifetime.
    pub id: u64,
    pub prompt: Arc<[Token]>,
    /// Images and sound, whose placeholders are in the prompt.
    pub chunks: Chunks,
    /// Keeps the projector open until they are evaluated.
    pub encoder: Option<Encoder>,
    pub work: Work,
    /// The slot that must run the job; `None`: any.
    pub slot: Option<usize>,
    /// Scale of each LoRA adapter.
    pub lora: Scales,
    /// Reuse tokens of the same beginning that this slot or another one has evaluated.
    pub cache_prompt: bool,
    pub events: Events,
    /// Memory accounted to the request for as long as any of its jobs lives.
    pub _held: Arc<Held>,
}

/// Bytes of events that may wait for a client that does not read.
const BACKLOG_BYTES_MAX: usize = 4 << 20;

/// The engine's end of a request.
#[derive(Clone, Debug)]
pub struct Events {
    sender: mpsc::UnboundedSender<Event>,
    unread: Arc<AtomicUsize>,
}

/// A request that the engine works on. Dropping it cancels the request.
pub struct Running {
    pub n_prompt: usize,
    receiver: mpsc::UnboundedReceiver<Event>,
    unread: Arc<AtomicUsize>,
    has_ended: bool,
    /// The record of the request that asked for the text.
    record: Option<Arc<Record>>,
    /// At the last token.
    timings: Timings,
    /// The last progress of the prompt, and a look for more.
    progress: Option<Progress>,
    look: Option<Look>,
}

/// Interval between looks at a prompt that is being evaluated.
const INTERVAL: Duration = Duration::from_millis(100);

/// More progress than the last one, if there is any by now.
type Look = Box<dyn Fn(&Progress) -> Option<Progress> + Send + Sync>;

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(record) = self.record.as_ref().filter(|_| !self.has_ended && self.timings.n_predicted > 0) {
            record.generated(&self.timings);
        }
    }
}

/// Both ends of a request with a prompt of `n_prompt` tokens.
pub fn events(n_prompt: usize) -> (Events, Running) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let unread = Arc::<AtomicUsize>::default();
    let record = record::CURRENT.try_with(Arc::clone).ok();
    let (sent, timings) = (Arc::clone(&unread), Timings::default());
    let (progress, look) = (None, None);
    let running = Running { n_prompt, receiver, unread, has_ended: false, record, timings, progress, look };
    (Events { sender, unread: sent }, running)
}

impl Events {
    /// Sends an event. False if the receiver is gone or the unread events exceed `BACKLOG_BYTES_MAX`.
    pub fn send(&self, event: Event) -> bool {
        self.unread.fetch_add(event.bytes(), Ordering::Relaxed) < BACKLOG_BYTES_MAX && self.sender.send(event).is_ok()
    }

    /// Ends the request with a failure.
    pub fn fail(&self, error: ApiError) {
        self.send(Event::Failed(error));
    }

    /// Whether the client is gone.
    pub fn is_cancelled(&self) -> bool {
        self.sender.is_closed()
    }
}

impl Running {
    /// Also reports the progress that `look` sees within the pieces of the prompt.
    pub fn follow(&mut self, look: impl Fn(&Progress) -> Option<Progress> + Send + Sync + 'static) {
        self.look = Some(Box::new(look));
    }

    /// The next event.
    pub async fn next(&mut self) -> Event {
        let event = loop {
            let Some((last, look)) = self.progress.as_ref().zip(self.look.as_ref()) else {
                break self.receiver.recv().await;
            };
            if let Ok(event) = tokio::time::timeout(INTERVAL, self.receiver.recv()).await {
                break event;
            }
            // Waits for the layer being computed.
            if let Some(progress) = tokio::task::block_in_place(|| look(last)) {
                self.progress = Some(progress);
                return Event::Progress(progress);
            }
        };
        self.note(event.unwrap_or_else(|| Event::Failed(ApiError::engine_ended())))
    }

    /// The next event if one is queued already.
    pub fn next_now(&mut self) -> Option<Event> {
        let event = self.receiver.try_recv().ok()?;
        Some(self.note(event))
    }

    /// Whether the last event has arrived.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    fn note(&mut self, event: Event) -> Event {
        self.unread.fetch_sub(event.bytes(), Ordering::Relaxed);
        self.has_ended = matches!(event, Event::Done(_) | Event::Embedding(_) | Event::Failed(_));
        self.progress = match &event {
            Event::Progress(progress) => Some(*progress).filter(|now| now.processed < now.total),
            Event::Started(_) | Event::Scores(_) => self.progress,
            _ => None,
        };
        match (&event, &self.record) {
            (Event::Token(token), _) => self.timings = token.timings,
            (Event::Embedding(_), Some(record)) => {
                record.generated(&Timings { n_prompt: self.n_prompt, ..Timings::default() });
            }
            (Event::Done(done), Some(record)) => record.generated(&done.timings),
            (Event::Failed(error), Some(record)) => record.failed(&error.message),
            _ => {}
        }
        event
    }
}

/// The kind of work on a prompt.
pub enum Work {
    Generate(Arc<Generate>),
    Embed,
}

/// A text to generate.
#[derive(Clone, Debug)]
pub struct Generate {
    /// Shared by all answers to a request, except for the seed.
    pub sampling: Arc<SamplingOptions>,
    /// Replaces the seed in `sampling`.
    pub seed: u32,
    /// Maximum tokens; `None`: until the model or the context ends.
    pub n_predict: Option<usize>,
    /// Tokens of the prompt that a context shift keeps; -1 all.
    pub n_keep: i32,
    /// Tokens that a context shift drops; 0: half of what may be dropped.
    pub n_discard: usize,
    /// Minimum length of a run of tokens that is moved within the slot's context instead of evaluated again; 0:
    /// never.
    pub cache_reuse: usize,
    /// Texts that end the generation.
    pub stops: Arc<[String]>,
    /// Number of candidates whose probabilities are sent with every token.
    pub n_probs: usize,
    /// Send the probabilities of the prompt's tokens, too.
    pub scores_prompt: bool,
    /// Send probabilities after sampling instead of before.
    pub post_sampling_probs: bool,
    /// Spell out special tokens.
    pub shows_special: bool,
    /// Counted from the first token; checked at the end of each line.
    pub time_limit: Option<Duration>,
    /// Minimum spaces at the beginning of every line; a line with fewer ends the text. 0: no check.
    pub n_indent: usize,
    /// Lets a client end the reasoning.
    pub end_reasoning: Option<EndReasoning>,
    /// Scale of each LoRA adapter.
    pub lora: Scales,
    pub drafting: Drafting,
}

/// How a text is drafted.
#[derive(Clone, Debug, PartialEq)]
pub struct Drafting {
    /// The sources' names, with commas between them; `none` without any.
    pub types: Arc<str>,
    /// Most drafts of a step; 0: none.
    pub n_max: usize,
    /// Fewer are none.
    pub n_min: usize,
    /// A model drafts no further where its next token is less probable.
    pub p_min: f32,
}

impl Drafting {
    pub fn new(options: Option<&SpeculationOptions>) -> Self {
        let names = options.map_or_else(Vec::new, |given| given.sources.iter().map(|source| source.name()).collect());
        Self {
            types: if names.is_empty() { "none".into() } else { names.join(",").into() },
            n_max: options.map_or(0, |given| given.n_max as usize),
            n_min: options.map_or(0, |given| given.n_min as usize),
            p_min: options.map_or(0.0, |given| given.p_min),
        }
    }

    /// With at most `n_max` drafts.
    pub fn at_most(&self, n_max: usize) -> Self {
        if n_max == 0 { Self::new(None) } else { Self { n_max: n_max.min(self.n_max), ..self.clone() } }
    }
}

impl Generate {
    /// Sampling options with the seed of this answer.
    pub fn sampling(&self) -> Cow<'_, SamplingOptions> {
        if self.seed == self.sampling.seed {
            return Cow::Borrowed(&self.sampling);
        }
        Cow::Owned(SamplingOptions { seed: self.seed, ..SamplingOptions::clone(&self.sampling) })
    }
}

/// Events of a job, in this order: `Started`, `Scores` and `Progress`…, then `Token`… and `Done`, or `Embedding`.
/// `Failed` ends the job at any time.
#[derive(Debug)]
pub enum Event {
    /// A slot has taken the job and the prompt fits: later failures are reported within the stream.
    Started(Started),
    /// The candidates for the next tokens of the prompt, from its second one on.
    Scores(Vec<Probabilities>),
    /// A piece of the prompt is evaluated.
    Progress(Progress),
    Token(Box<TokenEvent>),
    Done(Box<Done>),
    /// One row for a pooled sequence, else one per token.
    Embedding(Vec<Vec<f32>>),
    Failed(ApiError),
}

impl Event {
    /// Approximate memory size of the event.
    fn bytes(&self) -> usize {
        let candidates = match self {
            Self::Token(token) => token.probabilities.as_ref().map_or(0, |of| of.top.len()),
            Self::Scores(scores) => scores.iter().map(|of| 1 + of.top.len()).sum(),
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

/// A chosen token.
#[derive(Debug)]
pub struct TokenEvent {
    /// Text that is final now; may be empty.
    pub text: String,
    pub token: Token,
    /// Present if the request asked for them.
    pub probabilities: Option<Probabilities>,
    pub timings: Timings,
}

/// The candidates for a token.
#[derive(Clone, Debug, PartialEq)]
pub struct Probabilities {
    pub chosen: Candidate,
    pub top: Vec<Candidate>,
    pub is_post_sampling: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub token: Token,
    /// The token's bytes, special tokens spelled out.
    pub bytes: Vec<u8>,
    /// The natural logarithm of its probability.
    pub log: f32,
}

/// Why a generation ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Stop {
    /// The model's end token.
    Eos,
    /// A stop text, which is not part of the output.
    Word(String),
    /// The token limit, a full context or the time limit.
    #[default]
    Limit,
}

#[derive(Debug, Default)]
pub struct Done {
    pub stop: Stop,
    /// Text that was held back until the end.
    pub rest: String,
    /// Trailing tokens whose text belongs to the stop text.
    pub n_swallowed: usize,
    pub slot: usize,
    pub n_prompt: usize,
    /// Tokens that the slot holds at the end.
    pub n_held: usize,
    /// Part of the text was dropped, or would have been.
    pub truncated: bool,
    pub has_new_line: bool,
    pub timings: Timings,
}

/// Asks a generation to end its reasoning. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct EndReasoning(Arc<AtomicBool>);

impl EndReasoning {
    /// Asks for the end.
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Takes the request, if there is one.
    pub fn take(&self) -> bool {
        // Usually unset: avoid the write.
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed)
    }
}

/// Commands to the engine thread.
pub enum Command {
    Job(Box<Job>),
    Slot(SlotCommand),
    /// Begin nothing new; running jobs have this long to finish.
    Stop(Duration),
}

/// An operation on a slot, run once the slot is free.
pub struct SlotCommand {
    pub slot: usize,
    pub action: SlotAction,
    pub answer: oneshot::Sender<Result<SlotAnswer, ApiError>>,
}

impl SlotCommand {
    /// Ends the operation before it has begun.
    pub fn refuse(self, error: ApiError) {
        // The client may have gone.
        let _ = self.answer.send(Err(error));
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum SlotAction {
    Save(std::path::PathBuf),
    /// A file saved with these adapter scales.
    Restore(std::path::PathBuf, Scales),
    Erase,
}

/// The result of a slot operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlotAnswer {
    pub n_tokens: usize,
    pub n_bytes: u64,
    pub ms: f64,
}
