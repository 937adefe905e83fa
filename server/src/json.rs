//! JSON as clients write it.

use serde_json::Value;

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
    value.as_i64().or_else(|| value.as_f64().filter(|own| own.fract() == 0.0).map(|own| own as i64))
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
}
