//! Converts a request of Anthropic's Messages to OpenAI's chat completions.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::json::{Fields, get, list, object, shortened};
use crate::request::documents::{closing, opening};

/// Default maximum of tokens.
const MAX_TOKENS: u64 = 4096;

/// Default maximum of thinking tokens.
const THINKING_BUDGET: u64 = 10_000;

/// Beginning of a system prompt by which Anthropic's client marks each request differently.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

/// Fields that mean something else in OpenAI's form, or nothing. All other fields are the same there, or are
/// llama-server's.
const OWN: &str = "\
    system messages tools tool_choice stop_sequences max_tokens thinking metadata n output_config output_format";

/// Translates the request into OpenAI's form.
pub fn to_openai(body: &Fields) -> Result<Fields, ApiError> {
    let others = body.iter().filter(|(name, _)| !OWN.split(' ').any(|known| known == *name));
    let mut request: Fields = others.map(|(name, value)| (name.clone(), value.clone())).collect();
    let mut set = |name: &str, value: Value| drop(request.insert(name.to_owned(), value));
    let mut messages: Vec<Value> = get(body, "system").map(system).transpose()?.into_iter().collect();
    match get(body, "messages") {
        None => return Err(ApiError::invalid("'messages' is required")),
        Some(Value::Array(list)) => list.iter().try_for_each(|message| convert(message, &mut messages))?,
        Some(_) => return Err(ApiError::invalid("Expected 'messages' to be an array")),
    }
    set("messages", Value::Array(messages));
    if let Some(tools) = list(body, "tools")? {
        set("tools", tools.iter().map(tool).collect());
    }
    if let Some(choice) = get(body, "tool_choice") {
        let kind = match (text_of(choice, "type"), choice.get("name")) {
            ("tool", Some(name)) => json!({"type": "function", "function": {"name": name}}),
            ("any" | "tool", _) => json!("required"),
            (word @ ("auto" | "none"), _) => json!(word),
            (kind, _) => {
                let kind = shortened(kind);
                return Err(ApiError::field("tool_choice", format!("expected auto, any, tool or none, not '{kind}'")));
            }
        };
        set("tool_choice", kind);
        if let Some(is_single) = choice.get("disable_parallel_tool_use").and_then(Value::as_bool) {
            set("parallel_tool_calls", json!(!is_single));
        }
    }
    // `output_format` is the beta's name.
    let config = object(body, "output_config")?.and_then(|config| object(config, "format").transpose());
    if let Some(format) = config.transpose()?.or(object(body, "output_format")?) {
        match format.get("type").and_then(Value::as_str) {
            Some("json_schema") => {
                let schema = object(format, "schema")?.ok_or_else(|| ApiError::field("format", "expected a schema"))?;
                set("response_format", json!({"type": "json_schema", "json_schema": {"schema": schema}}));
            }
            _ => return Err(ApiError::field("format", "expected \"json_schema\" as its type")),
        }
    }
    if let Some(stops) = get(body, "stop_sequences") {
        set("stop", stops.clone());
    }
    set("max_tokens", get(body, "max_tokens").cloned().unwrap_or_else(|| json!(MAX_TOKENS)));
    if let Some(thinking) = get(body, "thinking") {
        match text_of(thinking, "type") {
            "enabled" => {
                let budget = thinking.get("budget_tokens").filter(|budget| !budget.is_null());
                set("thinking_budget_tokens", budget.cloned().unwrap_or_else(|| json!(THINKING_BUDGET)));
            }
            "disabled" => set("reasoning_effort", json!("none")),
            _ => {}
        }
    }
    Ok(request)
}

/// A system prompt: a text, or blocks of text.
fn system(value: &Value) -> Result<Value, ApiError> {
    let text = match value {
        Value::Array(blocks) => {
            let text = |block| {
                if text_of(block, "type") == "text" { Ok(stable(text_of(block, "text"))) } else { Err(unknown(block)) }
            };
            blocks.iter().map(text).collect::<Result<_, _>>()?
        }
        Value::String(text) => stable(text),
        _ => return Err(ApiError::field("system", "expected a string or an array of text blocks")),
    };
    Ok(json!({"role": "system", "content": text}))
}

