//! `/v1/responses`: conversations, in the shape of OpenAI's Responses. An answer is a list of items: reasoning,
//! messages and calls, each with its own id.

pub mod kept;
pub mod request;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hobbit::engine::ChatDelta;
use serde_json::{Value, json};

use super::chat::answer::Reader;
use super::chat::{Talk, count};
use super::openai::{Usage, now, random_id};
use super::params::{merge, shortened};
use super::{Fields, boolean, text};
use crate::server::app::App;
use crate::server::error::ApiError;
use crate::server::http::Body;
use crate::server::http::memory::Held;
use crate::server::http::stream::{Frame, Shape, respond, typed, whole};
use crate::server::job::{Done, Event, Stop};
use kept::Entry;
use request::{custom_tools, to_chat};

/// `POST /v1/responses`
pub async fn responses(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let previous = previous(&app, &body, &held).await?;
    let is_kept = boolean(&body, "store")?.unwrap_or(true);
    // Instructions hold for one request.
    let n_instructions = usize::from(text(&body, "instructions")?.is_some());
    let items = Items { custom: custom_tools(&body), ..Items::default() };
    let mut messages = String::new();
    let chat = || {
        let body = to_chat(body, conversation(previous)?)?;
        if let Some(all) = body["messages"].as_array().filter(|_| is_kept) {
            messages = json!(all[n_instructions..]).to_string();
        }
        Ok::<_, ApiError>(body)
    };
    let mut talk = Talk::new(&app, loaded, chat, held).await?;
    let mut running = talk.start(loaded).await?;
    let (streams, ping) = (talk.params.stream, talk.params.ping);
    let mut answer = Answer::new(talk, items)?;
    if is_kept {
        app.kept.begin(answer.id.clone(), messages);
    }
    if streams {
        return respond(running, answer, ping).await;
    }
    let own = whole(running.remove(0)).await?;
    let mut response = app.work(|| answer.finish(&own.text, &own.done, &mut Vec::new())).await?;
    response["timings"] = own.done.timings.json();
    if let Some(verbose) = answer.talk.verbose(&own.done, 0, &own.text) {
        response["__verbose"] = verbose;
    }
    Ok(Json(response).into_response())
}

/// The response that a request continues, whose memory is counted.
async fn previous(app: &App, body: &Fields, held: &Held) -> Result<Option<Entry>, ApiError> {
    let Some(id) = text(body, "previous_response_id")?.filter(|id| !id.is_empty()) else { return Ok(None) };
    let entry = app.kept.find(id).ok_or_else(|| {
        let id = shortened(id);
        let message = format!(
            "no response '{id}' is kept: the server remembers the last ones in --max-body bytes, unless \"store\" is \
             false; send the whole conversation"
        );
        ApiError::field("previous_response_id", message)
    })?;
    held.grow_by(app.work(|| entry.cost()).await).await?;
    Ok(Some(entry))
}

/// The messages of an earlier response.
fn conversation(previous: Option<Entry>) -> Result<Vec<Value>, ApiError> {
    let messages = previous.map_or(Some(Vec::new()), |entry| entry.conversation());
    messages.ok_or_else(|| ApiError::server("a kept response cannot be read"))
}

