//! Addresses, TLS and routes.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::Response;
use axum::routing::{get, post};
use axum_server::Handle;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use tower_http::catch_panic::CatchPanicLayer;

use super::api::{anthropic, chat, completions, embeddings, native, ollama, responses, small};
use super::app::App;
use super::error::ApiError;
use super::http::connections::{self, Acceptor, Connections};
use super::http::guard;
use super::{markdown, page};
use hobbit_programs::args::server::HttpArgs;
use hobbit_programs::log::{Level, Log};

/// Longest time that a connection may keep the server waiting for its client, unless --timeout is less.
const PATIENCE: Duration = Duration::from_secs(30);

/// Longest time that an idle connection is kept after an answer, unless --timeout is less.
const IDLE_PATIENCE: Duration = Duration::from_secs(75);

/// Maximum bytes buffered for one connection.
const CONNECTION_BYTES: usize = 64 << 10;

/// All endpoints of a server with one model.
pub fn routes(app: &Arc<App>) -> Router {
    let mut router = Router::new()
        .route("/api/version", get(ollama::version))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running))
        .route("/api/show", post(ollama::show))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(ollama::embed))
        .route("/api/embeddings", post(ollama::embeddings))
        .route("/props", get(small::props).post(small::set_props))
        .route("/slots", get(small::slots))
        .route("/slots/{id}", post(small::act_on_slot))
        .route("/metrics", get(small::metrics))
        .route("/experts", get(small::experts))
        .route("/lora-adapters", get(small::adapters).post(small::set_adapters))
        .route("/tokenizer_info", get(small::tokenizer_info))
        .route("/tokenize", post(small::tokenize))
        .route("/detokenize", post(small::detokenize))
        .route("/infill", post(native::infill))
        .route("/completion", post(native::completion))
        .route("/completions", post(native::completion))
        .route("/v1/completions", post(completions::completions))
        .route("/apply-template", post(chat::apply_template))
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/embedding", post(embeddings::native))
        .route("/embeddings", post(embeddings::native))
        .route("/v1/embeddings", post(embeddings::openai));
    for prefix in ["", "/v1"] {
        let routes = [
            ("/health", get(small::health)),
            ("/models", get(small::models)),
            ("/models/{*name}", get(small::model)),
            ("/chat/completions", post(chat::completions)),
            ("/chat/completions/input_tokens", post(chat::input_tokens)),
            ("/chat/completions/control", post(chat::control)),
            ("/responses", post(responses::responses)),
            ("/responses/input_tokens", post(responses::input_tokens)),
            ("/rerank", post(small::rerank)),
            ("/reranking", post(small::rerank)),
        ];
        router =
            routes.into_iter().fold(router, |router, (path, route)| router.route(&format!("{prefix}{path}"), route));
    }
    if app.settings.http.ui.0 {
        router = router.merge(page::router()).route("/markdown", post(markdown::markdown));
    }
    router.fallback(async || ApiError::not_found("File Not Found")).with_state(Arc::clone(app))
}

/// The endpoints, and what holds for all requests.
fn checked(routes: Router, app: &Arc<App>, connections: &Arc<Connections>) -> Router {
    routes
        .method_not_allowed_fallback(async || ApiError::wrong_method())
        .layer(map_response(with_charset))
        .layer(CatchPanicLayer::new())
        .layer(from_fn_with_state(Arc::clone(app), guard::take_turns))
        .layer(from_fn_with_state(Arc::clone(app), guard::authenticate))
        .layer(from_fn_with_state(Arc::clone(app), guard::cross_origin))
        .layer(from_fn_with_state(Arc::clone(app), guard::known_host))
        .layer(from_fn_with_state(Arc::clone(connections), connections::follow))
}

/// Adds the charset to JSON content types, as llama-server does.
async fn with_charset(mut response: Response) -> Response {
    use axum::http::header::{CONTENT_TYPE, HeaderValue};
    if response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind == "application/json") {
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"));
    }
    response
}

/// The listening sockets and their tasks.
pub struct Listening {
    handles: Vec<Handle<SocketAddr>>,
    tasks: Vec<tokio::task::JoinHandle<io::Result<()>>>,
    /// URLs of the server.
    pub addresses: Vec<String>,
}

