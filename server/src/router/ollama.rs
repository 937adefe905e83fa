//! Ollama's interface to several models: lists, and the models of the Hub. Other requests go to the model they name.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequest, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::sync::mpsc::{self, Sender};

use super::list::Entry;
use super::models::Models;
use super::named;
use crate::api::ollama::{Plain, date, unloads};
use crate::error::ApiError;
use crate::http;
use crate::ids::now;
use crate::json::{self, Fields};
use hobbit_common::exit::in_words;
use hobbit_common::hub::{Source, Witness};
use hobbit_programs::download;

/// Time between two lines about a download.
const BEAT: Duration = Duration::from_millis(100);
/// Lines that may wait for a client.
const LINES_MAX: usize = 16;

fn described(entry: &Entry) -> Value {
    json!({
        "name": entry.name, "model": entry.name, "modified_at": date(entry.modified), "size": entry.bytes,
        "digest": "", "details": {
            "parent_model": "", "format": "gguf", "family": "", "families": [], "parameter_size": "",
            "quantization_level": "",
        },
    })
}

/// `GET /api/tags`
pub async fn tags(State(models): State<Arc<Models>>) -> Json<Value> {
    let listed: Vec<Value> = models.listed().values().map(described).collect();
    Json(json!({"models": listed}))
}

/// `GET /api/ps`
pub async fn running(State(models): State<Arc<Models>>) -> Json<Value> {
    let idle = u64::try_from(models.given.args.sleep_idle_seconds).ok();
    let loaded = models.loaded().into_iter().filter_map(|(name, unused)| {
        let mut model = described(&models.find(&name).ok()?);
        let left = idle.map(|idle| date(now() + idle.saturating_sub(unused.as_secs())));
        model["expires_at"] = left.unwrap_or_else(|| "9999-12-31T23:59:59Z".to_owned()).into();
        model["size_vram"] = 0.into();
        Some(model)
    });
    Json(json!({"models": loaded.collect::<Vec<_>>()}))
}

/// The stay that a request's `keep_alive` asks for its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    Loaded,
    /// It is unloaded after the answer.
    UntilAnswered,
    /// It is unloaded, and nothing else is asked.
    Not,
}

impl Stay {
    /// As a request's path and body say.
    pub fn of(path: &str, body: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Asked<'a> {
            keep_alive: Option<Value>,
            #[serde(borrow)]
            prompt: Option<Cow<'a, str>>,
            messages: Option<Vec<IgnoredAny>>,
        }
        if !["/api/generate", "/api/chat", "/api/embed", "/api/embeddings"].contains(&path) {
            return Self::Loaded;
        }
        // The model's process refuses other types.
        let Ok(asked) = serde_json::from_slice::<Asked>(body) else { return Self::Loaded };
        if !asked.keep_alive.as_ref().is_some_and(unloads) {
            return Self::Loaded;
        }
        let is_empty = asked.prompt.is_none_or(|prompt| prompt.is_empty())
            && asked.messages.is_none_or(|messages| messages.is_empty());
        if is_empty && !path.starts_with("/api/embed") { Self::Not } else { Self::UntilAnswered }
    }
}

/// The answer to a request that unloads a model.
pub fn unloaded(path: &str, name: &str) -> Response {
    let mut answer = json!({"model": name, "created_at": date(now()), "done": true, "done_reason": "unload"});
    match path {
        "/api/chat" => answer["message"] = json!({"role": "assistant", "content": ""}),
        _ => answer["response"] = json!(""),
    }
    Json(answer).into_response()
}

/// The body of a request that changes what is on the disk.
async fn changing(models: &Models, request: Request) -> Result<Fields, ApiError> {
    if !models.given.args.models_pull.0 {
        let message = "clients of this server may not download or remove models; --models-pull allows it";
        return Err(ApiError::forbidden(message));
    }
    let http::Body(body, _) = http::Body::from_request(request, &models.app).await?;
    Ok(body)
}

/// `DELETE /api/delete`: only models of the Hub's cache, which `/api/pull` can fetch again.
pub async fn remove(State(models): State<Arc<Models>>, request: Request) -> Result<(), Plain> {
    let body = changing(&models, request).await?;
    let entry = models.find(named(&body)?)?;
    let kept = entry.kept.ok_or_else(|| {
        ApiError::forbidden(format!(
            "'{}' is a file of --models-dir; only downloaded models can be removed",
            entry.name
        ))
    })?;
    models.leave(&entry.name);
    let removed = hobbit_common::hub::kept::remove(&kept, &models.given.places);
    removed.map_err(|error| ApiError::server(format!("'{}' was not removed: {error}", entry.name)))?;
    models.listed();
    Ok(())
}