/// `POST /v1/responses/input_tokens`
pub async fn input_tokens(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Json<Value>, ApiError> {
    let previous = previous(&app, &body, &held).await?;
    let n = count(&app, || to_chat(body, conversation(previous)?), &held).await?;
    Ok(Json(json!({"input_tokens": n, "object": "response.input_tokens"})))
}

/// An answer, complete or as a stream.
struct Answer {
    talk: Talk,
    id: String,
    created: u64,
    reader: Reader,
    items: Items,
    /// Events sent so far.
    n: usize,
}

impl Answer {
    fn new(talk: Talk, items: Items) -> Result<Self, ApiError> {
        let reader = Reader::new(&talk.prompt)?;
        let id = format!("resp_{}", random_id());
        Ok(Self { talk, id, created: now(), reader, items, n: 0 })
    }

    /// The answer while it is generated.
    fn begun(&self) -> Value {
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress",
            "model": self.talk.app.model_name(),
            "output": [],
            "error": null,
            "incomplete_details": null,
            "parallel_tool_calls": true,
            "tool_choice": "auto",
            "tools": [],
        })
    }

    /// The complete answer, whose text ends with `rest`; `events` are those of its last items.
    fn finish(&mut self, rest: &str, done: &Done, events: &mut Vec<Value>) -> Result<Value, ApiError> {
        let deltas = self.reader.finish(rest, &done.stop)?;
        deltas.iter().for_each(|delta| self.items.add(delta, events));
        let is_cut = done.stop == Stop::Limit;
        let is_half = self.reader.cut().is_some() && self.items.open_call() == self.reader.cut();
        let status = if is_cut || is_half { "incomplete" } else { "completed" };
        self.items.close(status, events);
        self.talk.app.kept.finish(&self.id, &self.items.done);
        let mut answer = self.begun();
        let usage = Usage::of(done);
        answer["completed_at"] = json!(now());
        answer["status"] = json!(if is_cut { "incomplete" } else { "completed" });
        answer["output"] = json!(self.items.done);
        if is_cut {
            answer["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        answer["usage"] = json!({
            "input_tokens": usage.n_prompt,
            "output_tokens": usage.n_decoded,
            "total_tokens": usage.n_prompt + usage.n_decoded,
            "input_tokens_details": {"cached_tokens": usage.n_cached},
        });
        Ok(answer)
    }

    /// A numbered event, named after its type.
    fn frame(&mut self, mut event: Value) -> Frame {
        event["sequence_number"] = json!(self.n);
        self.n += 1;
        typed(&event)
    }
}

impl Shape for Answer {
    fn event(&mut self, _: usize, event: Event) -> Result<Vec<Frame>, ApiError> {
        let mut events = Vec::new();
        match event {
            Event::Started(_) => {
                for kind in ["response.created", "response.in_progress"] {
                    events.push(json!({"type": kind, "response": self.begun()}));
                }
            }
            Event::Progress(progress) if self.talk.params.return_progress => {
                events.push(json!({"type": "response.in_progress", "response": self.begun()}));
                self.talk.params.add_progress(&mut events[0], &progress);
            }
            Event::Token(token) => {
                self.reader.push(&token.text).iter().for_each(|delta| self.items.add(delta, &mut events));
                if let Some(last) = events.last_mut() {
                    self.talk.params.add_timings(last, &token.timings);
                }
            }
            Event::Done(done) => {
                let response = self.finish(&done.rest, &done, &mut events)?;
                let timings = done.timings.json();
                let kind = format!("response.{}", response["status"].as_str().unwrap_or_default());
                events.push(json!({"type": kind, "response": response, "timings": timings}));
            }
            _ => {}
        }
        Ok(events.into_iter().map(|event| self.frame(event)).collect())
    }

    fn failure(&mut self, error: &ApiError) -> Vec<Frame> {
        let mut response = self.begun();
        response["status"] = json!("failed");
        response["error"] = error.json();
        // llama-server's error, in the event that OpenAI's clients wait for.
        let event = json!({"type": "response.failed", "response": response, "error": error.json()});
        vec![self.frame(event)]
    }
}

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
struct Items {
    open: Option<Item>,
    /// Complete items.
    done: Vec<Value>,
    /// Names of custom tools.
    custom: Vec<String>,
}

impl Items {
    /// Adds a piece to an item of its kind.
    fn add(&mut self, delta: &ChatDelta, events: &mut Vec<Value>) {
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
    fn open_call(&self) -> Option<usize> {
        match self.open.as_ref()?.kind {
            Kind::Call { index, .. } => Some(index),
            _ => None,
        }
    }

    /// Closes the open item, which is complete or not.
    fn close(&mut self, status: &str, events: &mut Vec<Value>) {
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
    use hobbit::engine::ToolCallDelta;

    fn call(id: &str, name: &str, arguments: &str) -> ChatDelta {
        let [id, name, arguments] = [id, name, arguments].map(str::to_owned);
        ChatDelta::ToolCall(ToolCallDelta { index: 0, id, name, arguments })
    }

    #[test]
    fn custom_tools_get_a_text() {
        let mut items = Items { custom: vec!["patch".to_owned()], ..Items::default() };
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
