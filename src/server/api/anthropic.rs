//! `/v1/messages`: conversations, in Anthropic's shape. An answer is a list of blocks: thinking, text and tool calls.

pub mod request;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hobbit::engine::ChatDelta;
use serde_json::{Value, json};

use super::chat::answer::{Message, Reader};
use super::chat::{Talk, count};
use super::openai::random_id;
use super::texts;
use crate::server::app::App;
use crate::server::error::ApiError;
use crate::server::http::Body;
use crate::server::http::stream::{Frame, Shape, respond, typed, whole};
use crate::server::job::{Done, Event, Stop};
use request::to_openai;

/// `POST /v1/messages`
pub async fn messages(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let stops = texts(&body, "stop_sequences")?.unwrap_or_default();
    let mut talk = app.work(|| Talk::new(&app, loaded, to_openai(&body)?, held)).await?;
    drop(body);
    let mut running = talk.start(loaded).await?;
    let (streams, ping) = (talk.params.stream, talk.params.ping);
    let answer = Answer::new(talk, stops)?;
    if streams {
        return respond(running, answer, ping).await;
    }
    let own = whole(running.remove(0)).await?;
    let message = app.work(|| Message::of(&answer.talk.prompt, &own)).await?;
    let (done, n_cached) = (&own.done, own.done.timings.n_cached);
    let mut value = answer.message(blocks(&message), n_cached, done.n_prompt.saturating_sub(n_cached), done.n_decoded);
    value["stop_reason"] = json!(stop_reason(&done.stop, !message.calls.is_empty(), &answer.stops));
    value["stop_sequence"] = json!(stop_sequence(&done.stop, &answer.stops));
    if let Some(verbose) = answer.talk.verbose(done, 0, &own.text) {
        value["__verbose"] = verbose;
    }
    Ok(Json(value).into_response())
}

/// `POST /v1/messages/count_tokens`
pub async fn count_tokens(State(app): State<Arc<App>>, Body(body, _held): Body) -> Result<Json<Value>, ApiError> {
    Ok(Json(json!({"input_tokens": app.work(|| count(&app, to_openai(&body)?)).await?})))
}

/// An answer, complete or as a stream.
struct Answer {
    talk: Talk,
    id: String,
    /// The request's stop texts.
    stops: Vec<String>,
    reader: Reader,
    blocks: Blocks,
}

impl Answer {
    fn new(talk: Talk, stops: Vec<String>) -> Result<Self, ApiError> {
        let reader = Reader::new(&talk.prompt)?;
        Ok(Self { talk, id: format!("msg_{}", random_id()), stops, reader, blocks: Blocks::default() })
    }

    /// The message with this content; `n_new` tokens of the prompt were not cached.
    fn message(&self, content: Value, n_cached: usize, n_new: usize, n_decoded: usize) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.talk.app.model_name(),
            "stop_reason": null,
            "stop_sequence": null,
            "usage": {"cache_read_input_tokens": n_cached, "input_tokens": n_new, "output_tokens": n_decoded},
        })
    }

    fn done(&mut self, done: &Done, events: &mut Vec<Value>) -> Result<(), ApiError> {
        let deltas = self.reader.finish(&done.rest, &done.stop)?;
        deltas.iter().for_each(|delta| self.blocks.add(delta, events));
        self.blocks.close(events);
        events.push(json!({
            "type": "message_delta",
            "delta": {
                "stop_reason": stop_reason(&done.stop, self.blocks.have_calls, &self.stops),
                "stop_sequence": stop_sequence(&done.stop, &self.stops),
            },
            "usage": {"output_tokens": done.n_decoded},
        }));
        events.push(json!({"type": "message_stop"}));
        Ok(())
    }
}

impl Shape for Answer {
    fn event(&mut self, _: usize, event: Event) -> Result<Vec<Frame>, ApiError> {
        let mut events = Vec::new();
        match event {
            Event::Started(started) => {
                let n_new = started.n_prompt.saturating_sub(started.n_cached);
                let message = self.message(json!([]), started.n_cached, n_new, 0);
                events.push(json!({"type": "message_start", "message": message}));
            }
            // A ping shows waiting clients that the prompt advances.
            Event::Progress(_) if self.talk.params.return_progress => events.push(json!({"type": "ping"})),
            Event::Token(token) => {
                self.reader.push(&token.text).iter().for_each(|delta| self.blocks.add(delta, &mut events));
            }
            Event::Done(done) => self.done(&done, &mut events)?,
            _ => {}
        }
        Ok(events.iter().map(typed).collect())
    }

