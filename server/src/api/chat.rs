//! `/v1/chat/completions`: conversations in OpenAI's shape, and the code shared with Responses and Messages, which
//! are other shapes of the same.

pub mod answer;
pub mod messages;
pub mod request;
mod stream;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use hobbit::ChatError;
use hobbit::engine::{ChatInputs, ChatPrompt, Chunks, Encoder, Media, MediaPrompt};
use hobbit::options::Token;
use serde::Serialize;
use serde_json::{Value, json};

use super::media;
use super::openai::{self, Logprobs, Stamp, finish_reason};
use super::params::Params;
use super::{Fields, native, prompts, text};
use crate::app::{App, Loaded};
use crate::error::ApiError;
use crate::held::Held;
use crate::http::Body;
use crate::http::stream::{Whole, all, respond};
use crate::job::{Done, EndReasoning, Running};
use answer::Message;
use request::{Defaults, Request};

/// A conversation as a prompt, ready for the engine.
pub struct Talk {
    pub app: Arc<App>,
    pub params: Params,
    pub prompt: ChatPrompt,
    pub tokens: Arc<[Token]>,
    media: (Chunks, Option<Encoder>),
    pub include_usage: bool,
    /// Candidates that the answer shows for each token.
    n_top: usize,
    /// How reasoning appears in the answer.
    reasoning_format: &'static str,
    held: Arc<Held>,
}

impl Talk {
    /// Reads a request in OpenAI's form, which `body` makes.
    pub async fn new(
        app: &Arc<App>,
        loaded: &Loaded,
        body: impl FnOnce() -> Result<Fields, ApiError>,
        held: Held,
    ) -> Result<Self, ApiError> {
        native::refuse_embedding_server(app)?;
        let begin = || {
            let request = read(app, loaded, body()?)?;
            let params = Params::of(&request.rest, app)?;
            prompts::check(params.n, app)?;
            Ok::<_, ApiError>((request, params))
        };
        let (mut request, params) = app.work(begin).await?;
        let media = media::read(app, loaded, std::mem::take(&mut request.media), &held).await?;
        app.work(|| Self::of(app, loaded, (request, params), media, held)).await
    }

    /// A request whose images and sound are read.
    fn of(
        app: &Arc<App>,
        loaded: &Loaded,
        (request, mut params): (Request, Params),
        (media, encoder): (Vec<Media>, Option<Encoder>),
        held: Held,
    ) -> Result<Self, ApiError> {
        let Request { inputs, budget, include_usage, n_top, .. } = request;
        let (mut prompt, MediaPrompt { tokens, chunks }) = write(loaded, &inputs, &media)?;
        // The prompt's tokens hold the same text.
        prompt.prompt.clear();
        prompt.prompt.shrink_to_fit();
        let generate = &mut params.generate;
        generate.end_reasoning = budget.control.then(EndReasoning::default);
        let sampling = Arc::make_mut(&mut generate.sampling);
        sampling.reasoning = budget;
        prompt.constrain(sampling);
        generate.stops = generate.stops.iter().chain(&prompt.additional_stops).cloned().collect();
        let reasoning_format = inputs.reasoning_format.name();
        let (app, tokens, held) = (Arc::clone(app), tokens.into(), Arc::new(held));
        Ok(Self { app, params, prompt, tokens, media: (chunks, encoder), include_usage, n_top, reasoning_format, held })
    }

    /// Hands the prompt to the engine, once per requested answer.
    pub async fn start(&mut self, loaded: &Loaded) -> Result<Vec<Running>, ApiError> {
        let media = std::mem::take(&mut self.media);
        native::start(loaded, &self.params, std::slice::from_ref(&self.tokens), media, &self.held).await
    }

    /// Details of a generation for `__verbose`; `None` if not requested.
    pub fn verbose(&self, done: &Done, index: usize, content: &str) -> Option<Value> {
        if !self.params.verbose {
            return None;
        }
        let mut all = native::last(&self.app, &self.params, done, index, &self.tokens, content);
        let settings = &mut all["generation_settings"];
        settings["chat_format"] = json!(self.prompt.format);
        settings["reasoning_format"] = json!(self.reasoning_format);
        settings["generation_prompt"] = json!(self.prompt.generation_prompt);
        Some(all)
    }
}

