//! llama.cpp's samplers: the chain, as `common_sampler_init` builds it, and the reasoning budget, which counts the
//! tokens between two tags and forces the end.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};

use ggml_sys::llama::{llama_logit_bias, llama_sampler, llama_token_data, llama_token_data_array};
use ggml_sys::{llama, shim};

use crate::engine::error::SamplerError;
use crate::engine::ggml::raw::{MESSAGE_BYTES, Owned, text_of};
use crate::engine::model::Model;
use hobbit_core::options::{DryOptions, SamplerKind, SamplingOptions, Token};

/// A sampler of llama.cpp. A chain frees its links.
pub(super) struct Raw(Owned<llama_sampler>);

// SAFETY: a sampler is memory without ties to a thread; it is used only through `&mut Sampler`.
unsafe impl Send for Raw {}

impl Raw {
    pub(super) fn new(made: *mut llama_sampler, name: &str) -> Result<Raw, SamplerError> {
        let made = Owned::new(made).map(Raw);
        made.ok_or_else(|| SamplerError::Settings(format!("llama.cpp refused the sampler '{name}'")))
    }

    pub(super) fn as_ptr(&self) -> *mut llama_sampler {
        self.0.as_ptr()
    }

    /// False where llama.cpp fails.
    pub(super) fn accept(&mut self, token: Token) -> bool {
        // SAFETY: the sampler is live.
        unsafe { shim::hobbit_sampler_accept(self.as_ptr(), token) }
    }

    /// # Errors
    /// [`SamplerError::Settings`]: llama.cpp fails; the candidates must not be used.
    pub(super) fn apply(&mut self, candidates: &mut llama_token_data_array) -> Result<(), SamplerError> {
        let mut message = [0u8; MESSAGE_BYTES];
        // SAFETY: the sampler is live; the array's data is valid for its size and stays in place.
        let is_done = unsafe {
            shim::hobbit_sampler_apply(self.as_ptr(), candidates, message.as_mut_ptr().cast(), message.len())
        };
        if is_done {
            Ok(())
        } else {
            Err(SamplerError::Settings(format!("llama.cpp's samplers fail: {}", text_of(&message))))
        }
    }

    pub(super) fn reset(&mut self) {
        // SAFETY: the sampler is live, and so is the vocabulary a grammar refers to.
        let is_done = unsafe { shim::hobbit_sampler_reset(self.as_ptr()) };
        debug_assert!(is_done, "a sampler begins anew as it began");
    }
}

// The chain.

/// Candidates from which Mirostat 1 estimates its exponent, as in llama.cpp.
const MIROSTAT_CANDIDATES: i32 = 100;

/// `LLAMA_TOKEN_NULL`: the vocabulary has no such token.
const NO_TOKEN: Token = -1;

/// `common_sampler_init` without the grammar and the reasoning budget.
pub(super) fn new_chain(model: &Model, options: &SamplingOptions) -> Result<Raw, SamplerError> {
    // SAFETY: returns a chain that owns what is added to it.
    let chain = unsafe { llama::llama_sampler_chain_init(llama::llama_sampler_chain_params { no_perf: false }) };
    let chain = Raw::new(chain, "chain")?;
    let add = |link: *mut llama_sampler, name: &str| {
        let link = Raw::new(link, name)?;
        // SAFETY: both are live; the chain takes the link over.
        unsafe { llama::llama_sampler_chain_add(chain.as_ptr(), link.as_ptr()) };
        std::mem::forget(link);
        Ok::<(), SamplerError>(())
    };

    let bias = logit_bias(model, options);
    let n_vocab = i32::try_from(model.n_vocab()).expect("llama.cpp counts tokens in an i32");
    if !bias.is_empty() {
        let n_bias = i32::try_from(bias.len()).map_err(|_| SamplerError::Settings("too many logit biases".into()))?;
        // SAFETY: the sampler copies the biases.
        add(unsafe { shim::hobbit_sampler_init_logit_bias(n_vocab, n_bias, bias.as_ptr()) }, "logit_bias")?;
    }
    let seed = options.seed;
    let mirostat = options.mirostat;
    if mirostat.version != 0 {
        // SAFETY: constructors that take plain values.
        let (temp, draw) = unsafe {
            let draw = match mirostat.version {
                1 => llama::llama_sampler_init_mirostat(n_vocab, seed, mirostat.tau, mirostat.eta, MIROSTAT_CANDIDATES),
                _ => llama::llama_sampler_init_mirostat_v2(seed, mirostat.tau, mirostat.eta),
            };
            (llama::llama_sampler_init_temp(options.temp), draw)
        };
        add(temp, "temperature")?;
        add(draw, "mirostat")?;
        return Ok(chain);
    }
    for &kind in &options.samplers {
        // Adaptive-p draws, so it is last in any case.
        if kind != SamplerKind::AdaptiveP {
            add(new_link(model, options, kind)?, kind.name())?;
        }
    }
    if options.samplers.contains(&SamplerKind::AdaptiveP) {
        add(new_link(model, options, SamplerKind::AdaptiveP)?, SamplerKind::AdaptiveP.name())?;
    } else {
        // SAFETY: a constructor that takes a plain value.
        add(unsafe { llama::llama_sampler_init_dist(seed) }, "dist")?;
    }
    Ok(chain)
}