    fn failure(&mut self, error: &ApiError) -> Vec<Frame> {
        vec![typed(&json!({"type": "error", "error": error.json()}))]
    }
}

/// Reasoning, text and calls as blocks.
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

/// The kind of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    /// A tool call, by index.
    Call(usize),
}

/// Blocks of a stream, in order.
#[derive(Debug, Default)]
struct Blocks {
    open: Option<Kind>,
    /// Index of the open block, or of the next one.
    index: usize,
    have_calls: bool,
}

impl Blocks {
    /// Adds a piece to a block of its kind.
    fn add(&mut self, delta: &ChatDelta, events: &mut Vec<Value>) {
        let (kind, block, piece) = match delta {
            ChatDelta::Reasoning(text) => (
                Kind::Thinking,
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                json!({"type": "thinking_delta", "thinking": text}),
            ),
            ChatDelta::Content(text) => {
                (Kind::Text, json!({"type": "text", "text": ""}), json!({"type": "text_delta", "text": text}))
            }
            ChatDelta::ToolCall(call) => (
                Kind::Call(call.index),
                json!({"type": "tool_use", "id": call.id, "name": call.name, "input": {}}),
                json!({"type": "input_json_delta", "partial_json": call.arguments}),
            ),
        };
        if self.open != Some(kind) {
            self.close(events);
            self.open = Some(kind);
            self.have_calls |= matches!(kind, Kind::Call(_));
            events.push(json!({"type": "content_block_start", "index": self.index, "content_block": block}));
        }
        let is_empty = matches!(delta, ChatDelta::ToolCall(call) if call.arguments.is_empty());
        if !is_empty {
            events.push(json!({"type": "content_block_delta", "index": self.index, "delta": piece}));
        }
    }

    /// Closes the open block.
    fn close(&mut self, events: &mut Vec<Value>) {
        let Some(kind) = self.open.take() else { return };
        if kind == Kind::Thinking {
            // Reasoning is not signed.
            let delta = json!({"type": "signature_delta", "signature": ""});
            events.push(json!({"type": "content_block_delta", "index": self.index, "delta": delta}));
        }
        events.push(json!({"type": "content_block_stop", "index": self.index}));
        self.index += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit::engine::{ToolCall, ToolCallDelta};

    #[test]
    fn stop_reasons() {
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
        let calls = vec![call("{\"a\":1}"), call("{\"a\"")];
        let message = Message { content: "Ja".to_owned(), reasoning: "hm".to_owned(), calls };
        let expected = json!([
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Ja"},
            {"type": "tool_use", "id": "1", "name": "w", "input": {"a": 1}},
            {"type": "tool_use", "id": "1", "name": "w", "input": {}},
        ]);
        assert_eq!(blocks(&message), expected);
        assert_eq!(blocks(&Message::default()), json!([]));
    }

    #[test]
    fn blocks_follow_each_other() {
        let text = str::to_owned;
        let call = |index: usize, name: &str, arguments: &str| {
            let (name, arguments) = (text(name), text(arguments));
            ChatDelta::ToolCall(ToolCallDelta { index, id: format!("id{index}"), name, arguments })
        };
        let mut blocks = Blocks::default();
        let mut events = Vec::new();
        for delta in [
            ChatDelta::Reasoning(text("h")),
            ChatDelta::Reasoning(text("m")),
            ChatDelta::Content(text("Ja")),
            call(0, "get", "{}"),
            call(1, "stop", ""),
        ] {
            blocks.add(&delta, &mut events);
        }
        blocks.close(&mut events);
        blocks.close(&mut events);
        let kind = |event: &Value| {
            format!("{} {}", event["type"].as_str().unwrap().trim_start_matches("content_block_"), event["index"])
        };
        let kinds: Vec<String> = events.iter().map(kind).collect();
        let expected =
            "start 0,delta 0,delta 0,delta 0,stop 0,start 1,delta 1,stop 1,start 2,delta 2,stop 2,start 3,stop 3";
        assert_eq!(kinds.join(","), expected);
        assert!(blocks.have_calls);
    }
}
