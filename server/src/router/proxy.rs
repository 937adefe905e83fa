//! Requests for a model: passed on to its process, and the answer back, as it comes.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Query, Request, State};
use axum::http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderName, HeaderValue, ORIGIN,
    TRANSFER_ENCODING, UPGRADE,
};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use http_body::{Frame, SizeHint};
use serde::Deserialize;
use serde_json::json;

use super::client;
use super::models::{Lease, Models};
use super::ollama::{Stay, unloaded};
use crate::api::ollama::Plain;
use crate::error::ApiError;
use crate::http;
use crate::record;
use crate::turns::{self, CLIENT_HEADER};

/// The part of a body or query that the router reads.
#[derive(Debug, Default, Deserialize)]
struct Named {
    model: Option<String>,
    autoload: Option<bool>,
}

/// Headers of one connection, and those that the router answers for.
const OWN_HEADERS: [HeaderName; 11] = [
    AUTHORIZATION,
    HeaderName::from_static("x-api-key"),
    HOST,
    ORIGIN,
    CONTENT_LENGTH,
    EXPECT,
    CONNECTION,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("te"),
];

/// Any endpoint of a model.
pub async fn forward(State(models): State<Arc<Models>>, request: Request) -> Response {
    let is_ollamas = request.uri().path().starts_with("/api/");
    match pass_on(&models, request).await {
        Ok(response) => response,
        Err(error) if is_ollamas => Plain::from(error).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn pass_on(models: &Arc<Models>, request: Request) -> Result<Response, ApiError> {
    if ![Method::GET, Method::HEAD, Method::POST].contains(request.method()) {
        return Err(ApiError::wrong_method());
    }
    let query = Query::<Named>::try_from_uri(request.uri());
    let Query(query) = query.map_err(|error| ApiError::invalid(error.to_string()))?;
    let (method, uri, mut headers) = (request.method().clone(), request.uri().clone(), request.headers().clone());
    let held = models.app.memory.hold();
    let bytes = http::read(request, &models.app, &held).await?;
    let named = named(&bytes)?;
    let counts = method == Method::POST;
    let given = named.or(query.model).filter(|name| !name.is_empty());
    let name = match &given {
        Some(name) => models.find(name)?.name,
        None => models.usual()?,
    };
    let stay = Stay::of(uri.path(), &bytes);
    if stay == Stay::Not {
        models.leave(&name);
        return Ok(unloaded(uri.path(), &name));
    }
    let is_loaded = models.loaded().iter().any(|(loaded, _)| *loaded == name);
    // A read-only request that names no model loads none.
    let loads = query.autoload.unwrap_or(models.given.args.models_autoload.0) && (given.is_some() || counts);
    if !is_loaded && !loads {
        return Err(ApiError::invalid(format!("model '{name}' is not loaded; POST /models/load does it")));
    }
    let lease = models.lease(&name, counts).await?;
    if stay == Stay::UntilAnswered {
        models.leave(&name);
    }
    OWN_HEADERS.iter().for_each(|name| drop(headers.remove(name)));
    let key = HeaderValue::try_from(format!("Bearer {}", lease.key)).expect("a key is letters and digits");
    headers.insert(AUTHORIZATION, key);
    if let Some(address) = turns::address().and_then(|address| HeaderValue::try_from(address.to_string()).ok()) {
        headers.insert(CLIENT_HEADER, address);
    }
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut inner = Request::builder().method(method).uri(format!("http://{}{path}", lease.address));
    if let Some(empty) = inner.headers_mut() {
        *empty = headers;
    }
    let inner = inner.body(Body::from(bytes)).map_err(|error| ApiError::invalid(error.to_string()))?;
    match client().request(inner).await {
        Ok(response) => Ok(answer(response.map(Body::new), lease)),
        Err(error) => Err(broken(&lease, &error.to_string()).await),
    }
}

/// The model that a body names, if it names one.
fn named(bytes: &[u8]) -> Result<Option<String>, ApiError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let no_json = |error: serde_json::Error| ApiError::invalid(format!("the body is no JSON object: {error}"));
    Ok(serde_json::from_slice::<Named>(bytes).map_err(no_json)?.model)
}

/// The error of a model that broke off.
async fn broken(lease: &Lease, error: &str) -> ApiError {
    let why = lease.why_broken().await.unwrap_or_else(|| error.to_owned());
    let mut error = ApiError::unavailable(format!("model '{}' ended before it had answered: {why}", lease.name));
    error.status = StatusCode::BAD_GATEWAY;
    error
}

/// The answer of a model, which is used until the answer has ended.
fn answer(response: Response, lease: Lease) -> Response {
    let (mut parts, body) = response.into_parts();
    [CONNECTION, TRANSFER_ENCODING, UPGRADE].iter().for_each(|name| drop(parts.headers.remove(name)));
    let kind = parts.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let body = if kind.starts_with("text/event-stream") {
        streamed(body, lease, |error| format!("data: {}\n\n", json!({"type": "error", "error": error.json()})))
    } else if kind.starts_with("application/x-ndjson") {
        streamed(body, lease, |error| format!("{}\n", json!({"error": error.message})))
    } else {
        Body::new(Whole { body, _lease: lease })
    };
    Response::from_parts(parts, body)
}

/// A stream. If the model breaks off, it ends with the error in the form of `last`.
fn streamed(body: Body, lease: Lease, last: fn(&ApiError) -> String) -> Body {
    let record = record::CURRENT.try_with(Arc::clone).ok();
    let state = (body.into_data_stream(), Some(lease), record);
    Body::from_stream(stream::unfold(state, move |(mut body, mut lease, record)| async move {
        let used = lease.as_ref()?;
        let frame = match body.next().await? {
            Ok(bytes) => bytes,
            Err(error) => {
                let error = broken(used, &error.to_string()).await;
                record.iter().for_each(|record| record.failed(&error.message));
                lease = None;
                last(&error).into()
            }
        };
        Some((Ok::<Bytes, Infallible>(frame), (body, lease, record)))
    }))
}

/// An answer whose length is known as that of `body` is.
struct Whole {
    body: Body,
    _lease: Lease,
}

impl HttpBody for Whole {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_read_from_any_body() {
        let named = |body: &str| named(body.as_bytes()).ok();
        let a = Some(Some("a".to_owned()));
        assert_eq!(named(r#"{"messages": [{"model": "b"}], "model": "a", "stream": true}"#), a);
        assert_eq!((named(r#"{"name": "a"}"#), named("")), (Some(None), Some(None)));
        for bad in [r#"{"model": ["a"]}"#, "[", "\"a\"", r#"{"model": "a", "model": "b"}"#] {
            assert_eq!(named(bad), None, "{bad}");
        }
    }
}
