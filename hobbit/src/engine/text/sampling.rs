//! Sampling the next token: llama.cpp's sampler chain, grammar and reasoning budget, combined as in
//! `common_sampler_init`, `common_sampler_sample` and `_accept` (`common/sampling.cpp`).

mod chain;
mod checks;
mod grammar;

use std::ffi::CStr;
use std::{ptr, slice};

use ggml_sys::llama;
use ggml_sys::llama::{llama_token_data, llama_token_data_array};

use self::chain::{Budget, Raw};
use self::grammar::Grammar;
use crate::engine::error::{EvalError, SamplerError, TokenizeError};
use crate::engine::ggml::context::Context;
use crate::engine::ggml::limits;
use crate::engine::model::Model;
use crate::engine::text::chat::isolation::{self, Failure, Task};
use crate::engine::text::chat::schema;
use hobbit_core::options::{SamplingOptions, Token};

/// Chooses tokens from logits. Keeps its model alive.
pub struct Sampler {
    // These refer to the model's vocabulary, so they are dropped before the model.
    grammar: Option<Grammar>,
    budget: Option<Budget>,
    chain: Raw,
    /// One entry per token of the vocabulary, reused.
    candidates: Vec<llama_token_data>,
    /// Number of candidates left by the chain.
    n_kept: usize,
    /// Logits of the last choice, if they are kept.
    logits: Option<Vec<f32>>,
    /// The last choice.
    chosen: Option<Token>,
    /// Control tokens whose text belongs to the answer.
    preserved: Vec<Token>,
    model: Model,
}

impl Sampler {
    /// Builds the chain: logit bias, then the samplers in their order (or Mirostat), then the draw.
    ///
    /// # Errors
    /// [`SamplerError::Settings`] if they are invalid, [`SamplerError::Grammar`] for a grammar llama.cpp refuses,
    /// [`SamplerError::Tokenize`] for tags and triggers that the vocabulary cannot encode.
    pub fn new(model: &Model, options: &SamplingOptions) -> Result<Sampler, SamplerError> {
        checks::validate(options)?;
        let preserved = preserved_tokens(model, options)?;
        let prefill = prefill_tokens(model, &options.generation_prompt)?;
        Ok(Sampler {
            grammar: Grammar::new(model, options, &preserved, &prefill)?,
            budget: Budget::new(model, options, &prefill)?,
            chain: chain::new_chain(model, options)?,
            candidates: Vec::new(),
            n_kept: 0,
            logits: options.keep_logits.then(Vec::new),
            chosen: None,
            preserved,
            model: model.clone(),
        })
    }

    /// Bytes that a sampler with these options takes, besides those that all samplers of a model take.
    pub fn bytes(options: &SamplingOptions) -> u64 {
        checks::bytes(options)
    }

    /// The GBNF grammar of the JSON texts that `schema` (a JSON schema) describes. llama.cpp makes it, in a process of
    /// its own if the program called [`crate::engine::isolate_chat_templates`].
    ///
    /// # Errors
    /// [`SamplerError::Grammar`] for a schema that is not JSON, that llama.cpp cannot express, or that takes too much
    /// time or memory; [`SamplerError::Busy`] if it is slow and got no turn.
    pub fn json_schema_to_grammar(schema: &str) -> Result<String, SamplerError> {
        // Parsed here too: serde_json reports the position of an error, and bounds the depth.
        let value: serde_json::Value = serde_json::from_str(schema)
            .map_err(|error| SamplerError::Grammar(format!("the schema is not JSON: {error}")))?;
        let schema_stack =
            limits::schema_stack(&value).map_err(|error| SamplerError::Grammar(format!("the schema: {error}")))?;
        let schema = schema::of_answer(schema).map_err(SamplerError::Grammar)?;
        match isolation::run(&Task::Schema { schema, schema_stack }) {
            Ok(grammar) => Ok(grammar),
            Err(Failure::Inputs(reason)) => Err(SamplerError::Grammar(reason)),
            Err(Failure::Work(reason)) => Err(SamplerError::Grammar(format!("the schema: {reason}"))),
            Err(Failure::Slow) => Err(SamplerError::Grammar("the schema: it takes too long".to_owned())),
            Err(Failure::Busy(reason)) => Err(SamplerError::Busy(reason)),
        }
    }

