//! Generation parameters, under llama-server's names and OpenAI's.

use std::sync::Arc;
use std::time::Duration;

use hobbit::options::{SamplerKind, SamplingOptions, Token, sampler_order};
use hobbit::{Model, Sampler, SamplerError};
use serde_json::{Value, json};

use super::prompts::{check_parts, encode};
use crate::adapters;
use crate::app::App;
use crate::error::ApiError;
use crate::job::{Drafting, Generate, Progress, Timings};
use crate::json::{Fields, SHOWN_BYTES_MAX, boolean, get, integer, merge, number, shortened, text, texts, whole};

const MOST: i64 = i32::MAX as i64;

/// A request's fields other than its prompt.
#[derive(Clone, Debug)]
pub struct Params {
    pub generate: Generate,
    pub stream: bool,
    /// Answers per prompt.
    pub n: usize,
    pub slot: Option<usize>,
    pub cache_prompt: bool,
    pub timings_per_token: bool,
    pub return_progress: bool,
    pub return_tokens: bool,
    /// Requested fields of the answer; empty for all.
    pub response_fields: Vec<String>,
    pub verbose: bool,
    pub ping: Option<Duration>,
    /// Bytes of texts that the answer repeats.
    pub echoed_bytes: usize,
}

impl Params {
    /// Reads a request's body. A JSON schema becomes a grammar if the body has no grammar.
    pub fn of(body: &Fields, app: &App) -> Result<Self, ApiError> {
        let (backend, settings) = (app.backend()?, &app.settings);
        let model = &backend.model;
        let n_predict = match whole(body, &["n_predict", "max_completion_tokens", "max_tokens"], -1..=MOST)? {
            Some(n) => usize::try_from(n).ok(),
            None => settings.slots.predict.and_then(|n| usize::try_from(n).ok()),
        };
        let n_probs = whole(body, &["n_probs"], 0..=MOST)?.unwrap_or(0).min(model.n_vocab() as i64) as usize;
        let sampling = sampling(body, &settings.sampling, model)?;
        let generate = Generate {
            seed: sampling.seed,
            sampling: Arc::new(sampling),
            n_predict,
            n_keep: whole(body, &["n_keep"], -1..=MOST)?.map_or(settings.context.keep, |n| n as i32),
            n_discard: whole(body, &["n_discard"], 0..=MOST)?.unwrap_or(0) as usize,
            cache_reuse: whole(body, &["n_cache_reuse"], 0..=MOST)?.map_or(settings.slots.cache_reuse, |n| n as usize),
            stops: stops(body)?.into(),
            n_probs,
            scores_prompt: false,
            post_sampling_probs: boolean(body, "post_sampling_probs")?.unwrap_or(false),
            shows_special: settings.slots.special.0,
            time_limit: whole(body, &["t_max_predict_ms"], -1..=MOST)?
                .and_then(|ms| u64::try_from(ms).ok())
                .filter(|ms| *ms > 0)
                .map(Duration::from_millis),
            n_indent: whole(body, &["n_indent"], 0..=MOST)?.unwrap_or(0) as usize,
            end_reasoning: None,
            drafting: drafting(body, &backend.drafting)?,
            lora: match get(body, "lora") {
                Some(list) => adapters::read(list, model.adapters().len())?,
                None => backend.adapters.scales(),
            },
        };
        let slot = whole(body, &["id_slot"], -1..=MOST)?.and_then(|slot| usize::try_from(slot).ok());
        let n_slots = settings.n_slots;
        if slot.is_some_and(|slot| slot >= n_slots) {
            return Err(ApiError::field("id_slot", format!("there are {n_slots} slots, from 0 on")));
        }
        let ping = match whole(body, &["sse_ping_interval"], -1..=MOST)? {
            None => settings.ping,
            Some(seconds) => u64::try_from(seconds).ok().filter(|seconds| *seconds > 0).map(Duration::from_secs),
        };
        Ok(Self {
            generate,
            stream: boolean(body, "stream")?.unwrap_or(false),
            n: n_answers(body, app)?,
            slot,
            cache_prompt: boolean(body, "cache_prompt")?.unwrap_or(settings.slots.cache_prompt.0),
            timings_per_token: boolean(body, "timings_per_token")?.unwrap_or(false),
            return_progress: boolean(body, "return_progress")?.unwrap_or(false),
            return_tokens: boolean(body, "return_tokens")?.unwrap_or(false),
            response_fields: texts(body, "response_fields")?.unwrap_or_default(),
            verbose: boolean(body, "verbose")?.unwrap_or(settings.verbose),
            ping,
            echoed_bytes: 0,
        })
    }

