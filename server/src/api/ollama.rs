//! Ollama's interface to the loaded model: `/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings`, and what its
//! clients ask first.

mod request;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::dialect::{self, Dialect, Framing, Whole};
use super::embeddings;
use crate::app::App;
use crate::backend::Backend;
use crate::error::ApiError;
use crate::held::Held;
use crate::http::Asked;
use crate::ids::now;
use crate::job::{Done, Event, Stop};
use crate::json::{Fields, boolean, get, merge, text};
use crate::request::chat::Talk;
use crate::request::chat::reply::{ChatDelta, Message};
use request::to_openai;

/// An error in Ollama's form.
pub struct Plain(ApiError);

impl From<ApiError> for Plain {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Plain {
    fn into_response(self) -> Response {
        (self.0.status, Json(json!({"error": self.0.message}))).into_response()
    }
}

/// A time in seconds since 1970, as RFC 3339 writes it.
pub fn date(seconds: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
}

/// `GET /api/version`
pub async fn version() -> Json<Value> {
    Json(json!({"version": hobbit_programs::VERSION}))
}

/// The model, as lists have it.
fn described(app: &App, backend: &Backend) -> Value {
    json!({
        "name": backend.name, "model": backend.name, "modified_at": date(app.began),
        "size": backend.model.info().tensor_bytes, "digest": "", "details": details(backend),
    })
}

fn details(backend: &Backend) -> Value {
    let info = backend.model.info();
    json!({
        "parent_model": "", "format": "gguf", "family": info.architecture, "families": [info.architecture],
        "parameter_size": format!("{:.1}B", info.n_params as f64 / 1e9), "quantization_level": info.description,
    })
}

/// `GET /api/tags`
pub async fn tags(State(app): State<Arc<App>>) -> Result<Json<Value>, Plain> {
    Ok(Json(json!({"models": [described(&app, app.backend()?)]})))
}

/// `GET /api/ps`
pub async fn running(State(app): State<Arc<App>>) -> Result<Json<Value>, Plain> {
    let backend = app.backend()?;
    let mut model = described(&app, backend);
    // The model stays for as long as the server runs.
    let more = json!({
        "expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": backend.n_ctx,
    });
    merge(&mut model, more);
    Ok(Json(json!({"models": [model]})))
}

/// `POST /api/show`
pub async fn show(asked: Result<Asked, ApiError>) -> Result<Json<Value>, Plain> {
    let Asked { app, backend, .. } = asked?;
    let info = backend.model.info();
    let embeds = app.settings.slots.embeddings.0;
    let capabilities = [
        ("completion", !embeds),
        ("embedding", embeds),
        ("tools", backend.template_can("supports_tools")),
        ("thinking", backend.templates.supports_thinking()),
        ("vision", backend.takes_media()[0]),
    ];
    let capabilities: Vec<&str> = capabilities.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
    let key = |name: &str| format!("{}.{name}", info.architecture);
    Ok(Json(json!({
        "modified_at": date(app.began), "license": "", "modelfile": "", "parameters": "",
        "template": backend.templates.source(), "details": details(&backend), "capabilities": capabilities,
        "model_info": {
            "general.architecture": info.architecture, "general.parameter_count": info.n_params,
            key("context_length"): info.n_ctx_train, key("embedding_length"): backend.model.n_embd(),
            key("block_count"): info.n_layer, key("expert_count"): info.n_expert,
            key("expert_used_count"): info.n_expert_used,
        },
    })))
}

/// `POST /api/chat`
pub async fn chat(asked: Result<Asked, ApiError>) -> Result<Response, Plain> {
    answer(asked?, "message").await
}

/// `POST /api/generate`
pub async fn generate(asked: Result<Asked, ApiError>) -> Result<Response, Plain> {
    answer(asked?, "response").await
}

async fn answer(Asked { app, backend, body, held }: Asked, field: &'static str) -> Result<Response, Plain> {
    let (began, streams) = (Instant::now(), boolean(&body, "stream")?.unwrap_or(true));
    check_keep_alive(&body)?;
    if is_load(&body) {
        if get(&body, "keep_alive").is_some_and(unloads) {
            let message = "this server keeps its only model loaded: stop it, or start it with --models-dir";
            return Err(ApiError::field("keep_alive", message).into());
        }
        let mut line = line(&backend.name, field, &json!({"content": ""}));
        merge(&mut line, json!({"done": true, "done_reason": "load"}));
        return Ok(Json(line).into_response());
    }
    let (talk, mut scheduled) = Talk::start(&app, backend, held, || to_openai(body)).await?;
    scheduled.stream = streams;
    Ok(dialect::answer(&app, scheduled, Answer { talk, field, began, calls: Message::default() }).await?)
}

/// Whether this `keep_alive` asks for the model to be unloaded.
pub fn unloads(keep_alive: &Value) -> bool {
    seconds(keep_alive) == Some(0.0)
}

/// The seconds of a `keep_alive`: a number, or a duration as `1h30m`. Those below zero stand for ever.
fn seconds(keep_alive: &Value) -> Option<f64> {
    let Value::String(text) = keep_alive else { return keep_alive.as_f64() };
    let length = text.strip_prefix('-').unwrap_or(text);
    let duration = || humantime::parse_duration(length).ok().map(|duration| duration.as_secs_f64());
    let seconds = length.parse().ok().or_else(duration)?;
    Some(if length == text { seconds } else { -seconds })
}

/// Checks the request's `keep_alive`.
fn check_keep_alive(body: &Fields) -> Result<(), ApiError> {
    match get(body, "keep_alive") {
        Some(given) if seconds(given).is_none() => {
            Err(ApiError::field("keep_alive", "expected seconds as a number, or a duration such as \"5m\""))
        }
        _ => Ok(()),
    }
}

/// Whether a request only asks for the model to be loaded.
fn is_load(body: &Fields) -> bool {
    let is_empty = |name: &str| match get(body, name) {
        None => true,
        Some(Value::String(text)) => text.is_empty(),
        Some(Value::Array(list)) => list.is_empty(),
        Some(_) => false,
    };
    is_empty("messages") && is_empty("prompt")
}

/// A line of `model` with a part of a message.
fn line(model: &str, field: &str, message: &Value) -> Value {
    let mut line = json!({"model": model, "created_at": date(now()), "done": false});
    if field == "response" {
        line["response"] = message["content"].clone();
        if let Some(thinking) = message.get("thinking") {
            line["thinking"] = thinking.clone();
        }
    } else {
        line["message"] = json!({"role": "assistant"});
        merge(&mut line["message"], message.clone());
    }
    line
}

/// A message in Ollama's form.
fn message_json(Message { content, reasoning, calls }: &Message) -> Value {
    let mut message = json!({"content": content});
    if !reasoning.is_empty() {
        message["thinking"] = json!(reasoning);
    }
    if !calls.is_empty() {
        // A call that was cut off is not valid JSON.
        let arguments = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|_| json!({}));
        let calls = calls.iter().map(|call| {
            let function = json!({"name": call.name, "arguments": arguments(&call.arguments)});
            json!({"id": call.id, "function": function})
        });
        message["tool_calls"] = calls.collect();
    }
    message
}