impl Listening {
    /// Accepts no new connections; open ones have `grace` to end.
    pub fn stop(&self, grace: Duration) {
        self.handles.iter().for_each(|handle| handle.graceful_shutdown(Some(grace)));
    }

    /// Waits until all connections have ended.
    pub async fn ended(self) {
        for task in self.tasks {
            let _ = task.await;
        }
    }
}

/// Binds all addresses and begins to answer with `routes`, each request with `n_descriptors`
/// file descriptors. Until a model is loaded, its answers say that it is loading.
pub async fn listen(app: &Arc<App>, routes: Router, n_descriptors: u64, log: &Log) -> Result<Listening> {
    let settings = &app.settings;
    let tls = match settings.http.ssl_key_file.as_ref().zip(settings.http.ssl_cert_file.as_ref()) {
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
        connections::limit(settings.n_slots + settings.slots.max_waiting as usize, n_descriptors),
        settings.http.timeout.min(PATIENCE),
        settings.http.timeout.min(IDLE_PATIENCE),
        log.clone(),
    );
    tokio::spawn(Arc::clone(&connections).watch());
    let mut listening = Listening { handles: Vec::new(), tasks: Vec::new(), addresses: Vec::new() };
    for (listener, bound) in sockets(&settings.http)? {
        let handle = Handle::new();
        let service = checked(routes.clone(), app, &connections).into_make_service();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let server = axum_server::from_tcp(listener).context("listening")?.handle(handle.clone());
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
        if !bound.ip().is_loopback() && settings.http.api_key.is_empty() {
            log.line(
                Level::Warning,
                format!("warning: {bound}: anyone who reaches this machine may use the server; see --api-key"),
            );
        }
    }
    log.line(Level::More, format!("hobbit: listening on {}", listening.addresses.join(", ")));
    Ok(listening)
}

/// Bounds a connection's buffers. Answer headers use llama-server's title case, because some clients compare them
/// literally.
fn configure(builder: &mut hyper_util::server::conn::auto::Builder<hyper_util::rt::TokioExecutor>) {
    builder.http1().max_buf_size(CONNECTION_BYTES).title_case_headers(true);
    let window = CONNECTION_BYTES as u32;
    builder
        .http2()
        .initial_connection_window_size(window)
        .initial_stream_window_size(window)
        .max_send_buf_size(CONNECTION_BYTES);
}

/// The sockets to listen on, and their addresses: the inherited one, or those of --host and --port.
fn sockets(http: &HttpArgs) -> Result<Vec<(TcpListener, SocketAddr)>> {
    if http.socket_on_stdin.0 {
        let found = inherited().and_then(|listener| listener.local_addr().map(|bound| (listener, bound)));
        return Ok(vec![found.context("--socket-on-stdin: standard input is no socket that listens")?]);
    }
    let mut port = http.port;
    let mut sockets = Vec::new();
    for host in &http.host {
        let name = host.trim().trim_start_matches('[').trim_end_matches(']');
        let wanted = port;
        let fail =
            || format!("{host}:{wanted}: cannot listen there; another --port (0 takes a free one) or --host may help");
        let found = (name, wanted).to_socket_addrs().with_context(fail)?.next();
        let address = found.with_context(|| format!("{host}: no such address"))?;
        let listener = bind(address).with_context(fail)?;
        let bound = listener.local_addr().with_context(fail)?;
        // A port that the system chose is used for all addresses.
        port = bound.port();
        sockets.push((listener, bound));
    }
    Ok(sockets)
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The socket on standard input, which is replaced by /dev/null: no other process of ours may hold it.
#[cfg(unix)]
fn inherited() -> io::Result<TcpListener> {
    let listener = TcpListener::from(std::os::fd::AsFd::as_fd(&io::stdin()).try_clone_to_owned()?);
    nix::unistd::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The socket that standard input describes. Its end asks this process to end.
#[cfg(windows)]
fn inherited() -> io::Result<TcpListener> {
    let mut bytes = [0; hobbit_core::windows::SOCKET_BYTES];
    io::Read::read_exact(&mut io::stdin(), &mut bytes)?;
    let listener = hobbit_core::windows::socket_from(&bytes)?;
    hobbit_common::signals::watch_standard_input()?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