    /// Chooses a token from the logits at `index` of the last batch (-1: the last) and remembers it as generated.
    ///
    /// As in llama.cpp, the grammar checks only the chosen token and, if it rejects that, masks all candidates for a
    /// second choice.
    ///
    /// # Errors
    /// [`EvalError::Decode`] if `index` has no logits, [`EvalError::NotFinite`] if they are not finite,
    /// [`EvalError::Sampler`] if no candidate is left, or no token continues the grammar.
    pub(crate) fn sample(&mut self, context: &Context, index: i32) -> Result<Token, EvalError> {
        self.chosen = None;
        let waits = self.grammar.as_ref().is_some_and(Grammar::waits);
        // A token in which a trigger ends may go on as the grammar does not: it is left out.
        let mut excluded = Vec::new();
        let mut token = self.choose(context, index, &excluded, false)?;
        while !self.grammar_allows(token)? {
            if excluded.len() >= if waits { EXCLUDED_MAX } else { 1 } {
                return Err(no_token().into());
            }
            excluded.push(token);
            token = self.choose(context, index, if waits { &excluded } else { &[] }, !waits)?;
        }
        self.accept_generated(token)?;
        self.chosen = Some(token);
        Ok(token)
    }

    /// Records a token of the prompt: penalties see it, the grammar and the reasoning budget do not.
    pub fn accept(&mut self, token: Token) {
        // A placeholder of an image or sound.
        if token < 0 {
            return;
        }
        let accepted = self.chain.accept(token);
        debug_assert!(accepted, "the samplers of a chain accept any token");
    }

    /// Records a generated token that was not chosen here. [`crate::Session::generate`] and `Session::sample` record
    /// those that they choose.
    ///
    /// # Errors
    /// [`SamplerError::Grammar`] if the grammar does not allow it.
    pub fn accept_generated(&mut self, token: Token) -> Result<(), SamplerError> {
        let is_grammars = self.grammar_applies();
        let mut replayed = Vec::new();
        if let Some(budget) = &mut self.budget {
            budget.accept(&self.model, token);
            // The end of reasoning may trigger the grammar that was inactive until then.
            if !is_grammars {
                replayed = budget.end_match();
            }
        }
        if let Some(grammar) = &mut self.grammar {
            for token in replayed.into_iter().chain(is_grammars.then_some(token)) {
                grammar.accept(&self.model, token)?;
            }
        }
        self.accept(token);
        Ok(())
    }

    /// Ends the model's reasoning, as if its budget were spent. False if there is none, or if it is not tracked
    /// ([`hobbit_core::options::ReasoningBudget::control`]).
    pub fn end_reasoning(&mut self) -> bool {
        self.budget.as_mut().is_some_and(Budget::end_reasoning)
    }

    /// Whether the model reasons, if that is tracked.
    pub fn is_reasoning(&self) -> bool {
        self.budget.as_ref().is_some_and(Budget::is_reasoning)
    }

    /// Control tokens whose text belongs to the answer ([`SamplingOptions::preserved_tokens`]): get it from
    /// [`Model::piece`] with `special`.
    pub fn preserved_tokens(&self) -> &[Token] {
        &self.preserved
    }

    /// The probabilities of the last choice: of the chosen token, and the `n` largest. With `post_sampling` they are
    /// those after the chain; otherwise the model's, which needs [`SamplingOptions::keep_logits`].
    ///
    /// `None` before the first choice, or if the logits were not kept.
    pub fn probabilities(&self, n: usize, post_sampling: bool) -> Option<Probabilities> {
        let chosen = self.chosen?;
        if post_sampling {
            return Some(of_candidates(self.kept(), chosen, n));
        }
        self.logits.as_deref().map(|logits| Probabilities::of_logits(logits, chosen, n))
    }

    /// Forgets all tokens and restarts the grammar, the reasoning budget and the random choice.
    pub fn reset(&mut self) {
        self.chain.reset();
        self.chosen = None;
        if let Some(budget) = &mut self.budget {
            budget.reset(&self.model);
        }
        if let Some(grammar) = &mut self.grammar {
            let begun = grammar.reset(&self.model);
            debug_assert!(begun.is_ok(), "a grammar that once began begins again");
        }
    }

