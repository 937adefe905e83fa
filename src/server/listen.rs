//! Addresses, TLS, and which request goes where.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::Router;
use axum::http::Method;
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use axum_server::Handle;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use tower_http::catch_panic::CatchPanicLayer;

use super::api::predict::Predictor;
use super::api::{anthropic, chat, completions, embeddings, native, responses, small};
use super::app::App;
use super::http::connections::{self, Acceptor, Connections};
use super::http::guard;
use super::page;
use crate::log::{Level, Log};

/// How long a connection may keep the server waiting for its client, where --timeout is not less.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a connection is kept for the next request after one was answered, where --timeout is not less.
const IDLE_PATIENCE: Duration = Duration::from_secs(75);

/// Bytes that a connection may have read or written and not passed on.
const CONNECTION_BYTES: usize = 64 << 10;

/// A path, and who answers there.
type Endpoint = (&'static str, MethodRouter<Arc<App>>);

/// What can be looked at.
fn gets() -> Vec<Endpoint> {
    vec![
        ("/health", get(small::health)),
        ("/v1/health", get(small::health)),
        ("/models", get(small::models)),
        ("/v1/models", get(small::models)),
        ("/api/tags", get(small::models)),
        ("/props", get(small::props)),
        ("/slots", get(small::slots)),
        ("/metrics", get(small::metrics)),
        ("/experts", get(small::experts)),
        ("/lora-adapters", get(small::adapters)),
    ]
}

/// What can be asked.
fn posts() -> Vec<Endpoint> {
    vec![
        ("/props", post(small::set_props)),
        ("/slots/{id}", post(small::act_on_slot)),
        ("/tokenize", post(small::tokenize)),
        ("/detokenize", post(small::detokenize)),
        ("/infill", post(small::infill)),
        ("/lora-adapters", post(small::set_adapters)),
        ("/completion", post(native::completion)),
        ("/completions", post(native::completion)),
        ("/v1/completions", post(completions::completions)),
        ("/apply-template", post(chat::apply_template)),
        ("/chat/completions", post(chat::completions)),
        ("/chat/completions/input_tokens", post(chat::input_tokens)),
        ("/chat/completions/control", post(chat::control)),
        ("/v1/chat/completions", post(chat::completions)),
        ("/v1/chat/completions/input_tokens", post(chat::input_tokens)),
        ("/v1/chat/completions/control", post(chat::control)),
        ("/responses", post(responses::responses)),
        ("/responses/input_tokens", post(responses::input_tokens)),
        ("/v1/responses", post(responses::responses)),
        ("/v1/responses/input_tokens", post(responses::input_tokens)),
        ("/v1/messages", post(anthropic::messages)),
        ("/v1/messages/count_tokens", post(anthropic::count_tokens)),
        ("/embedding", post(embeddings::native)),
        ("/embeddings", post(embeddings::native)),
        ("/v1/embeddings", post(embeddings::openai)),
        ("/rerank", post(small::rerank)),
        ("/reranking", post(small::rerank)),
        ("/v1/rerank", post(small::rerank)),
        ("/v1/reranking", post(small::rerank)),
    ]
}

/// All endpoints.
///
/// # Errors
/// Predictions have the path of another endpoint.
fn router(app: &Arc<App>, connections: &Arc<Connections>) -> Result<Router> {
    let (gets, posts) = (gets(), posts());
    let path = |(path, _): &Endpoint| *path;
    let looked: Vec<&str> = gets.iter().map(path).collect();
    let asked: Vec<&str> = posts.iter().map(path).collect();
    let endpoints = gets.into_iter().chain(posts).fold(Router::new(), |all, (path, own)| all.route(path, own));
    let mut router = endpoints.clone();
    if app.settings.has_page {
        router = router.merge(page::router());
    }
    router = router.fallback(small::nothing).method_not_allowed_fallback(small::wrong_method);
    if let Some(vertex) = &app.settings.vertex {
        let path = &vertex.predict;
        if looked.iter().chain(&asked).any(|own| own == path) {
            bail!("AIP_PREDICT_ROUTE={path}: another endpoint has this path");
        }
        let paths = looked.into_iter().map(|path| (Method::GET, path));
        let paths = paths.chain(asked.into_iter().map(|path| (Method::POST, path)));
        let predictor = Predictor::new(endpoints.with_state(Arc::clone(app)), paths);
        // Around the others: whatever else had the path of health, Vertex AI looks there for health.
        let mut outer = Router::new()
            .without_v07_checks()
            .route(path, post(move |app, body| predictor.clone().predict(app, body)))
            .method_not_allowed_fallback(small::wrong_method);
        if let Some(path) = &vertex.health {
            outer = outer.route(path, get(small::health));
        }
        router = outer.fallback_service(router.with_state(Arc::clone(app)));
    }
    Ok(router
        .layer(map_response(with_charset))
        .layer(CatchPanicLayer::new())
        .layer(from_fn_with_state(Arc::clone(app), guard::authenticate))
        .layer(from_fn_with_state(Arc::clone(app), guard::cross_origin))
        .layer(from_fn_with_state(Arc::clone(app), guard::known_host))
        .layer(from_fn_with_state(Arc::clone(connections), connections::follow))
        .with_state(Arc::clone(app)))
}

/// JSON says how it is encoded, as llama-server's does.
async fn with_charset(mut response: Response) -> Response {
    use axum::http::header::{CONTENT_TYPE, HeaderValue};
    if response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind == "application/json") {
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"));
    }
    response
}

