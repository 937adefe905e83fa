//! `/v1/chat/completions`: conversations in OpenAI's shape.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};

use super::dialect::{Dialect, Framing, Whole, answer};
use super::native;
use super::openai::{self, Logprobs, Stamp, Usage, finish_reason};
use crate::app::{App, Listed};
use crate::error::ApiError;
use crate::http::{Asked, Body};
use crate::job::{Done, Event, Probabilities, Timings, TokenEvent};
use crate::json::text;
use crate::request::chat::reply::{ChatDelta, Message, ToolCall};
use crate::request::chat::{Talk, count, written};

/// `POST /v1/chat/completions`
pub async fn completions(Asked { app, backend, body, held }: Asked) -> Result<Response, ApiError> {
    let (talk, scheduled) = Talk::start(&app, backend, held, || Ok(body)).await?;
    let params = &talk.texts.params;
    let stamp = Stamp::new(&talk.texts.backend.name, "chat.completion.chunk");
    let listed = params.stream.then(|| app.controls.list(stamp.id(), params.generate.end_reasoning.clone()));
    let states = scheduled.running.iter().map(|_| Streamed::default()).collect();
    let (usage, timings) = (Usage::default(), Timings::default());
    answer(&app, scheduled, Chat { talk, stamp, states, usage, timings, _listed: listed }).await
}

/// `POST /v1/chat/completions/control`
pub async fn control(State(app): State<Arc<App>>, Body(body, _held): Body) -> Result<Json<Value>, ApiError> {
    let id = text(&body, "id")?.ok_or_else(|| ApiError::invalid("missing completion id"))?;
    if text(&body, "action")? != Some("reasoning_end") {
        return Err(ApiError::invalid("unknown control action"));
    }
    Ok(Json(match app.controls.end_reasoning(id) {
        Ok(()) => json!({"success": true}),
        Err(message) => json!({"success": false, "message": message}),
    }))
}

/// `POST /apply-template`
pub async fn apply_template(Asked { app, backend, body, .. }: Asked) -> Result<Json<Value>, ApiError> {
    let prompt = app.work(|| written(&app, &backend, body)).await?;
    Ok(Json(json!({ "prompt": prompt })))
}

/// `POST /v1/chat/completions/input_tokens`
pub async fn input_tokens(Asked { app, backend, body, held }: Asked) -> Result<Json<Value>, ApiError> {
    let n = count(&app, &backend, &held, || Ok(body)).await?;
    Ok(Json(json!({"input_tokens": n, "object": "response.input_tokens"})))
}

/// Details of answer `index` for `__verbose`; `None` if not requested.
pub fn verbose(talk: &Talk, done: &Done, index: usize, content: &str) -> Option<Value> {
    let mut all = native::verbose(&talk.texts, done, index, content)?;
    let settings = &mut all["generation_settings"];
    settings["chat_format"] = json!(talk.format);
    settings["reasoning_format"] = json!(talk.reasoning_format);
    settings["generation_prompt"] = json!(talk.texts.params.generate.sampling.generation_prompt);
    Some(all)
}

/// OpenAI's form.
struct Chat {
    talk: Talk,
    stamp: Stamp,
    states: Vec<Streamed>,
    usage: Usage,
    /// Timings of the answer that ended last.
    timings: Timings,
    /// A stream is listed for control requests while it lasts.
    _listed: Option<Listed>,
}

/// Progress of one answer in a stream.
#[derive(Default)]
struct Streamed {
    /// The role has been sent.
    has_begun: bool,
    has_calls: bool,
    /// Probabilities of tokens whose text is not sent yet.
    probabilities: Vec<Probabilities>,
}

#[derive(Serialize)]
struct Choice<'a> {
    finish_reason: &'static str,
    index: usize,
    message: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Logprobs<'a>>,
}

impl Chat {
    fn chunk(&self, index: usize, delta: Value, finish_reason: Option<&str>) -> Value {
        self.stamp.part(json!([{"finish_reason": finish_reason, "index": index, "delta": delta}]))
    }

    fn role(&self, index: usize) -> Value {
        self.chunk(index, json!({"role": "assistant", "content": null}), None)
    }

    /// The role, unless it was sent already.
    fn begin(&mut self, index: usize) -> Option<Value> {
        let is_first = !std::mem::replace(&mut self.states[index].has_begun, true);
        is_first.then(|| self.role(index))
    }

    /// Chunks for the new deltas; the last one carries their tokens' probabilities.
    fn chunks(&mut self, index: usize, deltas: &[ChatDelta]) -> Vec<Value> {
        let mut chunks: Vec<Value> = deltas.iter().map(|delta| self.chunk(index, delta_json(delta), None)).collect();
        let state = &mut self.states[index];
        state.has_calls |= deltas.iter().any(|delta| matches!(delta, ChatDelta::ToolCall(_)));
        if let Some(last) = chunks.last_mut()
            && !state.probabilities.is_empty()
        {
            let probabilities = std::mem::take(&mut state.probabilities);
            last["choices"][0]["logprobs"] = json!(Logprobs::new(&probabilities, self.talk.n_top));
        }
        chunks
    }

    fn token(&mut self, index: usize, token: TokenEvent) -> Vec<Value> {
        let mut chunks: Vec<Value> = self.begin(index).into_iter().collect();
        self.states[index].probabilities.extend(token.probabilities);
        let deltas = self.talk.readers[index].push(&token.text);
        let mut new = self.chunks(index, &deltas);
        if let Some(last) = new.last_mut() {
            self.talk.texts.params.add_timings(last, &token.timings);
        }
        chunks.append(&mut new);
        chunks
    }

