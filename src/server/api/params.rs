//! How a text is to be generated, in llama-server's words; OpenAI's for the same are understood too.

use std::time::Duration;

use hobbit::options::{SamplerKind, SamplingOptions, Token, sampler_order};
use hobbit::{Model, Sampler};
use serde_json::{Map, Value, json};

use super::fields::{boolean, get, number, text, texts, whole};
use crate::server::adapters;
use crate::server::app::App;
use crate::server::http::error::ApiError;
use crate::server::job::Generate;

const MOST: i64 = i32::MAX as i64;

/// What a request says besides its prompt.
#[derive(Clone, Debug)]
pub struct Params {
    pub generate: Generate,
    pub stream: bool,
    /// Answers to each prompt.
    pub n: usize,
    pub slot: Option<usize>,
    pub cache_prompt: bool,
    pub timings_per_token: bool,
    pub return_progress: bool,
    pub return_tokens: bool,
    /// Fields of the answer that are wanted; empty for all.
    pub response_fields: Vec<String>,
    pub verbose: bool,
    pub ping: Option<Duration>,
}

impl Params {
    /// Of a request's body. A JSON schema becomes a grammar where there is none.
    ///
    /// # Errors
    /// Fields that are not as they should be.
    pub fn of(body: &Map<String, Value>, app: &App) -> Result<Self, ApiError> {
        let loaded = app.loaded()?;
        let settings = &app.settings;
        let model = &loaded.model;
        let n_predict = match whole(body, &["n_predict", "max_completion_tokens", "max_tokens"], -1..=MOST)? {
            Some(n) => usize::try_from(n).ok(),
            None => settings.n_predict,
        };
        let n_probs = whole(body, &["n_probs"], 0..=MOST)?.unwrap_or(0).min(model.n_vocab() as i64) as usize;
        check_candidates(n_probs, n_predict.map_or(loaded.n_ctx, |n| n.min(loaded.n_ctx)))?;
        let generate = Generate {
            sampling: sampling(body, &loaded.sampling, model)?,
            n_predict,
            n_keep: whole(body, &["n_keep"], -1..=MOST)?.map_or(settings.n_keep, |n| n as i32),
            n_discard: whole(body, &["n_discard"], 0..=MOST)?.unwrap_or(0) as usize,
            cache_reuse: whole(body, &["n_cache_reuse"], 0..=MOST)?.map_or(settings.cache_reuse, |n| n as usize),
            stops: stops(body)?,
            n_probs,
            post_sampling_probs: boolean(body, "post_sampling_probs")?.unwrap_or(false),
            shows_special: settings.shows_special,
            time_limit: whole(body, &["t_max_predict_ms"], -1..=MOST)?
                .and_then(|ms| u64::try_from(ms).ok())
                .filter(|ms| *ms > 0)
                .map(Duration::from_millis),
            n_indent: whole(body, &["n_indent"], 0..=MOST)?.unwrap_or(0) as usize,
            nudge: None,
            lora: match get(body, "lora") {
                Some(list) => adapters::read(list, model.adapters().len())?,
                None => loaded.adapters.scales(),
            },
        };
        let slot = whole(body, &["id_slot"], -1..=MOST)?.and_then(|slot| usize::try_from(slot).ok());
        if slot.is_some_and(|slot| slot >= loaded.n_slots) {
            return Err(ApiError::field("id_slot", format!("there are {} slots, from 0 on", loaded.n_slots)));
        }
        let ping = match whole(body, &["sse_ping_interval"], -1..=MOST)? {
            None => settings.ping,
            Some(seconds) => u64::try_from(seconds).ok().filter(|seconds| *seconds > 0).map(Duration::from_secs),
        };
        Ok(Self {
            generate,
            stream: boolean(body, "stream")?.unwrap_or(false),
            n: whole(body, &["n_cmpl", "n"], 1..=loaded.n_slots as i64)?.unwrap_or(1) as usize,
            slot,
            cache_prompt: boolean(body, "cache_prompt")?.unwrap_or(settings.cache_prompt),
            timings_per_token: boolean(body, "timings_per_token")?.unwrap_or(false),
            return_progress: boolean(body, "return_progress")?.unwrap_or(false),
            return_tokens: boolean(body, "return_tokens")?.unwrap_or(false),
            response_fields: texts(body, "response_fields")?.unwrap_or_default(),
            verbose: boolean(body, "verbose")?.unwrap_or(settings.verbose),
            ping,
        })
    }

