//! Converts a request of OpenAI's Responses to a chat completion.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::json::{Fields, get, shortened, text};
use crate::request::documents;

/// The request as a chat completion, after the messages `previous`. Fields that both have stay as they are.
///
/// # Errors
/// Invalid input.
pub fn to_chat(mut body: Fields, previous: Vec<Value>) -> Result<Fields, ApiError> {
    let input = body.remove("input").ok_or_else(|| ApiError::invalid("'input' is required"))?;
    let mut messages = Vec::new();
    if let Some(instructions) = text(&body, "instructions")? {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    messages.extend(previous);
    match input {
        Value::String(text) => messages.push(json!({"role": "user", "content": text})),
        Value::Array(items) => items.iter().try_for_each(|item| add(item, &mut messages))?,
        _ => return Err(ApiError::invalid("'input' must be a string or array of objects")),
    }
    match body.remove("tools") {
        None | Some(Value::Null) => {}
        Some(Value::Array(tools)) => {
            let tools: Result<Vec<Option<Value>>, ApiError> = tools.into_iter().map(tool).collect();
            body.insert("tools".to_owned(), tools?.into_iter().flatten().collect());
        }
        Some(_) => return Err(ApiError::invalid("'tools' must be an array of objects")),
    }
    if let Some(n) = body.remove("max_output_tokens") {
        body.insert("max_tokens".to_owned(), n);
    }
    if let Some(effort) = get(&body, "reasoning").and_then(|reasoning| reasoning.get("effort")).cloned() {
        body.insert("reasoning_effort".to_owned(), effort);
    }
    if let Some(format) = get(&body, "text").and_then(|text| text.get("format")).and_then(format) {
        body.insert("response_format".to_owned(), format);
    }
    for name in ["instructions", "reasoning", "text", "n"] {
        body.remove(name);
    }
    body.insert("messages".to_owned(), Value::Array(messages));
    Ok(body)
}

/// A function, whose fields a chat completion nests one level deeper. A custom tool becomes a function that takes a
/// text. Other tools run at the provider and are left out.
fn tool(tool: Value) -> Result<Option<Value>, ApiError> {
    let Value::Object(mut function) = tool else { return Err(ApiError::field("tools", "expected objects")) };
    match function.shift_remove("type").as_ref().and_then(Value::as_str) {
        Some("function") => {}
        Some("custom") => {
            let format = function.shift_remove("format").unwrap_or_default();
            if format.get("type").is_some_and(|kind| kind != "text") {
                return Err(ApiError::field(
                    "tools",
                    "a custom tool may have the format text: a grammar is not supported",
                ));
            }
            let input = json!({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]});
            function.insert("parameters".to_owned(), input);
        }
        Some(_) => return Ok(None),
        None => return Err(ApiError::field("tools", "a tool needs a type")),
    }
    function.entry("strict").or_insert(Value::Bool(true));
    Ok(Some(json!({"type": "function", "function": function})))
}

/// Names of the tools that take a text.
pub fn custom_tools(body: &Fields) -> Vec<String> {
    let tools = get(body, "tools").and_then(Value::as_array).into_iter().flatten();
    let custom = tools.filter(|tool| tool["type"] == "custom");
    custom.filter_map(|tool| tool["name"].as_str().map(str::to_owned)).collect()
}

/// The answer's format; a chat completion nests its fields one level deeper.
fn format(format: &Value) -> Option<Value> {
    match format["type"].as_str()? {
        "json_schema" => Some(json!({"type": "json_schema", "json_schema": {"schema": format.get("schema")}})),
        kind => Some(json!({"type": kind})),
    }
}

/// Appends an item of the conversation.
pub fn add(item: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let of = |name: &str| item.get(name).and_then(Value::as_str);
    let unknown = || {
        let kind = shortened(of("type").unwrap_or("none"));
        ApiError::invalid(format!("Cannot determine type of 'item': its type is {kind}"))
    };
    let needs = |name: &str| of(name).ok_or_else(unknown);
    match (of("role"), of("type")) {
        (Some("user" | "system" | "developer"), _) if item.get("content").is_some() => {
            let content = content(&item["content"], &["input_text"])?;
            messages.push(json!({"role": of("role"), "content": content}));
        }
        (Some("assistant"), None | Some("message")) => {
            let content = content(&item["content"], &["output_text", "input_text", "refusal"])?;
            append(assistant(messages), "content", content);
        }
        (_, Some("function_call")) => {
            let call = json!({
                "id": needs("call_id")?, "type": "function",
                "function": {"name": needs("name")?, "arguments": needs("arguments")?},
            });
            append(assistant(messages), "tool_calls", vec![call]);
        }
        // A tool that takes a text.
        (_, Some("custom_tool_call")) => {
            let arguments = json!({"input": needs("input")?}).to_string();
            let function = json!({"name": needs("name")?, "arguments": arguments});
            let call = json!({"id": needs("call_id")?, "type": "function", "function": function});
            append(assistant(messages), "tool_calls", vec![call]);
        }
        (_, Some("function_call_output" | "custom_tool_call_output")) => {
            let content = match item.get("output") {
                Some(Value::String(text)) => json!(text),
                Some(output @ Value::Array(_)) => Value::Array(content(output, &["input_text", "output_text"])?),
                _ => return Err(unknown()),
            };
            messages.push(json!({"role": "tool", "tool_call_id": needs("call_id")?, "content": content}));
        }
        (_, Some("reasoning")) => {
            let reasoning: String = ["content", "summary"]
                .iter()
                .find_map(|name| item.get(*name)?.as_array().filter(|parts| !parts.is_empty()))
                .map(|parts| parts.iter().filter_map(|part| part.get("text")?.as_str()).collect())
                .unwrap_or_default();
            if !reasoning.is_empty() {
                let message = assistant(messages);
                let before = message["reasoning_content"].as_str().unwrap_or_default();
                message["reasoning_content"] = json!(format!("{before}{reasoning}"));
            }
        }
        _ => return Err(unknown()),
    }
    Ok(())
}

