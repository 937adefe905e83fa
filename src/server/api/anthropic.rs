//! `/v1/messages`: conversations, in Anthropic's shape.

pub mod request;
mod stream;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::chat::answer::Message;
use super::chat::{Talk, count};
use super::fields::texts;
use super::openai::random_id;
use crate::server::app::App;
use crate::server::http::body::Body;
use crate::server::http::error::ApiError;
use crate::server::http::stream::{respond, whole};
use crate::server::job::Stop;
use request::to_openai;

/// `POST /v1/messages`
pub async fn messages(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let header = Header::new(&app, &body)?;
    let talk = app.work(|| Talk::new(&app, loaded, to_openai(&body)?, held)).await?;
    drop(body);
    let mut running = talk.start(loaded).await?;
    if talk.params.stream {
        let ping = talk.params.ping;
        return respond(running, stream::Messages::new(talk, header)?, ping).await;
    }
    let own = whole(running.remove(0)).await?;
    let message = app.work(|| talk.message(&own)).await?;
    let done = &own.done;
    let reason = stop_reason(&done.stop, !message.calls.is_empty(), &header.stops);
    let (n_cached, n_prompt) = (done.timings.n_cached, done.n_prompt);
    let mut answer = header.message(
        blocks(&message),
        json!(reason),
        json!(stop_sequence(&done.stop, &header.stops)),
        n_cached,
        n_prompt.saturating_sub(n_cached),
        done.n_decoded,
    );
    if let Some(verbose) = talk.verbose(done, 0, &own.text) {
        answer["__verbose"] = verbose;
    }
    Ok(Json(answer).into_response())
}

/// `POST /v1/messages/count_tokens`
pub async fn count_tokens(State(app): State<Arc<App>>, Body(body, _held): Body) -> Result<Json<Value>, ApiError> {
    Ok(Json(json!({"input_tokens": app.work(|| count(&app, to_openai(&body)?)).await?})))
}

/// The fields of a message other than its content.
struct Header {
    id: String,
    model: String,
    /// The request's stop texts.
    stops: Vec<String>,
}

impl Header {
    fn new(app: &App, body: &Map<String, Value>) -> Result<Self, ApiError> {
        let stops = texts(body, "stop_sequences")?.unwrap_or_default();
        Ok(Self { id: format!("msg_{}", random_id()), model: app.model_name().to_owned(), stops })
    }

    fn message(
        &self,
        content: Value,
        stop_reason: Value,
        stop_sequence: Value,
        n_cached: usize,
        n_new: usize,
        n_decoded: usize,
    ) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": {"cache_read_input_tokens": n_cached, "input_tokens": n_new, "output_tokens": n_decoded},
        })
    }
}

/// Thoughts, text and calls as blocks.
fn blocks(message: &Message) -> Value {
    let mut blocks = Vec::new();
    if !message.reasoning.is_empty() {
        blocks.push(json!({"type": "thinking", "thinking": message.reasoning, "signature": ""}));
    }
    if !message.content.is_empty() {
        blocks.push(json!({"type": "text", "text": message.content}));
    }
    for call in &message.calls {
        // A call that was cut off is not valid JSON.
        let input = serde_json::from_str::<Value>(&call.arguments).unwrap_or_else(|_| json!({}));
        blocks.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input}));
    }
    Value::Array(blocks)
}

/// The request's stop text that ended an answer; `None` for one of the chat template's.
fn stop_sequence<'a>(stop: &'a Stop, stops: &[String]) -> Option<&'a str> {
    match stop {
        Stop::Word(word) if stops.contains(word) => Some(word),
        _ => None,
    }
}

/// The stop reason of an answer.
fn stop_reason(stop: &Stop, has_calls: bool, stops: &[String]) -> &'static str {
    match stop {
        Stop::Limit => "max_tokens",
        _ if has_calls => "tool_use",
        stop if stop_sequence(stop, stops).is_some() => "stop_sequence",
        _ => "end_turn",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit::engine::ToolCall;

    #[test]
    fn why_it_ended() {
        let stops = ["END".to_owned()];
        let word = |word: &str| Stop::Word(word.to_owned());
        assert_eq!(stop_reason(&Stop::Limit, true, &stops), "max_tokens");
        assert_eq!(stop_reason(&Stop::Eos, true, &stops), "tool_use");
        assert_eq!(stop_reason(&word("END"), false, &stops), "stop_sequence");
        assert_eq!(stop_reason(&word("<|im_end|>"), false, &stops), "end_turn");
        assert_eq!(stop_sequence(&word("<|im_end|>"), &stops), None);
    }

    #[test]
    fn a_message_in_blocks() {
        let call =
            |arguments: &str| ToolCall { id: "1".to_owned(), name: "w".to_owned(), arguments: arguments.to_owned() };
        let message = Message {
            content: "Ja".to_owned(),
            reasoning: "hm".to_owned(),
            calls: vec![call("{\"a\":1}"), call("{\"a\"")],
        };
        let expected = json!([
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Ja"},
            {"type": "tool_use", "id": "1", "name": "w", "input": {"a": 1}},
            {"type": "tool_use", "id": "1", "name": "w", "input": {}},
        ]);
        assert_eq!(blocks(&message), expected);
        assert_eq!(blocks(&Message::default()), json!([]));
    }
}
