//! Several models (`--models-dir`): this process has none. Each model runs in a process of its own, this program with
//! `-m`, which is started when a request names the model ([`models`]); requests are passed on to it ([`proxy`]). A
//! process has a random API key that only this one knows, and listens on loopback.

mod list;
mod models;
mod ollama;
mod presets;
mod process;
mod proxy;
mod watch;

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::{delete, get, post};
use axum::{Json, Router as Routes};
use futures_util::stream;
use hobbit::SessionOptions;
use hobbit_core::plan::{Budget, MemoryLimits, MemoryPlan};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;

use super::api::ollama as single;
use super::app::App;
use super::error::ApiError;
use super::http::stream::Frame;
use super::http::{self, Body};
use super::json::{self, Fields, shortened};
use super::settings::Settings;
use super::{LOOK, listen, markdown, page};
use hobbit_common::hub::Places;
use hobbit_common::signals;
use hobbit_programs::args::Verbosity;
use hobbit_programs::args::server::RouterArgs;
use hobbit_programs::argv::Note;
use hobbit_programs::log::{Level, Log};
use hobbit_programs::run;
use models::Models;

/// The router's settings.
pub struct Given {
    pub args: RouterArgs,
    /// The command line in clap's spelling.
    pub words: Vec<OsString>,
    /// The cache of `-hf`.
    pub places: Places,
    pub budget: Budget,
    pub verbosity: Verbosity,
}

/// Listens, and serves all models until a signal arrives.
pub fn serve(given: Given, settings: Settings, session: &SessionOptions, notes: &[Note], log: &Log) -> Result<u8> {
    let ctrl_c = run::begin(notes, session, false, log)?;
    let named = given.args.models().cloned().unwrap_or_default();
    if let Some(directory) = &given.args.models_dir {
        let listed = std::fs::read_dir(directory);
        listed.with_context(|| format!("--models-dir {}: cannot be listed", directory.display()))?;
    }
    let (most, grace) = (usize::from(given.args.models_max), settings.http.shutdown_grace);
    let budget = part_of(given.budget, most)?;
    let runtime = super::runtime(settings.http.threads_http)?;
    let app = Arc::new(App::new(settings, super::ids::now()));
    let models = Models::new(given, budget, Arc::clone(&app), log.clone(), runtime.handle().clone())?;
    let listening = runtime.block_on(listen::listen(&app, routes(&models), 2, log))?;
    runtime.spawn(Arc::clone(&models).unload_idle());
    let listed = models.listed();
    for name in models.presets.idle(&listed) {
        let why = "names no model here; give the section model = FNAME";
        log.line(Level::Warning, format!("warning: --models-preset: [{name}] {why}"));
    }
    let (addresses, n) = (listening.addresses.join(", "), listed.len());
    let (s, at_once) = (if n == 1 { "" } else { "s" }, if most == 1 { "one" } else { &most.to_string() });
    log.line(
        Level::Info,
        format!("hobbit: ready; {addresses}, {n} model{s} of {}, {at_once} in memory at a time", named.display()),
    );
    while !signals::came() {
        std::thread::sleep(LOOK);
    }
    ctrl_c.obey();
    log.line(Level::Info, "hobbit: ending");
    models.end();
    listening.stop(grace + Duration::from_secs(1));
    models.wait_for_end();
    runtime.block_on(listening.ended());
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(0)
}

/// The memory budget of each of `n` models.
fn part_of(budget: Budget, n: usize) -> Result<Budget> {
    match budget {
        budget if n == 1 => Ok(budget),
        Budget::Bytes(bytes) => Ok(Budget::Bytes(bytes / n as u64)),
        Budget::Auto => {
            let (bytes, source) = MemoryLimits::read().budget().context("give --mem-budget for several models")?;
            Ok(Budget::Bytes(MemoryPlan::without_margin(bytes, source) / n as u64))
        }
    }
}

/// All endpoints; those that are not here are a model's.
fn routes(models: &Arc<Models>) -> Routes {
    let mut routes: Routes<Arc<Models>> = Router::new()
        .route("/models/load", post(load))
        .route("/models/unload", post(unload))
        .route("/models/sse", get(events))
        .route("/api/version", get(single::version))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running))
        .route("/api/pull", post(ollama::pull))
        .route("/api/delete", delete(ollama::remove));
    for prefix in ["", "/v1"] {
        routes = routes
            .route(&format!("{prefix}/health"), get(async || Json(json!({"status": "ok"}))))
            .route(&format!("{prefix}/models"), get(all))
            .route(&format!("{prefix}/models/{{*name}}"), get(one));
    }
    let mut routes = routes.fallback(proxy::forward).with_state(Arc::clone(models));
    if models.app.settings.http.ui.0 {
        let formatting = Router::new().route("/markdown", post(markdown::markdown));
        routes = routes.merge(page::router()).merge(formatting.with_state(Arc::clone(&models.app)));
    }
    routes
}

/// `GET /models`
async fn all(State(models): State<Arc<Models>>) -> Json<Value> {
    let listed = models.listed();
    let data: Vec<Value> = listed.values().map(|entry| models.described(entry)).collect();
    let short = |entry: &list::Entry| json!({"name": entry.name, "model": entry.name, "size": entry.bytes.to_string()});
    let short: Vec<Value> = listed.values().map(short).collect();
    Json(json!({"object": "list", "data": data, "models": short}))
}

/// `GET /models/NAME`
async fn one(State(models): State<Arc<Models>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    let entry = models.find(&name)?;
    Ok(Json(models.described(&entry)))
}

/// `GET /models/sse`: the changes of all models' status, until the client leaves or too many others came after it.
async fn events(State(models): State<Arc<Models>>) -> Result<Response, ApiError> {
    let frames = stream::unfold(models.events()?, |(mut events, mut place)| async move {
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                _ = &mut place => return None,
            };
            match event {
                Ok(event) => return Some((Frame::unnamed(&event), (events, place))),
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    });
    Ok(http::stream::events(frames, models.app.settings.ping))
}

/// The name of a model in a body.
fn named(body: &Fields) -> Result<&str, ApiError> {
    let name = json::text(body, "model")?;
    name.ok_or_else(|| ApiError::invalid("model name is missing from the request"))
}

/// `POST /models/load`: the model is loaded once the others give way.
async fn load(State(models): State<Arc<Models>>, body: Named) -> Result<Json<Value>, ApiError> {
    let entry = models.find(&body.0)?;
    tokio::spawn(async move { models.lease(&entry.name, true).await.map(drop) });
    Ok(Json(json!({"success": true})))
}

/// `POST /models/unload`: the model leaves once its requests have ended.
async fn unload(State(models): State<Arc<Models>>, body: Named) -> Result<Json<Value>, ApiError> {
    let entry = models.find(&body.0)?;
    if !models.leave(&entry.name) {
        let message = format!("the model '{}' is not loaded", shortened(&entry.name));
        return Err(ApiError::invalid(message));
    }
    Ok(Json(json!({"success": true})))
}

/// The name in a small body.
struct Named(String);

impl axum::extract::FromRequest<Arc<Models>> for Named {
    type Rejection = ApiError;

    async fn from_request(request: axum::extract::Request, models: &Arc<Models>) -> Result<Self, ApiError> {
        let Body(body, _) = Body::from_request(request, &models.app).await?;
        named(&body).map(|name| Self(name.to_owned()))
    }
}

/// A client that keeps no connections: a connection's end is then the end of its request, on both sides.
fn client() -> Client<HttpConnector, axum::body::Body> {
    Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http()
}
