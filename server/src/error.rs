//! Errors of requests, in OpenAI's shape and with their HTTP status.

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use hobbit_core::units::Bytes;
use serde_json::{Map, Value, json};

use super::record::Reason;

/// An error answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    /// OpenAI's name for the kind.
    pub kind: &'static str,
    pub message: String,
    /// Additional fields.
    pub more: Map<String, Value>,
    /// Whether a retry may succeed soon.
    retries: bool,
}

/// `Retry-After` for refused clients.
const RETRY_AFTER_SECONDS: u16 = 2;

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), more: Map::new(), retries: false }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// An invalid field.
    pub fn field(name: &str, what: impl std::fmt::Display) -> Self {
        Self::invalid(format!("Field '{name}': {what}"))
    }

    pub fn unauthorised() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", "Invalid API Key")
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }

    pub fn wrong_method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "Method Not Allowed")
    }

    pub fn too_large(bytes: usize) -> Self {
        let message = format!("the body is larger than {bytes} bytes; see --max-body of the server");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// JSON of many small values takes far more memory than its bytes. `max_body`: the --max-body that is enough.
    pub fn too_large_to_work_on(bytes: usize, most: usize, max_body: usize) -> Self {
        let message = format!(
            "working on this request takes {} of memory, and {} are reserved for requests: send less at once, or start \
             the server with --max-body {}M or more",
            Bytes(bytes as u64),
            Bytes(most as u64),
            max_body.div_ceil(1 << 20)
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// The server is busy and may serve a retry soon.
    pub fn busy(message: impl std::fmt::Display) -> Self {
        let message = format!("{message}; try again in {RETRY_AFTER_SECONDS} s");
        Self { retries: true, ..Self::unavailable(message) }
    }

    pub fn too_slow() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "the body did not arrive in time")
    }

    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "not_supported_error", message)
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", message)
    }

    /// A prompt that does not fit a slot's context. `n_ctx_train`: the context that the model was trained on, beyond
    /// which none is advised, unless the server has one.
    pub fn exceeds_context(n_prompt: usize, n_ctx: usize, n_ctx_train: usize) -> Self {
        let advice = if n_prompt < n_ctx_train || n_ctx > n_ctx_train {
            let n_wanted = (n_prompt + 1).next_power_of_two();
            let n_wanted = if n_prompt < n_ctx_train { n_wanted.min(n_ctx_train) } else { n_wanted };
            format!("try increasing it: start the server with -c {n_wanted} or more for each slot")
        } else {
            format!("and the model was trained on {n_ctx_train}: send less, or begin a new conversation")
        };
        let message =
            format!("request ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens), {advice}");
        let mut error = Self::new(StatusCode::BAD_REQUEST, "exceed_context_size_error", message);
        error.more.insert("n_prompt_tokens".to_owned(), json!(n_prompt));
        error.more.insert("n_ctx".to_owned(), json!(n_ctx));
        error
    }

    /// The engine's thread is gone.
    pub fn engine_ended() -> Self {
        Self::server("the engine has ended")
    }

    /// The server stops and begins nothing new.
    pub fn shutting_down() -> Self {
        Self::unavailable("the server is shutting down")
    }

    pub fn server(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// `{"code", "message", "type", …}`: the value of `error`.
    pub fn json(&self) -> Value {
        let mut error = json!({"code": self.status.as_u16(), "message": self.message, "type": self.kind});
        self.more.iter().for_each(|(name, value)| error[name] = value.clone());
        error
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        // Anthropic's clients look for the type on top; OpenAI's do not look there.
        let body = json!({"type": "error", "error": self.json()});
        let mut response = (self.status, Json(body)).into_response();
        response.extensions_mut().insert(Reason(self.message));
        if self.retries {
            response.headers_mut().insert(RETRY_AFTER, RETRY_AFTER_SECONDS.into());
        }
        response
    }
}