pub(super) fn new_link(
    model: &Model,
    options: &SamplingOptions,
    kind: SamplerKind,
) -> Result<*mut llama_sampler, SamplerError> {
    let o = options;
    let min_keep = o.min_keep as usize;
    // SAFETY: constructors that take plain values, the live vocabulary of the model, and (DRY) arrays that they copy.
    Ok(unsafe {
        match kind {
            SamplerKind::Penalties => shim::hobbit_sampler_init_penalties(
                llama::llama_vocab_n_tokens(model.shared.raw.vocab()),
                o.repeat_last_n,
                o.repeat_penalty,
                o.frequency_penalty,
                o.presence_penalty,
            ),
            SamplerKind::Dry => {
                let sequences = breaks(model, &o.dry)?;
                let lens: Vec<usize> = sequences.iter().map(Vec::len).collect();
                let tokens = sequences.concat();
                shim::hobbit_sampler_init_dry(
                    o.dry.multiplier,
                    o.dry.base,
                    o.dry.allowed_length,
                    o.dry.penalty_last_n,
                    tokens.as_ptr(),
                    lens.as_ptr(),
                    lens.len(),
                )
            }
            SamplerKind::TopNSigma => llama::llama_sampler_init_top_n_sigma(o.top_n_sigma),
            SamplerKind::TopK => llama::llama_sampler_init_top_k(o.top_k),
            SamplerKind::TypicalP => llama::llama_sampler_init_typical(o.typical_p, min_keep),
            SamplerKind::TopP => llama::llama_sampler_init_top_p(o.top_p, min_keep),
            SamplerKind::MinP => llama::llama_sampler_init_min_p(o.min_p, min_keep),
            SamplerKind::Xtc => llama::llama_sampler_init_xtc(o.xtc.probability, o.xtc.threshold, min_keep, o.seed),
            SamplerKind::Temperature => {
                llama::llama_sampler_init_temp_ext(o.temp, o.dynatemp_range, o.dynatemp_exponent)
            }
            SamplerKind::Infill => llama::llama_sampler_init_infill(model.shared.raw.vocab()),
            SamplerKind::AdaptiveP => llama::llama_sampler_init_adaptive_p(o.adaptive_target, o.adaptive_decay, o.seed),
        }
    })
}

/// Maximum bytes of a text that ends repetitions, and of tokens after the one in which it begins, as in llama.cpp.
const BREAKER_BYTES_MAX: usize = 40;
const REST_TOKENS_MAX: usize = 20;

/// Maximum sequences of tokens that end repetitions: each takes about 100 bytes.
const BREAKS_MAX: usize = 1 << 16;

/// The sequences of tokens that end a repetition: a token with one of the texts in it, or one in whose end a text
/// begins and the tokens of the rest. The same as those of llama.cpp's `get_overlapping_token_sequences`, which
/// tokenises the rest anew for each of the first tokens: some 10,000 times for a common letter, while all requests
/// wait.
fn breaks(model: &Model, dry: &DryOptions) -> Result<Vec<Vec<Token>>, SamplerError> {
    if dry.multiplier == 0.0 || dry.base < 1.0 || dry.penalty_last_n <= 0 {
        return Ok(Vec::new());
    }
    let texts = dry.sequence_breakers.iter().map(String::as_bytes);
    let texts: Vec<&[u8]> = texts.map(|text| &text[..text.len().min(BREAKER_BYTES_MAX)]).collect();
    let mut rests: HashMap<&[u8], Vec<Token>> = HashMap::new();
    let mut found = BTreeSet::new();
    for token in 0..model.n_vocab() as Token {
        let word = model.shared.raw.word(token);
        for text in texts.iter().filter(|text| !text.is_empty()) {
            if word.windows(text.len()).any(|part| part == *text) {
                found.insert(vec![token]);
                continue;
            }
            for (begun, rest) in (1..text.len()).map(|at| text.split_at(at)) {
                if !word.ends_with(begun) {
                    continue;
                }
                let rest = match rests.entry(rest) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(new) => new.insert(model.tokenize(rest, false, false)?),
                };
                let n = rest.len().min(REST_TOKENS_MAX);
                found.insert([&[token], &rest[..n]].concat());
            }
        }
        if found.len() > BREAKS_MAX {
            let message = format!(
                "dry_sequence_breakers stand in more than {BREAKS_MAX} tokens, or sequences of them: leave out single \
                 letters"
            );
            return Err(SamplerError::Settings(message));
        }
    }
    Ok(found.into_iter().collect())
}

