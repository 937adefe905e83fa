//! The items of a response, as its deltas come.

use serde_json::{Value, json};

use crate::ids::random_id;
use crate::json::merge;
use crate::request::chat::reply::ChatDelta;

/// The kind of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    /// A tool call by index, with its id and name; a custom tool takes a text.
    Call {
        index: usize,
        id: String,
        name: String,
        is_custom: bool,
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
    fn json(&self, status: &str) -> Value {
        let content = |part: Value| if status == "in_progress" { json!([]) } else { json!([part]) };
        match &self.kind {
            Kind::Reasoning => json!({
                "id": self.id, "summary": [], "type": "reasoning",
                "content": content(json!({"text": self.text, "type": "reasoning_text"})),
                "encrypted_content": "", "status": status,
            }),
            Kind::Message => json!({
                "content": content(self.part()), "id": self.id, "role": "assistant", "status": status,
                "type": "message",
            }),
            Kind::Call { id, name, is_custom: true, .. } => json!({
                "id": self.id, "type": "custom_tool_call", "status": status, "input": self.input(),
                "call_id": id, "name": name,
            }),
            Kind::Call { id, name, .. } => json!({
                "id": self.id, "type": "function_call", "status": status, "arguments": self.text,
                "call_id": id, "name": name,
            }),
        }
    }

    /// The text for a custom tool.
    fn input(&self) -> String {
        let arguments: Value = serde_json::from_str(&self.text).unwrap_or_default();
        arguments["input"].as_str().unwrap_or_default().to_owned()
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
    pub done: Vec<Value>,
    /// Names of custom tools.
    custom: Vec<String>,
}

impl Items {
    /// No items yet. `custom`: names of custom tools.
    pub fn new(custom: Vec<String>) -> Self {
        Self { custom, ..Self::default() }
    }

    /// Adds a piece to an item of its kind.
    pub fn add(&mut self, delta: &ChatDelta, events: &mut Vec<Value>) {
        let (kind, text) = match delta {
            ChatDelta::Reasoning(text) => (Kind::Reasoning, text),
            ChatDelta::Content(text) => (Kind::Message, text),
            ChatDelta::ToolCall(call) => {
                let (id, name, is_custom) = (call.id.clone(), call.name.clone(), self.custom.contains(&call.name));
                (Kind::Call { index: call.index, id, name, is_custom }, &call.arguments)
            }
        };
        let goes_on = match (self.open.as_ref().map(|open| &open.kind), &kind) {
            (Some(Kind::Call { index: open, .. }), Kind::Call { index, .. }) => open == index,
            (open, kind) => open == Some(kind),
        };
        if !goes_on {
            self.close("completed", events);
            self.begin(kind, events);
        }
        let output_index = self.done.len();
        let Some(open) = self.open.as_mut().filter(|_| !text.is_empty()) else { return };
        open.text.push_str(text);
        let (kind, more) = match open.kind {
            Kind::Reasoning => ("reasoning_text", json!({"content_index": 0})),
            Kind::Message => ("output_text", json!({"content_index": 0, "logprobs": []})),
            // Its text is known at the end.
            Kind::Call { is_custom: true, .. } => return,
            Kind::Call { .. } => ("function_call_arguments", json!({})),
        };
        let kind = format!("response.{kind}.delta");
        let mut event = json!({"type": kind, "item_id": open.id, "output_index": output_index, "delta": text});
        merge(&mut event, more);
        events.push(event);
    }

    fn begin(&mut self, kind: Kind, events: &mut Vec<Value>) {
        let id = match &kind {
            Kind::Reasoning => format!("rs_{}", random_id()),
            Kind::Message => format!("msg_{}", random_id()),
            Kind::Call { id, .. } => format!("fc_{id}"),
        };
        let item = Item { kind, id, text: String::new() };
        let at = self.done.len();
        events
            .push(json!({"type": "response.output_item.added", "output_index": at, "item": item.json("in_progress")}));
        if item.kind == Kind::Message {
            events.push(json!({
                "type": "response.content_part.added", "item_id": item.id, "output_index": at, "content_index": 0,
                "part": item.part(),
            }));
        }
        self.open = Some(item);
    }

    /// The index of the open call.
    pub fn open_call(&self) -> Option<usize> {
        match self.open.as_ref()?.kind {
            Kind::Call { index, .. } => Some(index),
            _ => None,
        }
    }

    /// Closes the open item, which is complete or not.
    pub fn close(&mut self, status: &str, events: &mut Vec<Value>) {
        let Some(item) = self.open.take() else { return };
        let output_index = self.done.len();
        let parts = match &item.kind {
            Kind::Reasoning => vec![("reasoning_text.done", json!({"content_index": 0, "text": item.text}))],
            Kind::Message => vec![
                ("output_text.done", json!({"content_index": 0, "text": item.text, "logprobs": []})),
                ("content_part.done", json!({"content_index": 0, "part": item.part()})),
            ],
            Kind::Call { is_custom: true, .. } => vec![
                ("custom_tool_call_input.delta", json!({"delta": item.input()})),
                ("custom_tool_call_input.done", json!({"input": item.input()})),
            ],
            Kind::Call { name, .. } => {
                vec![("function_call_arguments.done", json!({"arguments": item.text, "name": name}))]
            }
        };
        for (kind, more) in parts {
            let kind = format!("response.{kind}");
            let mut event = json!({"type": kind, "item_id": item.id, "output_index": output_index});
            merge(&mut event, more);
            events.push(event);
        }
        let whole = item.json(status);
        events.push(json!({"type": "response.output_item.done", "output_index": output_index, "item": whole}));
        self.done.push(whole);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::chat::reply::ToolCallDelta;

    fn call(id: &str, name: &str, arguments: &str) -> ChatDelta {
        let [id, name, arguments] = [id, name, arguments].map(str::to_owned);
        ChatDelta::ToolCall(ToolCallDelta { index: 0, id, name, arguments })
    }

    #[test]
    fn custom_tools_get_a_text() {
        let mut items = Items::new(vec!["patch".to_owned()]);
        let mut events = Vec::new();
        items.add(&call("x", "patch", "{\"input\":\"a"), &mut events);
        items.add(&call("", "", "\\n\"}"), &mut events);
        items.close("completed", &mut events);
        let expected = json!({
            "id": "fc_x", "type": "custom_tool_call", "status": "completed", "input": "a\n", "call_id": "x",
            "name": "patch",
        });
        assert_eq!(items.done, [expected]);
        let kinds: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
        let expected =
            ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"];
        assert_eq!(kinds, expected.map(|kind| format!("response.{kind}")));
        assert_eq!((&events[1]["delta"], &events[2]["input"]), (&json!("a\n"), &json!("a\n")));
    }

    #[test]
    fn items_follow_each_other() {
        let mut items = Items::default();
        let mut events = Vec::new();
        let text = str::to_owned;
        for delta in [
            ChatDelta::Reasoning(text("hm")),
            ChatDelta::Content(text("J")),
            ChatDelta::Content(text("a")),
            call("x", "get", "{\"a\""),
            call("", "", ":1}"),
        ] {
            items.add(&delta, &mut events);
        }
        items.close("incomplete", &mut events);
        let kind = |event: &Value| {
            let kind = event["type"].as_str().unwrap().trim_start_matches("response.");
            format!("{} {kind}", event["output_index"])
        };
        let kinds: Vec<String> = events.iter().map(kind).collect();
        let expected = "0 output_item.added, 0 reasoning_text.delta, 0 reasoning_text.done, 0 output_item.done, \
                        1 output_item.added, 1 content_part.added, 1 output_text.delta, 1 output_text.delta, \
                        1 output_text.done, 1 content_part.done, 1 output_item.done, 2 output_item.added, \
                        2 function_call_arguments.delta, 2 function_call_arguments.delta, \
                        2 function_call_arguments.done, 2 output_item.done";
        assert_eq!(kinds.join(", "), expected);
        let output = items.done;
        assert_eq!(output[0]["content"][0], json!({"text": "hm", "type": "reasoning_text"}));
        assert_eq!(output[1]["content"][0]["text"], "Ja");
        assert!(output[1]["id"].as_str().unwrap().starts_with("msg_"));
        assert_eq!(events[5]["item_id"], output[1]["id"]);
        assert_eq!((&output[2]["id"], &output[2]["call_id"]), (&json!("fc_x"), &json!("x")));
        let status: Vec<&Value> = output.iter().map(|item| &item["status"]).collect();
        assert_eq!(status, ["completed", "completed", "incomplete"]);
        assert_eq!(output[2]["arguments"], "{\"a\":1}");
    }
}
