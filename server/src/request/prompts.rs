//! Prompts: a text, tokens, a mix of both, or several prompts; for `/infill`, a text with a gap.

use std::sync::Arc;

use hobbit::Model;
use hobbit::options::Token;
use serde_json::Value;

use super::params;
use crate::app::App;
use crate::error::ApiError;
use crate::json::{Fields, get, integer, text};

/// The tokens of each prompt, shared by all its answers.
pub type Prompts = Vec<Arc<[Token]>>;

/// The `prompt` of a request.
pub fn given(body: &Fields) -> Result<&Value, ApiError> {
    get(body, "prompt").ok_or_else(|| ApiError::invalid("\"prompt\" is required"))
}

/// The prompts of a request: one, or a list.
pub fn prompts(value: &Value, body: &Fields, app: &App) -> Result<Prompts, ApiError> {
    let model = &app.backend()?.model;
    let n_answers = params::n_answers(body, app)?;
    let prompts = each(value);
    if prompts.is_empty() {
        return Err(ApiError::invalid("\"prompt\" must not be empty"));
    }
    check(prompts.len().saturating_mul(n_answers), app)?;
    check_parts(prompts.iter().map(n_texts).sum())?;
    prompts.iter().map(|prompt| Ok(one(prompt, model)?.into())).collect()
}

/// Each prompt: a list with tokens is one, a list of texts is several.
pub fn each(value: &Value) -> &[Value] {
    match value {
        Value::Array(list) if !list.iter().any(Value::is_number) || !list.iter().all(is_part) => list,
        one => std::slice::from_ref(one),
    }
}

/// Checks the number of texts in a request before they are tokenized: at most as many as may wait.
pub fn check(n_texts: usize, app: &App) -> Result<(), ApiError> {
    let most = app.settings.slots.max_waiting as usize;
    if n_texts > most {
        return Err(ApiError::invalid(format!(
            "the request has {n_texts} texts, and {most} may wait: send several requests, or start the server with \
             --max-waiting {n_texts}"
        )));
    }
    Ok(())
}

/// Maximum texts of a request that are tokenized, each by itself: where the pre-tokenizer is a regular expression,
/// llama.cpp compiles it anew for every text.
const PARTS_MAX: usize = 2048;

/// Checks the number of texts that are tokenized.
pub fn check_parts(n: usize) -> Result<(), ApiError> {
    if n > PARTS_MAX {
        let message =
            format!("the request has {n} texts or more, and may have {PARTS_MAX}: join texts, or send tokens");
        return Err(ApiError::invalid(message));
    }
    Ok(())
}

/// The number of texts in a prompt.
pub fn n_texts(prompt: &Value) -> usize {
    prompt.as_array().map_or(1, |parts| parts.iter().filter(|part| part.is_string()).count())
}

fn is_part(value: &Value) -> bool {
    value.is_number() || value.is_string()
}

/// One prompt.
pub fn one(value: &Value, model: &Model) -> Result<Vec<Token>, ApiError> {
    match value {
        Value::String(text) => tokens(model, text, true),
        Value::Array(parts) if parts.iter().all(is_part) => mixed(parts, model, true),
        Value::Object(fields) if fields.contains_key("multimodal_data") => {
            Err(ApiError::invalid("Multimodal data provided, but model does not support multimodal requests."))
        }
        Value::Object(fields) => match fields.get("prompt_string") {
            Some(Value::String(text)) => tokens(model, text, true),
            _ => Err(ApiError::invalid("\"prompt_string\" is required in a prompt that is an object")),
        },
        _ => Err(ApiError::invalid(
            "\"prompt\" must be a string, an array of tokens and strings, an object with prompt_string, or an array of \
             these",
        )),
    }
}

/// Tokens and texts in turn; special tokens are added to the first part only.
pub fn mixed(parts: &[Value], model: &Model, adds_special: bool) -> Result<Vec<Token>, ApiError> {
    check_parts(parts.iter().filter(|part| part.is_string()).count())?;
    let mut all = Vec::new();
    for (at, part) in parts.iter().enumerate() {
        match part {
            Value::String(text) => all.extend(tokens(model, text, adds_special && at == 0)?),
            number => all.push(token(number, model)?),
        }
    }
    Ok(all)
}

