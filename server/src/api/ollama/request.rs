//! Converts a request of Ollama's to OpenAI's chat completions.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::json::{Fields, get, integer, list, object, text};

/// Options whose names are llama-server's. Others concern the loading of a model.
const OPTIONS: &str = "\
    temperature top_k top_p min_p typical_p seed stop repeat_last_n repeat_penalty presence_penalty \
    frequency_penalty mirostat mirostat_tau mirostat_eta cache_prompt";

/// Fields of `/api/generate` that this server does not have.
const UNSUPPORTED: [&str; 4] = ["raw", "suffix", "context", "template"];

/// Translates the request into OpenAI's form.
pub fn to_openai(mut body: Fields) -> Result<Fields, ApiError> {
    let mut request = Fields::new();
    let messages = match body.remove("messages").filter(|messages| !messages.is_null()) {
        Some(Value::Array(messages)) => {
            let mut ids = Ids::default();
            messages.iter().map(|given| message(given, &mut ids)).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(ApiError::field("messages", "expected an array")),
        None => prompt(&body)?,
    };
    request.insert("messages".to_owned(), Value::Array(messages));
    for name in ["stream", "tools", "logprobs", "top_logprobs"] {
        request.extend(body.remove(name).map(|value| (name.to_owned(), value)));
    }
    match get(&body, "format") {
        None => {}
        Some(Value::String(word)) if word.is_empty() => {}
        Some(Value::String(word)) if word == "json" => {
            request.insert("response_format".to_owned(), json!({"type": "json_object"}));
        }
        Some(schema @ Value::Object(_)) => {
            let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
            request.insert("response_format".to_owned(), format);
        }
        Some(_) => return Err(ApiError::field("format", "expected \"json\" or a JSON schema")),
    }
    match get(&body, "think") {
        None => {}
        Some(Value::Bool(false)) => drop(request.insert("reasoning_effort".to_owned(), json!("none"))),
        Some(Value::Bool(true)) => {
            request.insert("chat_template_kwargs".to_owned(), json!({"enable_thinking": true}));
        }
        Some(level @ Value::String(_)) => drop(request.insert("reasoning_effort".to_owned(), level.clone())),
        Some(_) => return Err(ApiError::field("think", "expected true, false or a level")),
    }
    if let Some(options) = object(&body, "options")? {
        let same = OPTIONS.split(' ').filter_map(|name| Some((name.to_owned(), get(options, name)?.clone())));
        request.extend(same);
        if let Some(n) = get(options, "num_predict") {
            // -2 fills the context, which -1 does here.
            let n = if integer(n) == Some(-2) { json!(-1) } else { n.clone() };
            request.insert("max_tokens".to_owned(), n);
        }
        request.extend(get(options, "num_keep").map(|n| ("n_keep".to_owned(), n.clone())));
    }
    Ok(request)
}

/// The messages of `/api/generate`.
fn prompt(body: &Fields) -> Result<Vec<Value>, ApiError> {
    let is_given = |value: &Value| !matches!(value, Value::Bool(false)) && value.as_str() != Some("");
    if let Some(name) = UNSUPPORTED.iter().find(|name| get(body, name).is_some_and(is_given)) {
        return Err(ApiError::field(name, "not supported here: use /v1/completions, whose prompts are not changed"));
    }
    let mut messages = Vec::new();
    if let Some(system) = text(body, "system")?.filter(|system| !system.is_empty()) {
        messages.push(json!({"role": "system", "content": system}));
    }
    let prompt = text(body, "prompt")?.unwrap_or_default();
    messages.push(json!({"role": "user", "content": content(prompt, body)?}));
    Ok(messages)
}

/// A text with the images beside it.
fn content(text: &str, fields: &Fields) -> Result<Value, ApiError> {
    let Some(images) = list(fields, "images")?.filter(|images| !images.is_empty()) else { return Ok(json!(text)) };
    let mut parts = vec![json!({"type": "text", "text": text})];
    for image in images {
        let data = image.as_str().ok_or_else(|| ApiError::field("images", "expected base64"))?;
        // The kind is read from the bytes.
        let url = format!("data:image/png;base64,{data}");
        parts.push(json!({"type": "image_url", "image_url": {"url": url}}));
    }
    Ok(Value::Array(parts))
}

fn message(message: &Value, ids: &mut Ids) -> Result<Value, ApiError> {
    let Value::Object(fields) = message else { return Err(ApiError::field("messages", "expected objects")) };
    let mut message = fields.clone();
    let words = text(fields, "content")?.unwrap_or_default();
    message.insert("content".to_owned(), content(words, fields)?);
    message.remove("images");
    if let Some(thinking) = message.remove("thinking").filter(|thinking| !thinking.is_null()) {
        message.insert("reasoning_content".to_owned(), thinking);
    }
    if let Some(calls) = list(fields, "tool_calls")? {
        message.insert("tool_calls".to_owned(), calls.iter().map(|given| call(given, ids)).collect());
    }
    // A result names its call by the tool.
    if let Some(name) = message.remove("tool_name").filter(|name| !name.is_null()) {
        message.entry("tool_call_id").or_insert_with(|| ids.of_result(&name).into());
        message.insert("name".to_owned(), name);
    }
    Ok(Value::Object(message))
}

/// Ids for calls, which Ollama's clients need not send. The same conversation gets the same ids, so that its prompt is
/// the same. Mistral's templates take 9 letters and digits.
#[derive(Default)]
struct Ids {
    n: usize,
    /// Names and ids of calls without results.
    open: Vec<(Value, String)>,
}

impl Ids {
    fn next(&mut self) -> String {
        self.n += 1;
        format!("call{:05}", self.n % 100_000)
    }

    /// The id for a result of a tool: of its oldest call without one.
    fn of_result(&mut self, name: &Value) -> String {
        match self.open.iter().position(|(open, _)| open == name) {
            Some(at) => self.open.remove(at).1,
            None => self.next(),
        }
    }
}

/// A call of a tool, whose arguments are an object in Ollama's form.
fn call(call: &Value, ids: &mut Ids) -> Value {
    let function = call.get("function").unwrap_or(&Value::Null);
    let name = function.get("name").unwrap_or(&Value::Null);
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let id = call.get("id").and_then(Value::as_str).filter(|id| !id.is_empty());
    let id = id.map_or_else(|| ids.next(), str::to_owned);
    ids.open.push((name.clone(), id.clone()));
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(body: Value) -> Result<Value, String> {
        let Value::Object(body) = body else { panic!("a body is an object") };
        to_openai(body).map(Value::Object).map_err(|error| error.message)
    }

    #[test]
    fn a_conversation_with_tools() {
        let own = converted(json!({
            "model": "x", "stream": false, "think": false, "keep_alive": "5m", "format": {"type": "object"},
            "options": {"num_predict": 8, "temperature": 0, "num_ctx": 4096, "stop": ["END"]},
            "messages": [
                {"role": "user", "content": "Weather?", "images": ["AAAA"]},
                {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
                    {"function": {"name": "w", "arguments": {"city": "Rome"}}},
                    {"id": "mine", "function": {"name": "w", "arguments": {"city": "Rome"}}},
                ]},
                {"role": "tool", "tool_name": "w", "content": "sunny"},
                {"role": "tool", "tool_name": "w", "content": "hot"},
            ],
        }));
        let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
        let function = json!({"name": "w", "arguments": "{\"city\":\"Rome\"}"});
        let expected = json!({
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Weather?"}, image]},
                {"role": "assistant", "content": "", "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": "call00001", "type": "function", "function": function},
                        {"id": "mine", "type": "function", "function": function},
                    ]},
                {"role": "tool", "content": "sunny", "tool_call_id": "call00001", "name": "w"},
                {"role": "tool", "content": "hot", "tool_call_id": "mine", "name": "w"},
            ],
            "stream": false, "reasoning_effort": "none", "max_tokens": 8, "temperature": 0, "stop": ["END"],
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        });
        assert_eq!(own.unwrap(), expected);
    }

    #[test]
    fn a_prompt() {
        let own = converted(json!({"prompt": "Hi", "system": "Be brief.", "format": "json", "raw": false})).unwrap();
        let expected = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
        assert_eq!((&own["messages"], &own["response_format"]["type"]), (&expected, &json!("json_object")));
        for (body, part) in [
            (json!({"prompt": "x", "raw": true}), "'raw'"),
            (json!({"prompt": 7}), "'prompt'"),
            (json!({"prompt": "x", "format": 7}), "'format'"),
            (json!({"prompt": "x", "images": [7]}), "'images'"),
            (json!({"prompt": "x", "options": 7}), "'options'"),
            (json!({"messages": 7}), "'messages'"),
            (json!({"messages": [7]}), "'messages'"),
        ] {
            let message = converted(body).unwrap_err();
            assert!(message.contains(part), "{part}: {message}");
        }
    }
}
