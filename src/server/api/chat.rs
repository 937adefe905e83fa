//! `/v1/chat/completions`: conversations, in OpenAI's shape; and what Responses and Messages, which are other shapes of the same, have in
//! common with it.

pub mod answer;
pub mod messages;
pub mod request;
mod stream;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hobbit::Error;
use hobbit::engine::{ChatInputs, ChatPrompt};
use hobbit::options::Token;
use serde_json::{Map, Value, json};

use super::fields::text;
use super::openai::{Stamp, Usage, finish_reason, logprobs};
use super::params::Params;
use super::{native, prompts};
use crate::server::app::{App, Loaded, Running};
use crate::server::control::Nudge;
use crate::server::http::body::Body;
use crate::server::http::error::ApiError;
use crate::server::http::stream::{Whole, respond, whole};
use crate::server::job::Done;
use answer::Message;
use request::{Defaults, Request};

/// A conversation, written down and ready to be answered.
pub struct Talk {
    pub app: Arc<App>,
    pub params: Params,
    pub prompt: ChatPrompt,
    pub tokens: Vec<Token>,
    pub include_usage: bool,
    /// What becomes of thoughts.
    reasoning_format: &'static str,
}

impl Talk {
    /// Of a request in OpenAI's form.
    ///
    /// # Errors
    /// What makes no sense, or a template that fails on it.
    pub fn new(app: &Arc<App>, loaded: &Loaded, body: Map<String, Value>) -> Result<Self, ApiError> {
        native::refuse_embedding_server(app)?;
        let Request { inputs, rest, budget, include_usage } = read(app, loaded, body)?;
        let (prompt, tokens) = write(loaded, &inputs)?;
        let mut params = Params::of(&rest, app)?;
        let generate = &mut params.generate;
        generate.nudge = budget.control.then(Nudge::default);
        generate.sampling.reasoning = budget;
        prompt.constrain(&mut generate.sampling);
        generate.stops.extend(prompt.additional_stops.iter().cloned());
        let reasoning_format = inputs.reasoning_format.name();
        Ok(Self { app: Arc::clone(app), params, prompt, tokens, include_usage, reasoning_format })
    }

    /// Hands it to the engine, as often as answers are wanted.
    pub fn start(&self, loaded: &Loaded) -> Vec<Running> {
        native::start(loaded, &self.params, std::slice::from_ref(&self.tokens))
    }

    /// The `index`-th answer, of which all is known.
    ///
    /// # Errors
    /// It is not of the form that the template asks for.
    pub fn message(&self, whole: &Whole) -> Result<Message, ApiError> {
        Message::of(&self.prompt, whole)
    }

    /// All that is known of a generation, for `__verbose`; `None` where nobody asked.
    pub fn verbose(&self, done: &Done, index: usize, content: &str) -> Option<Value> {
        let loaded = self.app.loaded.get().filter(|_| self.params.verbose)?;
        let prompt = native::text_of(&loaded.model, &self.tokens);
        let mut all = native::last(&self.app, &self.params, done, index, &prompt, content);
        let settings = &mut all["generation_settings"];
        settings["chat_format"] = json!(self.prompt.format);
        settings["reasoning_format"] = json!(self.reasoning_format);
        settings["generation_prompt"] = json!(self.prompt.generation_prompt);
        Some(all)
    }
}

fn read(app: &App, loaded: &Loaded, body: Map<String, Value>) -> Result<Request, ApiError> {
    let settings = &app.settings;
    let templates = &loaded.templates;
    request::read(
        body,
        &Defaults {
            reasoning: &settings.reasoning,
            jinja: settings.jinja,
            prefills_assistant: settings.prefills_assistant,
            template_thinks: settings.jinja && templates.supports_thinking(),
            calls_in_parallel: templates.capabilities().get("supports_parallel_tool_calls").copied().unwrap_or(false),
        },
    )
}

/// A conversation as the model reads it.
fn write(loaded: &Loaded, inputs: &ChatInputs) -> Result<(ChatPrompt, Vec<Token>), ApiError> {
    // Long ones take a while.
    tokio::task::block_in_place(|| {
        let prompt = loaded.templates.apply(inputs).map_err(|error| match error {
            Error::ChatInput(reason) => ApiError::invalid(reason),
            error => ApiError::invalid(error.to_string()),
        })?;
        let tokens = prompts::tokens(&loaded.model, &prompt.prompt, true)?;
        Ok((prompt, tokens))
    })
}

/// The tokens of the prompt that a request in OpenAI's form makes.
///
/// # Errors
/// As [`Talk::new`].
pub fn count(app: &App, body: Map<String, Value>) -> Result<usize, ApiError> {
    let loaded = app.loaded()?;
    let request = read(app, loaded, body)?;
    Ok(write(loaded, &request.inputs)?.1.len())
}

/// `POST /v1/chat/completions`
pub async fn completions(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let talk = Talk::new(&app, loaded, body)?;
    let running = talk.start(loaded);
    if talk.params.stream {
        let ping = talk.params.ping;
        return respond(running, stream::Chat::new(talk)?, ping).await;
    }
    let results = futures_util::future::try_join_all(running.into_iter().map(whole)).await?;
    let messages = results.iter().map(|own| talk.message(own)).collect::<Result<Vec<_>, _>>()?;
    let mut usage = Usage::default();
    let mut choices = Vec::new();
    for (index, (own, message)) in results.iter().zip(&messages).enumerate() {
        usage.add(Usage::of(&own.done), index, talk.params.n);
        let mut choice = json!({
            "finish_reason": finish_reason(&own.done.stop, !message.calls.is_empty()),
            "index": index,
            "message": message.json(),
        });
        if talk.params.generate.n_probs > 0 {
            choice["logprobs"] = logprobs(&own.probabilities);
        }
        choices.push(choice);
    }
    let mut answer = Stamp::new(&app, "chat.completion").part(Value::Array(choices));
    answer["usage"] = usage.json();
    if let Some(first) = results.first() {
        answer["timings"] = first.done.timings.json();
        if let Some(verbose) = talk.verbose(&first.done, 0, &first.text) {
            answer["__verbose"] = verbose;
        }
    }
    Ok(Json(answer).into_response())
}

/// `POST /v1/chat/completions/control`
pub async fn control(State(app): State<Arc<App>>, Body(body): Body) -> Result<Json<Value>, ApiError> {
    let id = text(&body, "id")?.ok_or_else(|| ApiError::invalid("missing completion id"))?;
    if text(&body, "action")? != Some("reasoning_end") {
        return Err(ApiError::invalid("unknown control action"));
    }
    Ok(Json(match app.controls.end_thought(id) {
        Ok(()) => json!({"success": true}),
        Err(message) => json!({"success": false, "message": message}),
    }))
}

/// `POST /apply-template`
pub async fn apply_template(State(app): State<Arc<App>>, Body(body): Body) -> Result<Json<Value>, ApiError> {
    let loaded = app.loaded()?;
    let request = read(&app, loaded, body)?;
    Ok(Json(json!({"prompt": write(loaded, &request.inputs)?.0.prompt})))
}

/// `POST /v1/chat/completions/input_tokens`
pub async fn input_tokens(State(app): State<Arc<App>>, Body(body): Body) -> Result<Json<Value>, ApiError> {
    Ok(Json(json!({"input_tokens": count(&app, body)?, "object": "response.input_tokens"})))
}