    fn done(&mut self, index: usize, done: &Done) -> Vec<Value> {
        let mut chunks: Vec<Value> = self.begin(index).into_iter().collect();
        let n_before = chunks.len();
        let probabilities = &mut self.states[index].probabilities;
        probabilities.truncate(probabilities.len().saturating_sub(done.n_swallowed));
        let deltas = self.talk.readers[index].finish(&done.rest, &done.stop);
        chunks.append(&mut self.chunks(index, &deltas));
        let has_calls = self.states[index].has_calls && self.talk.readers[index].cut().is_none();
        let mut last = self.chunk(index, json!({}), Some(finish_reason(&done.stop, has_calls)));
        if !self.talk.include_usage {
            last["timings"] = done.timings.json();
        }
        chunks.push(last);
        if let Some(verbose) = verbose(&self.talk, done, index, "") {
            chunks[n_before]["__verbose"] = verbose;
        }
        self.usage.add(Usage::of(done), index, self.talk.texts.params.n);
        self.timings = done.timings;
        chunks
    }
}

impl Dialect for Chat {
    const FRAMING: Framing = Framing::UntilDone;

    fn event(&mut self, index: usize, event: Event) -> Vec<Value> {
        match event {
            Event::Progress(progress) => {
                self.states[index].has_begun = true;
                let mut chunk = self.role(index);
                self.talk.texts.params.add_progress(&mut chunk, &progress);
                vec![chunk]
            }
            Event::Token(token) => self.token(index, *token),
            Event::Done(done) => self.done(index, &done),
            _ => Vec::new(),
        }
    }

    fn end(&mut self) -> Option<Value> {
        self.talk.include_usage.then(|| {
            let mut last = self.stamp.part(json!([]));
            last["usage"] = self.usage.json();
            last["timings"] = self.timings.json();
            last
        })
    }

    fn whole(mut self, answers: Vec<Whole>) -> Response {
        let Talk { readers, n_top, texts, .. } = &mut self.talk;
        let choices = answers.iter().zip(readers).enumerate().map(|(index, (whole, reader))| {
            let message = reader.message(&whole.text, &whole.done.stop);
            let has_calls = !message.calls.is_empty() && reader.cut().is_none();
            Choice {
                finish_reason: finish_reason(&whole.done.stop, has_calls),
                index,
                message: message_json(&message),
                logprobs: (texts.params.generate.n_probs > 0).then(|| Logprobs::new(&whole.probabilities, *n_top)),
            }
        });
        let choices = choices.collect();
        let verbose = verbose(&self.talk, &answers[0].done, 0, &answers[0].text);
        let stamp = Stamp::new(&self.talk.texts.backend.name, "chat.completion");
        openai::whole(&stamp, self.talk.texts.params.n, &answers, choices, verbose)
    }
}

/// A message in OpenAI's form.
fn message_json(message: &Message) -> Value {
    let mut value = json!({"role": "assistant", "content": message.content});
    if !message.reasoning.is_empty() {
        value["reasoning_content"] = json!(message.reasoning);
    }
    if !message.calls.is_empty() {
        let call = |call: &ToolCall| {
            json!({
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
                "id": call.id,
            })
        };
        value["tool_calls"] = message.calls.iter().map(call).collect();
    }
    value
}

/// A delta in OpenAI's form.
fn delta_json(delta: &ChatDelta) -> Value {
    match delta {
        ChatDelta::Reasoning(text) => json!({"reasoning_content": text}),
        ChatDelta::Content(text) => json!({"content": text}),
        ChatDelta::ToolCall(call) => {
            let mut part = json!({"index": call.index, "function": {}});
            if !call.name.is_empty() {
                (part["id"], part["type"]) = (json!(call.id), json!("function"));
                part["function"]["name"] = json!(call.name);
            }
            part["function"]["arguments"] = json!(call.arguments);
            json!({"tool_calls": [part]})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::chat::reply::ToolCallDelta;

    fn call(index: usize, name: &str, arguments: &str) -> ChatDelta {
        let id = if name.is_empty() { String::new() } else { format!("id{index}") };
        ChatDelta::ToolCall(ToolCallDelta { index, id, name: name.to_owned(), arguments: arguments.to_owned() })
    }

    #[test]
    fn pieces_make_a_message() {
        let mut message = Message::default();
        for delta in [
            ChatDelta::Reasoning("hm".to_owned()),
            ChatDelta::Content("J".to_owned()),
            ChatDelta::Content("a".to_owned()),
            call(0, "get", "{\"a\""),
            call(0, "", ":1}"),
        ] {
            message.add(&delta);
        }
        assert_eq!(
            message_json(&message),
            json!({
                "role": "assistant", "content": "Ja", "reasoning_content": "hm",
                "tool_calls": [
                    {"type": "function", "function": {"name": "get", "arguments": "{\"a\":1}"}, "id": "id0"},
                ],
            })
        );
        assert_eq!(message_json(&Message::default()), json!({"role": "assistant", "content": ""}));
    }

    #[test]
    fn pieces_in_openai_form() {
        assert_eq!(delta_json(&ChatDelta::Content("x".to_owned())), json!({"content": "x"}));
        let function = json!({"name": "get", "arguments": "{"});
        let first = json!({"index": 1, "id": "id1", "type": "function", "function": function});
        assert_eq!(delta_json(&call(1, "get", "{")), json!({"tool_calls": [first]}));
        assert_eq!(
            delta_json(&call(1, "", "}")),
            json!({"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]})
        );
    }
}