/// The caller's biases, then minus infinity for end-of-generation tokens (`ignore_eos`, where there is an EOS token)
/// and for the tokens that the model file suppresses.
fn logit_bias(model: &Model, options: &SamplingOptions) -> Vec<llama_logit_bias> {
    let mut list: Vec<_> = options.logit_bias.iter().map(|&(token, bias)| llama_logit_bias { token, bias }).collect();
    let exclude = |token: Token| llama_logit_bias { token, bias: f32::NEG_INFINITY };
    // SAFETY: the vocabulary lives as long as the model and owns its list of suppressed tokens.
    unsafe {
        let vocab = model.shared.raw.vocab();
        if options.ignore_eos && llama::llama_vocab_eos(vocab) != NO_TOKEN {
            list.extend((0..llama::llama_vocab_n_tokens(vocab)).filter(|&token| model.is_eog(token)).map(exclude));
        }
        let mut n = 0;
        let suppressed = llama::llama_vocab_get_suppress_tokens(vocab, &raw mut n);
        if !suppressed.is_null() && n > 0 {
            list.extend(std::slice::from_raw_parts(suppressed, n as usize).iter().copied().map(exclude));
        }
    }
    list
}

// The reasoning budget.

/// Tracks reasoning by its text, however the model divides that into tokens, and forces its end when the budget is
/// spent. Otherwise as llama.cpp's `common_reasoning_budget_init`, which finds the tags' own tokens only.
pub(super) struct Budget {
    start: Vec<u8>,
    ends: Vec<Vec<u8>>,
    /// Tokens of the message and the first end tag.
    forced: Vec<Token>,
    n_tokens: u32,
    /// The generation prompt, in which reasoning may have begun.
    prefill: Vec<Token>,
    countdown: Countdown,
    recent: Recent,
    /// The tokens that ended the last reasoning.
    ended_by: Vec<Token>,
}

#[derive(Clone, Copy)]
enum Countdown {
    /// No reasoning yet, or it has ended.
    Outside,
    /// Remaining tokens of the budget.
    Counting(u32),
    /// The budget is spent, within a character.
    Unfinished,
    /// Index of the next token to force.
    Forcing(usize),
}

impl Budget {
    /// `Some` if there are tags and something depends on them: a budget, a lazy grammar (which is
    /// inactive during reasoning), or a caller who may end reasoning.
    ///
    /// # Errors
    /// Texts that the vocabulary cannot encode.
    pub(super) fn new(
        model: &Model,
        options: &SamplingOptions,
        prefill: &[Token],
    ) -> Result<Option<Self>, SamplerError> {
        let reasoning = &options.reasoning;
        let is_wanted = reasoning.tokens.is_some() || options.grammar_lazy || reasoning.control;
        let ends: Vec<Vec<u8>> =
            reasoning.ends.iter().filter(|end| !end.is_empty()).map(|end| end.clone().into_bytes()).collect();
        let Some(first) = ends.first().filter(|_| is_wanted && !reasoning.start.is_empty()) else { return Ok(None) };
        let mut forced = Vec::new();
        if !reasoning.message.is_empty() {
            forced = model.tokenize(&reasoning.message, false, true)?;
        }
        forced.extend(model.tokenize(first, false, true)?);
        let start = reasoning.start.clone().into_bytes();
        let longest = ends.iter().chain([&start]).map(Vec::len).max().unwrap_or(0);
        let mut own = Self {
            start,
            ends,
            forced,
            n_tokens: reasoning.tokens.unwrap_or(u32::MAX),
            prefill: prefill.to_vec(),
            countdown: Countdown::Outside,
            recent: Recent { longest: longest.max(CHARACTER_BYTES_MAX), ..Recent::default() },
            ended_by: Vec::new(),
        };
        own.accept_prefill(model);
        Ok(Some(own))
    }

