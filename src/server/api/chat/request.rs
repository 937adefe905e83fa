//! Splits a chat request into the chat template's inputs and the generation's parameters.

use hobbit::engine::{ChatInputs, Continuation, ToolChoice};
use hobbit::options::{ReasoningBudget, ReasoningFormat};
use serde_json::{Value, json};

use crate::reasoning::{ENABLE_THINKING, REASONING_EFFORT, Reasoning};
use crate::server::api::{Fields, boolean, get, media, object, text, whole};
use crate::server::error::ApiError;

/// Default number of candidates with `logprobs`.
const TOP_LOGPROBS: i64 = 20;

/// Defaults for fields that a request leaves out.
pub struct Defaults<'a> {
    pub reasoning: &'a Reasoning,
    pub jinja: bool,
    /// Continue a last message of the assistant's.
    pub prefills_assistant: bool,
    /// Whether the template supports reasoning.
    pub template_reasons: bool,
    pub calls_in_parallel: bool,
    /// Place of an image or sound in a text; `None`: the server takes none.
    pub marker: Option<&'a str>,
}

/// A parsed chat request.
#[derive(Debug)]
pub struct Request {
    pub inputs: ChatInputs,
    /// The remaining fields, for the generation.
    pub rest: Fields,
    pub budget: ReasoningBudget,
    /// The stream ends with token counts.
    pub include_usage: bool,
    /// Files of images and sound, in order of their places in the conversation.
    pub media: Vec<Vec<u8>>,
}

/// Parses a request in OpenAI's form.
pub fn read(mut body: Fields, defaults: &Defaults) -> Result<Request, ApiError> {
    let (tools, tool_choice) = tools(&mut body, defaults.jinja)?;
    let json_schema = schema(&mut body)?;
    let grammar = text(&body, "grammar")?.filter(|grammar| !grammar.is_empty()).map(str::to_owned);
    if tools.is_some() && tool_choice != ToolChoice::None && grammar.is_some() {
        return Err(ApiError::invalid("Cannot use custom grammar constraints with tools."));
    }
    let mut conversation = body.remove("messages").ok_or_else(|| ApiError::invalid("'messages' is required"))?;
    let mut media = Vec::new();
    check_messages(&mut conversation, defaults.marker, &mut media)?;
    let (continue_final_message, add_generation_prompt) = continuation(&body, &conversation, defaults)?;
    let reasoning = reasoning(&body, defaults)?;
    probabilities(&mut body, tools.is_some())?;
    let options = object(&body, "stream_options")?.map(|options| boolean(options, "include_usage"));
    let include_usage = options.transpose()?.flatten().unwrap_or(false);
    let inputs = ChatInputs {
        messages: conversation.to_string(),
        tools,
        tool_choice,
        parallel_tool_calls: boolean(&body, "parallel_tool_calls")?.unwrap_or(defaults.calls_in_parallel),
        json_schema,
        grammar,
        add_generation_prompt,
        continue_final_message,
        reasoning_format: reasoning.format,
        enable_thinking: reasoning.enabled,
        template_kwargs: reasoning.kwargs,
        use_jinja: defaults.jinja,
        pure_content: defaults.reasoning.skip_parsing,
    };
    Ok(Request { inputs, rest: body, budget: reasoning.budget, include_usage, media })
}

/// Tools as JSON, if any, and whether the model must call them.
fn tools(body: &mut Fields, jinja: bool) -> Result<(Option<String>, ToolChoice), ApiError> {
    let mut tools = match body.remove("tools") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(tools)) => tools,
        Some(_) => return Err(ApiError::field("tools", "expected an array")),
    };
    if !jinja && !tools.is_empty() {
        return Err(ApiError::invalid("tools param requires --jinja flag"));
    }
    let choice = match body.remove("tool_choice") {
        None | Some(Value::Null) => ToolChoice::Auto,
        Some(Value::String(word)) => {
            word.parse().map_err(|_| ApiError::invalid(format!("Invalid tool_choice: {word}")))?
        }
        // One tool by name: the template receives only this one.
        Some(choice) => {
            let name = choice.pointer("/function/name").or_else(|| choice.get("name")).and_then(Value::as_str);
            let name = name.ok_or_else(|| ApiError::invalid(format!("Invalid tool_choice: {choice}")))?;
            tools.retain(|tool| tool.pointer("/function/name").is_some_and(|own| own == name));
            if tools.is_empty() {
                return Err(ApiError::invalid(format!("Invalid tool_choice: there is no tool '{name}'")));
            }
            ToolChoice::Required
        }
    };
    if !jinja && choice != ToolChoice::Auto {
        return Err(ApiError::invalid("tool_choice param requires --jinja flag"));
    }
    let tools = (!tools.is_empty()).then(|| Value::Array(tools).to_string());
    Ok((tools, choice))
}