/// `POST /api/pull`
pub async fn pull(State(models): State<Arc<Models>>, request: Request) -> Result<Response, Plain> {
    let body = changing(&models, request).await?;
    let name = named(&body)?;
    let streams = json::boolean(&body, "stream")?.unwrap_or(true);
    let repo = ["hf.co/", "huggingface.co/"].iter().find_map(|host| name.strip_prefix(host)).unwrap_or(name);
    let source = Source::repo(repo.strip_suffix(":latest").unwrap_or(repo), None).map_err(ApiError::invalid)?;
    let turn = Arc::clone(&models.pulling).try_acquire_owned();
    let turn = turn.map_err(|_| ApiError::busy("several other models are being downloaded"))?;
    let (lines, mut incoming) = mpsc::channel(LINES_MAX);
    tokio::task::spawn_blocking(move || {
        let witness = Reporter { lines, file: RefCell::default(), size: Cell::default(), last: Cell::default() };
        witness.send(json!({"status": "pulling manifest"}));
        let last = match download::fetch(&source, &models.given.places, &witness) {
            Ok(_) => json!({"status": "success"}),
            Err(error) => json!({"error": in_words(&error)}),
        };
        models.listed();
        // A client that has the last line may ask for the next download.
        drop(turn);
        witness.send(last);
    });
    if streams {
        let lines = stream::unfold(incoming, |mut incoming| async move { Some((incoming.recv().await?, incoming)) });
        let lines = lines.map(|line: Value| Ok::<_, std::convert::Infallible>(format!("{line}\n")));
        return Ok(([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response());
    }
    let mut last = Value::Null;
    while let Some(line) = incoming.recv().await {
        last = line;
    }
    match last["error"].as_str() {
        Some(error) => Err(ApiError::server(error).into()),
        None => Ok(Json(last).into_response()),
    }
}

/// Progress as Ollama's lines. A download whose client has left stops; asked again, it goes on.
struct Reporter {
    lines: Sender<Value>,
    file: RefCell<String>,
    size: Cell<Option<u64>>,
    last: Cell<Option<Instant>>,
}

impl Reporter {
    fn send(&self, line: Value) {
        let _ = self.lines.blocking_send(line);
    }

    fn progress(&self, bytes: u64) {
        let name = self.file.borrow();
        let mut line = json!({"status": format!("pulling {name}"), "digest": *name, "completed": bytes});
        if let Some(size) = self.size.get() {
            line["total"] = size.into();
        }
        self.send(line);
        self.last.set(Some(Instant::now()));
    }
}

impl Witness for Reporter {
    fn note(&self, text: &str) {
        self.send(json!({"status": text}));
    }

    fn begin(&self, name: &str, size: Option<u64>, have: u64) {
        name.clone_into(&mut self.file.borrow_mut());
        self.size.set(size);
        self.progress(have);
    }

    fn at(&self, bytes: u64) {
        let is_last = self.size.get() == Some(bytes);
        if is_last || self.last.get().is_none_or(|last| last.elapsed() >= BEAT) {
            self.progress(bytes);
        }
    }

    fn end(&self) {}

    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }

    fn is_wanted(&self) -> bool {
        !self.lines.is_closed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_alive_0_unloads() {
        for (path, body, expected) in [
            ("/api/generate", json!({"keep_alive": 0}), Stay::Not),
            ("/api/generate", json!({"keep_alive": "0s", "prompt": ""}), Stay::Not),
            ("/api/chat", json!({"keep_alive": 0.0, "messages": []}), Stay::Not),
            (
                "/api/chat",
                json!({"keep_alive": "0", "messages": [{"role": "user", "content": "x"}]}),
                Stay::UntilAnswered,
            ),
            ("/api/generate", json!({"keep_alive": 0, "prompt": "a\nb"}), Stay::UntilAnswered),
            ("/api/embed", json!({"keep_alive": 0, "input": "x"}), Stay::UntilAnswered),
            ("/api/generate", json!({"keep_alive": "5m"}), Stay::Loaded),
            ("/api/generate", json!({"keep_alive": -1}), Stay::Loaded),
            ("/api/generate", json!({"keep_alive": null}), Stay::Loaded),
            ("/completion", json!({"keep_alive": 0}), Stay::Loaded),
        ] {
            assert_eq!(Stay::of(path, body.to_string().as_bytes()), expected, "{path} {body}");
        }
    }
}
