//! Conversations: a request in OpenAI's form becomes a prompt as the template writes it, and its answers are parsed by
//! the template's format. Other protocols' requests are brought into OpenAI's form first.

pub mod fields;
pub mod messages;
pub mod reply;

use std::sync::Arc;

use hobbit::ChatError;
use hobbit::engine::{ChatInputs, ChatPrompt, Media, MediaPrompt};

use super::params::Params;
use super::{Scheduled, Texts, media, prompts, refuse_embedding_server};
use crate::app::App;
use crate::backend::Backend;
use crate::error::ApiError;
use crate::held::Held;
use crate::job::EndReasoning;
use crate::json::Fields;
use fields::{Defaults, Request};
use reply::Reader;

/// A conversation that is answered.
pub struct Talk {
    pub texts: Texts,
    /// Parsers of the answers.
    pub readers: Vec<Reader>,
    pub include_usage: bool,
    /// Candidates that the answer shows for each token.
    pub n_top: usize,
    /// How reasoning appears in the answer.
    pub reasoning_format: &'static str,
    /// The template's format of answers.
    pub format: String,
    /// Memory of the request until it is answered.
    _held: Arc<Held>,
}

impl Talk {
    /// Reads a request in OpenAI's form, which `body` makes, and schedules it once per requested answer.
    ///
    /// # Errors
    /// An invalid request, or one for more than the server may do.
    pub async fn start(
        app: &App,
        backend: Arc<Backend>,
        held: Held,
        body: impl FnOnce() -> Result<Fields, ApiError>,
    ) -> Result<(Self, Scheduled), ApiError> {
        refuse_embedding_server(app)?;
        let begin = || {
            let request = read(app, &backend, body()?)?;
            let params = Params::of(&request.rest, app)?;
            prompts::check(params.n, app)?;
            Ok::<_, ApiError>((request, params))
        };
        let (request, mut params) = app.work(begin).await?;
        let Request { inputs, budget, include_usage, n_top, media: files, rest } = request;
        let (media, encoder) = media::read(app, &backend, files, &held).await?;
        let (mut prompt, MediaPrompt { tokens, chunks }) = app.work(|| write(&backend, &inputs, &media)).await?;
        // The prompt's tokens hold the same text.
        prompt.prompt = String::new();
        let generate = &mut params.generate;
        generate.end_reasoning = budget.control.then(EndReasoning::default);
        let sampling = Arc::make_mut(&mut generate.sampling);
        sampling.reasoning = budget;
        prompt.constrain(sampling);
        generate.stops = generate.stops.iter().chain(&prompt.additional_stops).cloned().collect();
        let reasoning_format = inputs.reasoning_format.name();
        drop((inputs, media, rest));
        let texts = Texts { backend, params, prompts: vec![tokens.into()] };
        let held = Arc::new(held);
        let scheduled = texts.schedule((chunks, encoder), &held).await?;
        let readers = scheduled.running.iter().map(|_| Reader::new(&prompt)).collect::<Result<_, _>>()?;
        let format = prompt.format;
        let talk = Self { texts, readers, include_usage, n_top, reasoning_format, format, _held: held };
        Ok((talk, scheduled))
    }
}

fn read(app: &App, backend: &Backend, body: Fields) -> Result<Request, ApiError> {
    let settings = &app.settings;
    fields::read(
        body,
        &Defaults {
            reasoning: &settings.reasoning,
            jinja: settings.chat.template.jinja.0,
            prefills_assistant: settings.chat.prefill_assistant.0,
            template_reasons: settings.chat.template.jinja.0 && backend.templates.supports_thinking(),
            marker: backend.projector.as_ref().map(|(_, marker)| marker.as_str()),
            // llama.cpp cannot tell for a template that writes no calls.
            calls_in_parallel: backend.template_can("supports_parallel_tool_calls")
                || !backend.template_can("supports_tool_calls"),
        },
    )
}

/// The conversation as the template writes it.
fn apply(backend: &Backend, inputs: &ChatInputs) -> Result<ChatPrompt, ApiError> {
    backend.templates.apply(inputs).map_err(|error| match error {
        ChatError::Input(reason) => ApiError::invalid(reason),
        error @ ChatError::Busy(_) => ApiError::busy(error),
        error => ApiError::invalid(error.to_string()),
    })
}

/// The conversation as the template writes it, with its tokens.
fn write(backend: &Backend, inputs: &ChatInputs, media: &[Media]) -> Result<(ChatPrompt, MediaPrompt), ApiError> {
    let prompt = apply(backend, inputs)?;
    let tokens = media::tokens(backend, &prompt.prompt, media)?;
    Ok((prompt, tokens))
}

/// The prompt of a request in OpenAI's form, as the template writes it.
pub fn written(app: &App, backend: &Backend, body: Fields) -> Result<String, ApiError> {
    Ok(apply(backend, &read(app, backend, body)?.inputs)?.prompt)
}

/// Number of prompt tokens of a request in OpenAI's form, which `body` makes.
pub async fn count(
    app: &App,
    backend: &Backend,
    held: &Held,
    body: impl FnOnce() -> Result<Fields, ApiError>,
) -> Result<usize, ApiError> {
    let request = app.work(|| read(app, backend, body()?)).await?;
    let (media, _) = media::read(app, backend, request.media, held).await?;
    let (_, prompt) = app.work(|| write(backend, &request.inputs, &media)).await?;
    Ok(prompt.tokens.len())
}