/// A token of the vocabulary.
pub fn token(value: &Value, model: &Model) -> Result<Token, ApiError> {
    let number = integer(value).filter(|number| (0..model.n_vocab() as i64).contains(number));
    number.map(|number| number as Token).ok_or_else(|| ApiError::invalid("Prompt contains invalid tokens"))
}

/// The tokens of a text, special tokens parsed.
pub fn tokens(model: &Model, text: &str, adds_special: bool) -> Result<Vec<Token>, ApiError> {
    encode(model, text, adds_special, true)
}

/// The tokens of a text.
pub fn encode(model: &Model, text: &str, adds_special: bool, parses_special: bool) -> Result<Vec<Token>, ApiError> {
    model.tokenize(text, adds_special, parses_special).map_err(|error| ApiError::invalid(error.to_string()))
}

/// The prompt for a text with a gap before `suffix`.
pub fn gap(app: &App, body: &Fields, suffix: &[Token]) -> Result<Vec<Token>, ApiError> {
    let backend = app.backend()?;
    let model = &backend.model;
    let special = model.special_tokens();
    let (Some(prefix_token), Some(suffix_token), Some(middle_token)) =
        (special.fim_prefix, special.fim_suffix, special.fim_middle)
    else {
        let tokens = [(special.fim_prefix, "prefix"), (special.fim_suffix, "suffix"), (special.fim_middle, "middle")];
        let missing = tokens.iter().filter(|(token, _)| token.is_none());
        let missing: String = missing.map(|(_, name)| format!("{name} token is missing. ")).collect();
        return Err(ApiError::unsupported(format!("Infill is not supported by this model: {missing}")));
    };
    let plain = |text: &str| encode(model, text, false, false);
    let prompt = tokens(model, text(body, "prompt")?.unwrap_or_default(), false)?;
    let prefix = text(body, "input_prefix")?.ok_or_else(|| ApiError::invalid("\"input_prefix\" is required"))?;
    let prefix = plain(prefix)?;
    let mut extra = Vec::new();
    if let Some(token) = special.fim_repository {
        extra.push(token);
        extra.extend(plain("myproject\n")?);
    }
    let chunks = match get(body, "input_extra") {
        None => &[][..],
        Some(Value::Array(chunks)) => chunks,
        Some(_) => {
            let message = "\"input_extra\" must be an array of {\"filename\": string, \"text\": string}";
            return Err(ApiError::invalid(message));
        }
    };
    // A name and a text each.
    check_parts(2 * chunks.len())?;
    for chunk in chunks {
        let text = chunk.get("text").and_then(Value::as_str).ok_or_else(|| {
            ApiError::invalid("extra_context chunk must contain a \"text\" field with a string value")
        })?;
        let name = chunk.get("filename").map_or(Some("tmp"), Value::as_str);
        let name =
            name.ok_or_else(|| ApiError::invalid("extra_context chunk's \"filename\" field must be a string"))?;
        extra.extend(special.fim_separator);
        match special.fim_separator {
            Some(_) => extra.extend(plain(&format!("{name}\n"))?),
            None => extra.extend(plain("\n\n--- snippet ---\n\n")?),
        }
        extra.extend(plain(text)?);
    }
    if let Some(token) = special.fim_separator {
        extra.push(token);
        extra.extend(plain("filename\n")?);
    }
    // As llama-server divides a batch: the text nearest to the gap is kept.
    let n_prefix = prefix.len().min(3 * (backend.n_batch / 4));
    let n_suffix = suffix.len().min((backend.n_batch / 4).saturating_sub(2 + prompt.len()));
    let n_predict = get(body, "n_predict").and_then(integer).unwrap_or(0).clamp(0, backend.n_ctx as i64) as usize;
    let n_extra = extra.len().min(backend.n_ctx.saturating_sub(backend.n_batch + 2 * n_predict));
    let before = [&[prefix_token], &prefix[prefix.len() - n_prefix..], &prompt].concat();
    let after = [&[suffix_token], &suffix[..n_suffix]].concat();
    let mut all = extra[extra.len() - n_extra..].to_vec();
    if model.adds_bos() {
        all.extend(special.bos);
    }
    let parts = if app.settings.slots.spm_infill.0 { [after, before] } else { [before, after] };
    all.extend(parts.concat());
    all.push(middle_token);
    Ok(all)
}
