//! Ollama's interface to the loaded model: `/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings`, and what its
//! clients ask first.

mod request;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hobbit::engine::ChatDelta;
use serde_json::{Value, json};

use super::chat::Talk;
use super::chat::answer::{Message, Reader};
use super::openai::now;
use super::params::merge;
use super::{Fields, boolean, embeddings, get, text};
use crate::app::App;
use crate::error::ApiError;
use crate::held::Held;
use crate::http::Body;
use crate::http::stream::{Frame, Shape, respond_in_lines, unnamed, whole};
use crate::job::{Done, Event, Stop};
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
fn described(app: &App) -> Result<Value, ApiError> {
    let info = app.loaded()?.model.info();
    Ok(json!({
        "name": app.model_name(), "model": app.model_name(), "modified_at": date(app.began), "size": info.tensor_bytes,
        "digest": "", "details": details(app)?,
    }))
}

fn details(app: &App) -> Result<Value, ApiError> {
    let info = app.loaded()?.model.info();
    Ok(json!({
        "parent_model": "", "format": "gguf", "family": info.architecture, "families": [info.architecture],
        "parameter_size": format!("{:.1}B", info.n_params as f64 / 1e9), "quantization_level": info.description,
    }))
}

/// `GET /api/tags`
pub async fn tags(State(app): State<Arc<App>>) -> Result<Json<Value>, Plain> {
    Ok(Json(json!({"models": [described(&app)?]})))
}

/// `GET /api/ps`
pub async fn running(State(app): State<Arc<App>>) -> Result<Json<Value>, Plain> {
    let mut model = described(&app)?;
    // The model stays for as long as the server runs.
    let more = json!({
        "expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": app.loaded()?.n_ctx,
    });
    merge(&mut model, more);
    Ok(Json(json!({"models": [model]})))
}

/// `POST /api/show`
pub async fn show(State(app): State<Arc<App>>, body: Result<Body, ApiError>) -> Result<Json<Value>, Plain> {
    body?;
    let loaded = app.loaded()?;
    let info = loaded.model.info();
    let has = |name: &str| loaded.templates.capabilities().get(name).copied().unwrap_or(false);
    let embeds = app.settings.slots.embeddings.0;
    let sees = loaded.projector.as_ref().is_some_and(|(own, _)| own.takes_images());
    let capabilities = [
        ("completion", !embeds),
        ("embedding", embeds),
        ("tools", has("supports_tools")),
        ("thinking", loaded.templates.supports_thinking()),
        ("vision", sees),
    ];
    let capabilities: Vec<&str> = capabilities.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
    let own = |name: &str| format!("{}.{name}", info.architecture);
    Ok(Json(json!({
        "modified_at": date(app.began), "license": "", "modelfile": "", "parameters": "",
        "template": loaded.templates.source(), "details": details(&app)?, "capabilities": capabilities,
        "model_info": {
            "general.architecture": info.architecture, "general.parameter_count": info.n_params,
            own("context_length"): info.n_ctx_train, own("embedding_length"): loaded.model.n_embd(),
            own("block_count"): info.n_layer, own("expert_count"): info.n_expert,
            own("expert_used_count"): info.n_expert_used,
        },
    })))
}

/// `POST /api/chat`
pub async fn chat(State(app): State<Arc<App>>, body: Result<Body, ApiError>) -> Result<Response, Plain> {
    answer(app, body?, "message").await
}

/// `POST /api/generate`
pub async fn generate(State(app): State<Arc<App>>, body: Result<Body, ApiError>) -> Result<Response, Plain> {
    answer(app, body?, "response").await
}

