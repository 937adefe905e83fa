//! JSON as clients write it. Null counts as absent at every level, and errors name the field.

use std::borrow::Cow;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

/// Fields with JSON of the client's own, in which null is a value: schemas, arguments, a template's variables.
const OPAQUE: [&str; 7] =
    ["parameters", "input_schema", "schema", "json_schema", "format", "arguments", "chat_template_kwargs"];

/// Removes null fields at every level. A message's content may be null.
pub fn remove_nulls(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(remove_nulls),
        Value::Object(fields) => {
            let is_call = fields.get("type").is_some_and(|kind| kind == "tool_use");
            fields.retain(|name, value| name == "content" || !value.is_null());
            let is_opaque = |name: &str| OPAQUE.contains(&name) || is_call && name == "input";
            fields.iter_mut().filter(|(name, _)| !is_opaque(name)).for_each(|(_, value)| remove_nulls(value));
        }
        _ => {}
    }
}

/// A whole number. Some clients write 3 as 3.0.
pub fn integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_f64().filter(|number| number.fract() == 0.0).map(|number| number as i64))
}

/// The fields of a request or of a part of it.
pub type Fields = Map<String, Value>;

/// The value of a field, if present.
pub fn get<'a>(body: &'a Fields, name: &str) -> Option<&'a Value> {
    body.get(name).filter(|value| !value.is_null())
}

/// A field as `of` reads it.
fn read<'a, T>(
    body: &'a Fields,
    name: &str,
    expected: &str,
    of: impl FnOnce(&'a Value) -> Option<T>,
) -> Result<Option<T>, ApiError> {
    let Some(value) = get(body, name) else { return Ok(None) };
    of(value).map(Some).ok_or_else(|| ApiError::field(name, format!("expected {expected}")))
}

/// A boolean, if present.
pub fn boolean(body: &Fields, name: &str) -> Result<Option<bool>, ApiError> {
    read(body, name, "true or false", Value::as_bool)
}

/// A text, if present.
pub fn text<'a>(body: &'a Fields, name: &str) -> Result<Option<&'a str>, ApiError> {
    read(body, name, "a string", Value::as_str)
}

/// An object, if present.
pub fn object<'a>(body: &'a Fields, name: &str) -> Result<Option<&'a Fields>, ApiError> {
    read(body, name, "an object", Value::as_object)
}

/// A list, if present.
pub fn list<'a>(body: &'a Fields, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
    read(body, name, "an array", Value::as_array)
}

/// A finite number, if present.
pub fn number(body: &Fields, name: &str) -> Result<Option<f32>, ApiError> {
    read(body, name, "a finite number", |value| {
        value.as_f64().map(|number| number as f32).filter(|number| number.is_finite())
    })
}

/// An integer, from the first of several names that is present.
pub fn whole(body: &Fields, names: &[&str], range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
    let Some(name) = names.iter().find(|name| get(body, name).is_some()) else { return Ok(None) };
    let whole = read(body, name, "a whole number", integer)?;
    match whole.filter(|whole| !range.contains(whole)) {
        None => Ok(whole),
        Some(got) => {
            let (low, high) = range.into_inner();
            Err(ApiError::field(name, format!("Value must be between {low} <= value <= {high}, but got {got}")))
        }
    }
}

/// One text, or a list of texts.
pub fn texts(body: &Fields, name: &str) -> Result<Option<Vec<String>>, ApiError> {
    read(body, name, "a string or an array of strings", |value| match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(list) => list.iter().map(|one| one.as_str().map(str::to_owned)).collect(),
        _ => None,
    })
}

/// Maximum bytes of a text that an answer repeats.
pub const SHOWN_BYTES_MAX: usize = 16 << 10;

/// A text as answers repeat it, cut to that length.
pub fn shortened(text: &str) -> Cow<'_, str> {
    if text.len() <= SHOWN_BYTES_MAX {
        return text.into();
    }
    let shown = &text[..text.floor_char_boundary(SHOWN_BYTES_MAX)];
    format!("{shown}… [truncated, {} bytes]", text.len()).into()
}

/// Adds the fields of an object to another.
pub fn merge(into: &mut Value, more: Value) {
    if let (Value::Object(fields), Value::Object(more)) = (into, more) {
        fields.extend(more);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn null_counts_as_absent_at_every_level() {
        let schema = json!({"enum": [null], "default": null});
        let arguments = json!({"city": null});
        let call = json!({"arguments": arguments});
        let mut body = json!({
            "logit_bias": {"262": null, "263": 1},
            "prompt": [1, null],
            "tools": [{"type": "function", "function": {"name": "w", "description": null, "parameters": schema}}],
            "messages": [
                {"role": "assistant", "content": null, "tool_calls": [{"id": null, "function": call}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": null, "input": arguments}]},
            ],
            "input": [{"type": "message", "id": null}],
        });
        remove_nulls(&mut body);
        let expected = json!({
            "logit_bias": {"263": 1},
            "prompt": [1, null],
            "tools": [{"type": "function", "function": {"name": "w", "parameters": schema}}],
            "messages": [
                {"role": "assistant", "content": null, "tool_calls": [{"function": call}]},
                {"role": "assistant", "content": [{"type": "tool_use", "input": arguments}]},
            ],
            "input": [{"type": "message"}],
        });
        assert_eq!(body, expected);
    }

    #[test]
    fn fields_are_read_or_named() {
        let body = json!({"null": null, "n": 11, "text": "x", "half": 1.5, "list": [1], "big": 1e300});
        let body = body.as_object().unwrap();
        assert_eq!(whole(body, &["null", "n"], 0..=11), Ok(Some(11)));
        assert_eq!(boolean(body, "null"), Ok(None));
        assert_eq!(texts(body, "text"), Ok(Some(vec!["x".to_owned()])));
        let message = whole(body, &["n"], 0..=10).unwrap_err().message;
        assert_eq!(message, "Field 'n': Value must be between 0 <= value <= 10, but got 11");
        assert_eq!(boolean(body, "text").unwrap_err().message, "Field 'text': expected true or false");
        assert!(whole(body, &["half"], 0..=9).is_err());
        assert_eq!(
            [json!(3), json!(3.0), json!(3.5), json!("3")].each_ref().map(integer),
            [Some(3), Some(3), None, None]
        );
        assert!(texts(body, "list").is_err());
        assert!(number(body, "big").is_err());
    }
}
