//! Streamed answers: server-sent events, or lines of JSON.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt};
use serde_json::Value;

/// One server-sent event, or one line.
#[derive(Debug, Default)]
pub struct Frame {
    name: Option<String>,
    data: String,
}

impl Frame {
    /// The end of OpenAI's streams.
    pub fn done() -> Self {
        Self { name: None, data: "[DONE]".to_owned() }
    }

    /// An event without a name, or a line.
    pub fn unnamed(value: &Value) -> Self {
        Self { name: None, data: value.to_string() }
    }

    /// An event named after its type.
    pub fn typed(value: &Value) -> Self {
        Self { name: value["type"].as_str().map(str::to_owned), ..Self::unnamed(value) }
    }
}

/// An answer of server-sent events.
pub fn events(frames: impl Stream<Item = Frame> + Send + 'static, ping: Option<Duration>) -> Response {
    let events = frames.map(|frame| {
        // Write the name first: not every client reads a whole event before it looks.
        let event = frame.name.map_or_else(Event::default, |name| Event::default().event(name));
        Ok::<_, Infallible>(event.data(frame.data))
    });
    let mut response = match ping {
        Some(interval) => Sse::new(events).keep_alive(KeepAlive::new().interval(interval).text("")).into_response(),
        None => Sse::new(events).into_response(),
    };
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// An answer of lines of JSON.
pub fn lines(frames: impl Stream<Item = Frame> + Send + 'static) -> Response {
    let lines = frames.map(|frame| Ok::<_, Infallible>(frame.data + "\n"));
    ([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}
