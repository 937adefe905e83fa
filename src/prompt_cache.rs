//! The state after a prompt in a file (`--prompt-cache`): a later run whose prompt begins alike continues there. Keys
//! and values are restored bit for bit; the remaining tokens are evaluated in other batches than the whole prompt
//! would be. A state that cannot be rewound continues at a checkpoint, which the file keeps, too.

use anyhow::{Result, anyhow};

use super::log::{Level, Log};
use super::resolve::PromptCacheOptions;
use super::saved::{self, Saved};
use hobbit::{Session, Token};

/// The file, and its use by this run.
pub struct PromptCache {
    options: PromptCacheOptions,
    /// Mark of the model and its KV cache.
    mark: u64,
    /// Whether the first prompt was looked up.
    is_restored: bool,
    /// Tokens of this run.
    n_tokens: usize,
    /// Tokens of the file, if it begins with all of the prompt.
    kept: usize,
}

impl PromptCache {
    pub fn new(options: &PromptCacheOptions, mark: u64) -> Self {
        Self { options: options.clone(), mark, is_restored: false, n_tokens: 0, kept: 0 }
    }

    /// Whether generated tokens are saved, too.
    pub fn keeps_all(&self) -> bool {
        self.options.keeps_all
    }

    /// Restores as much of the first prompt into the session's empty context as the file has; returns the number of
    /// tokens. The last token is never restored, because its logits are needed.
    pub fn restore(&mut self, session: &mut Session, prompt: &[Token], log: &Log) -> Result<usize> {
        if std::mem::replace(&mut self.is_restored, true)
            || prompt.is_empty()
            || session.n_past() > 0
            || !self.options.path.exists()
        {
            return Ok(0);
        }
        let file = self.options.path.display().to_string();
        let refused = |why: String| anyhow!("--prompt-cache {file}: {why}; give another file, or remove this one");
        let (Saved { tokens, state, checkpoints }, _) = saved::read(&self.options.path, self.mark).map_err(refused)?;
        let shared = common_prefix(&tokens, prompt);
        self.kept = if shared == prompt.len() { tokens.len() } else { 0 };
        let wanted = shared.min(prompt.len() - 1);
        if wanted > 0 {
            session.restore(&tokens, &state, checkpoints).map_err(|error| refused(error.to_string()))?;
            session.keep(wanted);
        }
        let known = session.n_past();
        let all = prompt.len();
        log.line(Level::Info, format!("hobbit: prompt: {known} of {all} tokens are known from {file}"));
        Ok(known)
    }

    /// Writes the file if `prompt`, which was just read into the context, is not fully in it.
    pub fn keep_prompt(&mut self, session: &mut Session, prompt: &[Token]) -> Result<()> {
        let is_first = self.n_tokens == 0;
        self.n_tokens += prompt.len();
        let is_whole = session.sequences().tokens(0).len() == prompt.len();
        if is_first && !self.options.is_read_only && self.kept < prompt.len() && is_whole {
            self.write(session)?;
        }
        Ok(())
    }

    /// Records generated tokens.
    pub fn note(&mut self, generated: &[Token]) {
        self.n_tokens += generated.len();
    }

    /// At the end: writes the generated tokens if they are to be saved.
    pub fn finish(mut self, session: &mut Session, log: &Log) -> Result<()> {
        if !self.options.keeps_all || self.options.is_read_only || session.sequences().tokens(0).is_empty() {
            return Ok(());
        }
        if session.n_past() != self.n_tokens {
            log.line(Level::Warning, "warning: --prompt-cache-all: the context was shifted or cut, so it is not saved");
            return Ok(());
        }
        self.write(session)
    }

    fn write(&mut self, session: &mut Session) -> Result<()> {
        let sequences = session.sequences_mut();
        let state = sequences.state(0)?;
        let (tokens, checkpoints) = (sequences.tokens(0), sequences.checkpoints(0));
        self.kept = tokens.len();
        let written = saved::write(&self.options.path, self.mark, tokens, &state, checkpoints);
        written.map_err(|error| {
            anyhow!("--prompt-cache {}: cannot write this file: {error}", self.options.path.display())
        })?;
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