    /// The seed in use, drawn if none was given.
    pub fn seed(&self) -> u32 {
        // SAFETY: the chain is live.
        unsafe { llama::llama_sampler_get_seed(self.chain.as_ptr()) }
    }

    /// The chain as llama.cpp prints it: `logits -> top-k -> dist`. A question mark marks a sampler without effect.
    pub fn describe(&self) -> String {
        // SAFETY: the chain is live; its links have indices below `n` and names that are NUL-terminated and static.
        let names = unsafe {
            (0..llama::llama_sampler_chain_n(self.chain.as_ptr())).map(|link| {
                let link = llama::llama_sampler_chain_get(self.chain.as_ptr(), link);
                CStr::from_ptr(llama::llama_sampler_name(link)).to_string_lossy()
            })
        };
        names.fold("logits".to_owned(), |text, name| text + " -> " + &name)
    }

    /// Time spent in the chain in ms, and the number of tokens it processed, prompts included.
    pub fn perf(&self) -> (f64, u64) {
        // SAFETY: the chain is live and a chain.
        let data = unsafe { llama::llama_perf_sampler(self.chain.as_ptr()) };
        (data.t_sample_ms, u64::try_from(data.n_sample).unwrap_or(0))
    }

    /// Runs the budget and the chain over fresh logits without those of `excluded`; the grammar masks them in between
    /// if `masked`.
    fn choose(&mut self, context: &Context, index: i32, excluded: &[Token], masked: bool) -> Result<Token, EvalError> {
        self.load_logits(context, index)?;
        for token in excluded {
            self.candidates[*token as usize].logit = f32::NEG_INFINITY;
        }
        if let Some(budget) = &self.budget {
            budget.mask(&mut self.candidates);
        }
        let mut array = llama_token_data_array {
            data: self.candidates.as_mut_ptr(),
            size: self.candidates.len(),
            selected: -1,
            sorted: false,
        };
        if masked && let Some(grammar) = &mut self.grammar {
            // SAFETY: the array's data is valid for its size.
            grammar.mask(&self.model, unsafe { slice::from_raw_parts_mut(array.data, array.size) })?;
        }
        self.chain.apply(&mut array)?;
        // Samplers shorten and reorder the array but leave it in place.
        self.n_kept = array.size.min(self.candidates.len());
        let selected = usize::try_from(array.selected).ok().and_then(|selected| self.kept().get(selected));
        match selected {
            Some(chosen) if chosen.logit > f32::NEG_INFINITY && !chosen.p.is_nan() => Ok(chosen.id),
            _ if masked || !excluded.is_empty() => Err(no_token().into()),
            _ => Err(SamplerError::Settings(
                "no candidate is left; loosen the logit biases or the sampling settings, which exclude every token or \
                 overflow"
                    .into(),
            )
            .into()),
        }
    }

    /// The candidates left by the chain.
    fn kept(&self) -> &[llama_token_data] {
        &self.candidates[..self.n_kept]
    }

    /// Copies the logits (`[n_vocab]`) into `candidates`.
    fn load_logits(&mut self, context: &Context, index: i32) -> Result<(), EvalError> {
        // SAFETY: the context is live.
        unsafe {
            if !ptr::eq(llama::llama_get_model(context.as_ptr()), self.model.shared.raw.as_ptr()) {
                return Err(SamplerError::Settings("the sampler was made for another model".into()).into());
            }
            llama::llama_synchronize(context.as_ptr());
        }
        // Our contexts have no samplers attached, so only logits can be read.
        let logits = context.logits(index, self.model.n_vocab());
        let logits =
            logits.ok_or_else(|| EvalError::Decode(format!("the last batch has no logits at index {index}")))?;
        // Checked here because llama.cpp's samplers sort: with NaN there is no order.
        if !are_finite(logits) {
            return Err(EvalError::NotFinite);
        }
        if let Some(kept) = &mut self.logits {
            kept.clear();
            kept.extend_from_slice(logits);
        }
        self.candidates.clear();
        self.candidates.extend((0..).zip(logits).map(|(id, &logit)| llama_token_data { id, logit, p: 0.0 }));
        Ok(())
    }

