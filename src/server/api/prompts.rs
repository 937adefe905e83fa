//! Prompts: a text, tokens, a mix of both, or several prompts.

use std::sync::Arc;

use hobbit::Model;
use hobbit::options::Token;
use serde_json::Value;

use super::{Fields, params};
use crate::server::app::App;
use crate::server::error::ApiError;

/// The tokens of each prompt, shared by all its answers.
pub type Prompts = Vec<Arc<[Token]>>;

/// The prompts of a request: one, or a list.
///
/// # Errors
/// No prompt, or more prompts than the server lets wait.
pub fn prompts(value: &Value, body: &Fields, app: &App) -> Result<Prompts, ApiError> {
    let loaded = app.loaded()?;
    let model = &loaded.model;
    let n_answers = params::n_answers(body, loaded)?;
    // A list with tokens is one prompt; a list of texts is several.
    let prompts = match value {
        Value::Array(list) if list.is_empty() => return Err(ApiError::invalid("\"prompt\" must not be empty")),
        Value::Array(list) if !list.iter().any(Value::is_number) || !list.iter().all(is_part) => list,
        one => std::slice::from_ref(one),
    };
    check(prompts.len().saturating_mul(n_answers), app)?;
    prompts.iter().map(|own| Ok(one(own, model)?.into())).collect()
}

/// Checks the number of texts in a request before they are tokenized: at most as many as may wait.
///
/// # Errors
/// There are more.
pub fn check(n_texts: usize, app: &App) -> Result<(), ApiError> {
    let most = app.settings.n_waiting_max;
    if n_texts > most {
        return Err(ApiError::invalid(format!(
            "the request has {n_texts} texts, and {most} may wait: send several requests, or start the server with \
             --max-waiting {n_texts}"
        )));
    }
    Ok(())
}

fn is_part(value: &Value) -> bool {
    value.is_number() || value.is_string()
}

/// One prompt.
///
/// # Errors
/// The value is not a prompt.
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
///
/// # Errors
/// Tokens outside the vocabulary.
pub fn mixed(parts: &[Value], model: &Model, adds_special: bool) -> Result<Vec<Token>, ApiError> {
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
///
/// # Errors
/// The vocabulary has no such token.
pub fn token(value: &Value, model: &Model) -> Result<Token, ApiError> {
    let number = value.as_i64().filter(|number| (0..model.n_vocab() as i64).contains(number));
    number.map(|number| number as Token).ok_or_else(|| ApiError::invalid("Prompt contains invalid tokens"))
}

/// The tokens of a text, special tokens parsed.
///
/// # Errors
/// Text that the vocabulary cannot encode.
pub fn tokens(model: &Model, text: &str, adds_special: bool) -> Result<Vec<Token>, ApiError> {
    encode(model, text, adds_special, true)
}

/// The tokens of a text.
///
/// # Errors
/// Text that the vocabulary cannot encode.
pub fn encode(model: &Model, text: &str, adds_special: bool, parses_special: bool) -> Result<Vec<Token>, ApiError> {
    model.tokenize(text, adds_special, parses_special).map_err(|error| ApiError::invalid(error.to_string()))
}
