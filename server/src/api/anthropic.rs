//! `/v1/messages`: conversations, in Anthropic's shape. An answer is a list of blocks: thinking, text and tool calls.

pub mod request;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::chat::verbose;
use super::dialect::{Dialect, Framing, Whole, answer};
use crate::error::ApiError;
use crate::http::Asked;
use crate::ids::random_id;
use crate::job::{Done, Event, Stop};
use crate::json::texts;
use crate::request::chat::reply::ChatDelta;
use crate::request::chat::{Talk, count};
use request::to_openai;

/// `POST /v1/messages`
pub async fn messages(Asked { app, backend, body, held }: Asked) -> Result<Response, ApiError> {
    let stops = texts(&body, "stop_sequences")?.unwrap_or_default();
    let (talk, scheduled) = Talk::start(&app, backend, held, move || to_openai(&body)).await?;
    let id = format!("msg_{}", random_id());
    answer(&app, scheduled, Answer { talk, id, stops, blocks: Blocks::default() }).await
}

/// `POST /v1/messages/count_tokens`
pub async fn count_tokens(Asked { app, backend, body, held }: Asked) -> Result<Json<Value>, ApiError> {
    Ok(Json(json!({"input_tokens": count(&app, &backend, &held, || to_openai(&body)).await?})))
}

/// Anthropic's form.
struct Answer {
    talk: Talk,
    id: String,
    /// The request's stop texts.
    stops: Vec<String>,
    blocks: Blocks,
}

impl Answer {
    /// The message so far.
    fn message(&self, n_prompt: usize, n_cached: usize, n_decoded: usize) -> Value {
        let n_new = n_prompt.saturating_sub(n_cached);
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": self.blocks.done,
            "model": self.talk.texts.backend.name,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": {"cache_read_input_tokens": n_cached, "input_tokens": n_new, "output_tokens": n_decoded},
        })
    }

    /// The complete message, whose text ends with `rest`; `events` are those of its last blocks.
    fn finish(&mut self, rest: &str, done: &Done, events: &mut Vec<Value>) -> Value {
        let reader = &mut self.talk.readers[0];
        reader.finish(rest, &done.stop).iter().for_each(|delta| self.blocks.add(delta, events));
        let calls = self.blocks.have_calls && reader.cut().is_none();
        self.blocks.close(events);
        let mut message = self.message(done.n_prompt, done.timings.n_cached, done.timings.n_predicted);
        message["stop_reason"] = json!(stop_reason(&done.stop, calls, &self.stops));
        message["stop_sequence"] = json!(stop_sequence(&done.stop, &self.stops));
        message
    }
}

impl Dialect for Answer {
    const FRAMING: Framing = Framing::Typed;

    fn event(&mut self, _: usize, event: Event) -> Vec<Value> {
        let mut events = Vec::new();
        match event {
            Event::Started(started) => {
                let message = self.message(started.n_prompt, started.n_cached, 0);
                events.push(json!({"type": "message_start", "message": message}));
            }
            // A ping shows waiting clients that the prompt advances.
            Event::Progress(_) => events.push(json!({"type": "ping"})),
            Event::Token(token) => {
                let deltas = self.talk.readers[0].push(&token.text);
                deltas.iter().for_each(|delta| self.blocks.add(delta, &mut events));
            }
            Event::Done(done) => {
                let message = self.finish(&done.rest, &done, &mut events);
                let [reason, sequence] = ["stop_reason", "stop_sequence"].map(|name| &message[name]);
                let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
                let usage = json!({"output_tokens": done.timings.n_predicted});
                events.push(json!({"type": "message_delta", "delta": delta, "usage": usage}));
                events.push(json!({"type": "message_stop"}));
            }
            _ => {}
        }
        events
    }

    fn failure(&mut self, error: &ApiError) -> Value {
        json!({"type": "error", "error": error.json()})
    }

