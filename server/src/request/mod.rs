//! Validated requests: JSON becomes prompts as tokens, and parameters within their bounds.

pub mod chat;
pub mod documents;
pub mod inputs;
pub mod media;
pub mod params;
pub mod prompts;

use std::sync::Arc;
use std::time::Duration;

use hobbit::engine::{Chunks, Encoder};
use hobbit::options::Token;

use crate::app::App;
use crate::backend::Backend;
use crate::error::ApiError;
use crate::held::Held;
use crate::job::{Generate, Running, Work};
use params::Params;
use prompts::Prompts;

/// A request for texts, ready for the engine.
pub struct Texts {
    pub backend: Arc<Backend>,
    pub params: Params,
    pub prompts: Prompts,
}

/// Texts that the engine works on, and how their client wants them.
pub struct Scheduled {
    pub running: Vec<Running>,
    pub stream: bool,
    pub ping: Option<Duration>,
    pub return_progress: bool,
}

/// Bytes per prompt while it is answered, besides its tokens: its job, a sampler, the answer's text.
const TEXT_BYTES: usize = 16 << 10;

impl Texts {
    /// Schedules the prompts, each once per requested answer, with the images and sound in them. Releases most of the
    /// memory that reading the request took.
    ///
    /// # Errors
    /// More candidates or memory than a request may have.
    pub async fn schedule(
        &self,
        (chunks, encoder): (Chunks, Option<Encoder>),
        held: &Arc<Held>,
    ) -> Result<Scheduled, ApiError> {
        let Self { backend, params, prompts } = self;
        let n_tokens: usize = prompts.iter().map(|prompt| prompt.len()).sum();
        let n_answers = prompts.len() * params.n;
        let bytes = params.candidate_bytes(prompts, backend.n_ctx)?
            + n_tokens * size_of::<Token>()
            + params.bytes(n_answers.min(backend.n_slots))
            + n_answers * TEXT_BYTES
            + media::bytes(&chunks);
        held.grow_to(bytes).await?;
        held.shrink_to(bytes);
        let generate: Vec<_> = (0..params.n).map(|index| Arc::new(params.generate_of(index))).collect();
        let texts = prompts.iter().flat_map(|prompt| generate.iter().map(move |generate| (prompt, generate)));
        let schedule = |(prompt, generate): (&Arc<[Token]>, &Arc<Generate>)| {
            let prompt = (Arc::clone(prompt), chunks.clone(), encoder.clone());
            let work = Work::Generate(Arc::clone(generate));
            backend.schedule(prompt, work, params.slot, params.cache_prompt, held)
        };
        let running = texts.map(schedule).collect();
        let (stream, ping, return_progress) = (params.stream, params.ping, params.return_progress);
        Ok(Scheduled { running, stream, ping, return_progress })
    }

    /// The prompt of answer `index`.
    pub fn prompt(&self, index: usize) -> &Arc<[Token]> {
        &self.prompts[index / self.params.n]
    }
}

/// Refuses requests for text on a server for embeddings.
pub fn refuse_embedding_server(app: &App) -> Result<(), ApiError> {
    if app.settings.slots.embeddings.0 {
        let message = "This server does not support completions. Start it without `--embeddings`";
        return Err(ApiError::unsupported(message));
    }
    Ok(())
}