    /// Whether the grammar, if any, applies now: a lazy one is inactive during reasoning.
    fn grammar_applies(&self) -> bool {
        self.grammar.as_ref().is_some_and(|grammar| !(grammar.is_lazy && self.is_reasoning()))
    }

    /// Whether the grammar, if it applies, allows `token`. Does not advance it.
    fn grammar_allows(&mut self, token: Token) -> Result<bool, SamplerError> {
        let applies = self.grammar_applies();
        match &mut self.grammar {
            Some(grammar) if applies => grammar.allows(&self.model, token),
            _ => Ok(true),
        }
    }
}

/// Maximum tokens that are left out before a lazy grammar begins.
const EXCLUDED_MAX: usize = 256;

fn no_token() -> SamplerError {
    SamplerError::Grammar("it allows no token of this model next".into())
}

/// Whether these logits permit a choice. Minus infinity excludes a token; NaN and infinity mean a failed computation.
pub(crate) fn are_finite(logits: &[f32]) -> bool {
    !logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY)
}

/// The tokens of those `preserved_tokens` that are a single token.
fn preserved_tokens(model: &Model, options: &SamplingOptions) -> Result<Vec<Token>, TokenizeError> {
    let mut preserved = Vec::new();
    for text in &options.preserved_tokens {
        if let [token] = model.tokenize(text, false, true)?[..] {
            preserved.push(token);
        }
    }
    Ok(preserved)
}

/// The tokens of the generation prompt, without the space that some tokenizers put before a special token.
fn prefill_tokens(model: &Model, text: &str) -> Result<Vec<Token>, TokenizeError> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let mut tokens = model.tokenize(text, false, true)?;
    let is_space = |byte: Option<&u8>| byte.is_some_and(|byte| matches!(byte, b' ' | b'\t'..=b'\r'));
    let first = tokens.first().map(|&token| model.piece(token, true)).unwrap_or_default();
    if is_space(first.first()) && !is_space(text.as_bytes().first()) {
        tokens.remove(0);
    }
    Ok(tokens)
}

/// Natural logarithms of probabilities.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Probabilities {
    /// The chosen token's; minus infinity if it is not a candidate.
    pub chosen: f32,
    /// The most probable tokens in descending order; of equals the lower id is first.
    pub top: Vec<(Token, f32)>,
}

impl Probabilities {
    /// The softmax of `logits`, `[n_vocab]`.
    pub fn of_logits(logits: &[f32], chosen: Token, n: usize) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
        let log_sum = sum.ln();
        let log_of = |logit: f32| (f64::from(logit - max) - log_sum) as f32;
        let of_chosen = usize::try_from(chosen).ok().and_then(|chosen| logits.get(chosen));
        Self {
            chosen: of_chosen.map_or(f32::NEG_INFINITY, |logit| log_of(*logit)),
            top: largest((0..).zip(logits.iter().copied()).collect(), n)
                .into_iter()
                .map(|(token, logit)| (token, log_of(logit)))
                .collect(),
        }
    }
}

/// The candidates left by the chain, except those with probability 0.
fn of_candidates(candidates: &[llama_token_data], chosen: Token, n: usize) -> Probabilities {
    let of_chosen = candidates.iter().find(|candidate| candidate.id == chosen);
    let kept = candidates.iter().filter(|candidate| candidate.p > 0.0);
    Probabilities {
        chosen: of_chosen.map_or(f32::NEG_INFINITY, |candidate| candidate.p.ln()),
        top: largest(kept.map(|candidate| (candidate.id, candidate.p)).collect(), n)
            .into_iter()
            .map(|(token, p)| (token, p.ln()))
            .collect(),
    }
}

/// The `n` largest in descending order.
fn largest(mut all: Vec<(Token, f32)>, n: usize) -> Vec<(Token, f32)> {
    let order = |a: &(Token, f32), b: &(Token, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if n < all.len() {
        if n > 0 {
            all.select_nth_unstable_by(n - 1, order);
        }
        all.truncate(n);
    }
    all.sort_unstable_by(order);
    all
}

#[cfg(test)]
mod tests;