/// Ollama's form.
struct Answer {
    talk: Talk,
    /// `message`, or `response` for a text alone.
    field: &'static str,
    began: Instant,
    /// The tool calls of a stream, which are sent at its end.
    calls: Message,
}

impl Answer {
    fn line(&self, message: &Value) -> Value {
        line(&self.talk.texts.backend.name, self.field, message)
    }

    /// The last line, with a part of the message.
    fn last(&self, message: &Value, done: &Done) -> Value {
        let nanoseconds = |ms: f64| (ms * 1e6) as u64;
        let mut line = self.line(message);
        let more = json!({
            "done": true,
            "done_reason": if done.stop == Stop::Limit { "length" } else { "stop" },
            "total_duration": nanoseconds(self.began.elapsed().as_secs_f64() * 1e3),
            "load_duration": 0,
            "prompt_eval_count": done.n_prompt,
            "prompt_eval_duration": nanoseconds(done.timings.prompt_ms),
            "eval_count": done.timings.n_predicted,
            "eval_duration": nanoseconds(done.timings.predicted_ms),
        });
        merge(&mut line, more);
        line
    }

    /// Lines for new parts; calls are kept.
    fn lines(&mut self, deltas: &[ChatDelta]) -> Vec<Value> {
        let mut lines = Vec::new();
        for delta in deltas {
            match delta {
                ChatDelta::Content(text) => lines.push(self.line(&json!({"content": text}))),
                ChatDelta::Reasoning(text) => lines.push(self.line(&json!({"content": "", "thinking": text}))),
                ChatDelta::ToolCall(_) => self.calls.add(delta),
            }
        }
        lines
    }
}

