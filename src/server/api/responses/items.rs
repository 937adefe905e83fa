//! The items of a Responses answer: thoughts, messages and calls, each with its own id.

use hobbit::engine::ChatDelta;
use serde_json::{Value, json};

use crate::server::api::openai::random_id;

/// The kind of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    /// A tool call by index, with its id and name.
    Call {
        index: usize,
        id: String,
        name: String,
    },
}

/// One item.
#[derive(Clone, Debug)]
struct Item {
    kind: Kind,
    id: String,
    text: String,
}

impl Item {
    fn json(&self, is_complete: bool) -> Value {
        let status = if is_complete { "completed" } else { "in_progress" };
        match &self.kind {
            Kind::Reasoning => {
                let text = json!({"text": self.text, "type": "reasoning_text"});
                let content = if is_complete { json!([text]) } else { json!([]) };
                json!({
                    "id": self.id, "summary": [], "type": "reasoning", "content": content, "encrypted_content": "",
                    "status": status,
                })
            }
            Kind::Message => {
                let content = if is_complete { json!([self.part()]) } else { json!([]) };
                json!({"content": content, "id": self.id, "role": "assistant", "status": status, "type": "message"})
            }
            Kind::Call { id, name, .. } => json!({
                "id": self.id, "type": "function_call", "status": status, "arguments": self.text,
                "call_id": format!("call_{id}"), "name": name,
            }),
        }
    }

    fn part(&self) -> Value {
        json!({"type": "output_text", "annotations": [], "logprobs": [], "text": self.text})
    }
}

/// The items of an answer, in order.
#[derive(Debug, Default)]
pub struct Items {
    open: Option<Item>,
    /// Complete items.
    done: Vec<Value>,
}

impl Items {
    /// Adds a piece to an item of its kind.
    pub fn add(&mut self, delta: &ChatDelta, events: &mut Vec<Value>) {
        let (kind, text) = match delta {
            ChatDelta::Reasoning(text) => (Kind::Reasoning, text),
            ChatDelta::Content(text) => (Kind::Message, text),
            ChatDelta::ToolCall(call) => {
                (Kind::Call { index: call.index, id: call.id.clone(), name: call.name.clone() }, &call.arguments)
            }
        };
        let goes_on = match (self.open.as_ref().map(|open| &open.kind), &kind) {
            (Some(Kind::Call { index: open, .. }), Kind::Call { index, .. }) => open == index,
            (open, kind) => open == Some(kind),
        };
        if !goes_on {
            self.close(events);
            self.begin(kind, events);
        }
        let output_index = self.done.len();
        let Some(open) = self.open.as_mut().filter(|_| !text.is_empty()) else { return };
        open.text.push_str(text);
        let kind = match open.kind {
            Kind::Reasoning => "response.reasoning_text.delta",
            Kind::Message => "response.output_text.delta",
            Kind::Call { .. } => "response.function_call_arguments.delta",
        };
        let mut event = json!({"type": kind, "item_id": open.id, "output_index": output_index, "delta": text});
        if !matches!(open.kind, Kind::Call { .. }) {
            event["content_index"] = json!(0);
        }
        if open.kind == Kind::Message {
            event["logprobs"] = json!([]);
        }
        events.push(event);
    }

    fn begin(&mut self, kind: Kind, events: &mut Vec<Value>) {
        let id = match &kind {
            Kind::Reasoning => format!("rs_{}", random_id()),
            Kind::Message => format!("msg_{}", random_id()),
            Kind::Call { id, .. } => format!("fc_{id}"),
        };
        let item = Item { kind, id, text: String::new() };
        let output_index = self.done.len();
        events.push(json!({
            "type": "response.output_item.added", "output_index": output_index, "item": item.json(false),
        }));
        if item.kind == Kind::Message {
            events.push(json!({
                "type": "response.content_part.added", "item_id": item.id, "output_index": output_index, "content_index": 0,
                "part": item.part(),
            }));
        }
        self.open = Some(item);
    }

    /// Closes the open item.
    pub fn close(&mut self, events: &mut Vec<Value>) {
        let Some(item) = self.open.take() else { return };
        let output_index = self.done.len();
        let mut tell = |kind: &str, more: Value| {
            let mut event = json!({"type": kind, "item_id": item.id, "output_index": output_index});
            if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
                event.extend(more);
            }
            events.push(event);
        };
        match &item.kind {
            Kind::Reasoning => tell("response.reasoning_text.done", json!({"content_index": 0, "text": item.text})),
            Kind::Message => {
                tell("response.output_text.done", json!({"content_index": 0, "text": item.text, "logprobs": []}));
                tell("response.content_part.done", json!({"content_index": 0, "part": item.part()}));
            }
            Kind::Call { name, .. } => {
                tell("response.function_call_arguments.done", json!({"arguments": item.text, "name": name}));
            }
        }
        let whole = item.json(true);
        events.push(json!({"type": "response.output_item.done", "output_index": output_index, "item": whole}));
        self.done.push(whole);
    }

    /// All items; valid once the last one is closed.
    pub fn output(&self) -> &[Value] {
        &self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit::engine::ToolCallDelta;

    fn call(name: &str, arguments: &str) -> ChatDelta {
        let id = if name.is_empty() { "" } else { "x" };
        ChatDelta::ToolCall(ToolCallDelta {
            index: 0,
            id: id.to_owned(),
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        })
    }

    #[test]
    fn items_follow_each_other() {
        let mut items = Items::default();
        let mut events = Vec::new();
        for delta in [
            ChatDelta::Reasoning("hm".to_owned()),
            ChatDelta::Content("J".to_owned()),
            ChatDelta::Content("a".to_owned()),
            call("get", "{\"a\""),
            call("", ":1}"),
        ] {
            items.add(&delta, &mut events);
        }
        items.close(&mut events);
        let kinds: Vec<String> = events
            .iter()
            .map(|event| {
                let kind = event["type"].as_str().unwrap().trim_start_matches("response.");
                format!("{} {kind}", event["output_index"])
            })
            .collect();
        let expected = [
            "0 output_item.added",
            "0 reasoning_text.delta",
            "0 reasoning_text.done",
            "0 output_item.done",
            "1 output_item.added",
            "1 content_part.added",
            "1 output_text.delta",
            "1 output_text.delta",
            "1 output_text.done",
            "1 content_part.done",
            "1 output_item.done",
            "2 output_item.added",
            "2 function_call_arguments.delta",
            "2 function_call_arguments.delta",
            "2 function_call_arguments.done",
            "2 output_item.done",
        ];
        assert_eq!(kinds, expected);
        let output = items.output();
        assert_eq!(output[0]["content"][0], json!({"text": "hm", "type": "reasoning_text"}));
        assert_eq!(output[1]["content"][0]["text"], "Ja");
        assert!(output[1]["id"].as_str().unwrap().starts_with("msg_"));
        assert_eq!(events[5]["item_id"], output[1]["id"]);
        assert_eq!((&output[2]["id"], &output[2]["call_id"]), (&json!("fc_x"), &json!("call_x")));
        assert_eq!(output[2]["arguments"], "{\"a\":1}");
    }
}
