//! What is read: a text in windows, and questions about it.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use hobbit::perplexity::tasks::{Continuation, continuations};
use hobbit::perplexity::windows::{Windows, n_scored};
use hobbit::{Model, Token};

/// Tokens of a window. The second half is scored, as llama-perplexity does: every scored token has context.
pub const WINDOW: usize = 512;
/// Questions about a text that is read whole.
const QUESTIONS: usize = 500;
/// Questions for each window of a quick look.
const QUESTIONS_OF_WINDOW: usize = 16;
/// Which questions are asked.
const SEED: u32 = 16;

/// A text as windows of tokens, each beginning with the start token where the model has one.
pub struct Text {
    pub name: String,
    pub windows: Vec<Vec<Token>>,
    pub questions: Vec<Continuation>,
}

/// How much of texts is read; `None`: all windows, and as many questions as are usual for so much text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extent {
    pub windows: Option<usize>,
    pub questions: Option<usize>,
}

impl Text {
    /// Reads a file with the tokenizer of a model, in whose tables the text is called `name`.
    ///
    /// # Errors
    /// A file that is no text, or too short for one window.
    pub fn new(path: &Path, name: String, model: &Model, extent: Extent) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let tokens = model.tokenize(&text, true, false)?;
        ensure!(
            tokens.len() >= WINDOW,
            "{}: found {} tokens, expected at least {WINDOW}, a window; give a longer --text",
            path.display(),
            tokens.len()
        );
        let start = if model.adds_bos() { model.tokenize("", true, false)?.first().copied() } else { None };
        let n_windows = (tokens.len() / WINDOW).min(extent.windows.unwrap_or(usize::MAX));
        let mut windows: Vec<Vec<Token>> = tokens.chunks_exact(WINDOW).take(n_windows).map(<[Token]>::to_vec).collect();
        for window in &mut windows {
            window[0] = start.unwrap_or(window[0]);
        }
        let usual = extent.windows.map_or(QUESTIONS, |_| QUESTIONS_OF_WINDOW * n_windows);
        let n_questions = extent.questions.unwrap_or(usual);
        // A quick look asks about what it reads.
        let asked = if extent.windows.is_some() { &tokens[..n_windows * WINDOW] } else { &tokens[..] };
        Ok(Self { name, windows, questions: continuations(asked, start, n_questions, SEED) })
    }

    /// Tokens that are scored.
    pub fn n_scored(&self) -> usize {
        self.windows.len() * n_scored(WINDOW)
    }
}

/// Whether the successor of this position is scored.
pub fn is_scored(position: usize) -> bool {
    Windows { n_ctx: WINDOW, n_batch: WINDOW, n_ubatch: WINDOW, n_chunk: 1 }.is_scored(position)
}
