//! `/v1/completions`: a text to continue, in OpenAI's shape.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hobbit::options::Token;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::fields::{boolean, get, whole as integer};
use super::native;
use super::openai::{Answer, Logprobs, Stamp, Usage, finish_reason};
use super::params::Params;
use crate::server::app::App;
use crate::server::http::body::Body;
use crate::server::http::error::ApiError;
use crate::server::http::stream::{Frame, Shape, respond, whole};
use crate::server::job::{Done, Event, Probabilities};

/// Fields of OpenAI's that llama.cpp does not support.
const UNSUPPORTED: [&str; 2] = ["best_of", "suffix"];

/// `POST /v1/completions`
pub async fn completions(State(app): State<Arc<App>>, Body(mut body, held): Body) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    native::refuse_embedding_server(&app)?;
    check(&mut body)?;
    let (prompts, params) = app.work(|| native::read(body, &app)).await?;
    let running = native::start(loaded, &params, &prompts, &Arc::new(held)).await?;
    let stamp = Stamp::new(&app, "text_completion");
    let ping = params.ping;
    let shape = Text { app: Arc::clone(&app), params, stamp, prompts };
    if shape.params.stream {
        return respond(running, shape, ping).await;
    }
    let results = futures_util::future::try_join_all(running.into_iter().map(whole)).await?;
    let mut usage = Usage::default();
    let mut choices = Vec::new();
    for (index, own) in results.iter().enumerate() {
        usage.add(Usage::of(&own.done), index, shape.params.n);
        choices.push(choice(&own.text, index, &own.probabilities, Some(&own.done)));
    }
    let mut rest = shape.stamp.rest();
    rest["usage"] = usage.json();
    if let Some(first) = results.first() {
        rest["timings"] = first.done.timings.json();
        shape.explain(&mut rest, 0, &first.done, &first.text);
    }
    Ok(app.work(|| Json(Answer { choices, rest }).into_response()).await)
}

/// Checks the fields of OpenAI's endpoint; `logprobs` becomes `n_probs`.
fn check(body: &mut Map<String, Value>) -> Result<(), ApiError> {
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
    prompts: Vec<Arc<[Token]>>,
}

impl Text {
    fn explain(&self, answer: &mut Value, index: usize, done: &Done, content: &str) {
        if self.params.verbose {
            let prompt = &self.prompts[index / self.params.n];
            answer["__verbose"] = native::last(&self.app, &self.params, done, index, prompt, content);
        }
    }
}

impl Shape for Text {
    fn event(&mut self, index: usize, event: Event) -> Result<Vec<Frame>, ApiError> {
        let part = |own: &Self, text: &str, probabilities: &[Probabilities], done: Option<&Done>| {
            own.stamp.part(json!([choice(text, index, probabilities, done)]))
        };
        let parts = match event {
            Event::Progress(progress) if self.params.return_progress => {
                let mut part = part(self, "", &[], None);
                part["prompt_progress"] = json!(progress);
                if self.params.timings_per_token {
                    part["timings"] = progress.timings.json();
                }
                vec![part]
            }
            Event::Token(token) => {
                let mut part = part(self, &token.text, token.probabilities.as_slice(), None);
                if self.params.timings_per_token {
                    part["timings"] = token.timings.json();
                }
                vec![part]
            }
            Event::Done(done) => {
                let rest = Some(&done.rest).filter(|rest| !rest.is_empty()).map(|rest| part(self, rest, &[], None));
                let mut last = part(self, "", &[], Some(&done));
                last["usage"] = Usage::of(&done).json();
                last["timings"] = done.timings.json();
                self.explain(&mut last, index, &done, "");
                rest.into_iter().chain([last]).collect()
            }
            Event::Started(_) | Event::Progress(_) | Event::Embedding(_) | Event::Failed(_) => Vec::new(),
        };
        Ok(parts.iter().map(Frame::data).collect())
    }

    fn end(&mut self) -> Vec<Frame> {
        vec![Frame { name: None, data: "[DONE]".to_owned() }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_understood() {
        let read = |value: Value| {
            let Value::Object(mut body) = value else { panic!("a body is an object") };
            check(&mut body).map(|()| body).map_err(|error| error.message)
        };
        assert_eq!(read(json!({"logprobs": 3})).unwrap()["n_probs"], 3);
        assert_eq!(read(json!({"logprobs": 3, "n_probs": 2})).unwrap()["n_probs"], 2);
        assert!(read(json!({"echo": false, "suffix": null})).is_ok());
        assert_eq!(read(json!({"echo": true})).unwrap_err(), "Only no echo is supported");
        assert_eq!(read(json!({"best_of": 2})).unwrap_err(), "Unsupported param: best_of");
        assert!(read(json!({"logprobs": -1})).unwrap_err().contains("'logprobs'"));
    }
}
