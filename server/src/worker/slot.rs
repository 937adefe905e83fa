//! One slot: a sequence of the session, and its current request.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use hobbit::engine::Chunk;
use hobbit::options::Token;
use hobbit::{EvalError, Sampler, Session};
use hobbit_core::checkpoints::Cut;
use hobbit_programs::saved;

use crate::adapters::Scales;
use crate::error::ApiError;
use crate::job::{Generate, Job, Timings, Work};
use crate::status::{LastRun, SlotState};
use crate::text::Text;

/// A sequence of the session.
pub struct Slot {
    pub id: usize,
    /// Adapter scales that the sequence's tokens were evaluated with.
    pub lora: Scales,
    /// Whether another slot may share cells of the context; if so, tokens must not be moved.
    pub is_shared: bool,
    pub last_used: u64,
    pub run: Option<Run>,
    /// Summary of the last request, for status requests.
    pub last: Option<LastRun>,
}

/// A request in a slot.
pub struct Run {
    pub job: Job,
    pub stage: Stage,
    /// Counts so far, without durations.
    pub counts: Timings,
    /// Prompt tokens being evaluated.
    pub n_reading: usize,
    /// Where the prompt's evaluation pauses for checkpoints, in order.
    pub cuts: Vec<Cut>,
    pub began: Instant,
    /// End of the prompt's evaluation.
    pub prompted: Option<Instant>,
    pub sampler: Option<Sampler>,
    pub text: Text,
    pub truncated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Prompt,
    Generating,
}

impl Slot {
    pub fn new(id: usize) -> Self {
        Self { id, lora: Scales::default(), is_shared: false, last_used: 0, run: None, last: None }
    }

    /// The state that status requests show.
    pub fn state(&self, session: &Session, n_ctx: usize) -> SlotState {
        SlotState {
            id: self.id,
            is_processing: !self.is_free(),
            n_ctx,
            n_past: self.tokens(session).len(),
            run: self.run.as_ref().map(Run::as_last).or_else(|| self.last.clone()),
        }
    }

    pub fn is_free(&self) -> bool {
        self.run.is_none()
    }

    /// The sequence's number in llama.cpp.
    pub fn sequence(&self) -> i32 {
        self.id as i32
    }

    /// Tokens that the slot has evaluated and keeps.
    pub fn tokens<'a>(&self, session: &'a Session) -> &'a [Token] {
        session.sequences().tokens(self.sequence())
    }

    /// Empties a slot that has no request.
    pub fn forget(&mut self, session: &mut Session) -> Result<(), EvalError> {
        self.is_shared = false;
        session.sequences_mut().keep(self.sequence(), 0).map(drop)
    }

    /// Writes the tokens and state to a file. Returns their number and the bytes of the file.
    pub fn save(&self, session: &mut Session, mark: u64, path: &Path) -> Result<(usize, u64), ApiError> {
        let (sequence, sequences) = (self.sequence(), session.sequences_mut());
        let state = sequences.state(sequence).map_err(|error| ApiError::server(error.to_string()))?;
        let tokens = sequences.tokens(sequence);
        let mark = saved::mark_with(mark, &self.lora);
        let written = saved::write(path, mark, tokens, &state, sequences.checkpoints(sequence));
        let n_bytes = written.map_err(|error| {
            let message = format!("Unable to save slot: {error}");
            match error.kind() {
                // The client chose the name and can choose another.
                ErrorKind::InvalidInput | ErrorKind::InvalidFilename => ApiError::invalid(message),
                _ => ApiError::server(message),
            }
        })?;
        Ok((tokens.len(), n_bytes))
    }

    /// The embeddings of the sequence: one row if they are pooled, else one per token.
    pub fn rows(&self, session: &Session, first: usize, n_tokens: usize) -> Option<Vec<Vec<f32>>> {
        let context = session.context();
        if context.pooling().is_some() {
            return Some(vec![context.embedding_of_sequence(self.sequence())?.to_vec()]);
        }
        (first..first + n_tokens).map(|index| context.embedding_of(index).map(<[f32]>::to_vec)).collect()
    }

    /// Whether the last evaluation's results for the slot, `n` entries from `first` on, are finite.
    pub fn is_finite(&self, session: &Session, first: usize, n: usize) -> bool {
        match self.run.as_ref().map(|run| &run.job.work) {
            Some(Work::Embed) => {
                self.rows(session, first, n).is_none_or(|rows| rows.iter().flatten().all(|value| value.is_finite()))
            }
            _ if self.run.as_ref().is_some_and(Run::scores_prompt) => {
                (first..first + n).all(|index| session.has_finite_logits(index))
            }
            _ => session.has_finite_logits(first + n - 1),
        }
    }

    pub fn is_generating(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.stage == Stage::Generating)
    }

    /// Prompt tokens that are not evaluated yet.
    pub fn n_lacking(&self) -> usize {
        let of = |run: &Run| match run.stage {
            Stage::Prompt => run.job.prompt.len() - run.counts.n_done(),
            Stage::Generating => 0,
        };
        self.run.as_ref().map_or(0, of)
    }

    /// The next chunk of the prompt, and the number of tokens before it that are not evaluated yet.
    pub fn next_chunk(&self) -> Option<(usize, &Arc<Chunk>)> {
        let run = self.run.as_ref().filter(|run| run.stage == Stage::Prompt)?;
        let (at, chunk) = run.job.chunks.iter().find(|(at, _)| *at >= run.counts.n_done())?;
        Some((at - run.counts.n_done(), chunk))
    }

    /// Tokens of the prompt that can be evaluated together: those before the next chunk.
    pub fn n_ready(&self) -> usize {
        self.next_chunk().map_or_else(|| self.n_lacking(), |(n, _)| n)
    }
}

