//! `/v1/responses`: conversations, in the shape of OpenAI's Responses. An answer is a list of items: reasoning,
//! messages and calls, each with its own id.

mod items;
pub mod request;

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::chat::verbose;
use super::dialect::{Dialect, Framing, Whole, answer};
use super::openai::Usage;
use crate::app::App;
use crate::error::ApiError;
use crate::held::Held;
use crate::http::Asked;
use crate::ids::{now, random_id};
use crate::job::{Done, Event, Stop};
use crate::json::{Fields, boolean, shortened, text};
use crate::kept::{Entry, Kept};
use crate::request::chat::{Talk, count};
use items::Items;
use request::{custom_tools, to_chat};

/// `POST /v1/responses`
pub async fn responses(Asked { app, backend, body, held }: Asked) -> Result<Response, ApiError> {
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
    let (talk, scheduled) = Talk::start(&app, backend, held, chat).await?;
    let id = format!("resp_{}", random_id());
    if is_kept {
        app.kept.begin(id.clone(), messages);
    }
    let kept = Arc::clone(&app.kept);
    answer(&app, scheduled, Answer { talk, id, created: now(), kept, items, n: 0 }).await
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
pub async fn input_tokens(Asked { app, backend, body, held }: Asked) -> Result<Json<Value>, ApiError> {
    let previous = previous(&app, &body, &held).await?;
    let n = count(&app, &backend, &held, || to_chat(body, conversation(previous)?)).await?;
    Ok(Json(json!({"input_tokens": n, "object": "response.input_tokens"})))
}

/// The form of OpenAI's Responses.
struct Answer {
    talk: Talk,
    id: String,
    created: u64,
    kept: Arc<Kept>,
    items: Items,
    /// Events sent so far.
    n: usize,
}

impl Answer {
    /// The answer while it is generated.
    fn begun(&self) -> Value {
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress",
            "model": self.talk.texts.backend.name,
            "output": [],
            "error": null,
            "incomplete_details": null,
            "parallel_tool_calls": true,
            "tool_choice": "auto",
            "tools": [],
        })
    }

    /// The complete answer, whose text ends with `rest`; `events` are those of its last items.
    fn finish(&mut self, rest: &str, done: &Done, events: &mut Vec<Value>) -> Value {
        let reader = &mut self.talk.readers[0];
        reader.finish(rest, &done.stop).iter().for_each(|delta| self.items.add(delta, events));
        let is_cut = done.stop == Stop::Limit;
        let is_half = reader.cut().is_some() && self.items.open_call() == reader.cut();
        let status = if is_cut || is_half { "incomplete" } else { "completed" };
        self.items.close(status, events);
        self.kept.finish(&self.id, &self.items.done);
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
        answer
    }

    /// Numbers events.
    fn numbered(&mut self, mut events: Vec<Value>) -> Vec<Value> {
        for event in &mut events {
            event["sequence_number"] = json!(self.n);
            self.n += 1;
        }
        events
    }
}

impl Dialect for Answer {
    const FRAMING: Framing = Framing::Typed;

    fn event(&mut self, _: usize, event: Event) -> Vec<Value> {
        let mut events = Vec::new();
        match event {
            Event::Started(_) => {
                for kind in ["response.created", "response.in_progress"] {
                    events.push(json!({"type": kind, "response": self.begun()}));
                }
            }
            Event::Progress(progress) => {
                events.push(json!({"type": "response.in_progress", "response": self.begun()}));
                self.talk.texts.params.add_progress(&mut events[0], &progress);
            }
            Event::Token(token) => {
                let deltas = self.talk.readers[0].push(&token.text);
                deltas.iter().for_each(|delta| self.items.add(delta, &mut events));
                if let Some(last) = events.last_mut() {
                    self.talk.texts.params.add_timings(last, &token.timings);
                }
            }
            Event::Done(done) => {
                let response = self.finish(&done.rest, &done, &mut events);
                let timings = done.timings.json();
                let kind = format!("response.{}", response["status"].as_str().unwrap_or_default());
                events.push(json!({"type": kind, "response": response, "timings": timings}));
            }
            _ => {}
        }
        self.numbered(events)
    }

    fn failure(&mut self, error: &ApiError) -> Value {
        let mut response = self.begun();
        response["status"] = json!("failed");
        response["error"] = error.json();
        // llama-server's error, in the event that OpenAI's clients wait for.
        let event = json!({"type": "response.failed", "response": response, "error": error.json()});
        self.numbered(vec![event]).remove(0)
    }

    fn whole(mut self, answers: Vec<Whole>) -> Response {
        let Whole { text, done, .. } = &answers[0];
        let mut response = self.finish(text, done, &mut Vec::new());
        response["timings"] = done.timings.json();
        if let Some(verbose) = verbose(&self.talk, done, 0, text) {
            response["__verbose"] = verbose;
        }
        Json(response).into_response()
    }
}
