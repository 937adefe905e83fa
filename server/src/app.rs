//! State shared by all requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use super::backend::Backend;
use super::error::ApiError;
use super::held::Memory;
use super::job::EndReasoning;
use super::kept::Kept;
use super::lock;
use super::settings::Settings;
use super::turns::Turns;

/// The server.
pub struct App {
    pub settings: Settings,
    /// Set once the model is loaded.
    pub backend: OnceLock<Arc<Backend>>,
    /// Start of the server, in seconds since 1970.
    pub began: u64,
    /// Streamed answers that accept control requests.
    pub controls: Arc<Controls>,
    pub memory: Memory,
    /// Conversations of `/v1/responses`.
    pub kept: Arc<Kept>,
    pub turns: Arc<Turns>,
}

impl App {
    /// A server whose model is not loaded yet.
    pub fn new(settings: Settings, began: u64) -> Self {
        let memory = Memory::new(settings.http.max_body);
        let kept = Arc::new(Kept::new(settings.http.max_body));
        Self { settings, backend: OnceLock::new(), began, controls: Arc::default(), memory, kept, turns: Turns::new() }
    }

    /// Runs slow work of a request, such as parsing JSON, applying a template or tokenizing, while another thread
    /// serves connections.
    pub async fn work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.turns.work(work).await
    }

    /// The engine, once the model is loaded.
    pub fn backend(&self) -> Result<&Arc<Backend>, ApiError> {
        self.backend.get().ok_or_else(|| ApiError::unavailable("Loading model"))
    }
}

/// Running streamed answers by client-visible id; `None` if their reasoning cannot be ended.
#[derive(Debug, Default)]
pub struct Controls(Mutex<BTreeMap<String, Option<EndReasoning>>>);

/// Keeps an answer in the list for as long as this lives.
#[derive(Debug)]
pub struct Listed {
    controls: Arc<Controls>,
    id: String,
}

impl Controls {
    /// Adds an answer.
    pub fn list(self: &Arc<Self>, id: &str, end_reasoning: Option<EndReasoning>) -> Listed {
        lock(&self.0).insert(id.to_owned(), end_reasoning);
        Listed { controls: Arc::clone(self), id: id.to_owned() }
    }

    /// Asks an answer to end its reasoning.
    ///
    /// # Errors
    /// The reason why it cannot, in llama-server's words.
    pub fn end_reasoning(&self, id: &str) -> Result<(), &'static str> {
        match lock(&self.0).get(id) {
            None => Err("no active completion for this id"),
            Some(None) => Err("reasoning control not enabled for this completion"),
            Some(Some(end)) => {
                end.ask();
                Ok(())
            }
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        lock(&self.controls.0).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_listed_while_they_last() {
        let controls = Arc::new(Controls::default());
        let end = EndReasoning::default();
        let listed = controls.list("a", Some(end.clone()));
        let _without = controls.list("b", None);
        assert_eq!(controls.end_reasoning("a"), Ok(()));
        assert!(end.take() && !end.take());
        assert!(controls.end_reasoning("b").unwrap_err().contains("not enabled"));
        drop(listed);
        assert!(controls.end_reasoning("a").unwrap_err().contains("no active"));
    }
}