    /// Those of the `index`-th answer to a prompt: another choice, if choices are left to chance.
    pub fn generate_of(&self, index: usize) -> Generate {
        let mut generate = self.generate.clone();
        if generate.sampling.seed != SamplingOptions::RANDOM_SEED {
            generate.sampling.seed = generate.sampling.seed.wrapping_add(index as u32);
        }
        generate
    }
}

/// As many candidates as OpenAI tells at most are told of any number of tokens.
const CANDIDATES_ALWAYS: usize = 20;

/// The most that a request may ask for besides, all tokens together: some 300 bytes each until it is answered.
const CANDIDATES_MAX: usize = 1 << 19;

fn check_candidates(n_probs: usize, n_tokens: usize) -> Result<(), ApiError> {
    if n_probs <= CANDIDATES_ALWAYS || n_probs.saturating_mul(n_tokens) <= CANDIDATES_MAX {
        return Ok(());
    }
    Err(ApiError::invalid(format!(
        "{n_probs} candidates for each of {n_tokens} tokens are too many: ask for fewer (n_probs, logprobs), or for fewer tokens"
    )))
}

fn sampling(body: &Map<String, Value>, defaults: &SamplingOptions, model: &Model) -> Result<SamplingOptions, ApiError> {
    let mut own = defaults.clone();
    let float = |name: &str, into: &mut f32| -> Result<(), ApiError> {
        if let Some(value) = number(body, name)? {
            *into = value;
        }
        Ok(())
    };
    float("temperature", &mut own.temp)?;
    own.temp = own.temp.max(0.0);
    float("dynatemp_range", &mut own.dynatemp_range)?;
    float("dynatemp_exponent", &mut own.dynatemp_exponent)?;
    float("top_p", &mut own.top_p)?;
    float("min_p", &mut own.min_p)?;
    float("top_n_sigma", &mut own.top_n_sigma)?;
    float("xtc_probability", &mut own.xtc.probability)?;
    float("xtc_threshold", &mut own.xtc.threshold)?;
    float("typical_p", &mut own.typical_p)?;
    float("repeat_penalty", &mut own.repeat_penalty)?;
    float("presence_penalty", &mut own.presence_penalty)?;
    float("frequency_penalty", &mut own.frequency_penalty)?;
    float("dry_multiplier", &mut own.dry.multiplier)?;
    float("dry_base", &mut own.dry.base)?;
    float("mirostat_tau", &mut own.mirostat.tau)?;
    float("mirostat_eta", &mut own.mirostat.eta)?;
    float("adaptive_target", &mut own.adaptive_target)?;
    float("adaptive_decay", &mut own.adaptive_decay)?;
    for unit in [&mut own.top_p, &mut own.min_p, &mut own.xtc.probability, &mut own.xtc.threshold] {
        *unit = unit.clamp(0.0, 1.0);
    }
    let int = |names: &[&'static str], low: i64, into: &mut i32| -> Result<(), ApiError> {
        if let Some(value) = whole(body, names, low..=MOST)? {
            *into = value as i32;
        }
        Ok(())
    };
    int(&["top_k"], i64::from(i32::MIN), &mut own.top_k)?;
    int(&["repeat_last_n"], -1, &mut own.repeat_last_n)?;
    int(&["dry_allowed_length"], 0, &mut own.dry.allowed_length)?;
    int(&["dry_penalty_last_n"], -1, &mut own.dry.penalty_last_n)?;
    if let Some(version) = whole(body, &["mirostat"], i64::from(i32::MIN)..=MOST)? {
        own.mirostat.version = version.clamp(0, 2) as u8;
    }
    if let Some(n) = whole(body, &["min_keep"], 0..=MOST)? {
        own.min_keep = n as u32;
    }
    if let Some(seed) = whole(body, &["seed"], -1..=i64::from(u32::MAX))? {
        own.seed = u32::try_from(seed).unwrap_or(SamplingOptions::RANDOM_SEED);
    }
    if let Some(breakers) = texts(body, "dry_sequence_breakers")? {
        if breakers.is_empty() {
            return Err(ApiError::invalid("Error: dry_sequence_breakers must be a non-empty array of strings"));
        }
        own.dry.sequence_breakers = breakers;
    }
    match get(body, "samplers") {
        None => {}
        Some(Value::String(letters)) => {
            let kinds: Result<_, _> = letters.chars().map(SamplerKind::from_letter).collect();
            own.samplers = kinds.map_err(|error| ApiError::field("samplers", error))?;
        }
        Some(_) => {
            let names = texts(body, "samplers")?.unwrap_or_default();
            own.samplers = sampler_order(&names.join(";")).map_err(|error| ApiError::field("samplers", error))?;
        }
    }
    if let Some(ignores) = boolean(body, "ignore_eos")? {
        own.ignore_eos = ignores;
    }
    own.logit_bias.extend(logit_bias(body, model)?);
    own.keep_logits = get(body, "n_probs").and_then(Value::as_i64).is_some_and(|n| n > 0);
    let grammar = text(body, "grammar")?.filter(|grammar| !grammar.is_empty());
    match (grammar, get(body, "json_schema")) {
        (Some(grammar), _) => own.grammar = Some(grammar.to_owned()),
        (None, Some(schema)) => {
            let made = Sampler::json_schema_to_grammar(&schema.to_string());
            own.grammar = Some(made.map_err(|error| ApiError::field("json_schema", error))?);
        }
        (None, None) => {}
    }
    Ok(own)
}

