//! Inputs of embeddings.

use std::sync::Arc;

use hobbit::Model;
use hobbit::options::Token;
use serde_json::Value;

use super::chat::messages::check_part;
use super::prompts;
use crate::error::ApiError;

/// Maximum inputs per request, as in OpenAI's API. As many run at once as there are slots.
const INPUTS_MAX: usize = 2048;

/// The tokens of every input: of one, or of a list of them. Of each at most `n_max`.
pub fn inputs(value: &Value, model: &Model, n_max: usize) -> Result<Vec<Arc<[Token]>>, ApiError> {
    let list = match value {
        Value::Array(list) if list.is_empty() => return Err(ApiError::invalid("\"input\" must not be empty")),
        Value::Array(list) if !list.iter().any(Value::is_number) => list,
        one => std::slice::from_ref(one),
    };
    if list.len() > INPUTS_MAX {
        let n = list.len();
        let message = format!("the request has {n} inputs, and may have {INPUTS_MAX}: send several requests");
        return Err(ApiError::invalid(message));
    }
    prompts::check_parts(list.iter().map(prompts::n_texts).sum())?;
    let tokens = |value| match input(value, model)? {
        tokens if tokens.is_empty() => Err(ApiError::invalid("Input content cannot be empty")),
        mut tokens => {
            // The token that ends every text stays.
            let end =
                tokens.last().copied().filter(|last| model.is_eog(*last) || model.special_tokens().sep == Some(*last));
            if tokens.len() > n_max {
                tokens.truncate(n_max);
                if let Some((last, end)) = tokens.last_mut().zip(end) {
                    *last = end;
                }
            }
            Ok(tokens.into())
        }
    };
    list.iter().map(tokens).collect()
}

/// The tokens of one input: of a prompt, or of a message's content.
fn input(value: &Value, model: &Model) -> Result<Vec<Token>, ApiError> {
    match value.get("content") {
        None => prompts::one(value, model),
        Some(Value::Array(parts)) => {
            let mut parts = parts.clone();
            parts.iter_mut().try_for_each(|part| check_part(part, None, &mut Vec::new()))?;
            let text: String = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            prompts::tokens(model, &text, true)
        }
        Some(_) => Err(ApiError::invalid("\"content\" must be an array of parts")),
    }
}