    /// Parameters of the `index`-th answer to a prompt: a given seed grows by `index`.
    pub fn generate_of(&self, index: usize) -> Generate {
        let mut generate = self.generate.clone();
        if generate.seed != SamplingOptions::RANDOM_SEED {
            generate.seed = generate.seed.wrapping_add(index as u32);
        }
        generate
    }

    /// Bytes that the candidates of all answers to prompts take until they are sent. A stream sends those of generated
    /// tokens at once.
    ///
    /// # Errors
    /// Too many candidates.
    pub fn candidate_bytes(&self, prompts: &[Arc<[Token]>], n_ctx: usize) -> Result<usize, ApiError> {
        let n_generated = self.generate.n_predict.map_or(n_ctx, |n| n.min(n_ctx));
        let n_scored = prompts.iter().map(|prompt| prompt.len()).max().filter(|_| self.generate.scores_prompt);
        let n_scored = n_scored.unwrap_or(0).min(n_ctx);
        let n_answers = prompts.len() * self.n;
        let bytes = candidates(self.generate.n_probs, n_generated + n_scored, n_answers)?;
        Ok(if self.stream { candidates(self.generate.n_probs, n_scored, n_answers)? } else { bytes })
    }

    /// Adds the timings to a part of a stream, if the request asked for them.
    pub fn add_timings(&self, part: &mut Value, timings: &Timings) {
        if self.timings_per_token {
            part["timings"] = timings.json();
        }
    }

    /// Adds the progress of a prompt to a part of a stream.
    pub fn add_progress(&self, part: &mut Value, progress: &Progress) {
        part["prompt_progress"] = json!(progress);
        self.add_timings(part, &progress.timings);
    }

    /// Bytes that stay in memory while answers are made, `n_at_once` of them at a time.
    pub fn bytes(&self, n_at_once: usize) -> usize {
        let sampling = &self.generate.sampling;
        let grammar = sampling.grammar.as_ref().map_or(0, String::len);
        let samplers = n_at_once * Sampler::bytes(sampling) as usize;
        sampling.logit_bias.len() * size_of::<(Token, f32)>() + grammar + self.echoed_bytes + samplers
    }
}

/// Number of answers per prompt.
pub fn n_answers(body: &Fields, app: &App) -> Result<usize, ApiError> {
    Ok(whole(body, &["n_cmpl", "n"], 1..=app.settings.n_slots as i64)?.unwrap_or(1) as usize)
}

/// Candidates per token that a single answer may always ask for: OpenAI's maximum.
const CANDIDATES_ALWAYS: usize = 20;

/// Maximum candidates of all answers of a request otherwise.
const CANDIDATES_MAX: usize = 1 << 18;

/// Bytes per candidate until it is sent.
const CANDIDATE_BYTES: usize = 140;

/// Bytes for `n_probs` candidates per token of `n_answers` answers of `n_tokens` tokens each.
fn candidates(n_probs: usize, n_tokens: usize, n_answers: usize) -> Result<usize, ApiError> {
    let n = n_probs.saturating_mul(n_tokens).saturating_mul(n_answers);
    let is_few = n_probs <= CANDIDATES_ALWAYS && n_answers == 1;
    if n <= CANDIDATES_MAX || is_few {
        return Ok(n.min(CANDIDATES_MAX) * CANDIDATE_BYTES);
    }
    Err(ApiError::invalid(format!(
        "{n_probs} candidates for each of {n_tokens} tokens of {n_answers} answers are more than {CANDIDATES_MAX}: ask \
         for fewer (n_probs, logprobs), for fewer tokens (max_tokens), or for fewer answers"
    )))
}

