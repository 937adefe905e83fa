//! Streamed answers: server-sent events, and the same collected into one answer.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::HeaderValue;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;

use super::error::ApiError;
use crate::server::app::Running;
use crate::server::job::{Done, Event, Failure, Probabilities};

/// One server-sent event.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// Its name, where the protocol has names.
    pub name: Option<&'static str>,
    pub data: String,
}

impl Frame {
    /// An event without a name.
    pub fn data(value: &Value) -> Self {
        Self { name: None, data: value.to_string() }
    }

    /// An event of that name.
    pub fn named(name: &'static str, value: &Value) -> Self {
        Self { name: Some(name), data: value.to_string() }
    }
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
        vec![Frame::data(&serde_json::json!({ "error": error.json() }))]
    }
}

/// Streams the events of several requests. Nothing is sent before all have begun, so that an earlier error is an
/// answer of its own.
///
/// # Errors
/// A request that fails before it begins.
pub async fn respond(
    running: Vec<Running>,
    mut shape: impl Shape,
    ping: Option<Duration>,
) -> Result<Response, ApiError> {
    let mut running = running;
    let mut frames = VecDeque::new();
    // One request may hold the only slot that another waits for: queue its events here.
    for (index, own) in running.iter_mut().enumerate() {
        let event = if index == 0 { own.next().await } else { own.next_now() };
        match event {
            Some(Event::Failed(failure)) => return Err(failure.into()),
            Some(event) => frames.extend(shape.event(index, event)?),
            None if index == 0 => return Err(gone()),
            None => {}
        }
    }
    let state = (running, shape, frames, false);
    let events = stream::unfold(state, |(mut running, mut shape, mut frames, mut has_ended)| async move {
        loop {
            if let Some(frame) = frames.pop_front() {
                return Some((Ok::<_, Infallible>(sse(frame)), (running, shape, frames, has_ended)));
            }
            if has_ended {
                return None;
            }
            match next_of(&mut running).await {
                Some((_, Event::Failed(failure))) => {
                    frames.extend(shape.failure(&failure.into()));
                    has_ended = true;
                }
                Some((index, event)) => match shape.event(index, event) {
                    Ok(own) => frames.extend(own),
                    Err(error) => {
                        frames.extend(shape.failure(&error));
                        running.clear();
                        has_ended = true;
                    }
                },
                None => {
                    frames.extend(shape.end());
                    has_ended = true;
                }
            }
        }
    });
    let events = Sse::new(events);
    let mut response = match ping {
        Some(interval) => events.keep_alive(KeepAlive::new().interval(interval).text("")).into_response(),
        None => events.into_response(),
    };
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

fn sse(frame: Frame) -> SseEvent {
    // Write the name first: not every client reads a whole event before it looks.
    let event = SseEvent::default();
    match frame.name {
        Some(name) => event.event(name).data(frame.data),
        None => event.data(frame.data),
    }
}

/// The next event of any request; `None` once all have ended.
async fn next_of(running: &mut [Running]) -> Option<(usize, Event)> {
    let waits = running.iter_mut().enumerate().filter(|(_, own)| !own.has_ended());
    let waits: Vec<_> = waits.map(|(index, own)| Box::pin(async move { (index, own.next().await) })).collect();
    if waits.is_empty() {
        return None;
    }
    let ((index, event), ..) = futures_util::future::select_all(waits).await;
    Some((index, event.unwrap_or_else(|| Event::Failed(Failure::server("the engine has ended")))))
}

fn gone() -> ApiError {
    ApiError::server("the engine has ended")
}

/// The collected output of a generation.
#[derive(Debug)]
pub struct Whole {
    pub text: String,
    pub tokens: Vec<i32>,
    /// One entry per token of the text, if requested.
    pub probabilities: Vec<Probabilities>,
    pub done: Done,
}

/// Waits for the end of a generation and collects its output.
///
/// # Errors
/// The generation's failure.
pub async fn whole(mut running: Running) -> Result<Whole, ApiError> {
    let (mut text, mut tokens, mut probabilities) = (String::new(), Vec::new(), Vec::new());
    loop {
        match running.next().await.ok_or_else(gone)? {
            Event::Started(_) | Event::Progress(_) | Event::Embedding(_) => {}
            Event::Token(event) => {
                text.push_str(&event.text);
                tokens.push(event.token);
                probabilities.extend(event.probabilities);
            }
            Event::Done(done) => {
                text.push_str(&done.rest);
                probabilities.truncate(probabilities.len().saturating_sub(done.n_swallowed));
                return Ok(Whole { text, tokens, probabilities, done: *done });
            }
            Event::Failed(failure) => return Err(failure.into()),
        }
    }
}

/// Waits for embeddings: rows, and the number of input tokens.
///
/// # Errors
/// The request's failure.
pub async fn embeddings(mut running: Running) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    let mut n_tokens = 0;
    loop {
        match running.next().await.ok_or_else(gone)? {
            Event::Started(started) => n_tokens = started.n_prompt,
            Event::Embedding(rows) => return Ok((rows, n_tokens)),
            Event::Failed(failure) => return Err(failure.into()),
            Event::Progress(_) | Event::Token(_) | Event::Done(_) => {}
        }
    }
}