impl Dialect for Answer {
    const FRAMING: Framing = Framing::Lines;

    fn event(&mut self, _: usize, event: Event) -> Vec<Value> {
        match event {
            Event::Token(token) => {
                let deltas = self.talk.readers[0].push(&token.text);
                self.lines(&deltas)
            }
            Event::Done(done) => {
                let deltas = self.talk.readers[0].finish(&done.rest, &done.stop);
                let mut lines = self.lines(&deltas);
                // A call within which the answer ended is none.
                self.calls.calls.truncate(self.talk.readers[0].cut().unwrap_or(usize::MAX));
                if !self.calls.calls.is_empty() {
                    lines.push(self.line(&message_json(&self.calls)));
                }
                lines.push(self.last(&json!({"content": ""}), &done));
                lines
            }
            _ => Vec::new(),
        }
    }

    fn failure(&mut self, error: &ApiError) -> Value {
        json!({"error": error.message})
    }

    fn whole(mut self, answers: Vec<Whole>) -> Response {
        let Whole { text, done, .. } = &answers[0];
        let message = self.talk.readers[0].message(text, &done.stop);
        Json(self.last(&message_json(&message), done)).into_response()
    }
}

/// `POST /api/embed`
pub async fn embed(asked: Result<Asked, ApiError>) -> Result<Response, Plain> {
    let Asked { app, backend, mut body, held } = asked?;
    let began = Instant::now();
    let truncates = boolean(&body, "truncate")?.unwrap_or(true);
    let all = embedded(&app, &backend, &mut body, held, truncates).await?;
    let answer = Embedded {
        model: &backend.name,
        embeddings: all.iter().flat_map(|input| &input.rows).map(Vec::as_slice).collect(),
        total_duration: began.elapsed().as_nanos() as u64,
        load_duration: 0,
        prompt_eval_count: all.iter().map(|input| input.n_tokens).sum(),
    };
    Ok(app.work(|| Json(answer).into_response()).await)
}

/// `POST /api/embeddings`: one text, whose numbers are not scaled.
pub async fn embeddings(asked: Result<Asked, ApiError>) -> Result<Response, Plain> {
    let Asked { app, backend, mut body, held } = asked?;
    let prompt = text(&body, "prompt")?.ok_or_else(|| ApiError::invalid("\"prompt\" is required"))?;
    let input = Value::from(prompt);
    body.insert("input".to_owned(), input);
    body.insert("embd_normalize".to_owned(), json!(-1));
    let all = embedded(&app, &backend, &mut body, held, true).await?;
    let row = all.first().and_then(|input| input.rows.first()).map_or(&[][..], Vec::as_slice);
    Ok(Json(BTreeMap::from([("embedding", row)])).into_response())
}

/// The vectors of all inputs, one for each.
async fn embedded(
    app: &App,
    backend: &Backend,
    body: &mut Fields,
    held: Held,
    truncates: bool,
) -> Result<Vec<embeddings::Embedded>, ApiError> {
    check_keep_alive(body)?;
    let all = embeddings::embed(app, backend, body, held, truncates).await?;
    if all.iter().any(|input| input.rows.len() != 1) {
        return Err(ApiError::invalid("pooling 'none' gives no embedding of a text: start with another --pooling"));
    }
    Ok(all)
}

/// Numbers are written directly as text: JSON values would take ten times the memory.
#[derive(serde::Serialize)]
struct Embedded<'a> {
    model: &'a str,
    embeddings: Vec<&'a [f32]>,
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}
