//! Fields of a request. Null counts as absent, and errors name the field.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::server::http::error::ApiError;

/// The value of a field, if present.
pub fn get<'a>(body: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    body.get(name).filter(|value| !value.is_null())
}

/// The first of several names that is present.
pub fn first<'a>(body: &'a Map<String, Value>, names: &[&'static str]) -> Option<(&'static str, &'a Value)> {
    names.iter().find_map(|name| Some((*name, get(body, name)?)))
}

/// # Errors
/// The field is not a boolean.
pub fn boolean(body: &Map<String, Value>, name: &str) -> Result<Option<bool>, ApiError> {
    let Some(value) = get(body, name) else { return Ok(None) };
    value.as_bool().map(Some).ok_or_else(|| ApiError::field(name, "expected true or false"))
}

/// # Errors
/// The field is not a text.
pub fn text<'a>(body: &'a Map<String, Value>, name: &str) -> Result<Option<&'a str>, ApiError> {
    let Some(value) = get(body, name) else { return Ok(None) };
    value.as_str().map(Some).ok_or_else(|| ApiError::field(name, "expected a string"))
}

/// # Errors
/// The field is not a finite number.
pub fn number(body: &Map<String, Value>, name: &str) -> Result<Option<f32>, ApiError> {
    let Some(value) = get(body, name) else { return Ok(None) };
    let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
    number.map(Some).ok_or_else(|| ApiError::field(name, "expected a finite number"))
}

/// An integer, from the first of several names that is present.
///
/// # Errors
/// The field is not an integer, or is out of `range`.
pub fn whole(
    body: &Map<String, Value>,
    names: &[&'static str],
    range: RangeInclusive<i64>,
) -> Result<Option<i64>, ApiError> {
    let Some((name, value)) = first(body, names) else { return Ok(None) };
    let whole = value.as_i64().or_else(|| value.as_f64().filter(|own| own.fract() == 0.0).map(|own| own as i64));
    let whole = whole.ok_or_else(|| ApiError::field(name, "expected a whole number"))?;
    if !range.contains(&whole) {
        let (low, high) = range.into_inner();
        return Err(ApiError::field(name, format!("Value must be between {low} <= value <= {high}, but got {whole}")));
    }
    Ok(Some(whole))
}

/// One text, or a list of texts.
///
/// # Errors
/// The field is anything else.
pub fn texts(body: &Map<String, Value>, name: &str) -> Result<Option<Vec<String>>, ApiError> {
    let fail = || ApiError::field(name, "expected a string or an array of strings");
    match get(body, name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(vec![text.clone()])),
        Some(Value::Array(list)) => {
            list.iter().map(|one| one.as_str().map(str::to_owned).ok_or_else(fail)).collect::<Result<_, _>>().map(Some)
        }
        Some(_) => Err(fail()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body(value: Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap()
    }

    #[test]
    fn null_is_none() {
        let body = body(json!({"a": null, "b": 1, "c": "x"}));
        assert_eq!(whole(&body, &["a", "b"], 0..=9), Ok(Some(1)));
        assert_eq!(boolean(&body, "a"), Ok(None));
        assert_eq!(texts(&body, "c"), Ok(Some(vec!["x".to_owned()])));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let body = body(json!({"n": 11, "h": 1.5, "s": [1], "b": "yes", "big": 1e300}));
        let message = |error: ApiError| error.message;
        assert_eq!(
            whole(&body, &["n"], 0..=10).map_err(message),
            Err("Field 'n': Value must be between 0 <= value <= 10, but got 11".to_owned())
        );
        assert!(whole(&body, &["h"], 0..=9).is_err());
        assert!(texts(&body, "s").is_err());
        assert!(boolean(&body, "b").is_err());
        assert!(number(&body, "big").is_err());
    }
}