    fn whole(mut self, answers: Vec<Whole>) -> Response {
        let Whole { text, done, .. } = &answers[0];
        let mut message = self.finish(text, done, &mut Vec::new());
        if let Some(verbose) = verbose(&self.talk, done, 0, text) {
            message["__verbose"] = verbose;
        }
        Json(message).into_response()
    }
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

/// The blocks of an answer, in order.
#[derive(Debug, Default)]
struct Blocks {
    open: Option<(Kind, Value)>,
    /// Arguments of the open call.
    arguments: String,
    /// Complete blocks.
    done: Vec<Value>,
    have_calls: bool,
}

impl Blocks {
    /// Adds a piece to a block of its kind.
    fn add(&mut self, delta: &ChatDelta, events: &mut Vec<Value>) {
        let (kind, block, name, text) = match delta {
            ChatDelta::Reasoning(text) => {
                (Kind::Thinking, json!({"type": "thinking", "thinking": "", "signature": ""}), "thinking", text)
            }
            ChatDelta::Content(text) => (Kind::Text, json!({"type": "text", "text": ""}), "text", text),
            ChatDelta::ToolCall(call) => {
                let block = json!({"type": "tool_use", "id": call.id, "name": call.name, "input": {}});
                (Kind::Call(call.index), block, "partial_json", &call.arguments)
            }
        };
        if self.open.as_ref().is_none_or(|(open, _)| *open != kind) {
            self.close(events);
            self.have_calls |= matches!(kind, Kind::Call(_));
            events.push(json!({"type": "content_block_start", "index": self.done.len(), "content_block": block}));
            self.open = Some((kind, block));
        }
        if text.is_empty() {
            return;
        }
        match self.open.as_mut().and_then(|(_, block)| block.get_mut(name)) {
            Some(Value::String(all)) => all.push_str(text),
            _ => self.arguments.push_str(text),
        }
        let kind = if name == "partial_json" { "input_json_delta".to_owned() } else { format!("{name}_delta") };
        let delta = json!({"type": kind, name: text});
        events.push(json!({"type": "content_block_delta", "index": self.done.len(), "delta": delta}));
    }

    /// Closes the open block.
    fn close(&mut self, events: &mut Vec<Value>) {
        let Some((kind, mut block)) = self.open.take() else { return };
        let index = self.done.len();
        if kind == Kind::Thinking {
            // Reasoning is not signed.
            let delta = json!({"type": "signature_delta", "signature": ""});
            events.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
        }
        if let Kind::Call(_) = kind {
            // A call that was cut off is not valid JSON.
            let arguments = serde_json::from_str(&std::mem::take(&mut self.arguments));
            block["input"] = arguments.unwrap_or_else(|_| json!({}));
        }
        events.push(json!({"type": "content_block_stop", "index": index}));
        self.done.push(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::chat::reply::ToolCallDelta;

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
            call(0, "get", "{\"a\""),
            call(0, "", ":1}"),
            call(1, "stop", ""),
            call(2, "cut", "{\"a\""),
        ] {
            blocks.add(&delta, &mut events);
        }
        blocks.close(&mut events);
        blocks.close(&mut events);
        let kind = |event: &Value| {
            format!("{} {}", event["type"].as_str().unwrap().trim_start_matches("content_block_"), event["index"])
        };
        let kinds: Vec<String> = events.iter().map(kind).collect();
        let expected = "start 0,delta 0,delta 0,delta 0,stop 0,start 1,delta 1,stop 1,start 2,delta 2,delta 2,stop 2,\
             start 3,stop 3,start 4,delta 4,stop 4";
        assert_eq!(kinds.join(","), expected);
        assert!(blocks.have_calls);
        let calls = [("id0", "get", json!({"a": 1})), ("id1", "stop", json!({})), ("id2", "cut", json!({}))];
        let calls = calls.map(|(id, name, input)| json!({"type": "tool_use", "id": id, "name": name, "input": input}));
        let [thinking, text] =
            [json!({"type": "thinking", "thinking": "hm", "signature": ""}), json!({"type": "text", "text": "Ja"})];
        assert_eq!(blocks.done, [&[thinking, text], &calls[..]].concat());
    }
}
