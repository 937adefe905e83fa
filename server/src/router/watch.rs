//! Watches the process of a model: when it is ready, and whether it still answers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{StatusCode, Uri};

use super::client;
use super::models::Models;
use crate::LOOK;

/// Longest time without an answer, unless --timeout is less. HTTP has threads of its own in a process, so that
/// neither loading nor evaluating delays its answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time between two questions to a model that is loaded.
const INTERVAL: Duration = Duration::from_secs(1);

/// Asks the process `id` of a model at `address` for its health, as long as it should answer. Kills one that does not
/// answer, such as a stopped one: others may wait for its memory.
pub async fn watch(models: Arc<Models>, name: String, id: u64, address: SocketAddr) {
    let patience = models.app.settings.http.timeout.min(PATIENCE);
    let mut is_ready = false;
    while models.should_answer(&name, id) {
        match tokio::time::timeout(patience, health(address)).await {
            Ok(Some(StatusCode::OK)) if !is_ready => {
                is_ready = true;
                models.is_ready(&name, id, address);
            }
            // It still loads, or has just ended.
            Ok(_) => {}
            Err(_) if models.should_answer(&name, id) => {
                let why = format!("its process gave no answer for {} s and was killed", patience.as_secs());
                return models.kill(&name, id, why);
            }
            Err(_) => return,
        }
        tokio::time::sleep(if is_ready { INTERVAL } else { LOOK }).await;
    }
}

/// The status of a process's answer about its health.
async fn health(address: SocketAddr) -> Option<StatusCode> {
    let uri: Uri = format!("http://{address}/health").parse().ok()?;
    let request = axum::http::Request::get(uri).body(Body::empty()).ok()?;
    client().request(request).await.ok().map(|answer| answer.status())
}