impl Run {
    /// Closes the projector once no image or sound is left to evaluate.
    pub fn release_encoder(&mut self) {
        if self.job.chunks.iter().all(|(at, _)| at < self.counts.n_done()) {
            self.job.encoder = None;
        }
    }

    /// Whether the prompt's tokens get probabilities.
    pub fn scores_prompt(&self) -> bool {
        self.generate().is_some_and(|generate| generate.scores_prompt)
    }

    /// Prompt tokens that may be evaluated at once.
    pub fn n_to_cut(&self) -> usize {
        let n_done = self.counts.n_done();
        self.cuts.iter().find(|cut| cut.at > n_done).map_or(usize::MAX, |cut| cut.at - n_done)
    }

    /// The text to generate, unless the work is an embedding.
    pub fn generate(&self) -> Option<&Arc<Generate>> {
        match &self.job.work {
            Work::Generate(generate) => Some(generate),
            Work::Embed => None,
        }
    }

    /// Tokens that may be drafted after the pending one, in a slot that holds `n_held` of at most `n_ctx` tokens.
    pub fn n_drafts(&self, n_held: usize, n_ctx: usize) -> usize {
        let Some(generate) = self.generate() else { return 0 };
        // Drafters read tokens; images and sound have none.
        if !self.job.chunks.is_empty() {
            return 0;
        }
        let n_left = generate.n_predict.map_or(usize::MAX, |n| n.saturating_sub(self.counts.n_predicted + 1));
        generate.drafting.n_max.min(n_left).min(n_ctx.saturating_sub(n_held + 1))
    }

    /// Timings so far.
    pub fn timings(&self) -> Timings {
        let now = Instant::now();
        let ms = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64() * 1e3;
        let prompt_ms = if self.counts.n_prompt == 0 { 0.0 } else { ms(self.began, self.prompted.unwrap_or(now)) };
        let predicted_ms = self.prompted.filter(|_| self.counts.n_predicted > 1).map_or(0.0, |from| ms(from, now));
        Timings { prompt_ms, predicted_ms, ..self.counts }
    }

    /// The summary of this request.
    pub fn as_last(&self) -> LastRun {
        LastRun {
            job: self.job.id,
            n_prompt: self.job.prompt.len(),
            counts: self.counts,
            n_reading: self.n_reading,
            began: self.began,
            has_new_line: self.text.has_new_line,
            generate: self.generate().cloned(),
        }
    }
}
