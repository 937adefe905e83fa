//! What a repetition evaluates.

use serde::{Deserialize, Serialize};

/// What a repetition evaluates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Test {
    /// Tokens of the prompt.
    pub n_prompt: u32,
    /// Tokens evaluated one by one.
    pub n_gen: u32,
    /// Tokens in the context before, not timed.
    pub n_depth: u32,
}

impl Test {
    /// Tokens of a repetition.
    pub fn n_tokens(self) -> usize {
        self.n_prompt as usize + self.n_gen as usize + self.n_depth as usize
    }

    /// As llama-bench writes it: `pp512`, `tg128`, `pp16+tg32`, with ` @ d1024` behind it.
    pub fn name(self) -> String {
        let Self { n_prompt, n_gen, n_depth } = self;
        let name = match (n_prompt, n_gen) {
            (_, 0) => format!("pp{n_prompt}"),
            (0, _) => format!("tg{n_gen}"),
            _ => format!("pp{n_prompt}+tg{n_gen}"),
        };
        if n_depth > 0 { format!("{name} @ d{n_depth}") } else { name }
    }
}
