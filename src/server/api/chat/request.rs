//! Splits a chat request into the chat template's inputs and the generation's parameters.

use hobbit::engine::{ChatInputs, Continuation, ToolChoice};
use hobbit::options::{ReasoningBudget, ReasoningFormat};
use serde_json::{Map, Value, json};

use super::messages;
use crate::reasoning::{ENABLE_THINKING, REASONING_EFFORT, Reasoning};
use crate::server::api::fields::{boolean, first, get, text, whole};
use crate::server::http::error::ApiError;

/// Default number of candidates with `logprobs`.
const TOP_LOGPROBS: i64 = 20;

/// Defaults for fields that a request leaves out.
pub struct Defaults<'a> {
    pub reasoning: &'a Reasoning,
    pub jinja: bool,
    /// Continue a last message of the assistant's.
    pub prefills_assistant: bool,
    /// Whether the template supports thoughts.
    pub template_thinks: bool,
    pub calls_in_parallel: bool,
}

/// A parsed chat request.
#[derive(Debug)]
pub struct Request {
    pub inputs: ChatInputs,
    /// The remaining fields, for the generation.
    pub rest: Map<String, Value>,
    pub budget: ReasoningBudget,
    /// The stream ends with token counts.
    pub include_usage: bool,
}

/// Parses a request in OpenAI's form.
///
/// # Errors
/// Invalid fields, or fields that exclude each other.
pub fn read(mut body: Map<String, Value>, defaults: &Defaults) -> Result<Request, ApiError> {
    let (tools, tool_choice) = tools(&mut body, defaults.jinja)?;
    let json_schema = schema(&mut body)?;
    let grammar = text(&body, "grammar")?.filter(|grammar| !grammar.is_empty()).map(str::to_owned);
    if tools.is_some() && tool_choice != ToolChoice::None && grammar.is_some() {
        return Err(ApiError::invalid("Cannot use custom grammar constraints with tools."));
    }
    let mut conversation = body.remove("messages").ok_or_else(|| ApiError::invalid("'messages' is required"))?;
    messages::check(&mut conversation)?;
    let (continue_final_message, add_generation_prompt) = continuation(&body, &conversation, defaults)?;
    let thinking = thinking(&body, defaults)?;
    probabilities(&mut body, tools.is_some())?;
    let include_usage = match get(&body, "stream_options") {
        None => false,
        Some(Value::Object(options)) => boolean(options, "include_usage")?.unwrap_or(false),
        Some(_) => return Err(ApiError::field("stream_options", "expected an object")),
    };
    let inputs = ChatInputs {
        messages: conversation.to_string(),
        tools,
        tool_choice,
        parallel_tool_calls: boolean(&body, "parallel_tool_calls")?.unwrap_or(defaults.calls_in_parallel),
        json_schema,
        grammar,
        add_generation_prompt,
        continue_final_message,
        reasoning_format: thinking.format,
        enable_thinking: thinking.enabled,
        template_kwargs: thinking.kwargs,
        use_jinja: defaults.jinja,
        pure_content: defaults.reasoning.skip_parsing,
        ..ChatInputs::default()
    };
    Ok(Request { inputs, rest: body, budget: thinking.budget, include_usage })
}

/// Tools as JSON, if any, and whether the model must call them.
fn tools(body: &mut Map<String, Value>, jinja: bool) -> Result<(Option<String>, ToolChoice), ApiError> {
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
fn schema(body: &mut Map<String, Value>) -> Result<Option<String>, ApiError> {
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
fn format_schema(format: &mut Map<String, Value>, given: Option<Value>) -> Result<Option<Value>, ApiError> {
    let schema = |own: &mut Map<String, Value>| own.remove("schema").filter(|schema| !schema.is_null());
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
fn continuation(
    body: &Map<String, Value>,
    conversation: &Value,
    defaults: &Defaults,
) -> Result<(Continuation, bool), ApiError> {
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
    let last = messages.last().filter(|last| messages::is_assistant(last));
    if own == Continuation::None && defaults.prefills_assistant && last.is_some() {
        if messages.len() >= 2 && messages::is_assistant(&messages[messages.len() - 2]) {
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

/// Settings of the model's thoughts.
struct Thinking {
    enabled: bool,
    format: ReasoningFormat,
    kwargs: std::collections::BTreeMap<String, String>,
    budget: ReasoningBudget,
}

fn thinking(body: &Map<String, Value>, defaults: &Defaults) -> Result<Thinking, ApiError> {
    let own = defaults.reasoning;
    let format = match text(body, "reasoning_format")? {
        None => own.format,
        Some(word) => word.parse().map_err(|error| ApiError::field("reasoning_format", error))?,
    };
    let mut kwargs = own.template_kwargs.clone();
    match get(body, "chat_template_kwargs") {
        None => {}
        Some(Value::Object(more)) => kwargs.extend(more.iter().map(|(name, value)| (name.clone(), value.to_string()))),
        Some(_) => return Err(ApiError::field("chat_template_kwargs", "expected an object")),
    }
    let enabled = own.enable_thinking(&kwargs, defaults.template_thinks);
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
    Ok(Thinking { enabled, format, kwargs, budget })
}

/// `logprobs` and `top_logprobs` become `n_probs`.
fn probabilities(body: &mut Map<String, Value>, has_tools: bool) -> Result<(), ApiError> {
    let are_wanted = boolean(body, "logprobs")?.unwrap_or(false);
    let top = whole(body, &["top_logprobs"], 0..=i64::from(i32::MAX))?;
    let streams = boolean(body, "stream")?.unwrap_or(false);
    let has_field = first(body, &["top_logprobs"]).is_some();
    for name in ["logprobs", "top_logprobs"] {
        body.remove(name);
    }
    match are_wanted {
        true if has_tools && streams => Err(ApiError::invalid("logprobs is not supported with tools + stream")),
        true => {
            body.insert("n_probs".to_owned(), json!(top.unwrap_or(TOP_LOGPROBS)));
            Ok(())
        }
        false if has_field => Err(ApiError::invalid("top_logprobs requires logprobs to be set to true")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests;
