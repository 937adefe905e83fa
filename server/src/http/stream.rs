//! Streamed answers: server-sent events or lines of JSON, and the same collected into one answer.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt, stream};
use serde_json::Value;

use crate::error::ApiError;
use crate::job::{Done, Event, Probabilities, Running};

/// One server-sent event, or one line.
#[derive(Debug, Default)]
pub struct Frame {
    name: Option<String>,
    data: String,
}

/// An event without a name, or a line.
pub fn unnamed(value: &Value) -> Frame {
    Frame { name: None, data: value.to_string() }
}

/// An event named after its type.
pub fn typed(value: &Value) -> Frame {
    Frame { name: value["type"].as_str().map(str::to_owned), ..unnamed(value) }
}

impl From<Frame> for sse::Event {
    fn from(frame: Frame) -> Self {
        // Write the name first: not every client reads a whole event before it looks.
        let event = frame.name.map_or_else(Self::default, |name| Self::default().event(name));
        event.data(frame.data)
    }
}

/// The end of OpenAI's streams.
pub fn done() -> Frame {
    Frame { name: None, data: "[DONE]".to_owned() }
}

/// A protocol's form of events.
pub trait Shape: Send + 'static {
    /// The frames for an event of request `index`; the event is never a failure.
    ///
    /// # Errors
    /// The model's output cannot be parsed: the stream ends.
    fn event(&mut self, index: usize, event: Event) -> Result<Vec<Frame>, ApiError>;

    /// The frames after all requests have ended.
    fn end(&mut self) -> Vec<Frame> {
        Vec::new()
    }

    /// The frames that end the stream after a failure past the first frame.
    fn failure(&mut self, error: &ApiError) -> Vec<Frame> {
        vec![unnamed(&serde_json::json!({ "error": error.json() }))]
    }
}

/// Streams the events of several requests. Nothing is sent before all have begun, so that an earlier error is an
/// answer of its own.
pub async fn respond(running: Vec<Running>, shape: impl Shape, ping: Option<Duration>) -> Result<Response, ApiError> {
    Ok(events(frames(running, shape).await?, ping))
}

/// An answer of server-sent events.
pub fn events(frames: impl Stream<Item = Frame> + Send + 'static, ping: Option<Duration>) -> Response {
    let events = Sse::new(frames.map(|frame| Ok::<_, Infallible>(frame.into())));
    let mut response = match ping {
        Some(interval) => events.keep_alive(KeepAlive::new().interval(interval).text("")).into_response(),
        None => events.into_response(),
    };
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// As [`respond`], each frame a line of JSON.
pub async fn respond_in_lines(running: Vec<Running>, shape: impl Shape) -> Result<Response, ApiError> {
    let lines = frames(running, shape).await?.map(|frame| Ok::<_, Infallible>(frame.data + "\n"));
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response())
}

/// The frames of several requests, once all have begun.
async fn frames(
    mut running: Vec<Running>,
    mut shape: impl Shape,
) -> Result<impl Stream<Item = Frame> + Send + 'static, ApiError> {
    let mut frames = VecDeque::new();
    // One request may hold the only slot that another waits for: queue its events here.
    for (index, own) in running.iter_mut().enumerate() {
        match if index == 0 { Some(own.next().await) } else { own.next_now() } {
            Some(Event::Failed(error)) => return Err(error),
            Some(event) => frames.extend(shape.event(index, event)?),
            None => {}
        }
    }
    let state = (running, shape, frames, false);
    Ok(stream::unfold(state, |(mut running, mut shape, mut frames, mut has_ended)| async move {
        loop {
            if let Some(frame) = frames.pop_front() {
                return Some((frame, (running, shape, frames, has_ended)));
            }
            if has_ended {
                return None;
            }
            let new = match next_of(&mut running).await {
                Some((_, Event::Failed(error))) => Err(error),
                Some((index, event)) => shape.event(index, event),
                None => {
                    has_ended = true;
                    Ok(shape.end())
                }
            };
            frames.extend(new.unwrap_or_else(|error| {
                has_ended = true;
                // The other requests are given up.
                running.clear();
                shape.failure(&error)
            }));
        }
    }))
}

/// The next event of any request; `None` once all have ended.
async fn next_of(running: &mut [Running]) -> Option<(usize, Event)> {
    let waits = running.iter_mut().enumerate().filter(|(_, own)| !own.has_ended());
    let waits: Vec<_> = waits.map(|(index, own)| Box::pin(async move { (index, own.next().await) })).collect();
    if waits.is_empty() {
        return None;
    }
    Some(futures_util::future::select_all(waits).await.0)
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
pub async fn whole(mut running: Running) -> Result<Whole, ApiError> {
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

/// Waits for several generations.
pub async fn all(running: Vec<Running>) -> Result<Vec<Whole>, ApiError> {
    futures_util::future::try_join_all(running.into_iter().map(whole)).await
}

/// Waits for embeddings: rows, and the number of input tokens.
pub async fn embeddings(mut running: Running) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    let mut n_tokens = 0;
    loop {
        match running.next().await {
            Event::Started(started) => n_tokens = started.n_prompt,
            Event::Embedding(rows) => return Ok((rows, n_tokens)),
            Event::Failed(error) => return Err(error),
            Event::Scores(_) | Event::Progress(_) | Event::Token(_) | Event::Done(_) => {}
        }
    }
}