/// The sampling parameters that are numbers, by llama-server's names.
fn numbers(options: &mut SamplingOptions) -> [(&'static str, &mut f32); 18] {
    [
        ("temperature", &mut options.temp),
        ("dynatemp_range", &mut options.dynatemp_range),
        ("dynatemp_exponent", &mut options.dynatemp_exponent),
        ("top_p", &mut options.top_p),
        ("min_p", &mut options.min_p),
        ("top_n_sigma", &mut options.top_n_sigma),
        ("xtc_probability", &mut options.xtc.probability),
        ("xtc_threshold", &mut options.xtc.threshold),
        ("typical_p", &mut options.typical_p),
        ("repeat_penalty", &mut options.repeat_penalty),
        ("presence_penalty", &mut options.presence_penalty),
        ("frequency_penalty", &mut options.frequency_penalty),
        ("dry_multiplier", &mut options.dry.multiplier),
        ("dry_base", &mut options.dry.base),
        ("mirostat_tau", &mut options.mirostat.tau),
        ("mirostat_eta", &mut options.mirostat.eta),
        ("adaptive_target", &mut options.adaptive_target),
        ("adaptive_decay", &mut options.adaptive_decay),
    ]
}

/// The sampling parameters that are integers, by name and least value.
fn integers(options: &mut SamplingOptions) -> [(&'static str, i32, &mut i32); 4] {
    [
        ("top_k", i32::MIN, &mut options.top_k),
        ("repeat_last_n", -1, &mut options.repeat_last_n),
        ("dry_allowed_length", 0, &mut options.dry.allowed_length),
        ("dry_penalty_last_n", -1, &mut options.dry.penalty_last_n),
    ]
}

fn sampling(body: &Fields, defaults: &SamplingOptions, model: &Model) -> Result<SamplingOptions, ApiError> {
    let mut options = defaults.clone();
    for (name, into) in numbers(&mut options) {
        *into = number(body, name)?.unwrap_or(*into);
    }
    options.temp = options.temp.max(0.0);
    for unit in [&mut options.top_p, &mut options.min_p, &mut options.xtc.probability, &mut options.xtc.threshold] {
        *unit = unit.clamp(0.0, 1.0);
    }
    for (name, low, into) in integers(&mut options) {
        *into = whole(body, &[name], low.into()..=MOST)?.map_or(*into, |value| value as i32);
    }
    if let Some(version) = whole(body, &["mirostat"], i64::from(i32::MIN)..=MOST)? {
        options.mirostat.version = version.clamp(0, 2) as u8;
    }
    if let Some(n) = whole(body, &["min_keep"], 0..=MOST)? {
        options.min_keep = n as u32;
    }
    if let Some(given) = get(body, "seed") {
        options.seed = seed(given).ok_or_else(|| ApiError::field("seed", "expected a whole number"))?;
    }
    if let Some(breakers) = texts(body, "dry_sequence_breakers")? {
        check_texts("dry_sequence_breakers", &breakers)?;
        if breakers.is_empty() {
            return Err(ApiError::invalid("Error: dry_sequence_breakers must be a non-empty array of strings"));
        }
        options.dry.sequence_breakers = breakers;
    }
    if let Some(given) = get(body, "samplers") {
        let samplers: Result<_, _> = match given {
            Value::String(letters) => letters.chars().map(SamplerKind::from_letter).collect(),
            _ => sampler_order(&texts(body, "samplers")?.unwrap_or_default().join(";")),
        };
        options.samplers = samplers.map_err(|error| ApiError::field("samplers", error))?;
    }
    options.ignore_eos = boolean(body, "ignore_eos")?.unwrap_or(options.ignore_eos);
    options.logit_bias.extend(logit_bias(body, model)?);
    options.keep_logits = get(body, "n_probs").and_then(integer).is_some_and(|n| n > 0);
    let grammar = text(body, "grammar")?.filter(|grammar| !grammar.is_empty());
    match (grammar, get(body, "json_schema")) {
        (Some(grammar), _) => options.grammar = Some(grammar.to_owned()),
        (None, Some(schema)) => {
            let made = Sampler::json_schema_to_grammar(&schema.to_string());
            options.grammar = Some(made.map_err(|error| match error {
                SamplerError::Busy(_) => ApiError::busy(error),
                error => ApiError::field("json_schema", error),
            })?);
        }
        (None, None) => {}
    }
    Ok(options)
}

/// The last 32 bits of a seed, which may have 64; -1 stands for a random one.
fn seed(given: &Value) -> Option<u32> {
    let whole = given.as_u64().or_else(|| integer(given).map(|seed| seed as u64))?;
    let is_random = whole == u64::MAX || whole == u64::from(SamplingOptions::RANDOM_SEED);
    let most = if is_random { u32::MAX } else { SamplingOptions::RANDOM_SEED - 1 };
    Some((whole as u32).min(most))
}

/// Maximum number of stop texts.
const STOPS_MAX: usize = 256;

/// Maximum bytes of all stop texts: each is searched for at every token while other requests wait.
const STOP_BYTES_MAX: usize = 16 << 10;

/// How a request's text is drafted. One drafter serves all requests, so its sources and probability stay the server's;
/// `none` switches it off.
fn drafting(body: &Fields, usual: &Drafting) -> Result<Drafting, ApiError> {
    let n_max = whole(body, &["speculative.n_max"], 0..=MOST)?;
    let n_min = whole(body, &["speculative.n_min"], 0..=MOST)?.map_or(usual.n_min, |n| n as usize);
    let mut n_max = n_max.map_or(usual.n_max, |n| n as usize);
    let is_off = usual.n_max == 0;
    for name in ["speculative.type", "speculative.types"] {
        match text(body, name)? {
            Some("none") => n_max = 0,
            Some(types) if *types != *usual.types => {
                return Err(ApiError::field(name, format!("this server only takes none and its own, {}", usual.types)));
            }
            _ => {}
        }
    }
    let p_min = number(body, "speculative.p_min")?;
    if p_min.is_some_and(|p_min| !is_off && p_min != usual.p_min) {
        return Err(ApiError::field("speculative.p_min", format!("this server only takes its own, {}", usual.p_min)));
    }
    if !is_off && n_min < usual.n_min {
        return Err(ApiError::field("speculative.n_min", format!("this server drafts {} at least", usual.n_min)));
    }
    let drafting = usual.at_most(n_max);
    Ok(Drafting { n_min: n_min.min(drafting.n_max), ..drafting })
}

fn check_texts(name: &str, texts: &[String]) -> Result<(), ApiError> {
    if texts.len() > STOPS_MAX || texts.iter().map(String::len).sum::<usize>() > STOP_BYTES_MAX {
        let expected = format!("at most {STOPS_MAX} texts of {STOP_BYTES_MAX} bytes together");
        return Err(ApiError::field(name, format!("expected {expected}")));
    }
    Ok(())
}

/// `stop`: one text, or several.
fn stops(body: &Fields) -> Result<Vec<String>, ApiError> {
    let stops: Vec<String> =
        texts(body, "stop")?.unwrap_or_default().into_iter().filter(|stop| !stop.is_empty()).collect();
    check_texts("stop", &stops)?;
    Ok(stops)
}

/// `[[token or text, bias or false], …]`, or an object of the same; at most one entry per token of the vocabulary.
fn logit_bias(body: &Fields, model: &Model) -> Result<Vec<(Token, f32)>, ApiError> {
    let fail = || ApiError::field("logit_bias", "expected pairs of a token or a text and a number or false");
    let n_vocab = model.n_vocab();
    let check = |n: usize| {
        let message = || format!("has biases for {n} tokens, the model has {n_vocab} tokens");
        if n > n_vocab { Err(ApiError::field("logit_bias", message())) } else { Ok(()) }
    };
    let (mut all, mut n_texts) = (Vec::new(), 0);
    let mut add = |token: Result<i64, &str>, bias: &Value| {
        if bias.is_null() {
            return Ok(());
        }
        let bias = match bias {
            Value::Bool(false) => f32::NEG_INFINITY,
            other => other.as_f64().map(|bias| bias as f32).filter(|bias| bias.is_finite()).ok_or_else(fail)?,
        };
        match token {
            Err(text) => {
                n_texts += 1;
                check_parts(n_texts)?;
                let tokens = encode(model, text, false, false)?;
                all.extend(tokens.into_iter().map(|token| (token, bias)));
            }
            // Tokens outside the vocabulary are ignored.
            Ok(token) => all.extend((0..n_vocab as i64).contains(&token).then_some((token as Token, bias))),
        }
        check(all.len())
    };
    match get(body, "logit_bias") {
        None => {}
        Some(Value::Object(map)) => {
            check(map.len())?;
            map.iter().try_for_each(|(key, bias)| add(key.parse::<i64>().map_err(|_| key.as_str()), bias))?;
        }
        Some(Value::Array(list)) => {
            check(list.len())?;
            for pair in list {
                let Some([token, bias]) = pair.as_array().map(Vec::as_slice) else { return Err(fail()) };
                let token = match token {
                    Value::String(text) => Err(text.as_str()),
                    other => Ok(integer(other).ok_or_else(fail)?),
                };
                add(token, bias)?;
            }
        }
        Some(_) => return Err(fail()),
    }
    Ok(all)
}

/// Maximum list entries that an answer repeats.
const SHOWN_ITEMS_MAX: usize = 512;

/// Generation settings as llama-server shows them; `is_whole` adds the fields that /props and /slots leave out. Long
/// values are cut and named in `truncated`.
pub fn shown(generate: &Generate, model: &Model, stream: bool, timings_per_token: bool, is_whole: bool) -> Value {
    let mut options = SamplingOptions::clone(&generate.sampling);
    let n_predict = generate.n_predict.map_or(-1, |n| n as i64);
    let mut value = json!({"seed": generate.seed});
    numbers(&mut options).into_iter().for_each(|(name, number)| value[name] = json!(number));
    integers(&mut options).into_iter().for_each(|(name, _, number)| value[name] = json!(number));
    let more = json!({
        "mirostat": options.mirostat.version,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": generate.n_keep,
        "n_discard": generate.n_discard,
        "ignore_eos": options.ignore_eos,
        "stream": stream,
        "n_probs": generate.n_probs,
        "min_keep": options.min_keep,
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": false,
        "generation_prompt": "",
        "samplers": options.samplers.iter().map(|kind| kind.name()).collect::<Vec<_>>(),
        "speculative.types": *generate.drafting.types,
        "speculative.n_max": generate.drafting.n_max,
        "speculative.n_min": generate.drafting.n_min,
        "speculative.p_min": generate.drafting.p_min,
        "timings_per_token": timings_per_token,
        "post_sampling_probs": generate.post_sampling_probs,
        "backend_sampling": false,
        "lora": adapters::shown(&generate.lora),
    });
    merge(&mut value, more);
    if !is_whole {
        return value;
    }
    let ends = (0..model.n_vocab() as Token).filter(|token| options.ignore_eos && model.is_eog(*token));
    let ends = ends.map(|token| (token, f32::NEG_INFINITY));
    let bias = options.logit_bias.iter().copied().chain(ends).take(SHOWN_ITEMS_MAX);
    let bias: Vec<Value> = bias.map(|(token, bias)| json!({"token": token, "bias": bias})).collect();
    let grammar = options.grammar.as_deref().unwrap_or_default();
    let is_cut =
        [("logit_bias", options.logit_bias.len() > SHOWN_ITEMS_MAX), ("grammar", grammar.len() > SHOWN_BYTES_MAX)];
    let truncated: Vec<&str> = is_cut.iter().filter(|(_, is_cut)| *is_cut).map(|(name, _)| *name).collect();
    let more = json!({
        "dry_sequence_breakers": options.dry.sequence_breakers,
        "stop": *generate.stops,
        "logit_bias": bias,
        "grammar": shortened(grammar),
        "grammar_lazy": options.grammar_lazy,
        "grammar_triggers": [],
        "preserved_tokens": options.preserved_tokens,
    });
    merge(&mut value, more);
    if !truncated.is_empty() {
        value["truncated"] = json!(truncated);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_of_64_bits() {
        let random = Some(SamplingOptions::RANDOM_SEED);
        for (given, expected) in [
            (json!(7), Some(7)),
            (json!(7.0), Some(7)),
            (json!(-1), random),
            (json!(u32::MAX), random),
            (json!((5_u64 << 32) + 7), Some(7)),
            (json!(i64::MIN + 7), Some(7)),
            (json!(u64::MAX - 1), Some(u32::MAX - 1)),
            // It is no -1: the same seed gives the same text.
            (json!(i64::MAX), Some(u32::MAX - 1)),
            (json!(7.5), None),
            (json!("7"), None),
        ] {
            assert_eq!(seed(&given), expected, "{given}");
        }
    }

    #[test]
    fn candidates_of_all_answers_are_bounded_together() {
        let most = CANDIDATES_MAX * CANDIDATE_BYTES;
        assert_eq!(candidates(0, 4096, 256), Ok(0));
        assert_eq!(candidates(2, 10, 3), Ok(60 * CANDIDATE_BYTES));
        assert_eq!(candidates(CANDIDATES_ALWAYS, CANDIDATES_MAX, 1), Ok(most));
        assert_eq!(candidates(1024, CANDIDATES_MAX / 1024, 1), Ok(most));
        assert!(candidates(1024, CANDIDATES_MAX / 1024, 2).unwrap_err().message.contains("ask for fewer"));
        assert!(candidates(CANDIDATES_ALWAYS, 4096, 256).is_err());
    }
}
