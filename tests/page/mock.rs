//! A server with the page, whose answers the tests write.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

/// A part of an answer.
#[derive(Clone, Debug)]
pub enum Step {
    Say(&'static str),
    Think(&'static str),
    Event(Value),
    /// Bytes as they are.
    Raw(&'static str),
    /// Waits for the test's [`Mock::open`].
    Gate,
    /// Says nothing more until the client is gone.
    Hang,
    /// The connection breaks.
    Cut,
    /// How an answer ends: figures, then `[DONE]`.
    End,
    /// Not an answer but this.
    Refuse(u16, Value),
}

/// What the page sees of a server.
pub struct Mock {
    pub address: SocketAddr,
    pub state: Arc<Shared>,
}

pub struct Shared {
    answers: Mutex<VecDeque<Vec<Step>>>,
    /// Bodies of chat requests.
    requests: Mutex<Vec<Value>>,
    experts: Mutex<Value>,
    loading: Mutex<bool>,
    key: Mutex<Option<String>>,
    gate: Semaphore,
    gone: Semaphore,
}

impl Mock {
    pub async fn start() -> Mock {
        let state = Arc::new(Shared {
            answers: Mutex::default(),
            requests: Mutex::default(),
            experts: Mutex::new(json!({"managed": false, "layers": [], "slots": []})),
            loading: Mutex::new(false),
            key: Mutex::new(None),
            gate: Semaphore::new(0),
            gone: Semaphore::new(0),
        });
        let router = Router::new()
            .route("/health", get(health))
            .route("/props", get(props))
            .route("/v1/models", get(models))
            .route("/experts", get(experts))
            .route("/v1/chat/completions", post(chat))
            .merge(hobbit_programs::page::router())
            .with_state(state.clone());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async { axum::serve(listener, router).await.unwrap() });
        Mock { address, state }
    }
}

impl Shared {
    /// The next answer that has no other before it.
    pub fn answer(&self, steps: impl IntoIterator<Item = Step>) {
        self.answers.lock().unwrap().push_back(steps.into_iter().collect());
    }

    /// The chat requests so far.
    pub fn requests(&self) -> Vec<Value> {
        self.requests.lock().unwrap().clone()
    }

    pub fn last_request(&self) -> Value {
        self.requests.lock().unwrap().last().expect("a request").clone()
    }

    /// What `/experts` answers; null: there is no such endpoint.
    pub fn set_experts(&self, experts: Value) {
        *self.experts.lock().unwrap() = experts;
    }

    pub fn set_loading(&self, loading: bool) {
        *self.loading.lock().unwrap() = loading;
    }

    pub fn set_key(&self, key: &str) {
        *self.key.lock().unwrap() = Some(key.to_owned());
    }

    /// Lets one answer past its gate.
    pub fn open(&self) {
        self.gate.add_permits(1);
    }

    /// Waits until a client has left an answer that hangs.
    pub async fn client_gone(&self) {
        timeout(Duration::from_secs(60), self.gone.acquire()).await.expect("the client goes").unwrap().forget();
    }

    fn refusal(&self, headers: &HeaderMap) -> Option<Response> {
        if *self.loading.lock().unwrap() {
            return Some(refuse(
                503,
                &json!({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}),
            ));
        }
        let key = self.key.lock().unwrap().clone()?;
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        (given != Some(&format!("Bearer {key}"))).then(|| {
            refuse(401, &json!({"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}))
        })
    }
}

fn refuse(status: u16, body: &Value) -> Response {
    (StatusCode::from_u16(status).unwrap(), Json(body.clone())).into_response()
}

async fn health(State(state): State<Arc<Shared>>) -> Response {
    // As llama-server's: no key is asked for.
    let loading = *state.loading.lock().unwrap();
    let refusal = loading.then(|| state.refusal(&HeaderMap::new())).flatten();
    refusal.unwrap_or_else(|| Json(json!({"status": "ok"})).into_response())
}

async fn props(State(state): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    state.refusal(&headers).unwrap_or_else(|| {
        Json(json!({
            "model_path": "/models/Tiny-8x1B.gguf", "total_slots": 2, "build_info": "b1",
            "default_generation_settings": {"n_ctx": 4096, "params": {"temperature": 0.8, "top_k": 40}},
        }))
        .into_response()
    })
}

async fn models() -> Json<Value> {
    Json(json!({"object": "list", "data": [{"id": "tiny", "object": "model"}]}))
}

async fn experts(State(state): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    let experts = state.experts.lock().unwrap().clone();
    if experts.is_null() {
        return refuse(404, &json!({"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}));
    }
    state.refusal(&headers).unwrap_or_else(|| Json(experts).into_response())
}

async fn chat(State(state): State<Arc<Shared>>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    if let Some(refusal) = state.refusal(&headers) {
        return refusal;
    }
    state.requests.lock().unwrap().push(body);
    let steps = state.answers.lock().unwrap().pop_front().expect("an answer for every request");
    if let Some(Step::Refuse(status, body)) = steps.first() {
        return refuse(*status, body);
    }
    let (send, receive) = mpsc::channel::<Result<Bytes, std::io::Error>>(1);
    tokio::spawn(async move {
        for step in steps {
            let event = |value: &Value| format!("data: {value}\n\n");
            let delta = |delta: Value| event(&json!({"choices": [{"index": 0, "delta": delta}]}));
            let text = match step {
                Step::Say(text) => delta(json!({"content": text})),
                Step::Think(text) => delta(json!({"reasoning_content": text})),
                Step::Event(value) => event(&value),
                Step::Raw(text) => text.to_owned(),
                Step::Gate => {
                    state.gate.acquire().await.unwrap().forget();
                    continue;
                }
                Step::Hang => {
                    send.closed().await;
                    state.gone.add_permits(1);
                    return;
                }
                Step::Cut => {
                    let _ = send.send(Err(std::io::Error::other("cut"))).await;
                    return;
                }
                Step::End => {
                    event(&json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
                        + &event(&json!({
                            "choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 12},
                            "timings": {
                                "prompt_n": 20, "cache_n": 10, "prompt_ms": 500.0, "predicted_n": 12,
                                "predicted_ms": 1500.0, "predicted_per_second": 8.0,
                                "hit_rate": 0.875, "bytes_per_token": 3_145_728, "io_wait_ms": 250.0,
                            },
                        }))
                        + "data: [DONE]\n\n"
                }
                Step::Refuse(..) => unreachable!("only as the first"),
            };
            if send.send(Ok(text.into())).await.is_err() {
                return;
            }
        }
    });
    let chunks = stream::unfold(receive, async |mut receive| receive.recv().await.map(|chunk| (chunk, receive)));
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(chunks)).into_response()
}