/// The assistant's current message: consecutive reasoning, texts and calls are merged into one.
fn assistant(messages: &mut Vec<Value>) -> &mut Value {
    if messages.last().is_none_or(|last| last["role"] != "assistant") {
        messages.push(json!({"role": "assistant", "content": []}));
    }
    messages.last_mut().expect("there is one now")
}

/// Appends to a list of a message.
fn append(message: &mut Value, name: &str, more: Vec<Value>) {
    match message.get_mut(name).and_then(Value::as_array_mut) {
        Some(list) => list.extend(more),
        None => message[name] = Value::Array(more),
    }
}

/// Content parts as a chat completion's. `kinds` are the part types that are texts.
fn content(value: &Value, kinds: &[&str]) -> Result<Vec<Value>, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(vec![json!({"type": "text", "text": text})]),
        Value::Array(parts) => parts,
        Value::Null => return Ok(Vec::new()),
        _ => return Err(ApiError::invalid("Expected 'content' to be a string or an array")),
    };
    let part = |part: &Value| match part.get("type").and_then(Value::as_str) {
        Some(kind) if kinds.contains(&kind) => {
            let text = part.get("text").or_else(|| part.get("refusal")).and_then(Value::as_str);
            let text = text.ok_or_else(|| ApiError::invalid(format!("'{kind}' requires 'text'")))?;
            Ok(json!({"type": "text", "text": text}))
        }
        Some("input_image") => Ok(json!({"type": "image_url", "image_url": {"url": part.get("image_url")}})),
        Some("input_file") => Ok(json!({"type": "text", "text": documents::of_file(part)?})),
        kind => {
            let (kinds, kind) = (kinds.join("', '"), shortened(kind.unwrap_or("none")));
            Err(ApiError::invalid(format!(
                "'type' must be one of '{kinds}', 'input_image' or 'input_file', not {kind}"
            )))
        }
    };
    parts.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(body: Value) -> Result<Value, String> {
        let Value::Object(body) = body else { panic!("a body is an object") };
        to_chat(body, Vec::new()).map(Value::Object).map_err(|error| error.message)
    }

    #[test]
    fn a_text() {
        let own = converted(json!({
            "input": "Hi", "instructions": "Be brief.", "max_output_tokens": 8, "temperature": 0.5,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"b": 1, "a": 2}}},
        }));
        let expected = json!({
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "max_tokens": 8, "temperature": 0.5, "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"b": 1, "a": 2}}},
        });
        assert_eq!(own.unwrap(), expected);
    }

    #[test]
    fn a_conversation_with_tools() {
        let own = converted(json!({
            "tools": [
                {"type": "web_search"}, {"type": "function", "name": "w", "parameters": {"z": 1, "a": 2}},
                {"type": "custom", "name": "patch", "format": {"type": "text"}},
            ],
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c1", "name": "w", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
                {"role": "assistant", "content": "Sun."},
                {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "\"x\""},
                {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
            ],
        }));
        let text = |text: &str| json!([{"type": "text", "text": text}]);
        let expected = json!([
            {"role": "developer", "content": text("Be brief.")},
            {"role": "user", "content": text("Weather?")},
            {"role": "assistant", "content": text("I look."), "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "w", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "assistant", "content": text("Sun."), "reasoning_content": "ab",
                "tool_calls": [{"id": "c2", "type": "function", "function": {
                    "name": "patch", "arguments": "{\"input\":\"\\\"x\\\"\"}",
                }}]},
            {"role": "tool", "tool_call_id": "c2", "content": text("ok")},
        ]);
        let own = own.unwrap();
        assert_eq!(own["messages"], expected);
        let function = json!({"name": "w", "parameters": {"z": 1, "a": 2}, "strict": true});
        assert_eq!(own["tools"][0], json!({"type": "function", "function": function}));
        let custom = &own["tools"][1]["function"];
        assert_eq!((&custom["name"], &custom["parameters"]["required"]), (&json!("patch"), &json!(["input"])));
        assert_eq!(own["tools"].as_array().map(Vec::len), Some(2));
    }

    #[test]
    fn invalid_input() {
        for (body, expected) in [
            (json!({}), "'input' is required"),
            (json!({"input": 1}), "'input' must be a string or array of objects"),
            (json!({"input": [1]}), "Cannot determine type of 'item'"),
            (json!({"input": [{"type": "function_call", "name": "w"}]}), "Cannot determine type of 'item'"),
            (json!({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}), "not fetched"),
            (json!({"input": [{"role": "user", "content": [{"type": "input_dream"}]}]}), "not input_dream"),
            (json!({"input": [{"type": "item_reference", "id": "x"}]}), "item_reference"),
            (json!({"input": "x", "tools": {}}), "'tools' must be an array"),
            (json!({"input": "x", "tools": [{"type": "custom", "format": {"type": "grammar"}}]}), "grammar"),
        ] {
            let error = converted(body.clone()).unwrap_err();
            assert!(error.contains(expected), "{body}: {error}");
        }
    }
}