fn read(app: &App, loaded: &Loaded, body: Fields) -> Result<Request, ApiError> {
    let settings = &app.settings;
    let templates = &loaded.templates;
    let can = |name: &str| templates.capabilities().get(name).copied().unwrap_or(false);
    request::read(
        body,
        &Defaults {
            reasoning: &settings.reasoning,
            jinja: settings.chat.template.jinja.0,
            prefills_assistant: settings.chat.prefill_assistant.0,
            template_reasons: settings.chat.template.jinja.0 && templates.supports_thinking(),
            marker: loaded.projector.as_ref().map(|(_, marker)| marker.as_str()),
            // llama.cpp cannot tell for a template that writes no calls.
            calls_in_parallel: can("supports_parallel_tool_calls") || !can("supports_tool_calls"),
        },
    )
}

/// The conversation as the template writes it.
fn apply(loaded: &Loaded, inputs: &ChatInputs) -> Result<ChatPrompt, ApiError> {
    loaded.templates.apply(inputs).map_err(|error| match error {
        ChatError::Input(reason) => ApiError::invalid(reason),
        error @ ChatError::Busy(_) => ApiError::busy(error),
        error => ApiError::invalid(error.to_string()),
    })
}

/// The conversation as the template writes it, with its tokens.
fn write(loaded: &Loaded, inputs: &ChatInputs, media: &[Media]) -> Result<(ChatPrompt, MediaPrompt), ApiError> {
    let prompt = apply(loaded, inputs)?;
    let tokens = media::tokens(loaded, &prompt.prompt, media)?;
    Ok((prompt, tokens))
}

/// Number of prompt tokens of a request in OpenAI's form, which `body` makes.
pub async fn count(app: &App, body: impl FnOnce() -> Result<Fields, ApiError>, held: &Held) -> Result<usize, ApiError> {
    let loaded = app.loaded()?;
    let request = app.work(|| read(app, loaded, body()?)).await?;
    let (media, _) = media::read(app, loaded, request.media, held).await?;
    let (_, prompt) = app.work(|| write(loaded, &request.inputs, &media)).await?;
    Ok(prompt.tokens.len())
}

/// `POST /v1/chat/completions`
pub async fn completions(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let mut talk = Talk::new(&app, loaded, || Ok(body), held).await?;
    let running = talk.start(loaded).await?;
    if talk.params.stream {
        let ping = talk.params.ping;
        return respond(running, stream::Chat::new(talk)?, ping).await;
    }
    let results = all(running).await?;
    app.work(|| answer(&talk, &results)).await
}

#[derive(Serialize)]
struct Choice<'a> {
    finish_reason: &'static str,
    index: usize,
    message: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Logprobs<'a>>,
}

/// One answer with all choices.
fn answer(talk: &Talk, results: &[Whole]) -> Result<Response, ApiError> {
    let mut choices = Vec::new();
    for (index, own) in results.iter().enumerate() {
        let message = Message::of(&talk.prompt, own)?;
        choices.push(Choice {
            finish_reason: finish_reason(&own.done.stop, !message.calls.is_empty() && !message.is_cut),
            index,
            message: message.json(),
            logprobs: (talk.params.generate.n_probs > 0).then(|| Logprobs::new(&own.probabilities, talk.n_top)),
        });
    }
    let verbose = talk.verbose(&results[0].done, 0, &results[0].text);
    let stamp = Stamp::new(&talk.app, "chat.completion");
    Ok(openai::answer(&stamp, talk.params.n, results, choices, verbose))
}

/// `POST /v1/chat/completions/control`
pub async fn control(State(app): State<Arc<App>>, Body(body, _held): Body) -> Result<Json<Value>, ApiError> {
    let id = text(&body, "id")?.ok_or_else(|| ApiError::invalid("missing completion id"))?;
    if text(&body, "action")? != Some("reasoning_end") {
        return Err(ApiError::invalid("unknown control action"));
    }
    Ok(Json(match app.controls.end_reasoning(id) {
        Ok(()) => json!({"success": true}),
        Err(message) => json!({"success": false, "message": message}),
    }))
}

/// `POST /apply-template`
pub async fn apply_template(State(app): State<Arc<App>>, Body(body, _held): Body) -> Result<Json<Value>, ApiError> {
    let loaded = app.loaded()?;
    let written = app.work(|| apply(loaded, &read(&app, loaded, body)?.inputs)).await?;
    Ok(Json(json!({"prompt": written.prompt})))
}

/// `POST /v1/chat/completions/input_tokens`
pub async fn input_tokens(State(app): State<Arc<App>>, Body(body, held): Body) -> Result<Json<Value>, ApiError> {
    let n = count(&app, || Ok(body), &held).await?;
    Ok(Json(json!({"input_tokens": n, "object": "response.input_tokens"})))
}
