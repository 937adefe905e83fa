//! The state after a prompt in a file (`--prompt-cache`): a later run whose prompt begins alike continues there. Keys
//! and values are restored bit for bit; the remaining tokens are evaluated in other batches than the whole prompt
//! would be.

use std::path::PathBuf;

use anyhow::{Result, anyhow};

use super::log::{Level, Log};
use super::resolve::PromptCacheOptions;
use super::saved;
use hobbit::{Session, Token};

/// The file, and its use by this run.
pub struct PromptCache {
    path: PathBuf,
    /// Mark of the model and its KV cache.
    mark: u64,
    keeps_all: bool,
    writes: bool,
    /// Whether the first prompt was looked up.
    is_restored: bool,
    /// Tokens of this run, in order.
    history: Vec<Token>,
    /// Tokens of the file, if it begins with all of the prompt.
    kept: usize,
}

impl PromptCache {
    pub fn new(options: &PromptCacheOptions, mark: u64) -> Self {
        Self {
            path: options.path.clone(),
            mark,
            keeps_all: options.keeps_all,
            writes: !options.is_read_only,
            is_restored: false,
            history: Vec::new(),
            kept: 0,
        }
    }

    /// Whether generated tokens are saved, too.
    pub fn keeps_all(&self) -> bool {
        self.keeps_all
    }

    /// Restores as much of the first prompt into the session's empty context as the file has; returns the number of
    /// tokens. The last token is never restored, because its logits are needed.
    ///
    /// # Errors
    /// A file that is damaged, or another model's.
    pub fn restore(&mut self, session: &mut Session, prompt: &[Token], log: &Log) -> Result<usize> {
        if std::mem::replace(&mut self.is_restored, true)
            || prompt.is_empty()
            || session.n_past() > 0
            || !self.path.exists()
        {
            return Ok(0);
        }
        let file = self.path.display().to_string();
        let refused = |why: String| anyhow!("--prompt-cache {file}: {why}; give another file, or remove this one");
        let (tokens, state, _) = saved::read(&self.path, self.mark).map_err(refused)?;
        let shared = common_prefix(&tokens, prompt);
        self.kept = if shared == prompt.len() { tokens.len() } else { 0 };
        let wanted = shared.min(prompt.len() - 1);
        if wanted > 0 {
            session.restore(&state, tokens.len()).map_err(|error| refused(error.to_string()))?;
            session.keep(wanted);
        }
        let known = session.n_past();
        let all = prompt.len();
        log.line(Level::Info, format!("hobbit: prompt: {known} of {all} tokens are known from {file}"));
        Ok(known)
    }

    /// Writes the file if `prompt`, which was just read into the context, is not fully in it.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn keep_prompt(&mut self, session: &mut Session, prompt: &[Token]) -> Result<()> {
        let is_first = self.history.is_empty();
        self.history.extend_from_slice(prompt);
        if is_first && self.writes && self.kept < prompt.len() && session.n_evaluated() == prompt.len() {
            self.write(session, prompt.len())?;
        }
        Ok(())
    }

    /// Records generated tokens.
    pub fn note(&mut self, generated: &[Token]) {
        self.history.extend_from_slice(generated);
    }

    /// At the end: writes the generated tokens if they are to be saved.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn finish(mut self, session: &mut Session, log: &Log) -> Result<()> {
        let n = session.n_evaluated();
        if !self.keeps_all || !self.writes || n == 0 {
            return Ok(());
        }
        if session.n_past() != self.history.len() {
            log.line(Level::Warning, "warning: --prompt-cache-all: the context was shifted or cut: it is not kept");
            return Ok(());
        }
        self.write(session, n)
    }

    fn write(&mut self, session: &mut Session, n: usize) -> Result<()> {
        let state = session.sequence_state(0)?;
        let written = saved::write(&self.path, self.mark, &self.history[..n], &state);
        written.map_err(|error| anyhow!("--prompt-cache {}: cannot write this file: {error}", self.path.display()))?;
        self.kept = n;
        Ok(())
    }
}

/// Length of the common beginning.
pub fn common_prefix(one: &[Token], other: &[Token]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::common_prefix;

    #[test]
    fn beginnings() {
        assert_eq!(common_prefix(&[1, 2, 3], &[1, 2, 4]), 2);
        assert_eq!(common_prefix(&[1], &[1, 2]), 1);
        assert_eq!(common_prefix(&[], &[1]), 0);
    }
}
