//! `/v1/responses`: conversations, in the shape of OpenAI's Responses. An answer is a list of items: reasoning,
//! messages and calls, each with its own id.

mod items;
pub mod request;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::chat::answer::Reader;
use super::chat::{Talk, count};
use super::openai::{Usage, now, random_id};
use super::params::shortened;
use super::{Fields, boolean, text};
use crate::app::App;
use crate::error::ApiError;
use crate::held::Held;
use crate::http::Body;
use crate::http::stream::{Frame, Shape, respond, typed, whole};
use crate::job::{Done, Event, Stop};
use crate::kept::Entry;
use items::Items;
use request::{custom_tools, to_chat};

/// `POST /v1/responses`
pub async fn responses(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let previous = previous(&app, &body, &held).await?;
    let is_kept = boolean(&body, "store")?.unwrap_or(true);
    // Instructions hold for one request.
    let n_instructions = usize::from(text(&body, "instructions")?.is_some());
    let items = Items::new(custom_tools(&body));
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
    let Some(entry) = previous else { return Ok(Vec::new()) };
    let unreadable = || ApiError::server("a kept response cannot be read");
    let (mut messages, items) = entry.conversation().ok_or_else(unreadable)?;
    items.iter().try_for_each(|item| request::add(item, &mut messages)).map_err(|_| unreadable())?;
    Ok(messages)
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
        let deltas = self.reader.finish(rest, &done.stop);
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
