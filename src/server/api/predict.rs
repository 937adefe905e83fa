//! Vertex AI's predictions: several requests in one, each for an endpoint that it names, as llama-server answers them.

use std::collections::HashMap;
use std::sync::Arc;

use axum::body::{Body as Sent, HttpBody, to_bytes};
use axum::extract::{Request, State};
use axum::http::Method;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::server::app::App;
use crate::server::http::body::Body;
use crate::server::http::error::ApiError;

/// Requests in one.
const MAX_INSTANCES: usize = 128;

/// Who answers predictions.
#[derive(Clone)]
pub struct Predictor {
    endpoints: Router,
    /// By path, and by a name that is made of it.
    formats: Arc<HashMap<String, (Method, &'static str)>>,
}

impl Predictor {
    /// Of endpoints and their paths. Of two that are asked for by the same name the one under `/v1` is meant, then the first.
    pub fn new(endpoints: Router, paths: impl Iterator<Item = (Method, &'static str)>) -> Self {
        let mut formats = HashMap::new();
        for (method, path) in paths.filter(|(_, path)| !path.contains('{')) {
            let own = (method, path);
            let name = name_of(path);
            if path.starts_with("/v1/") || !formats.contains_key(&name) {
                formats.insert(name, own.clone());
            }
            formats.entry(path.to_owned()).or_insert(own);
        }
        Self { endpoints, formats: Arc::new(formats) }
    }

    /// `POST /predict`
    pub async fn predict(self, State(app): State<Arc<App>>, Body(mut body, held): Body) -> Result<Response, ApiError> {
        app.loaded()?;
        let Some(Value::Array(instances)) = body.remove("instances") else {
            return Err(ApiError::invalid("request body must include an array field named instances"));
        };
        if instances.len() > MAX_INSTANCES {
            return Err(ApiError::invalid(format!("instances array exceeds maximum size of {MAX_INSTANCES}")));
        }
        // Each holds memory of its own while it is worked on.
        let requests: Vec<Result<Request, ApiError>> =
            app.work(|| instances.into_iter().map(|instance| self.request(instance)).collect()).await;
        held.shrink_to(requests.iter().flatten().map(|request| request.body().size_hint().lower() as usize).sum());
        let answers = requests.into_iter().map(|request| self.answer(request));
        let predictions: Vec<Value> = stream::iter(answers).buffered(app.settings.n_slots).collect().await;
        Ok(app.work(|| Json(json!({"predictions": predictions})).into_response()).await)
    }

    /// The answer to one of the requests, or its error.
    async fn answer(&self, request: Result<Request, ApiError>) -> Value {
        let answer = async { self.ask(request?).await };
        answer.await.unwrap_or_else(|error| json!({"error": error.json()}))
    }

    /// What one of the requests asks.
    fn request(&self, instance: Value) -> Result<Request, ApiError> {
        let Value::Object(mut fields) = instance else {
            return Err(ApiError::invalid("each instance must be a JSON object"));
        };
        let Some(Value::String(format)) = fields.shift_remove("@requestFormat") else {
            return Err(ApiError::invalid("each instance must include a string @requestFormat"));
        };
        let Some((method, path)) = self.formats.get(&format) else {
            return Err(ApiError::invalid(format!("no handler registered for @requestFormat: {format}")));
        };
        // An answer is whole here.
        if let Some(stream) = fields.get_mut("stream") {
            *stream = json!(false);
        }
        let mut request = Request::new(Sent::from(Value::Object(fields).to_string()));
        *request.method_mut() = method.clone();
        *request.uri_mut() = axum::http::Uri::from_static(path);
        Ok(request)
    }

    async fn ask(&self, request: Request) -> Result<Value, ApiError> {
        let response = match self.endpoints.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let bytes = to_bytes(response.into_body(), usize::MAX).await;
        let bytes = bytes.map_err(|error| ApiError::server(error.to_string()))?;
        Ok(serde_json::from_slice(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into()))
    }
}

/// `/v1/chat/completions` is `chatCompletions`.
fn name_of(path: &str) -> String {
    let path = path.strip_prefix("/v1").unwrap_or(path);
    let mut words = path.split(['/', '-', '_']).filter(|word| !word.is_empty());
    let mut name = words.next().unwrap_or_default().to_owned();
    for word in words {
        let (first, rest) = word.split_at(1);
        name += &first.to_ascii_uppercase();
        name += rest;
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_paths() {
        for (path, name) in [
            ("/v1/chat/completions", "chatCompletions"),
            ("/apply-template", "applyTemplate"),
            ("/v1/messages/count_tokens", "messagesCountTokens"),
            ("/completion", "completion"),
        ] {
            assert_eq!(name_of(path), name);
        }
    }

    #[test]
    fn formats_are_names_and_paths() {
        let paths = ["/completions", "/v1/completions", "/props", "/slots/{id}"].map(|path| (Method::POST, path));
        let gets = [(Method::GET, "/props")];
        let predictor = Predictor::new(Router::new(), gets.into_iter().chain(paths));
        let format = |name: &str| predictor.formats.get(name).cloned();
        assert_eq!(format("completions"), Some((Method::POST, "/v1/completions")));
        assert_eq!(format("/completions"), Some((Method::POST, "/completions")));
        assert_eq!(format("props"), Some((Method::GET, "/props")));
        assert_eq!(predictor.formats.len(), 5);
    }
}
