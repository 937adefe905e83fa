//! The reasoning budget: llama.cpp's sampler that counts the tokens between two tags and forces the end.

use std::ffi::c_int;

use ggml_sys::chat::{self, HOBBIT_REASONING_DONE, HOBBIT_REASONING_IDLE};

use super::raw::Raw;
use crate::engine::error::Error;
use crate::engine::model::Model;
use hobbit_core::options::{SamplingOptions, Token};

/// Tracks thoughts.
pub(super) struct Budget {
    raw: Raw,
    /// The generation prompt, in which a thought may have begun.
    prefill: Vec<Token>,
    /// Tokens of the longest end tag.
    end_len_max: usize,
}

impl Budget {
    /// `Some` if there are tags and something depends on them: a budget, a lazy grammar (which sleeps through
    /// thoughts), or a caller who may end thoughts.
    ///
    /// # Errors
    /// Texts that the vocabulary cannot encode.
    pub(super) fn new(model: &Model, options: &SamplingOptions, prefill: &[Token]) -> Result<Option<Self>, Error> {
        let reasoning = &options.reasoning;
        let is_wanted = reasoning.tokens.is_some() || options.grammar_lazy || reasoning.control;
        if !is_wanted || reasoning.start.is_empty() {
            return Ok(None);
        }
        let tokens = |text: &String| model.tokenize(text, false, true);
        let start = tokens(&reasoning.start)?;
        let ends: Vec<Vec<Token>> =
            reasoning.ends.iter().filter(|end| !end.is_empty()).map(tokens).collect::<Result<_, _>>()?;
        let Some(first) = ends.first().filter(|_| !start.is_empty()) else { return Ok(None) };
        let mut forced = if reasoning.message.is_empty() { Vec::new() } else { tokens(&reasoning.message)? };
        forced.extend(first);
        let end_lens: Vec<usize> = ends.iter().map(Vec::len).collect();
        let budget = reasoning.tokens.map_or(i32::MAX, |tokens| i32::try_from(tokens).unwrap_or(i32::MAX));
        let all_ends = ends.concat();
        // SAFETY: the model's vocabulary is live and lives as long as the sampler's owner; the arrays have the given
        // lengths and are copied.
        let made = unsafe {
            chat::hobbit_reasoning_budget_init(
                model.vocab(),
                start.as_ptr(),
                start.len(),
                all_ends.as_ptr(),
                end_lens.as_ptr(),
                end_lens.len(),
                forced.as_ptr(),
                forced.len(),
                budget,
            )
        };
        let end_len_max = end_lens.into_iter().max().unwrap_or(0);
        let mut own = Self { raw: Raw::new(made, "reasoning budget")?, prefill: prefill.to_vec(), end_len_max };
        own.accept_prefill();
        Ok(Some(own))
    }

    pub(super) fn raw(&mut self) -> &mut Raw {
        &mut self.raw
    }

    pub(super) fn accept(&mut self, token: Token) {
        let accepted = self.raw.accept(token);
        debug_assert!(accepted, "a reasoning budget accepts any token");
    }

    pub(super) fn reset(&mut self) {
        self.raw.reset();
        self.accept_prefill();
    }

    fn accept_prefill(&mut self) {
        for token in self.prefill.clone() {
            self.accept(token);
        }
    }

    /// Whether the model is within a thought, or its end is being forced.
    pub(super) fn is_thinking(&self) -> bool {
        !matches!(self.state(), HOBBIT_REASONING_IDLE | HOBBIT_REASONING_DONE)
    }

    /// The tokens that ended the last thought, if it has ended.
    pub(super) fn end_match(&self) -> Vec<Token> {
        if self.state() != HOBBIT_REASONING_DONE {
            return Vec::new();
        }
        let mut tokens = vec![0; self.end_len_max];
        // SAFETY: the sampler is live and a reasoning budget; it writes at most as many tokens as there is room for.
        let n =
            unsafe { chat::hobbit_reasoning_budget_end_match(self.raw.as_ptr(), tokens.as_mut_ptr(), tokens.len()) };
        tokens.truncate(n);
        tokens
    }

    /// Ends the model's current thought. False if it is in none, or if its end is being forced already.
    pub(super) fn end_thought(&mut self) -> bool {
        // SAFETY: the sampler is live and a reasoning budget.
        unsafe { chat::hobbit_reasoning_budget_force(self.raw.as_ptr()) }
    }

    fn state(&self) -> c_int {
        // SAFETY: the sampler is live and a reasoning budget.
        unsafe { chat::hobbit_reasoning_budget_state(self.raw.as_ptr()) }
    }
}
