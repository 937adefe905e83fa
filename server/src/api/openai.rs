//! Common parts of OpenAI's endpoints: the fields of every answer, token counts.

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};

use super::dialect::Whole;
use super::native::Candidates;
use crate::ids::{now, random_id};
use crate::job::{Done, Probabilities, Stop};
use crate::json::merge;

/// The fields that every part of an answer repeats.
#[derive(Clone, Debug)]
pub struct Stamp {
    id: String,
    model: String,
    created: u64,
    object: &'static str,
}

impl Stamp {
    /// Fields of a new answer of `model`, whose parts have this `object` type.
    pub fn new(model: &str, object: &'static str) -> Self {
        Self { id: format!("chatcmpl-{}", random_id()), model: model.to_owned(), created: now(), object }
    }

    /// The answer's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// A part with these choices.
    pub fn part(&self, choices: Value) -> Value {
        let mut part = json!({ "choices": choices });
        merge(&mut part, self.rest());
        part
    }

    /// A part's fields other than its choices.
    fn rest(&self) -> Value {
        json!({
            "created": self.created,
            "model": self.model,
            "system_fingerprint": super::build(),
            "object": self.object,
            "id": self.id,
        })
    }
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub n_prompt: usize,
    /// Prompt tokens that were reused.
    pub n_cached: usize,
    pub n_decoded: usize,
}

impl Usage {
    pub fn of(done: &Done) -> Self {
        Self { n_prompt: done.n_prompt, n_cached: done.timings.n_cached, n_decoded: done.timings.n_predicted }
    }

    /// Adds the `index`-th answer, with `n` answers per prompt: each prompt counts once.
    pub fn add(&mut self, other: Self, index: usize, n: usize) {
        if index.is_multiple_of(n) {
            self.n_prompt += other.n_prompt;
            self.n_cached += other.n_cached;
        }
        self.n_decoded += other.n_decoded;
    }

    pub fn json(self) -> Value {
        json!({
            "completion_tokens": self.n_decoded,
            "prompt_tokens": self.n_prompt,
            "total_tokens": self.n_prompt + self.n_decoded,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
        })
    }
}

/// The finish reason of an answer.
pub fn finish_reason(stop: &Stop, has_calls: bool) -> &'static str {
    match stop {
        Stop::Limit => "length",
        Stop::Eos | Stop::Word(_) if has_calls => "tool_calls",
        Stop::Eos | Stop::Word(_) => "stop",
    }
}

/// `logprobs`: null if there are none.
#[derive(Serialize)]
#[serde(transparent)]
pub struct Logprobs<'a>(Option<Content<'a>>);

#[derive(Serialize)]
struct Content<'a> {
    content: Candidates<'a>,
}

impl<'a> Logprobs<'a> {
    /// The candidates of all tokens, of each the `n_top` most probable ones.
    pub fn new(all: &'a [Probabilities], n_top: usize) -> Self {
        Self((!all.is_empty()).then_some(Content { content: Candidates { all, n_top } }))
    }
}

/// A complete answer with these choices, one for each result; `n` answers per prompt.
pub fn whole<C: Serialize>(
    stamp: &Stamp,
    n: usize,
    results: &[Whole],
    choices: Vec<C>,
    verbose: Option<Value>,
) -> Response {
    #[derive(Serialize)]
    struct Answer<C> {
        choices: Vec<C>,
        #[serde(flatten)]
        rest: Value,
    }
    let mut usage = Usage::default();
    results.iter().enumerate().for_each(|(index, whole)| usage.add(Usage::of(&whole.done), index, n));
    let mut rest = stamp.rest();
    rest["usage"] = usage.json();
    rest["timings"] = results[0].done.timings.json();
    if let Some(verbose) = verbose {
        rest["__verbose"] = verbose;
    }
    Json(Answer { choices, rest }).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_count_once() {
        let mut all = Usage::default();
        for index in 0..4 {
            all.add(Usage { n_prompt: 10, n_cached: if index % 2 == 0 { 3 } else { 9 }, n_decoded: 5 }, index, 2);
        }
        assert_eq!(all, Usage { n_prompt: 20, n_cached: 6, n_decoded: 20 });
        assert_eq!(all.json()["total_tokens"], 40);
    }

    #[test]
    fn reasons() {
        assert_eq!(finish_reason(&Stop::Limit, true), "length");
        assert_eq!(finish_reason(&Stop::Eos, true), "tool_calls");
        assert_eq!(finish_reason(&Stop::Word("x".to_owned()), false), "stop");
    }
}