/// What listens.
pub struct Listening {
    handles: Vec<Handle<SocketAddr>>,
    tasks: Vec<tokio::task::JoinHandle<std::io::Result<()>>>,
    addresses: Vec<String>,
}

impl Listening {
    /// Where clients find the server.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// No new connections; those there are have this long to end.
    pub fn stop(&self, grace: Duration) {
        self.handles.iter().for_each(|handle| handle.graceful_shutdown(Some(grace)));
    }

    /// All connections have ended.
    pub async fn ended(self) {
        for task in self.tasks {
            let _ = task.await;
        }
    }
}

/// Binds all addresses and begins to answer; until the model is there, that it is loading.
///
/// # Errors
/// An address that cannot be had, keys that cannot be read, a path for predictions that is taken.
pub async fn listen(app: &Arc<App>, log: &Log) -> Result<Listening> {
    let settings = &app.settings;
    let tls = match &settings.tls {
        None => None,
        Some((key, certificate)) => {
            let _ = rustls::crypto::ring::default_provider().install_default();
            let config = RustlsConfig::from_pem_file(certificate, key).await;
            Some(config.with_context(|| {
                format!("{} and {}: no usable certificate and key", certificate.display(), key.display())
            })?)
        }
    };
    let connections = Connections::new(
        connections::limit(settings.n_slots + settings.n_waiting_max),
        settings.timeout.min(PATIENCE),
        settings.timeout.min(IDLE_PATIENCE),
    );
    tokio::spawn(Arc::clone(&connections).watch());
    let mut listening = Listening { handles: Vec::new(), tasks: Vec::new(), addresses: Vec::new() };
    let mut port = settings.port;
    for host in &settings.hosts {
        let name = host.trim().trim_start_matches('[').trim_end_matches(']');
        let wanted = port;
        let fail =
            || format!("{host}:{wanted}: cannot listen there; another --port (0 takes a free one) or --host may help");
        let found = (name, wanted).to_socket_addrs().with_context(fail)?.next();
        let address = found.with_context(|| format!("{host}: no such address"))?;
        let listener = bind(address).with_context(fail)?;
        let bound = listener.local_addr().with_context(fail)?;
        // The same for all where it was for us to choose.
        port = bound.port();
        let handle = Handle::new();
        let service = router(app, &connections)?.into_make_service();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let server = axum_server::from_tcp(listener).with_context(fail)?.handle(handle.clone());
        let acceptor = Acceptor(Arc::clone(&connections));
        let task = match &tls {
            None => {
                let mut server = server.acceptor(acceptor);
                configure(server.http_builder());
                tokio::spawn(server.serve(service))
            }
            Some(tls) => {
                let mut server = server.acceptor(RustlsAcceptor::new(tls.clone()).acceptor(acceptor));
                configure(server.http_builder());
                tokio::spawn(server.serve(service))
            }
        };
        listening.handles.push(handle);
        listening.tasks.push(task);
        listening.addresses.push(format!("{scheme}://{bound}"));
        if !bound.ip().is_loopback() && settings.api_keys.is_empty() {
            log.line(
                Level::Warning,
                format!("warning: {bound}: everybody who reaches this machine may use the server; see --api-key"),
            );
        }
    }
    log.line(Level::Info, format!("hobbit: listening on {}", listening.addresses.join(", ")));
    Ok(listening)
}

/// Bounds what a connection may take. The headers of answers are written as llama-server writes them: some clients compare them so.
fn configure(builder: &mut hyper_util::server::conn::auto::Builder<hyper_util::rt::TokioExecutor>) {
    builder.http1().max_buf_size(CONNECTION_BYTES).title_case_headers(true);
    let window = CONNECTION_BYTES as u32;
    builder
        .http2()
        .initial_connection_window_size(window)
        .initial_stream_window_size(window)
        .max_send_buf_size(CONNECTION_BYTES);
}

fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