/// Texts that end an answer.
const STOPS_MAX: usize = 256;

/// Their bytes together: each is looked for at every token, while all others wait.
const STOP_BYTES_MAX: usize = 16 << 10;

/// `stop`: a text, or several.
fn stops(body: &Map<String, Value>) -> Result<Vec<String>, ApiError> {
    let stops: Vec<String> =
        texts(body, "stop")?.unwrap_or_default().into_iter().filter(|stop| !stop.is_empty()).collect();
    if stops.len() > STOPS_MAX || stops.iter().map(String::len).sum::<usize>() > STOP_BYTES_MAX {
        let expected = format!("at most {STOPS_MAX} texts of {STOP_BYTES_MAX} bytes together");
        return Err(ApiError::field("stop", format!("expected {expected}")));
    }
    Ok(stops)
}

/// `[[token or text, bias or false], …]`, or an object of the same.
fn logit_bias(body: &Map<String, Value>, model: &Model) -> Result<Vec<(Token, f32)>, ApiError> {
    let fail = || ApiError::field("logit_bias", "expected pairs of a token or a text and a number or false");
    let pairs: Vec<(Value, Value)> = match get(body, "logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map
            .iter()
            .map(|(key, bias)| (key.parse::<Token>().map_or_else(|_| json!(key), |token| json!(token)), bias.clone()))
            .collect(),
        Some(Value::Array(list)) => list
            .iter()
            .map(|pair| match pair.as_array().map(Vec::as_slice) {
                Some([token, bias]) => Ok((token.clone(), bias.clone())),
                _ => Err(fail()),
            })
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(fail()),
    };
    let mut all = Vec::new();
    for (key, bias) in pairs {
        let bias = match bias {
            Value::Bool(false) => f32::NEG_INFINITY,
            other => other.as_f64().map(|bias| bias as f32).filter(|bias| bias.is_finite()).ok_or_else(fail)?,
        };
        match key {
            Value::String(text) => {
                let tokens = super::prompts::encode(model, &text, false, false)?;
                all.extend(tokens.into_iter().map(|token| (token, bias)));
            }
            other => {
                let token = other.as_i64().ok_or_else(fail)?;
                // Of another vocabulary: no matter.
                if let Some(token) =
                    Token::try_from(token).ok().filter(|token| (0..model.n_vocab() as i64).contains(&i64::from(*token)))
                {
                    all.push((token, bias));
                }
            }
        }
    }
    Ok(all)
}