/// A system prompt whose client mark is replaced by five constant characters: a mark that changes with every request
/// would defeat prompt caching.
fn stable(text: &str) -> String {
    let mark = text.strip_prefix(BILLING_HEADER).and_then(|rest| rest.find("cch="));
    let Some(begin) = mark.map(|at| BILLING_HEADER.len() + at + 4) else { return text.to_owned() };
    match text.get(begin..begin + 5).filter(|_| text[begin..].get(5..6) == Some(";")) {
        Some(_) => format!("{}fffff{}", &text[..begin], &text[begin + 5..]),
        None => text.to_owned(),
    }
}

fn tool(tool: &Value) -> Value {
    let schema = tool.get("input_schema").cloned().unwrap_or_else(|| json!({}));
    json!({"type": "function", "function": {
        "name": text_of(tool, "name"), "description": text_of(tool, "description"), "parameters": schema,
    }})
}

fn text_of<'a>(block: &'a Value, name: &str) -> &'a str {
    block.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// A message. The tool results in it become messages of their own, in their places.
fn convert(message: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = text_of(message, "role");
    let Some(Value::Array(blocks)) = message.get("content") else {
        // Skip an assistant message without content.
        if role != "assistant" || message.get("content").is_some() {
            messages.push(message.clone());
        }
        return Ok(());
    };
    let mut parts = Parts::default();
    for block in blocks {
        match text_of(block, "type") {
            "thinking" => parts.reasoning.push_str(text_of(block, "thinking")),
            "tool_use" => {
                let input = block.get("input").map_or_else(|| "{}".to_owned(), Value::to_string);
                parts.calls.push(json!({
                    "id": text_of(block, "id"), "type": "function",
                    "function": {"name": text_of(block, "name"), "arguments": input},
                }));
            }
            "tool_result" => {
                messages.extend(std::mem::take(&mut parts).message(role));
                messages.push(result(block)?);
            }
            _ => add(block, &mut parts.content)?,
        }
    }
    messages.extend(parts.message(role));
    Ok(())
}

/// The blocks of a message between two tool results. OpenAI's form has an assistant's text before its calls.
#[derive(Default)]
struct Parts {
    content: Vec<Value>,
    calls: Vec<Value>,
    reasoning: String,
}

impl Parts {
    fn message(self, role: &str) -> Option<Value> {
        let Self { content, calls, reasoning } = self;
        if content.is_empty() && calls.is_empty() && reasoning.is_empty() {
            return None;
        }
        let content = if content.is_empty() { json!("") } else { Value::Array(content) };
        let mut message = json!({"role": role, "content": content});
        if !calls.is_empty() {
            message["tool_calls"] = Value::Array(calls);
        }
        if !reasoning.is_empty() {
            message["reasoning_content"] = json!(reasoning);
        }
        Some(message)
    }
}

/// Adds a block of content in OpenAI's form.
///
/// # Errors
/// A block of another type, which the model would not see.
fn add(block: &Value, content: &mut Vec<Value>) -> Result<(), ApiError> {
    let text = |text: String| json!({"type": "text", "text": text});
    match text_of(block, "type") {
        "text" => content.push(json!({"type": "text", "text": block.get("text")})),
        "image" => content.push(image(block)),
        "document" => {
            content.push(text(opening("document", block, &["title", "context"])));
            let source = &block["source"];
            match (text_of(source, "type"), &source["data"], &source["content"]) {
                ("text", Value::String(data), _) => content.push(text(data.clone())),
                ("content", _, Value::String(data)) => content.push(text(data.clone())),
                ("content", _, Value::Array(blocks)) => blocks.iter().try_for_each(|block| add(block, content))?,
                (kind, ..) => {
                    let kind = shortened(kind);
                    let message = format!("a document with a source of type '{kind}' is not supported: send its text");
                    return Err(ApiError::invalid(message));
                }
            }
            content.push(text(closing("document")));
        }
        "search_result" => {
            content.push(text(opening("search_result", block, &["source", "title"])));
            block["content"].as_array().into_iter().flatten().try_for_each(|block| add(block, content))?;
            content.push(text(closing("search_result")));
        }
        _ => return Err(unknown(block)),
    }
    Ok(())
}

