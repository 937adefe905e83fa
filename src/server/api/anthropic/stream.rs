//! Anthropic's stream of an answer, block by block.

use hobbit::engine::ChatDelta;
use serde_json::{Value, json};

use super::{Header, stop_reason, stop_sequence};
use crate::server::api::chat::Talk;
use crate::server::api::chat::answer::Reader;
use crate::server::http::error::ApiError;
use crate::server::http::stream::{Frame, Shape};
use crate::server::job::{Done, Event};

/// Anthropic's stream.
pub struct Messages {
    talk: Talk,
    header: Header,
    reader: Reader,
    blocks: Blocks,
}

impl Messages {
    /// # Errors
    /// As [`Reader::new`].
    pub fn new(talk: Talk, header: Header) -> Result<Self, ApiError> {
        let reader = Reader::new(&talk.prompt)?;
        Ok(Self { talk, header, reader, blocks: Blocks::default() })
    }

    fn done(&mut self, done: &Done) -> Result<Vec<Value>, ApiError> {
        let mut events = Vec::new();
        for delta in self.reader.finish(&done.rest, &done.stop)? {
            self.blocks.add(&delta, &mut events);
        }
        self.blocks.close(&mut events);
        let stops = &self.header.stops;
        events.push(json!({
            "type": "message_delta",
            "delta": {
                "stop_reason": stop_reason(&done.stop, self.blocks.have_calls, stops),
                "stop_sequence": stop_sequence(&done.stop, stops),
            },
            "usage": {"output_tokens": done.n_decoded},
        }));
        events.push(json!({"type": "message_stop"}));
        Ok(events)
    }
}

impl Shape for Messages {
    fn event(&mut self, _: usize, event: Event) -> Result<Vec<Frame>, ApiError> {
        let mut events = Vec::new();
        match event {
            Event::Started(started) => {
                let n_new = started.n_prompt.saturating_sub(started.n_cached);
                let message = self.header.message(json!([]), Value::Null, Value::Null, started.n_cached, n_new, 0);
                events.push(json!({"type": "message_start", "message": message}));
            }
            // A ping shows waiting clients that the prompt advances.
            Event::Progress(_) if self.talk.params.return_progress => events.push(json!({"type": "ping"})),
            Event::Token(token) => {
                for delta in self.reader.push(&token.text) {
                    self.blocks.add(&delta, &mut events);
                }
            }
            Event::Done(done) => events = self.done(&done)?,
            Event::Progress(_) | Event::Embedding(_) | Event::Failed(_) => {}
        }
        Ok(events.iter().map(frame).collect())
    }

    fn failure(&mut self, error: &ApiError) -> Vec<Frame> {
        vec![Frame::named("error", &json!({"type": "error", "error": error.json()}))]
    }
}

/// Names an event after its type.
fn frame(event: &Value) -> Frame {
    const NAMES: [&str; 7] = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ];
    let name = NAMES.into_iter().find(|name| event["type"] == *name);
    Frame { name, data: event.to_string() }
}

/// The kind of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    /// A tool call, by index.
    Call(usize),
}

/// Blocks of an answer, in order.
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
            // Thoughts are not signed.
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
    use hobbit::engine::ToolCallDelta;

    #[test]
    fn blocks_follow_each_other() {
        let call = |index: usize, name: &str, arguments: &str| {
            ChatDelta::ToolCall(ToolCallDelta {
                index,
                id: format!("id{index}"),
                name: name.to_owned(),
                arguments: arguments.to_owned(),
            })
        };
        let mut blocks = Blocks::default();
        let mut events = Vec::new();
        for delta in [
            ChatDelta::Reasoning("h".to_owned()),
            ChatDelta::Reasoning("m".to_owned()),
            ChatDelta::Content("Ja".to_owned()),
            call(0, "get", "{}"),
            call(1, "stop", ""),
        ] {
            blocks.add(&delta, &mut events);
        }
        blocks.close(&mut events);
        blocks.close(&mut events);
        let told: Vec<String> = events
            .iter()
            .map(|event| {
                format!("{} {}", event["type"].as_str().unwrap().trim_start_matches("content_block_"), event["index"])
            })
            .collect();
        let expected =
            "start 0,delta 0,delta 0,delta 0,stop 0,start 1,delta 1,stop 1,start 2,delta 2,stop 2,start 3,stop 3";
        assert_eq!(told.join(","), expected);
        assert!(blocks.have_calls);
        assert_eq!(frame(&events[0]).name, Some("content_block_start"));
    }
}
