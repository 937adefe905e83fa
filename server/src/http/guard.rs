//! Checks of every request: host name, API key, and origin; and whose request it is.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_REQUEST_HEADERS, AUTHORIZATION, HOST, ORIGIN, VARY,
};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;

use super::connections::Connection;
use crate::app::App;
use crate::error::ApiError;
use crate::origins::Cors;
use crate::turns::CLIENT_HEADER;

/// Paths that need no key.
fn is_public(path: &str) -> bool {
    matches!(path, "/health" | "/v1/health" | "/" | "/index.html") || path.starts_with("/page/")
}

/// Requires a key if keys are set.
pub async fn authenticate(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let keys = &app.settings.http.api_key;
    if keys.is_empty() || is_public(request.uri().path()) || has_key(request.headers(), keys) {
        return next.run(request).await;
    }
    ApiError::unauthorised().into_response()
}

/// Whether the request has one of the keys. All keys are compared, each in constant time.
fn has_key(headers: &HeaderMap, keys: &[String]) -> bool {
    let bearer = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|value| {
        let scheme = value.get(..7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| &value[7..])
    });
    let given = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes));
    let Some(given) = given else { return false };
    let found = keys.iter().fold(subtle::Choice::from(0), |found, key| found | key.as_bytes().ct_eq(given));
    found.into()
}

/// Refuses requests for an unknown host. HTTP/2 has the host in the address, HTTP/1 in a header.
pub async fn known_host(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let headers = request.headers().get_all(HOST).iter().map(|host| host.to_str().unwrap_or("?"));
    let mut named = request.uri().authority().map(Authority::as_str).into_iter().chain(headers);
    let unknown = named.find(|host| !app.settings.hosts_allowed.allow(host)).map(str::to_owned);
    match unknown {
        None => next.run(request).await,
        Some(host) => ApiError::forbidden(format!(
            "requests for host '{host}' are refused: add --allowed-hosts {host}, or use --api-key"
        ))
        .into_response(),
    }
}

/// Headers that pages may send, unless their browser names others.
const HEADERS: HeaderValue = HeaderValue::from_static("authorization, content-type, x-api-key");

/// Adds CORS headers to answers, and answers preflight requests.
pub async fn cross_origin(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let cors = &app.settings.cors;
    let origin = request.headers().get(ORIGIN).cloned();
    let is_allowed = |origin: &HeaderValue| origin.to_str().is_ok_and(|origin| cors.allows(origin));
    let is_asking = request.method() == Method::OPTIONS;
    let wanted = request.headers().get(ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let changes = request.method() != Method::GET && (*cors == Cors::Off || !is_asking);
    if changes && is_foreign(&request) && !origin.as_ref().is_some_and(is_allowed) {
        // Refuse it here: a browser would send this request of a foreign page and hide only the answer.
        let message = "requests from pages of other origins are off; see --cors-origins\n";
        return (StatusCode::FORBIDDEN, message).into_response();
    }
    if *cors == Cors::Off {
        return next.run(request).await;
    }
    let mut response = if is_asking { StatusCode::OK.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    if let Some(origin) = origin.filter(is_allowed) {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.append(VARY, HeaderValue::from_static("Origin"));
    }
    if is_asking {
        headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE, OPTIONS"));
        // `*` would not include Authorization.
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted.unwrap_or(HEADERS));
    }
    response
}

/// Whether the browser marks the request as coming from another origin.
fn is_foreign(request: &Request) -> bool {
    let headers = request.headers();
    let Some(origin) = headers.get(ORIGIN) else { return false };
    let Ok(origin) = origin.to_str() else { return true };
    // HTTP/2 has it in the address.
    let authority = request.uri().authority().map(Authority::as_str);
    let host = authority.or_else(|| headers.get("host").and_then(|host| host.to_str().ok())).unwrap_or_default();
    origin.split_once("://").is_none_or(|(_, name)| !name.eq_ignore_ascii_case(host))
}

/// Answers a request in its client's turns.
pub async fn take_turns(
    State(app): State<Arc<App>>,
    Extension(connection): Extension<Arc<Connection>>,
    request: Request,
    next: Next,
) -> Response {
    let is_of_router = app.settings.http.socket_on_stdin.0;
    let named = request.headers().get(CLIENT_HEADER).filter(|_| is_of_router);
    let named = named.and_then(|address| address.to_str().ok()?.parse().ok());
    app.turns.follow(named.unwrap_or(connection.peer), next.run(request)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(uri: &str, headers: &[(&str, &str)]) -> Request {
        let all = headers.iter().fold(Request::builder().uri(uri), |all, (name, value)| all.header(*name, *value));
        all.body(axum::body::Body::empty()).unwrap()
    }

    #[test]
    fn keys() {
        let keys = ["one".to_owned(), "two".to_owned()];
        for (header, expected) in [
            (("authorization", "Bearer one"), true),
            (("authorization", "bearer two"), true),
            (("x-api-key", "two"), true),
            (("authorization", "Bearer onE"), false),
            (("authorization", "Bearer on"), false),
            (("authorization", "Basic one"), false),
            (("authorization", ""), false),
            (("x-api-key", ""), false),
            (("x-other", "one"), false),
        ] {
            assert_eq!(has_key(request("/", &[header]).headers(), &keys), expected, "{header:?}");
        }
    }

    #[test]
    fn foreign_origins() {
        let own = ("origin", "http://127.0.0.1:8080");
        for (uri, headers, expected) in [
            ("/", &[own, ("host", "127.0.0.1:8080")][..], false),
            ("/", &[own, ("host", "other:8080")], true),
            // HTTP/2 has the host in the address.
            ("https://127.0.0.1:8080/", &[own], false),
            ("https://other:8080/", &[own], true),
            ("/", &[("origin", "null")], true),
            ("/", &[], false),
        ] {
            assert_eq!(is_foreign(&request(uri, headers)), expected, "{uri} {headers:?}");
        }
    }
}
