//! `/v1/completions`: a text to continue, in OpenAI's shape.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};

use super::openai::{Logprobs, Stamp, Usage, answer, finish_reason};
use super::params::Params;
use super::prompts::Prompts;
use super::{Fields, boolean, get, native, whole as integer};
use crate::server::app::App;
use crate::server::error::ApiError;
use crate::server::http::Body;
use crate::server::http::stream::{Frame, Shape, all, done as end, respond, unnamed};
use crate::server::job::{Done, Event, Probabilities};

/// Fields of OpenAI's that llama.cpp does not support.
const UNSUPPORTED: [&str; 2] = ["best_of", "suffix"];

/// `POST /v1/completions`
pub async fn completions(State(app): State<Arc<App>>, Body(mut body, held): Body) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    native::refuse_embedding_server(&app)?;
    check(&mut body)?;
    let (prompts, params) = app.work(|| native::read(body, &app)).await?;
    let running = native::start(loaded, &params, &prompts, Default::default(), &Arc::new(held)).await?;
    let (streams, ping, stamp) = (params.stream, params.ping, Stamp::new(&app, "text_completion"));
    let shape = Text { app: Arc::clone(&app), params, stamp, prompts };
    if streams {
        return respond(running, shape, ping).await;
    }
    let results = all(running).await?;
    let choices = results.iter().enumerate();
    let choices = choices.map(|(index, own)| choice(&own.text, index, &own.probabilities, Some(&own.done))).collect();
    let verbose = shape.verbose(0, &results[0].done, &results[0].text);
    Ok(app.work(|| answer(&shape.stamp, shape.params.n, &results, choices, verbose)).await)
}

/// Checks the fields of OpenAI's endpoint; `logprobs` becomes `n_probs`.
fn check(body: &mut Fields) -> Result<(), ApiError> {
    if boolean(body, "echo")?.unwrap_or(false) {
        return Err(ApiError::invalid("Only no echo is supported"));
    }
    if let Some(name) = UNSUPPORTED.iter().find(|name| get(body, name).is_some()) {
        return Err(ApiError::invalid(format!("Unsupported param: {name}")));
    }
    if let Some(n) = integer(body, &["n_probs", "logprobs"], 0..=i64::from(i32::MAX))? {
        body.insert("n_probs".to_owned(), json!(n));
    }
    Ok(())
}

#[derive(Serialize)]
struct Choice<'a> {
    text: &'a str,
    index: usize,
    logprobs: Logprobs<'a>,
    finish_reason: Option<&'static str>,
}

/// One choice; complete if `done` is given.
fn choice<'a>(text: &'a str, index: usize, probabilities: &'a [Probabilities], done: Option<&Done>) -> Choice<'a> {
    let finish_reason = done.map(|done| finish_reason(&done.stop, false));
    Choice { text, index, logprobs: Logprobs::new(probabilities), finish_reason }
}

/// OpenAI's stream.
struct Text {
    app: Arc<App>,
    params: Params,
    stamp: Stamp,
    prompts: Prompts,
}

impl Text {
    /// Details of a generation for `__verbose`; `None` if not requested.
    fn verbose(&self, index: usize, done: &Done, content: &str) -> Option<Value> {
        let prompt = &self.prompts[index / self.params.n];
        self.params.verbose.then(|| native::last(&self.app, &self.params, done, index, prompt, content))
    }
}

impl Shape for Text {
    fn event(&mut self, index: usize, event: Event) -> Result<Vec<Frame>, ApiError> {
        let part = |text: &str, probabilities: &[Probabilities], done: Option<&Done>| {
            self.stamp.part(json!([choice(text, index, probabilities, done)]))
        };
        let parts = match event {
            Event::Progress(progress) if self.params.return_progress => {
                let mut part = part("", &[], None);
                self.params.add_progress(&mut part, &progress);
                vec![part]
            }
            Event::Token(token) => {
                let mut part = part(&token.text, token.probabilities.as_slice(), None);
                self.params.add_timings(&mut part, &token.timings);
                vec![part]
            }
            Event::Done(done) => {
                let rest = Some(&done.rest).filter(|rest| !rest.is_empty()).map(|rest| part(rest, &[], None));
                let mut last = part("", &[], Some(&done));
                last["usage"] = Usage::of(&done).json();
                last["timings"] = done.timings.json();
                if let Some(verbose) = self.verbose(index, &done, "") {
                    last["__verbose"] = verbose;
                }
                rest.into_iter().chain([last]).collect()
            }
            _ => Vec::new(),
        };
        Ok(parts.iter().map(unnamed).collect())
    }

    fn end(&mut self) -> Vec<Frame> {
        vec![end()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_openai() {
        let read = |value: Value| {
            let Value::Object(mut body) = value else { panic!("a body is an object") };
            check(&mut body).map(|()| body).map_err(|error| error.message)
        };
        assert_eq!(read(json!({"logprobs": 3})).unwrap()["n_probs"], 3);
        assert_eq!(read(json!({"logprobs": 3, "n_probs": 2})).unwrap()["n_probs"], 2);
        assert!(read(json!({"echo": false, "suffix": null})).is_ok());
        assert!(read(json!({"logprobs": -1})).unwrap_err().contains("'logprobs'"));
    }
}