fn unknown(block: &Value) -> ApiError {
    let kind = shortened(text_of(block, "type"));
    ApiError::invalid(format!("content blocks of type '{kind}' are not supported here: leave it out, or send its text"))
}

/// A tool's result.
fn result(block: &Value) -> Result<Value, ApiError> {
    let content = match block.get("content") {
        None | Some(Value::Null) => json!(""),
        Some(Value::Array(blocks)) => {
            let mut content = Vec::new();
            blocks.iter().try_for_each(|block| add(block, &mut content))?;
            Value::Array(content)
        }
        Some(other) => other.clone(),
    };
    Ok(json!({"role": "tool", "tool_call_id": text_of(block, "tool_use_id"), "content": content}))
}

fn image(block: &Value) -> Value {
    let source = &block["source"];
    let url = match text_of(source, "type") {
        "base64" => format!("data:{};base64,{}", text_of(source, "media_type"), text_of(source, "data")),
        _ => text_of(source, "url").to_owned(),
    };
    json!({"type": "image_url", "image_url": {"url": url}})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(body: Value) -> Value {
        let Value::Object(body) = body else { panic!("a body is an object") };
        Value::Object(to_openai(&body).unwrap())
    }

    /// The messages of a request with one user message.
    fn of_blocks(blocks: Value) -> Result<Value, String> {
        let Value::Object(body) = json!({"messages": [{"role": "user", "content": blocks}]}) else { panic!() };
        to_openai(&body).map(|mut own| own.remove("messages").unwrap()).map_err(|error| error.message)
    }

    #[test]
    fn documents_become_text() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let plain = json!({"type": "text", "media_type": "text/plain", "data": "Sun."});
        let parts = json!({"type": "content", "content": [text("a"), text("b")]});
        let result = json!({"type": "search_result", "source": "https://x", "title": "T", "content": [text("c")]});
        let messages = of_blocks(json!([
            {"type": "document", "source": plain, "title": "News", "context": "old", "citations": {"enabled": true}},
            {"type": "document", "source": parts},
            {"type": "tool_result", "tool_use_id": "t1", "content": [result]},
            {"type": "document", "source": {"type": "content", "content": "d"}},
        ]));
        let messages = messages.unwrap();
        let said = |at: usize| -> String {
            let parts = messages[at]["content"].as_array().unwrap();
            parts.iter().map(|part| part["text"].as_str().unwrap()).collect()
        };
        let first = "<document>\n<title>News</title>\n<context>old</context>\nSun.\n</document>\n";
        assert_eq!(said(0), format!("{first}<document>\nab\n</document>\n"));
        assert_eq!(messages[1]["role"], "tool");
        assert_eq!(said(1), "<search_result>\n<source>https://x</source>\n<title>T</title>\nc\n</search_result>\n");
        assert_eq!(said(2), "<document>\nd\n</document>\n");
    }

    #[test]
    fn unknown_blocks_are_refused() {
        let pdf = json!({"type": "base64", "media_type": "application/pdf", "data": "AAAA"});
        let unknown = json!({"type": "container_upload", "file_id": "f"});
        for (blocks, kind) in [
            (json!([{"type": "document", "source": pdf}]), "'base64'"),
            (json!([{"type": "document", "source": {"type": "file", "file_id": "f"}}]), "'file'"),
            (json!([{"type": "document"}]), "''"),
            (json!([unknown]), "'container_upload'"),
            (json!([{"type": "redacted_thinking", "data": "x"}]), "'redacted_thinking'"),
            (json!([{"type": "tool_result", "tool_use_id": "t", "content": [unknown]}]), "'container_upload'"),
            (json!([{"type": "search_result", "content": [unknown]}]), "'container_upload'"),
            (json!(["text"]), "''"),
        ] {
            let message = of_blocks(blocks.clone()).unwrap_err();
            assert!(message.contains(kind), "{blocks}: {message}");
        }
        let Value::Object(body) = json!({"system": [unknown], "messages": []}) else { panic!() };
        assert!(to_openai(&body).unwrap_err().message.contains("'container_upload'"));
    }

    #[test]
    fn a_conversation_with_tools() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let own = converted(json!({
            "seed": 7,
            "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
            "max_tokens": 9,
            "stop_sequences": ["END"],
            "tools": [{"name": "w", "description": "d", "input_schema": {"b": {}, "a": {}}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "temperature": 0,
            "metadata": {"user_id": "x"},
            "messages": [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "tool_use", "id": "t1", "name": "w", "input": {"z": 1, "b": 2}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text("su"), text("nny")]},
                    text("Here:"),
                    {"type": "tool_result", "tool_use_id": "t2"},
                    text("And?"),
                ]},
            ],
        }));
        let expected = json!({
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": "", "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "w", "arguments": "{\"z\":1,\"b\":2}"}},
                ], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "t1", "content": [text("su"), text("nny")]},
                {"role": "user", "content": [text("Here:")]},
                {"role": "tool", "tool_call_id": "t2", "content": ""},
                {"role": "user", "content": [text("And?")]},
            ],
            "tools": [{"type": "function", "function": {
                "name": "w", "description": "d", "parameters": {"b": {}, "a": {}},
            }}],
            "tool_choice": "required",
            "parallel_tool_calls": false,
            "stop": ["END"],
            "max_tokens": 9,
            "thinking_budget_tokens": 5,
            "temperature": 0,
            "seed": 7,
        });
        assert_eq!(own, expected);
    }

    #[test]
    fn formats() {
        let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
        let format = json!({"type": "json_schema", "schema": schema});
        let expected = json!({"type": "json_schema", "json_schema": {"schema": schema}});
        for body in [json!({"output_config": {"format": format}}), json!({"output_format": format})] {
            let mut body = body;
            body["messages"] = json!([]);
            let own = converted(body);
            assert_eq!(own["response_format"], expected);
            assert!(own.get("output_config").is_none() && own.get("output_format").is_none());
        }
        for wrong in [json!(7), json!({"type": "json"}), json!({"type": "json_schema"}), json!({})] {
            let Value::Object(body) = json!({"messages": [], "output_config": {"format": wrong}}) else { panic!() };
            assert!(to_openai(&body).unwrap_err().message.contains("'format'"), "{wrong}");
        }
        assert!(
            converted(json!({"messages": [], "output_config": {"effort": "low"}})).get("response_format").is_none()
        );
    }

    #[test]
    fn defaults() {
        let own = converted(
            json!({"messages": [], "thinking": {"type": "disabled"}, "tool_choice": {"type": "tool", "name": "w"}}),
        );
        assert_eq!(own["max_tokens"], 4096);
        assert_eq!(own["reasoning_effort"], "none");
        assert_eq!(own["tool_choice"]["function"]["name"], "w");
        assert!(to_openai(&Fields::new()).is_err());
        let Value::Object(body) = json!({"messages": [], "tool_choice": {"type": "often"}}) else { panic!() };
        assert!(to_openai(&body).unwrap_err().message.contains("'often'"));
    }

    #[test]
    fn images_are_passed_on() {
        let source = json!({"type": "base64", "media_type": "image/png", "data": "AAAA"});
        let own = converted(json!({"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}));
        assert_eq!(own["messages"][0]["content"][0]["image_url"]["url"], "data:image/png;base64,AAAA");
    }

    #[test]
    fn client_marks_are_made_constant() {
        let header = "x-anthropic-billing-header: cc_version=2; cch=a5145;You are";
        assert_eq!(stable(header), "x-anthropic-billing-header: cc_version=2; cch=fffff;You are");
        for text in ["cch=a5145;", "x-anthropic-billing-header: cch=a51", "x-anthropic-billing-header: cch=äöüäö;"]
        {
            assert_eq!(stable(text), text);
        }
    }
}
