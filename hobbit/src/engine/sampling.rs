//! The choice of the next token: llama.cpp's sampler chain and grammar, assembled by the rules of `common_sampler_init`
//! and used by those of `common_sampler_sample` (`common/sampling.cpp`).

use std::ffi::{CStr, CString, c_char};
use std::ptr::{self, NonNull};

use ggml_sys::llama::{self, llama_logit_bias, llama_sampler, llama_token_data, llama_token_data_array};

use super::error::Error;
use super::log;
use super::model::Model;
use super::raw::RawContext;
use crate::options::{SamplerKind, SamplingOptions, Token};

/// Tokens that penalties may look back over: a bound on the memory that one number can claim (64 MiB).
const LOOK_BACK_TOKENS_MAX: i32 = 1 << 24;

/// Candidates from which Mirostat 1 estimates its exponent, as in llama.cpp.
const MIROSTAT_CANDIDATES: i32 = 100;

/// `LLAMA_TOKEN_NULL`: the vocabulary has no such token.
const NO_TOKEN: Token = -1;

/// Chooses tokens from logits. Keeps its model alive.
pub struct Sampler {
    // Both refer to the model's vocabulary and are dropped before the model.
    grammar: Option<Raw>,
    chain: Raw,
    /// One entry per token of the vocabulary, reused.
    candidates: Vec<llama_token_data>,
    model: Model,
}

/// An owned `llama_sampler`.
struct Raw(NonNull<llama_sampler>);

// SAFETY: a sampler is memory without ties to a thread; it is used through `&mut Sampler` only.
unsafe impl Send for Raw {}

impl Raw {
    fn new(made: *mut llama_sampler, name: &str) -> Result<Raw, Error> {
        NonNull::new(made).map(Raw).ok_or_else(|| Error::Sampling(format!("llama.cpp refused the sampler '{name}'")))
    }

    fn as_ptr(&self) -> *mut llama_sampler {
        self.0.as_ptr()
    }

    /// False where llama.cpp threw an exception.
    fn accept(&mut self, token: Token) -> bool {
        // SAFETY: the sampler is live; the wrapper does not throw.
        unsafe { llama::llama_rs_sampler_accept(self.as_ptr(), token) == llama::LLAMA_RS_STATUS_OK }
    }

    fn apply(&mut self, candidates: &mut llama_token_data_array) {
        // SAFETY: the sampler is live; the array's data is valid for its size and stays in place.
        unsafe { llama::llama_sampler_apply(self.as_ptr(), candidates) };
    }

    fn reset(&mut self) {
        // SAFETY: the sampler is live, and so is the vocabulary a grammar refers to.
        unsafe { llama::llama_sampler_reset(self.as_ptr()) };
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: owned by us, freed once. A chain frees its links.
        unsafe { llama::llama_sampler_free(self.as_ptr()) };
    }
}

impl Sampler {
    /// Builds the chain: logit bias, then the samplers in their order (or Mirostat), then the draw.
    ///
    /// # Errors
    /// [`Error::Sampling`] for settings that cannot work, [`Error::Grammar`] for a grammar llama.cpp refuses.
    pub fn new(model: &Model, options: &SamplingOptions) -> Result<Sampler, Error> {
        validate(options)?;
        let grammar = match options.grammar.as_deref() {
            None | Some("") => None,
            Some(text) => Some(new_grammar(model, text)?),
        };
        Ok(Sampler { grammar, chain: new_chain(model, options)?, candidates: Vec::new(), model: model.clone() })
    }

