//! HTTP: connections, checks of requests, streams. Here are bodies: JSON of bounded size, in bounded
//! time, in memory that is counted, whatever their content type is.

pub mod connections;
pub mod guard;
pub mod stream;

use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use futures_util::StreamExt;
use serde_json::Value;

use super::app::App;
use super::backend::Backend;
use super::error::ApiError;
use super::held::{Held, check_media, cost};
use super::json::{Fields, remove_nulls};
use connections::Exchange;

/// A JSON object, whose null fields count as absent at every level, and the memory accounted to the request.
#[derive(Debug)]
pub struct Body(pub Fields, pub Held);

/// A request for the loaded model.
pub struct Asked {
    pub app: Arc<App>,
    pub backend: Arc<Backend>,
    pub body: Fields,
    /// Memory accounted to the request.
    pub held: Held,
}

/// Any JSON.
#[derive(Debug)]
pub struct AnyBody(pub Value, pub Held);

/// A larger body counts as one that is arriving.
const SMALL_BODY: usize = 32 << 10;

/// The bytes of a body.
pub async fn read(request: Request, app: &App, held: &Held) -> Result<Vec<u8>, ApiError> {
    let limit = app.settings.http.max_body;
    let declared = request.headers().get("content-length").and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|declared| declared > limit as u64) {
        return Err(ApiError::too_large(limit));
    }
    let exchange = request.extensions().get::<Arc<Exchange>>().cloned();
    let arriving = app.memory.arrive();
    let mut chunks = request.into_body().into_data_stream();
    let mut bytes = Vec::new();
    let arrive = async {
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|error| ApiError::invalid(format!("the body broke off: {error}")))?;
            let n_bytes = bytes.len() + chunk.len();
            if n_bytes > limit {
                return Err(ApiError::too_large(limit));
            }
            // The client does not keep the server waiting while others hold the memory.
            exchange.iter().for_each(|exchange| exchange.work());
            if n_bytes > SMALL_BODY {
                arriving.grow_to(n_bytes).await?;
            }
            held.grow_to(n_bytes).await?;
            exchange.iter().for_each(|exchange| exchange.wait());
            bytes.extend_from_slice(&chunk);
        }
        Ok(())
    };
    tokio::time::timeout(app.settings.http.timeout, arrive).await.map_err(|_| ApiError::too_slow())??;
    exchange.iter().for_each(|exchange| exchange.work());
    Ok(bytes)
}

impl FromRequest<Arc<App>> for AnyBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let held = app.memory.hold();
        let bytes = read(request, app, &held).await?;
        if bytes.is_empty() {
            return Ok(Self(Value::Null, held));
        }
        // Tokenizers other than BPE (2) and WordPiece (3) start from single characters.
        let by_letters = app.backend.get().is_some_and(|backend| !matches!(backend.model.vocab_type(), 2 | 3));
        held.grow_to(app.work(|| cost(&bytes, by_letters)).await).await?;
        // serde_json bounds the depth.
        let value = app.work(|| serde_json::from_slice(&bytes)).await;
        let value = value.map_err(|error| ApiError::invalid(format!("the body is no JSON: {error}")))?;
        app.work(|| check_media(&value)).await.map_err(|name| {
            ApiError::field(name, "expected no bytes of an image or sound here, but in a part of a message's content")
        })?;
        Ok(Self(value, held))
    }
}

impl FromRequest<Arc<App>> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let AnyBody(value, held) = AnyBody::from_request(request, app).await?;
        match value {
            Value::Object(mut fields) => {
                let remove = || {
                    fields.retain(|_, value| !value.is_null());
                    fields.values_mut().for_each(remove_nulls);
                };
                app.work(remove).await;
                Ok(Self(fields, held))
            }
            Value::Null => Err(ApiError::invalid("the request has no body; a JSON object is expected")),
            _ => Err(ApiError::invalid("the body must be a JSON object")),
        }
    }
}

impl FromRequest<Arc<App>> for Asked {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let Body(body, held) = Body::from_request(request, app).await?;
        Ok(Self { app: Arc::clone(app), backend: Arc::clone(app.backend()?), body, held })
    }
}
