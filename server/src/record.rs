//! The log of requests: one line each, once its answer has ended.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::http::Method;
use hobbit_core::units::{Bytes, Percent, Seconds};
use serde_json::{Value, json};

use crate::job::Timings;
use crate::lock;
use hobbit_programs::log::{Level, Log};

tokio::task_local! {
    /// The record of the request that the current task answers.
    pub static CURRENT: Arc<Record>;
}

/// Letters of a path and of an error's message that are logged.
const LETTERS_MAX: usize = 300;

/// The page sends this again and again, although it is no GET.
const MARKDOWN: &str = "/markdown";

/// The reason of a refusal, attached to its answer.
#[derive(Clone, Debug)]
pub struct Reason(pub String);

/// A request, which is logged when this is dropped: one that only looks with -v, or if it fails. It has no text of
/// prompts and answers.
#[derive(Debug)]
pub struct Record {
    log: Log,
    method: String,
    path: String,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// `None` before the answer has begun.
    status: Option<u16>,
    /// Whether the whole answer was handed over.
    is_complete: bool,
    error: Option<String>,
    /// Tokens of all texts of the request.
    timings: Option<Timings>,
}

impl Record {
    /// A request that has just arrived.
    pub fn new(log: &Log, method: &Method, path: &str) -> Arc<Self> {
        let (method, path) = (printable(method.as_str()), printable(path));
        Arc::new(Self { log: log.clone(), method, path, began: Instant::now(), state: Mutex::default() })
    }

    /// The answer begins.
    pub fn answered(&self, status: u16, reason: Option<&Reason>) {
        let mut state = lock(&self.state);
        state.status = Some(status);
        state.error = reason.map(|reason| printable(&reason.0));
    }

    /// The whole answer was handed to the connection.
    pub fn completed(&self) {
        lock(&self.state).is_complete = true;
    }

    /// A text of the answer failed after it had begun.
    pub fn failed(&self, reason: &str) {
        lock(&self.state).error = Some(printable(reason));
    }

    /// A text of the answer is complete.
    pub fn generated(&self, timings: &Timings) {
        let mut state = lock(&self.state);
        let all = state.timings.get_or_insert_default();
        all.n_cached += timings.n_cached;
        all.n_prompt += timings.n_prompt;
        all.n_predicted += timings.n_predicted;
        // Texts of a request are made at the same time.
        all.prompt_ms = all.prompt_ms.max(timings.prompt_ms);
        all.predicted_ms = all.predicted_ms.max(timings.predicted_ms);
        all.traffic.add(&timings.traffic, 1.0);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let state = lock(&self.state);
        let fails = state.status.is_none_or(|status| status >= 400) || state.error.is_some();
        // Pages and monitors ask again and again. While the model loads, every one of these fails.
        let only_looks = self.method == "GET" || self.method == "HEAD" || self.path == MARKDOWN;
        let is_quiet = only_looks && (!fails || state.status == Some(503));
        let level = if is_quiet { Level::More } else { Level::Info };
        let took = self.began.elapsed();
        self.log.record(level, || self.line(&state, took), || self.json(&state, took));
    }
}

impl Record {
    fn line(&self, state: &State, took: Duration) -> String {
        let Self { method, path, .. } = self;
        let status = state.status.map_or_else(|| "-".to_owned(), |status| status.to_string());
        let seconds = |ms: f64| Seconds(ms / 1e3);
        let mut line = format!("{method} {path} {status}");
        if let Some(timings) = &state.timings {
            line += &format!(": prompt {} tokens ({} cached)", timings.n_done(), timings.n_cached);
            if timings.prompt_ms > 0.0 {
                line += &format!(" in {}", seconds(timings.prompt_ms));
            }
            if timings.n_predicted > 0 {
                line += &format!(", generated {} in {}", timings.n_predicted, seconds(timings.predicted_ms));
            }
            let traffic = &timings.traffic;
            if self.log.shows(Level::More) && traffic.hits + traffic.misses > 0.0 {
                let rate = Percent(traffic.hits / (traffic.hits + traffic.misses));
                let per_token = Bytes((traffic.bytes_read / traffic.tokens.max(1.0)) as u64);
                let waited = seconds(traffic.io_wait_ms);
                line += &format!(", hit rate {rate}, {per_token} read per token, waited {waited}");
            }
        }
        line += &format!("; {} in total", Seconds(took.as_secs_f64()));
        if let Some(error) = &state.error {
            line += &format!("; {error}");
        } else if !state.is_complete {
            line += "; the client left";
        }
        line
    }

    fn json(&self, state: &State, took: Duration) -> Value {
        let mut value = json!({
            "method": self.method,
            "path": self.path,
            "status": state.status,
            "complete": state.is_complete,
            "seconds": took.as_secs_f64(),
        });
        if let Some(error) = &state.error {
            value["error"] = error.as_str().into();
        }
        if let Some(timings) = &state.timings {
            value["timings"] = timings.json();
        }
        value
    }
}

/// Text of a client's for a log: no control characters or look-alikes, and of bounded length.
fn printable(text: &str) -> String {
    let mut letters = text.chars();
    let mut safe = String::new();
    for letter in letters.by_ref().take(LETTERS_MAX) {
        match letter {
            ' '..='~' => safe.push(letter),
            other => safe.extend(other.escape_default()),
        }
    }
    if letters.next().is_some() {
        safe.push_str("...");
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logged_text_is_printable_and_short() {
        for (text, logged) in [
            ("/v1/models", "/v1/models"),
            ("/a\u{1b}[2J\n", "/a\\u{1b}[2J\\n"),
            ("/\u{9b}31m\u{202e}", "/\\u{9b}31m\\u{202e}"),
        ] {
            assert_eq!(printable(text), logged);
        }
        let long = printable(&"x".repeat(100_000));
        assert!(long.len() == LETTERS_MAX + 3 && long.ends_with("x..."));
    }
}