/// The settings of a generation as llama-server shows them; `whole` adds what /props and /slots leave out.
pub fn shown(generate: &Generate, model: &Model, stream: bool, timings_per_token: bool, is_whole: bool) -> Value {
    let own = &generate.sampling;
    let n_predict = generate.n_predict.map_or(-1, |n| n as i64);
    let mut value = json!({
        "seed": own.seed,
        "temperature": own.temp,
        "dynatemp_range": own.dynatemp_range,
        "dynatemp_exponent": own.dynatemp_exponent,
        "top_k": own.top_k,
        "top_p": own.top_p,
        "min_p": own.min_p,
        "top_n_sigma": own.top_n_sigma,
        "xtc_probability": own.xtc.probability,
        "xtc_threshold": own.xtc.threshold,
        "typical_p": own.typical_p,
        "repeat_last_n": own.repeat_last_n,
        "repeat_penalty": own.repeat_penalty,
        "presence_penalty": own.presence_penalty,
        "frequency_penalty": own.frequency_penalty,
        "dry_multiplier": own.dry.multiplier,
        "dry_base": own.dry.base,
        "dry_allowed_length": own.dry.allowed_length,
        "dry_penalty_last_n": own.dry.penalty_last_n,
        "mirostat": own.mirostat.version,
        "mirostat_tau": own.mirostat.tau,
        "mirostat_eta": own.mirostat.eta,
        "adaptive_target": own.adaptive_target,
        "adaptive_decay": own.adaptive_decay,
    });
    let more = json!({
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": generate.n_keep,
        "n_discard": generate.n_discard,
        "ignore_eos": own.ignore_eos,
        "stream": stream,
        "n_probs": generate.n_probs,
        "min_keep": own.min_keep,
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": false,
        "generation_prompt": "",
        "samplers": own.samplers.iter().map(|kind| kind.name()).collect::<Vec<_>>(),
        "speculative.types": "none",
        "timings_per_token": timings_per_token,
        "post_sampling_probs": generate.post_sampling_probs,
        "backend_sampling": false,
        "lora": adapters::shown(&generate.lora),
    });
    if let (Value::Object(fields), Value::Object(more)) = (&mut value, more) {
        fields.extend(more);
    }
    if is_whole && let Value::Object(fields) = &mut value {
        let mut bias = own.logit_bias.clone();
        if own.ignore_eos {
            let ends = (0..model.n_vocab() as Token).filter(|token| model.is_eog(*token));
            bias.extend(ends.map(|token| (token, f32::NEG_INFINITY)));
        }
        let bias: Vec<Value> = bias.iter().map(|(token, bias)| json!({"token": token, "bias": bias})).collect();
        fields.insert("dry_sequence_breakers".to_owned(), json!(own.dry.sequence_breakers));
        fields.insert("stop".to_owned(), json!(generate.stops));
        fields.insert("logit_bias".to_owned(), json!(bias));
        fields.insert("grammar".to_owned(), json!(own.grammar.as_deref().unwrap_or_default()));
        fields.insert("grammar_lazy".to_owned(), json!(own.grammar_lazy));
        fields.insert("grammar_triggers".to_owned(), json!([]));
        fields.insert("preserved_tokens".to_owned(), json!(own.preserved_tokens));
    }
    value
}