    /// The GBNF grammar of the JSON texts that `schema` (a JSON schema) describes.
    ///
    /// # Errors
    /// [`Error::Grammar`] for a schema that is not JSON or that llama.cpp cannot express.
    pub fn json_schema_to_grammar(schema: &str) -> Result<String, Error> {
        // Parsed here too: serde_json says where the error is, and bounds the depth.
        serde_json::from_str::<serde_json::Value>(schema)
            .map_err(|error| Error::Grammar(format!("the schema is not JSON: {error}")))?;
        let schema = CString::new(schema).map_err(|_| Error::Grammar("the schema contains a NUL byte".into()))?;
        let mut made: *mut c_char = ptr::null_mut();
        // SAFETY: the schema is NUL-terminated, `made` receives a string of ours to free; the wrapper does not throw.
        let status = unsafe { llama::llama_rs_json_schema_to_grammar(schema.as_ptr(), true, &raw mut made) };
        if status != llama::LLAMA_RS_STATUS_OK || made.is_null() {
            return Err(Error::Grammar(
                "llama.cpp cannot turn this JSON schema into a grammar; see which keywords and patterns it supports in \
                 llama.cpp's grammars/README.md"
                    .into(),
            ));
        }
        // SAFETY: a NUL-terminated string made by the call above, copied before it is freed, freed once.
        unsafe {
            let grammar = CStr::from_ptr(made).to_string_lossy().into_owned();
            llama::llama_rs_string_free(made);
            Ok(grammar)
        }
    }

    /// Chooses a token from the logits at `index` of the last batch (-1: the last) and remembers it as generated.
    ///
    /// As llama.cpp does, the grammar looks at the chosen token alone and, where it objects, masks all candidates for
    /// a second choice.
    ///
    /// # Errors
    /// [`Error::Decode`] where `index` has no logits, [`Error::Sampling`] where they are not numbers or no candidate
    /// is left, [`Error::Grammar`] where no token continues the grammar.
    pub(super) fn sample(&mut self, context: &RawContext, index: i32) -> Result<Token, Error> {
        let mut token = self.choose(context, index, false)?;
        if !self.grammar_allows(token) {
            token = self.choose(context, index, true)?;
            if !self.grammar_allows(token) {
                return Err(Error::Grammar("no token of this model continues the output as the grammar wants".into()));
            }
        }
        if let Some(grammar) = &mut self.grammar
            && !grammar.accept(token)
        {
            // A grammar without a state would abort the process at its next use.
            grammar.reset();
            return Err(Error::Grammar(format!("llama.cpp lost its place in it at token {token}")));
        }
        self.accept(token);
        Ok(token)
    }

    /// Remembers a token of the prompt: penalties see it, the grammar does not.
    pub fn accept(&mut self, token: Token) {
        let accepted = self.chain.accept(token);
        debug_assert!(accepted, "the samplers of a chain accept any token");
    }

    /// Forgets all tokens and starts the grammar and the random choice anew.
    pub fn reset(&mut self) {
        self.chain.reset();
        if let Some(grammar) = &mut self.grammar {
            grammar.reset();
        }
    }

    /// The seed in use, drawn if none was given.
    pub fn seed(&self) -> u32 {
        // SAFETY: the chain is live.
        unsafe { llama::llama_sampler_get_seed(self.chain.as_ptr()) }
    }

    /// The chain as llama.cpp prints it: `logits -> top-k -> dist`. A question mark stands before what has no effect.
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

    /// Time spent in the chain in ms, and tokens it has seen, those of the prompt included.
    pub fn perf(&self) -> (f64, u64) {
        // SAFETY: the chain is live and a chain.
        let data = unsafe { llama::llama_perf_sampler(self.chain.as_ptr()) };
        (data.t_sample_ms, u64::try_from(data.n_sample).unwrap_or(0))
    }

