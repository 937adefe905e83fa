//! Parts that all protocols share: the engine's events become a stream of JSON, or one answer.

use std::collections::VecDeque;

use axum::response::Response;
use futures_util::future::{select_all, try_join_all};
use futures_util::{Stream, stream};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::http::stream::{Frame, events, lines};
use crate::job::{Done, Event, Probabilities, Running};
use crate::request::Scheduled;

/// How the parts of a stream are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// Events without names.
    Unnamed,
    /// Events without names, then `[DONE]`.
    UntilDone,
    /// Events named after their types.
    Typed,
    /// Lines of JSON.
    Lines,
}

/// A protocol's form of the events of a request. Knows no engine.
pub trait Dialect: Send + 'static {
    const FRAMING: Framing;

    /// The parts of a stream for an event of answer `index`. Failures do not come here, progress only if requested.
    fn event(&mut self, index: usize, event: Event) -> Vec<Value>;

    /// The last part, after all answers have ended.
    fn end(&mut self) -> Option<Value> {
        None
    }

    /// The part that ends the stream after a failure past the first part.
    fn failure(&mut self, error: &ApiError) -> Value {
        json!({ "error": error.json() })
    }

    /// The answer that is no stream.
    fn whole(self, answers: Vec<Whole>) -> Response;
}

/// Answers a request as it asked, as a stream or in one piece. Nothing of a stream is sent before all texts have begun,
/// so that an earlier error is an answer of its own.
///
/// # Errors
/// A text that failed before the answer begins.
pub async fn answer<D: Dialect>(app: &App, scheduled: Scheduled, dialect: D) -> Result<Response, ApiError> {
    if !scheduled.stream {
        let answers = try_join_all(scheduled.running.into_iter().map(whole)).await?;
        return Ok(app.work(|| dialect.whole(answers)).await);
    }
    let ping = scheduled.ping;
    let frames = frames(scheduled, dialect).await?;
    Ok(if D::FRAMING == Framing::Lines { lines(frames) } else { events(frames, ping) })
}

/// A stream under way.
struct Streaming<D> {
    scheduled: Scheduled,
    dialect: D,
    frames: VecDeque<Frame>,
    has_ended: bool,
}

impl<D: Dialect> Streaming<D> {
    /// Queues the parts of an event; the stream ends with a failure.
    fn add(&mut self, index: usize, event: Event) {
        let parts = match event {
            Event::Failed(error) => {
                self.has_ended = true;
                // The other texts are given up.
                self.scheduled.running.clear();
                vec![self.dialect.failure(&error)]
            }
            Event::Progress(_) if !self.scheduled.return_progress => return,
            event => self.dialect.event(index, event),
        };
        let frame = if D::FRAMING == Framing::Typed { Frame::typed } else { Frame::unnamed };
        self.frames.extend(parts.iter().map(frame));
    }

    async fn next(&mut self) -> Option<Frame> {
        loop {
            if self.frames.is_empty() && !self.has_ended {
                match next_of(&mut self.scheduled.running).await {
                    Some((index, event)) => self.add(index, event),
                    None => {
                        self.has_ended = true;
                        self.frames.extend(self.dialect.end().as_ref().map(Frame::unnamed));
                        self.frames.extend((D::FRAMING == Framing::UntilDone).then(Frame::done));
                    }
                }
            }
            match self.frames.pop_front() {
                None if !self.has_ended => {}
                frame => return frame,
            }
        }
    }
}

/// The frames of several texts, once all have begun.
async fn frames<D: Dialect>(
    mut scheduled: Scheduled,
    dialect: D,
) -> Result<impl Stream<Item = Frame> + Send + 'static, ApiError> {
    let mut first = Vec::new();
    // One text may hold the only slot that another waits for: queue its events here.
    for (index, text) in scheduled.running.iter_mut().enumerate() {
        match if index == 0 { Some(text.next().await) } else { text.next_now() } {
            Some(Event::Failed(error)) => return Err(error),
            event => first.extend(event.map(|event| (index, event))),
        }
    }
    let mut state = Streaming { scheduled, dialect, frames: VecDeque::new(), has_ended: false };
    first.into_iter().for_each(|(index, event)| state.add(index, event));
    Ok(stream::unfold(state, async |mut state| Some((state.next().await?, state))))
}

/// The next event of any text; `None` once all have ended.
async fn next_of(running: &mut [Running]) -> Option<(usize, Event)> {
    let waits = running.iter_mut().enumerate().filter(|(_, text)| !text.has_ended());
    let waits: Vec<_> = waits.map(|(index, text)| Box::pin(async move { (index, text.next().await) })).collect();
    if waits.is_empty() {
        return None;
    }
    Some(select_all(waits).await.0)
}

/// The collected output of a generation.
#[derive(Debug)]
pub struct Whole {
    pub text: String,
    pub tokens: Vec<i32>,
    /// One entry per token of the prompt but the first, if requested.
    pub scores: Vec<Probabilities>,
    /// One entry per token of the text, if requested.
    pub probabilities: Vec<Probabilities>,
    pub done: Done,
}

/// Waits for the end of a generation and collects its output.
async fn whole(mut running: Running) -> Result<Whole, ApiError> {
    let (mut text, mut tokens) = (String::new(), Vec::new());
    let (mut scores, mut probabilities) = (Vec::new(), Vec::new());
    loop {
        match running.next().await {
            Event::Started(_) | Event::Progress(_) | Event::Embedding(_) => {}
            Event::Scores(more) => scores.extend(more),
            Event::Token(event) => {
                text.push_str(&event.text);
                tokens.push(event.token);
                probabilities.extend(event.probabilities);
            }
            Event::Done(done) => {
                text.push_str(&done.rest);
                probabilities.truncate(probabilities.len().saturating_sub(done.n_swallowed));
                return Ok(Whole { text, tokens, scores, probabilities, done: *done });
            }
            Event::Failed(error) => return Err(error),
        }
    }
}
