//! JSON schemas before llama.cpp makes grammars of them. Its converter drops keywords with a warning, or makes a
//! grammar that its parser refuses; here they are written so that it keeps them, or refused by name.

use serde_json::Value;

use super::read_json;
use crate::engine::ggml::log;
use hobbit_core::grammar::{Pattern, REPETITIONS_MAX};

/// The schema of an answer. All of it is kept.
///
/// # Errors
/// A pattern or a bound that a grammar cannot express.
pub(crate) fn of_answer(schema: &str) -> Result<String, String> {
    let what = "the JSON schema";
    let mut value = read_json(schema, what)?;
    match value {
        // llama.cpp takes objects only. True is any JSON value.
        Value::Bool(true) => return Ok("{}".to_owned()),
        Value::Bool(false) => return Err(format!("{what} allows no answer")),
        _ => {}
    }
    let mut is_changed = false;
    rewrite(&mut value, &mut is_changed, &mut |reason| Err(format!("{what}: {reason}")))?;
    Ok(if is_changed { value.to_string() } else { schema.to_owned() })
}

/// Tools whose arguments have schemas. A pattern or bound that a grammar cannot express is left out with a notice:
/// arguments are the model's proposal, and tools of other programs have such patterns.
///
/// # Errors
/// Tools that are not JSON.
pub(super) fn of_tools(tools: &str) -> Result<String, String> {
    let mut value = read_json(tools, "tools")?;
    let mut is_changed = false;
    for tool in value.as_array_mut().into_iter().flatten() {
        let Some(function) = tool.get_mut("function") else { continue };
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        let Some(parameters) = function.get_mut("parameters") else { continue };
        rewrite(parameters, &mut is_changed, &mut |reason| {
            log::notice(format_args!("tool '{name}': the grammar does not keep this: {reason}"));
            Ok(())
        })?;
    }
    Ok(if is_changed { value.to_string() } else { tools.to_owned() })
}

/// Rewrites a schema and those within it. `refuse` decides about each part that cannot be kept: an error, or the part
/// is left out.
fn rewrite(
    schema: &mut Value,
    is_changed: &mut bool,
    refuse: &mut dyn FnMut(String) -> Result<(), String>,
) -> Result<(), String> {
    let fields = match schema {
        Value::Array(all) => return all.iter_mut().try_for_each(|one| rewrite(one, is_changed, refuse)),
        Value::Object(fields) => fields,
        _ => return Ok(()),
    };
    for name in ["minItems", "maxItems", "minLength", "maxLength"] {
        if let Some(bound) = fields.get(name).and_then(Value::as_f64)
            && bound >= REPETITIONS_MAX as f64
        {
            refuse(format!("{name} {bound} is too large for a grammar, which counts to {}", REPETITIONS_MAX - 1))?;
            fields.remove(name);
            *is_changed = true;
        }
    }
    if let Some(Value::String(pattern)) = fields.get("pattern") {
        let bound = |name: &str| fields.get(name).and_then(Value::as_u64).and_then(|bound| usize::try_from(bound).ok());
        let (least, most) = (bound("minLength").unwrap_or(0), bound("maxLength"));
        let found = Pattern::new(pattern).and_then(|own| {
            let is_within = most.is_none_or(|most| own.length.1.is_some_and(|longest| longest <= most));
            let reason = "minLength and maxLength are not supported beside it; write them into the pattern";
            if own.length.0 >= least && is_within { Ok(own.text) } else { Err(reason.to_owned()) }
        });
        match found {
            Ok(text) if text == *pattern => {}
            Ok(text) => {
                fields.insert("pattern".to_owned(), text.into());
                *is_changed = true;
            }
            Err(reason) => {
                refuse(format!("the pattern '{pattern}': {reason}"))?;
                fields.remove("pattern");
                *is_changed = true;
            }
        }
    }
    for (name, value) in fields.iter_mut() {
        match name.as_str() {
            // Values, not schemas.
            "enum" | "const" | "default" | "example" | "examples" => {}
            // Schemas by names of the user's.
            "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas" => {
                for one in value.as_object_mut().into_iter().flat_map(|all| all.values_mut()) {
                    rewrite(one, is_changed, refuse)?;
                }
            }
            _ => rewrite(value, is_changed, refuse)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_rewritten_where_they_are_keywords() {
        let schema = r#"{"properties":{"pattern":{"type":"string","pattern":"^\\d$"}},"default":{"pattern":"\\b"}}"#;
        let written = of_answer(schema).unwrap();
        assert!(written.contains("[0-9]") && written.contains(r"\\b"), "{written}");
        let plain = r#"{ "type": "string", "pattern": "^[0-9]$" }"#;
        assert_eq!(of_answer(plain).unwrap(), plain, "left as it is");
        assert_eq!(of_answer("true").unwrap(), "{}");
    }

    #[test]
    fn schemas_that_no_grammar_keeps_are_refused_by_name() {
        for (schema, named) in [
            (r#"{"items": {"type": "string", "pattern": "(?=a)"}}"#, "the pattern '(?=a)'"),
            (r#"{"type": "array", "maxItems": 2000}"#, "maxItems 2000"),
            (r#"{"type": "string", "pattern": "^a+$", "maxLength": 3}"#, "minLength and maxLength"),
            ("false", "allows no answer"),
        ] {
            let error = of_answer(schema).unwrap_err();
            assert!(error.contains(named), "{schema}: {error}");
        }
        assert!(of_answer(r#"{"type": "string", "pattern": "^a{2}$", "maxLength": 3}"#).is_ok());
    }

    #[test]
    fn tools_go_without_what_no_grammar_keeps() {
        let tools = r#"[{"function":{"name":"f","parameters":{"properties":{"a":{"pattern":"(?=a)"}}}}}]"#;
        assert_eq!(of_tools(tools).unwrap(), tools.replace(r#""pattern":"(?=a)""#, ""));
    }
}