    /// Runs the chain over fresh logits, masked by the grammar first if `masked`.
    fn choose(&mut self, context: &RawContext, index: i32, masked: bool) -> Result<Token, Error> {
        self.load_logits(context, index)?;
        let mut array = llama_token_data_array {
            data: self.candidates.as_mut_ptr(),
            size: self.candidates.len(),
            selected: -1,
            sorted: false,
        };
        if masked && let Some(grammar) = &mut self.grammar {
            grammar.apply(&mut array);
        }
        self.chain.apply(&mut array);
        // Samplers shorten and reorder the array but leave it where it is.
        let kept = &self.candidates[..array.size.min(self.candidates.len())];
        let selected = usize::try_from(array.selected).ok().and_then(|selected| kept.get(selected));
        match selected {
            Some(chosen) if chosen.logit > f32::NEG_INFINITY && !chosen.p.is_nan() => Ok(chosen.id),
            _ if masked => {
                Err(Error::Grammar("no token of this model continues the output as the grammar wants".into()))
            }
            _ => Err(Error::Sampling(
                "no candidate is left; loosen the logit biases or the sampling settings, which exclude every token or \
                 overflow"
                    .into(),
            )),
        }
    }

    /// Copies the logits (`[n_vocab]`) into `candidates`.
    fn load_logits(&mut self, context: &RawContext, index: i32) -> Result<(), Error> {
        // SAFETY: the context is live.
        unsafe {
            if !ptr::eq(llama::llama_get_model(context.as_ptr()), self.model.shared.raw.as_ptr()) {
                return Err(Error::Sampling("the sampler was made for another model".into()));
            }
            llama::llama_synchronize(context.as_ptr());
        }
        // Nobody attaches samplers to our contexts, so logits are all there is to read.
        let logits = context.logits(index, self.model.n_vocab());
        let logits = logits.ok_or_else(|| Error::Decode(format!("the last batch has no logits at index {index}")))?;
        // Checked here because llama.cpp's samplers sort: with NaN there is no order.
        if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return Err(Error::Sampling(
                "the model computed logits that are not finite numbers; look for damaged weights with gguf-tools verify"
                    .into(),
            ));
        }
        self.candidates.clear();
        self.candidates.extend((0..).zip(logits).map(|(id, &logit)| llama_token_data { id, logit, p: 0.0 }));
        Ok(())
    }

    /// Whether the grammar, if there is one, can go on with `token`. Does not advance it.
    fn grammar_allows(&mut self, token: Token) -> bool {
        let Some(grammar) = &mut self.grammar else { return true };
        let mut single = llama_token_data { id: token, logit: 1.0, p: 0.0 };
        let mut array = llama_token_data_array { data: &raw mut single, size: 1, selected: -1, sorted: false };
        grammar.apply(&mut array);
        single.logit != f32::NEG_INFINITY
    }
}

/// Refuses what would make llama.cpp abort, exhaust memory or choose at random.
fn validate(options: &SamplingOptions) -> Result<(), Error> {
    let fail = |flag: &str, expected: &str, found: &dyn std::fmt::Display| {
        Err(Error::Sampling(format!("{flag} must be {expected}, not {found}")))
    };
    let penalty = options.repeat_penalty;
    if !penalty.is_finite() || penalty <= 0.0 || !(1.0 / penalty).is_finite() {
        return fail("--repeat-penalty", "finite and greater than 0", &penalty);
    }
    for (flag, value) in [
        ("--frequency-penalty", options.frequency_penalty),
        ("--presence-penalty", options.presence_penalty),
        ("--dry-multiplier", options.dry.multiplier),
        ("--dry-base", options.dry.base),
    ] {
        if !value.is_finite() {
            return fail(flag, "finite", &value);
        }
    }
    for (flag, value) in [
        ("--temp", options.temp),
        ("--dynatemp-range", options.dynatemp_range),
        ("--dynatemp-exp", options.dynatemp_exponent),
        ("--top-p", options.top_p),
        ("--min-p", options.min_p),
        ("--typical", options.typical_p),
        ("--top-nsigma", options.top_n_sigma),
        ("--xtc-probability", options.xtc.probability),
        ("--xtc-threshold", options.xtc.threshold),
        ("--adaptive-target", options.adaptive_target),
        ("--adaptive-decay", options.adaptive_decay),
        ("--mirostat-ent", options.mirostat.tau),
        ("--mirostat-lr", options.mirostat.eta),
    ] {
        if value.is_nan() {
            return fail(flag, "a number", &value);
        }
    }
    for (flag, tokens) in
        [("--repeat-last-n", options.repeat_last_n), ("--dry-penalty-last-n", options.dry.penalty_last_n)]
    {
        if tokens > LOOK_BACK_TOKENS_MAX {
            return fail(flag, &format!("at most {LOOK_BACK_TOKENS_MAX} tokens"), &tokens);
        }
    }
    if options.mirostat.version > 2 {
        return fail("--mirostat", "0, 1 or 2", &options.mirostat.version);
    }
    for (token, bias) in &options.logit_bias {
        if bias.is_nan() || *bias == f32::INFINITY {
            return fail(&format!("the logit bias of token {token}"), "below infinity (-inf excludes a token)", bias);
        }
    }
    Ok(())
}

