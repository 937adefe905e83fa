//! A request's body as JSON: of bounded size, in bounded time, whatever its content type says.

use std::sync::Arc;

use axum::body::to_bytes;
use axum::extract::{FromRequest, Request};
use serde_json::{Map, Value};

use super::error::ApiError;
use crate::server::app::App;

/// An object, with null for a field as good as none.
#[derive(Debug)]
pub struct Body(pub Map<String, Value>);

/// Any JSON.
#[derive(Debug)]
pub struct AnyBody(pub Value);

/// The bytes of a body.
async fn bytes(request: Request, app: &App) -> Result<axum::body::Bytes, ApiError> {
    let limit = app.settings.max_body;
    let declared = request.headers().get("content-length").and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|declared| declared > limit as u64) {
        return Err(ApiError::too_large(limit));
    }
    let read = tokio::time::timeout(app.settings.body_timeout, to_bytes(request.into_body(), limit));
    let read = read.await.map_err(|_| ApiError::too_slow())?;
    read.map_err(|error| {
        let is_too_large =
            std::error::Error::source(&error).is_some_and(|source| source.to_string().contains("length limit"));
        if is_too_large {
            ApiError::too_large(limit)
        } else {
            ApiError::invalid(format!("the body broke off: {error}"))
        }
    })
}

impl FromRequest<Arc<App>> for AnyBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let bytes = bytes(request, app).await?;
        if bytes.is_empty() {
            return Ok(Self(Value::Null));
        }
        // serde_json bounds the depth.
        serde_json::from_slice(&bytes)
            .map(Self)
            .map_err(|error| ApiError::invalid(format!("the body is no JSON: {error}")))
    }
}

impl FromRequest<Arc<App>> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        match AnyBody::from_request(request, app).await?.0 {
            Value::Object(mut fields) => {
                fields.retain(|_, value| !value.is_null());
                Ok(Self(fields))
            }
            Value::Null => Err(ApiError::invalid("the request has no body; a JSON object is expected")),
            _ => Err(ApiError::invalid("the body must be a JSON object")),
        }
    }
}