    /// Leaves only the forced token, if there is one.
    pub(super) fn mask(&self, candidates: &mut [llama_token_data]) {
        if let Countdown::Forcing(at) = self.countdown {
            let others = candidates.iter_mut().filter(|candidate| candidate.id != self.forced[at]);
            others.for_each(|other| other.logit = f32::NEG_INFINITY);
        }
    }

    pub(super) fn accept(&mut self, model: &Model, token: Token) {
        self.recent.push(token, model.shared.pieces().piece(token));
        match self.countdown {
            Countdown::Outside => {
                if self.recent.take(&self.start).is_some() {
                    self.ended_by.clear();
                    self.count(self.n_tokens);
                }
            }
            countdown => {
                if let Some(tokens) = self.ends.iter().find_map(|end| self.recent.take(end)) {
                    (self.countdown, self.ended_by) = (Countdown::Outside, tokens);
                    return;
                }
                match countdown {
                    Countdown::Forcing(at) if at + 1 < self.forced.len() => self.countdown = Countdown::Forcing(at + 1),
                    Countdown::Forcing(_) | Countdown::Outside => self.countdown = Countdown::Outside,
                    Countdown::Counting(left) => self.count(left.saturating_sub(1)),
                    Countdown::Unfinished => self.count(0),
                }
            }
        }
    }

    fn count(&mut self, left: u32) {
        self.countdown = match left {
            0 if self.recent.ends_within_a_character() => Countdown::Unfinished,
            0 => Countdown::Forcing(0),
            left => Countdown::Counting(left),
        };
        if let Countdown::Forcing(_) = self.countdown {
            self.recent.clear();
        }
    }

    pub(super) fn reset(&mut self, model: &Model) {
        self.countdown = Countdown::Outside;
        self.recent.clear();
        self.ended_by.clear();
        self.accept_prefill(model);
    }

    fn accept_prefill(&mut self, model: &Model) {
        for token in self.prefill.clone() {
            self.accept(model, token);
        }
        // Text of the prompt after the tag is not forced.
        if let Countdown::Forcing(_) = self.countdown {
            self.countdown = Countdown::Forcing(0);
        }
    }

    /// Whether the model reasons, or the end is being forced.
    pub(super) fn is_reasoning(&self) -> bool {
        !matches!(self.countdown, Countdown::Outside)
    }

    /// The tokens that ended the last reasoning, if it has ended.
    pub(super) fn end_match(&self) -> Vec<Token> {
        if self.is_reasoning() { Vec::new() } else { self.ended_by.clone() }
    }

    /// Ends the model's reasoning. False if there is none, or if its end is being forced already.
    pub(super) fn end_reasoning(&mut self) -> bool {
        let counts = matches!(self.countdown, Countdown::Counting(_));
        if counts {
            self.countdown = Countdown::Forcing(0);
            self.recent.clear();
        }
        counts
    }
}

/// Bytes of the longest character.
const CHARACTER_BYTES_MAX: usize = 4;

/// The end of a text, in which a tag may have begun.
#[derive(Default)]
struct Recent {
    text: Vec<u8>,
    /// Tokens, and the bytes of each.
    tokens: VecDeque<(Token, usize)>,
    /// Bytes that are kept, at least.
    longest: usize,
}

impl Recent {
    fn push(&mut self, token: Token, piece: &[u8]) {
        while let Some((_, n)) = self.tokens.front().copied()
            && self.text.len() - n >= self.longest
        {
            self.tokens.pop_front();
            self.text.drain(..n);
        }
        self.tokens.push_back((token, piece.len()));
        self.text.extend_from_slice(piece);
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.text.clear();
    }

    /// The tokens from the one in which `tag` begins, if it is in the text, which is then forgotten.
    fn take(&mut self, tag: &[u8]) -> Option<Vec<Token>> {
        let start = self.text.windows(tag.len()).position(|part| part == tag)?;
        let mut end = 0;
        let ends = self.tokens.iter().map(|(token, n)| {
            end += n;
            (*token, end)
        });
        let found = ends.filter(|(_, end)| *end > start).map(|(token, _)| token).collect();
        self.clear();
        Some(found)
    }

    fn ends_within_a_character(&self) -> bool {
        let n = self.text.iter().rev().take(3).take_while(|byte| **byte & 0xC0 == 0x80).count();
        let needed = match self.text.len().checked_sub(n + 1).map(|at| self.text[at]) {
            Some(0xC0..=0xDF) => 1,
            Some(0xE0..=0xEF) => 2,
            Some(0xF0..=0xF7) => 3,
            _ => 0,
        };
        n < needed
    }
}