async fn answer(app: Arc<App>, Body(body, held): Body, field: &'static str) -> Result<Response, Plain> {
    let loaded = app.loaded()?;
    let (began, streams) = (Instant::now(), boolean(&body, "stream")?.unwrap_or(true));
    check_keep_alive(&body)?;
    if is_load(&body) {
        if get(&body, "keep_alive").is_some_and(unloads) {
            let message = "this server keeps its only model loaded: stop it, or start it with --models-dir";
            return Err(ApiError::field("keep_alive", message).into());
        }
        let mut line = Answer::line(&app, field, &json!({"content": ""}));
        merge(&mut line, json!({"done": true, "done_reason": "load"}));
        return Ok(Json(line).into_response());
    }
    let mut talk = Talk::new(&app, loaded, || to_openai(body), held).await?;
    let mut running = talk.start(loaded).await?;
    let reader = Reader::new(&talk.prompt)?;
    let mut own = Answer { talk, reader, field, began, unsent: Message::default() };
    if streams {
        return Ok(respond_in_lines(running, own).await?);
    }
    let whole = whole(running.remove(0)).await?;
    own.unsent = app.work(|| Message::of(&own.talk.prompt, &whole)).await?;
    let mut line = Answer::line(&app, field, &own.message());
    merge(&mut line, own.last(&whole.done));
    Ok(Json(line).into_response())
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

/// An answer, complete or as lines.
struct Answer {
    talk: Talk,
    reader: Reader,
    /// `message`, or `response` for a text alone.
    field: &'static str,
    began: Instant,
    /// Parts not sent yet: the whole answer, or the tool calls of a stream, which are sent at its end.
    unsent: Message,
}

impl Answer {
    /// A line with a part of a message.
    fn line(app: &App, field: &str, message: &Value) -> Value {
        let mut line = json!({"model": app.model_name(), "created_at": date(now()), "done": false});
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

    /// The message that is not sent yet.
    fn message(&self) -> Value {
        let Message { content, reasoning, calls, .. } = &self.unsent;
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

    /// The fields of the last line.
    fn last(&self, done: &Done) -> Value {
        let nanoseconds = |ms: f64| (ms * 1e6) as u64;
        json!({
            "done": true,
            "done_reason": if done.stop == Stop::Limit { "length" } else { "stop" },
            "total_duration": nanoseconds(self.began.elapsed().as_secs_f64() * 1e3),
            "load_duration": 0,
            "prompt_eval_count": done.n_prompt,
            "prompt_eval_duration": nanoseconds(done.timings.prompt_ms),
            "eval_count": done.n_decoded,
            "eval_duration": nanoseconds(done.timings.predicted_ms),
        })
    }

    /// Lines for new parts; calls are kept.
    fn lines(&mut self, deltas: &[ChatDelta]) -> Vec<Value> {
        let mut lines = Vec::new();
        for delta in deltas {
            let message = match delta {
                ChatDelta::Content(text) => json!({"content": text}),
                ChatDelta::Reasoning(text) => json!({"content": "", "thinking": text}),
                ChatDelta::ToolCall(_) => {
                    self.unsent.add(delta);
                    continue;
                }
            };
            lines.push(Self::line(&self.talk.app, self.field, &message));
        }
        lines
    }
}

impl Shape for Answer {
    fn event(&mut self, _: usize, event: Event) -> Result<Vec<Frame>, ApiError> {
        let lines = match event {
            Event::Token(token) => {
                let deltas = self.reader.push(&token.text);
                self.lines(&deltas)
            }
            Event::Done(done) => {
                let deltas = self.reader.finish(&done.rest, &done.stop);
                let mut lines = self.lines(&deltas);
                // A call within which the answer ended is none.
                self.unsent.calls.truncate(self.reader.cut().unwrap_or(usize::MAX));
                if !self.unsent.calls.is_empty() {
                    lines.push(Self::line(&self.talk.app, self.field, &self.message()));
                    self.unsent = Message::default();
                }
                let mut last = Self::line(&self.talk.app, self.field, &json!({"content": ""}));
                merge(&mut last, self.last(&done));
                lines.push(last);
                lines
            }
            _ => Vec::new(),
        };
        Ok(lines.iter().map(unnamed).collect())
    }

    fn failure(&mut self, error: &ApiError) -> Vec<Frame> {
        vec![unnamed(&json!({"error": error.message}))]
    }
}

/// `POST /api/embed`
pub async fn embed(State(app): State<Arc<App>>, body: Result<Body, ApiError>) -> Result<Response, Plain> {
    let Body(mut body, held) = body?;
    let began = Instant::now();
    let truncates = boolean(&body, "truncate")?.unwrap_or(true);
    let all = embedded(&app, &mut body, held, truncates).await?;
    let n_tokens: usize = all.iter().map(|own| own.n_tokens).sum();
    let answer = Embedded {
        model: app.model_name(),
        embeddings: all.iter().flat_map(|own| &own.rows).map(Vec::as_slice).collect(),
        total_duration: began.elapsed().as_nanos() as u64,
        load_duration: 0,
        prompt_eval_count: n_tokens,
    };
    Ok(app.work(|| Json(answer).into_response()).await)
}

/// `POST /api/embeddings`: one text, whose numbers are not scaled.
pub async fn embeddings(State(app): State<Arc<App>>, body: Result<Body, ApiError>) -> Result<Response, Plain> {
    let Body(mut body, held) = body?;
    let prompt = text(&body, "prompt")?.ok_or_else(|| ApiError::invalid("\"prompt\" is required"))?;
    let input = Value::from(prompt);
    body.insert("input".to_owned(), input);
    body.insert("embd_normalize".to_owned(), json!(-1));
    let all = embedded(&app, &mut body, held, true).await?;
    let row = all.first().and_then(|own| own.rows.first()).map_or(&[][..], Vec::as_slice);
    Ok(Json(BTreeMap::from([("embedding", row)])).into_response())
}

/// The vectors of all inputs, one for each.
async fn embedded(
    app: &App,
    body: &mut Fields,
    held: Held,
    truncates: bool,
) -> Result<Vec<embeddings::Embedded>, ApiError> {
    check_keep_alive(body)?;
    let all = embeddings::embed(app, body, held, truncates).await?;
    if all.iter().any(|own| own.rows.len() != 1) {
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