/// The schema that the answer must follow, as JSON.
fn schema(body: &mut Fields) -> Result<Option<String>, ApiError> {
    let given = body.remove("json_schema").filter(|schema| !schema.is_null());
    let has_grammar = text(body, "grammar")?.is_some_and(|grammar| !grammar.is_empty());
    if given.is_some() && has_grammar {
        return Err(ApiError::invalid("Cannot use both json_schema and grammar"));
    }
    let schema = match body.remove("response_format") {
        None | Some(Value::Null) => given,
        Some(Value::Object(mut format)) => format_schema(&mut format, given)?,
        Some(_) => return Err(ApiError::field("response_format", "expected an object")),
    };
    match schema {
        None => Ok(None),
        // An empty schema stands for any object.
        Some(Value::Object(schema)) if schema.is_empty() => Ok(Some(json!({"type": "object"}).to_string())),
        Some(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(Some(schema.to_string())),
        Some(_) => Err(ApiError::invalid("a JSON schema must be an object")),
    }
}

/// The schema of `response_format`; `given` is a schema from another field.
fn format_schema(format: &mut Fields, given: Option<Value>) -> Result<Option<Value>, ApiError> {
    let schema = |own: &mut Fields| own.remove("schema").filter(|schema| !schema.is_null());
    let empty = || json!({});
    let kind = match get(format, "type") {
        None => "",
        Some(Value::String(kind)) => kind.as_str(),
        Some(_) => return Err(ApiError::field("response_format", "expected a string as its type")),
    };
    match kind {
        "" | "text" => Ok(given),
        "json_object" => Ok(Some(schema(format).or(given).unwrap_or_else(empty))),
        "json_schema" => match format.remove("json_schema") {
            None | Some(Value::Null) => Ok(Some(empty())),
            Some(Value::Object(mut wrapper)) => Ok(Some(schema(&mut wrapper).unwrap_or_else(empty))),
            Some(_) => Err(ApiError::field("response_format", "expected an object as its json_schema")),
        },
        other => Err(ApiError::invalid(format!(
            "response_format type must be one of \"text\" or \"json_object\", but got: {other}"
        ))),
    }
}

/// How the last message is continued, and whether a new turn is opened.
fn continuation(body: &Fields, conversation: &Value, defaults: &Defaults) -> Result<(Continuation, bool), ApiError> {
    let opens = boolean(body, "add_generation_prompt")?;
    let mut own = match get(body, "continue_final_message") {
        None | Some(Value::Bool(false)) => Continuation::None,
        Some(Value::Bool(true)) => Continuation::Auto,
        Some(Value::String(word)) => word.parse().map_err(|error| ApiError::field("continue_final_message", error))?,
        Some(_) => return Err(ApiError::field("continue_final_message", "expected true, false or a string")),
    };
    if own != Continuation::None && opens == Some(true) {
        return Err(ApiError::invalid("Cannot set both add_generation_prompt and continue_final_message to true."));
    }
    let messages = conversation.as_array().map_or(&[][..], Vec::as_slice);
    let last = messages.last().filter(|last| is_assistant(last));
    if own == Continuation::None && defaults.prefills_assistant && last.is_some() {
        if messages.len() >= 2 && is_assistant(&messages[messages.len() - 2]) {
            return Err(ApiError::invalid("Cannot have 2 or more assistant messages at the end of the list."));
        }
        own = Continuation::Auto;
    }
    let has_calls =
        |message: &Value| message.get("tool_calls").and_then(Value::as_array).is_some_and(|all| !all.is_empty());
    if own != Continuation::None && last.is_some_and(has_calls) {
        return Err(ApiError::invalid("Cannot continue an assistant message that contains tool calls."));
    }
    Ok((own, own == Continuation::None && opens.unwrap_or(true)))
}

/// Settings of the model's reasoning.
struct ReasoningFields {
    enabled: bool,
    format: ReasoningFormat,
    kwargs: std::collections::BTreeMap<String, String>,
    budget: ReasoningBudget,
}

fn reasoning(body: &Fields, defaults: &Defaults) -> Result<ReasoningFields, ApiError> {
    let own = defaults.reasoning;
    let format = match text(body, "reasoning_format")? {
        None => own.format,
        Some(word) => word.parse().map_err(|error| ApiError::field("reasoning_format", error))?,
    };
    let mut kwargs = own.template_kwargs.clone();
    let more = object(body, "chat_template_kwargs")?.into_iter().flatten();
    kwargs.extend(more.map(|(name, value)| (name.clone(), value.to_string())));
    let enabled = own.enable_thinking(&kwargs, defaults.template_reasons);
    let mut enabled = enabled.map_err(|error| ApiError::invalid(error.to_string()))?;
    match text(body, "reasoning_effort")? {
        None | Some("") => {}
        Some("none") => {
            enabled = false;
            kwargs.remove(REASONING_EFFORT);
            kwargs.entry(ENABLE_THINKING.to_owned()).and_modify(|thinks| *thinks = false.to_string());
        }
        Some(level) => drop(kwargs.insert(REASONING_EFFORT.to_owned(), Value::from(level).to_string())),
    }
    let mut budget = own.sampled();
    let tokens = whole(body, &["reasoning_budget_tokens", "thinking_budget_tokens"], -1..=i64::from(i32::MAX))?;
    if let Some(tokens) = tokens.and_then(|tokens| u32::try_from(tokens).ok()) {
        budget.tokens = Some(tokens);
    }
    budget.control = boolean(body, "reasoning_control")?.unwrap_or(false);
    if let Some(message) = text(body, "reasoning_budget_message")? {
        budget.message = message.to_owned();
    }
    Ok(ReasoningFields { enabled, format, kwargs, budget })
}

/// `logprobs` and `top_logprobs` become `n_probs`.
fn probabilities(body: &mut Fields, has_tools: bool) -> Result<(), ApiError> {
    let are_wanted = boolean(body, "logprobs")?.unwrap_or(false);
    let top = whole(body, &["top_logprobs"], 0..=i64::from(i32::MAX))?;
    let streams = boolean(body, "stream")?.unwrap_or(false);
    let has_field = get(body, "top_logprobs").is_some();
    for name in ["logprobs", "top_logprobs"] {
        body.remove(name);
    }
    if are_wanted && has_tools && streams {
        return Err(ApiError::invalid("logprobs is not supported with tools + stream"));
    }
    if !are_wanted && has_field {
        return Err(ApiError::invalid("top_logprobs requires logprobs to be set to true"));
    }
    if are_wanted {
        body.insert("n_probs".to_owned(), json!(top.unwrap_or(TOP_LOGPROBS)));
    }
    Ok(())
}

/// Checks messages in OpenAI's form, removes null fields, and moves images and sound to `media`.
fn check_messages(messages: &mut Value, marker: Option<&str>, media: &mut Vec<Vec<u8>>) -> Result<(), ApiError> {
    let Value::Array(messages) = messages else {
        return Err(ApiError::invalid("Expected 'messages' to be an array"));
    };
    messages.iter_mut().try_for_each(|message| match message {
        Value::Object(fields) => check_one(fields, marker, media),
        _ => Err(ApiError::invalid("Expected 'messages' to be an array of objects")),
    })
}

fn check_one(message: &mut Fields, marker: Option<&str>, media: &mut Vec<Vec<u8>>) -> Result<(), ApiError> {
    // Content may be null; any other null field counts as absent.
    message.retain(|name, value| name == "content" || !value.is_null());
    let role = match message.get("role") {
        Some(Value::String(role)) => role.as_str(),
        Some(_) => return Err(ApiError::invalid("Expected 'role' to be a string")),
        None => "",
    };
    let (is_assistant, is_role_missing) = (role == "assistant", role.is_empty());
    let has_calls = message.contains_key("tool_calls");
    let Some(content) = message.get_mut("content") else {
        return match (is_assistant, has_calls) {
            (true, true) => Ok(()),
            (true, false) => Err(ApiError::invalid("Assistant message must contain either 'content' or 'tool_calls'!")),
            (false, _) => Err(ApiError::invalid("All non-assistant messages must contain 'content'")),
        };
    };
    match content {
        Value::Null | Value::String(_) => {}
        Value::Array(parts) => parts.iter_mut().try_for_each(|part| check_part(part, marker, media))?,
        _ => return Err(ApiError::invalid("Expected 'content' to be a string or an array")),
    }
    if is_role_missing {
        return Err(ApiError::invalid("Missing 'role' in message"));
    }
    Ok(())
}

/// Checks a content part. Moves the bytes of an image or sound to `media`, and leaves a marker.
///
/// # Errors
/// Parts that are neither, or images and sound where the server takes none.
pub fn check_part(part: &mut Value, marker: Option<&str>, media: &mut Vec<Vec<u8>>) -> Result<(), ApiError> {
    let cannot = |what: &str| {
        ApiError::invalid(format!(
            "{what} input is not supported: the server has no projector for it; start it with --mmproj, or send the \
             message without it"
        ))
    };
    let bytes = match part.get("type").and_then(Value::as_str) {
        Some("text") if part.get("text").is_some_and(Value::is_string) => return Ok(()),
        Some("text") => return Err(ApiError::invalid("a content part of type 'text' needs a string 'text'")),
        Some("image_url") if marker.is_none() => return Err(cannot("image")),
        Some("input_audio") if marker.is_none() => return Err(cannot("audio")),
        Some("image_url") => media::image(&part["image_url"])?,
        Some("input_audio") => media::sound(&part["input_audio"])?,
        Some("input_video" | "video_url") => {
            return Err(ApiError::invalid("video input is not supported; send images of it"));
        }
        _ => return Err(ApiError::invalid("unsupported content[].type")),
    };
    if media.len() >= media::COUNT_MAX {
        return Err(ApiError::invalid(format!("a request may have at most {} images and sounds", media::COUNT_MAX)));
    }
    media.push(bytes);
    *part = json!({"type": "media_marker", "text": marker});
    Ok(())
}

/// Whether a message has the assistant's role.
fn is_assistant(message: &Value) -> bool {
    message.get("role").is_some_and(|role| role == "assistant")
}

#[cfg(test)]
mod tests;