fn new_grammar(model: &Model, text: &str) -> Result<Raw, Error> {
    if text.starts_with("%llguidance") {
        return Err(Error::Grammar("llguidance is not built in; write it in GBNF".into()));
    }
    let text = CString::new(text).map_err(|_| Error::Grammar("it contains a NUL byte".into()))?;
    log::clear_errors();
    // SAFETY: the model's vocabulary is live, the strings are NUL-terminated; the wrapper does not throw.
    let made = unsafe { llama::llama_rs_sampler_init_grammar(model.vocab(), text.as_ptr(), c"root".as_ptr()) };
    NonNull::new(made).map(Raw).ok_or_else(|| {
        let reason = log::take_errors();
        Error::Grammar(if reason.is_empty() { "llama.cpp cannot parse it".to_owned() } else { reason })
    })
}

/// `common_sampler_init` without the grammar.
fn new_chain(model: &Model, options: &SamplingOptions) -> Result<Raw, Error> {
    // SAFETY: returns a chain that owns what is added to it.
    let chain = unsafe { llama::llama_sampler_chain_init(llama::llama_sampler_chain_params { no_perf: false }) };
    let chain = Raw::new(chain, "chain")?;
    let add = |link: *mut llama_sampler, name: &str| {
        let link = Raw::new(link, name)?;
        // SAFETY: both are live; the chain takes the link over.
        unsafe { llama::llama_sampler_chain_add(chain.as_ptr(), link.as_ptr()) };
        std::mem::forget(link);
        Ok::<(), Error>(())
    };

    let bias = logit_bias(model, options);
    let n_vocab = i32::try_from(model.n_vocab()).expect("llama.cpp counts tokens in an i32");
    if !bias.is_empty() {
        let n_bias = i32::try_from(bias.len()).map_err(|_| Error::Sampling("too many logit biases".into()))?;
        // SAFETY: the sampler copies the biases.
        add(unsafe { llama::llama_sampler_init_logit_bias(n_vocab, n_bias, bias.as_ptr()) }, "logit_bias")?;
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
        // Adaptive-p draws, so it stands at the end wherever it was named.
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

fn new_link(model: &Model, options: &SamplingOptions, kind: SamplerKind) -> Result<*mut llama_sampler, Error> {
    let o = options;
    let min_keep = o.min_keep as usize;
    // SAFETY: constructors that take plain values, the live vocabulary of the model, and (DRY) strings they copy.
    Ok(unsafe {
        match kind {
            SamplerKind::Penalties => llama::llama_sampler_init_penalties(
                llama::llama_vocab_n_tokens(model.vocab()),
                o.repeat_last_n,
                o.repeat_penalty,
                o.frequency_penalty,
                o.presence_penalty,
            ),
            SamplerKind::Dry => {
                let breakers = o.dry.sequence_breakers.iter().map(|text| CString::new(text.as_str()));
                let breakers: Vec<CString> = breakers
                    .collect::<Result<_, _>>()
                    .map_err(|_| Error::Sampling("a DRY sequence breaker contains a NUL byte".into()))?;
                let mut pointers: Vec<*const c_char> = breakers.iter().map(|text| text.as_ptr()).collect();
                ggml_sys::shim::hobbit_sampler_init_dry(
                    model.vocab(),
                    o.dry.multiplier,
                    o.dry.base,
                    o.dry.allowed_length,
                    o.dry.penalty_last_n,
                    pointers.as_mut_ptr(),
                    pointers.len(),
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
            SamplerKind::Infill => llama::llama_sampler_init_infill(model.vocab()),
            SamplerKind::AdaptiveP => llama::llama_sampler_init_adaptive_p(o.adaptive_target, o.adaptive_decay, o.seed),
        }
    })
}

/// The caller's biases, then minus infinity for end-of-generation tokens (`ignore_eos`, where there is an EOS token)
/// and for the tokens that the model file suppresses.
fn logit_bias(model: &Model, options: &SamplingOptions) -> Vec<llama_logit_bias> {
    let mut list: Vec<_> = options.logit_bias.iter().map(|&(token, bias)| llama_logit_bias { token, bias }).collect();
    let exclude = |token: Token| llama_logit_bias { token, bias: f32::NEG_INFINITY };
    // SAFETY: the vocabulary lives as long as the model and owns its list of suppressed tokens.
    unsafe {
        let vocab = model.vocab();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut SamplingOptions)) -> String {
        let mut options = SamplingOptions::default();
        change(&mut options);
        validate(&options).unwrap_err().to_string()
    }

    #[test]
    fn defaults_and_extremes_are_valid() {
        for options in [SamplingOptions::default(), SamplingOptions::greedy()] {
            assert!(validate(&options).is_ok());
        }
        let extreme = SamplingOptions {
            temp: f32::INFINITY,
            repeat_last_n: -1,
            top_p: -1.0,
            logit_bias: vec![(-5, f32::NEG_INFINITY), (i32::MAX, 1e30)],
            ..SamplingOptions::default()
        };
        assert!(validate(&extreme).is_ok());
    }

    #[test]
    fn refusals_name_the_flag_and_the_value() {
        for value in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-39] {
            let message = refusal(|o| o.repeat_penalty = value);
            assert!(message.contains("--repeat-penalty must be finite and greater than 0"), "{message}");
        }
        let refusals = [
            (refusal(|o| o.presence_penalty = f32::INFINITY), "--presence-penalty must be finite, not inf"),
            (refusal(|o| o.frequency_penalty = f32::NAN), "--frequency-penalty must be finite, not NaN"),
            (refusal(|o| o.temp = f32::NAN), "--temp must be a number, not NaN"),
            (
                refusal(|o| o.repeat_last_n = i32::MAX),
                "--repeat-last-n must be at most 16777216 tokens, not 2147483647",
            ),
            (refusal(|o| o.dry.penalty_last_n = i32::MAX), "--dry-penalty-last-n must be at most 16777216 tokens"),
            (refusal(|o| o.mirostat.version = 3), "--mirostat must be 0, 1 or 2, not 3"),
            (refusal(|o| o.logit_bias = vec![(7, f32::INFINITY)]), "the logit bias of token 7 must be below infinity"),
        ];
        for (message, expected) in refusals {
            assert!(message.starts_with("cannot sample: ") && message.contains(expected), "{message}");
        }
    }

    #[test]
    fn json_schemas() {
        let grammar =
            Sampler::json_schema_to_grammar(r#"{"type": "object", "properties": {"n": {"type": "integer"}}}"#).unwrap();
        assert!(grammar.contains("root ::="), "{grammar}");
        for (schema, expected) in [
            ("", "the schema is not JSON"),
            ("{\"type\": ", "the schema is not JSON"),
            ("{\"type\": \"nonsense\"}", "llama.cpp cannot turn this JSON schema into a grammar"),
        ] {
            let message = Sampler::json_schema_to_grammar(schema).unwrap_err().to_string();
            assert!(message.contains(expected), "{schema}: {message}");
        }
        let deep = "[".repeat(100_000);
        assert!(Sampler::json_schema_to_grammar(&deep).is_err());
    }
}
