//! Splits a chat request into the chat template's inputs and the generation's parameters.

use hobbit::engine::{ChatInputs, Continuation, ToolChoice};
use hobbit::options::{ReasoningBudget, ReasoningFormat};
use serde_json::{Value, json};

use super::messages::check_messages;
use crate::error::ApiError;
use crate::json::{Fields, boolean, get, object, text, whole};
use hobbit_programs::reasoning::{ENABLE_THINKING, REASONING_EFFORT, Reasoning};

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
    /// Candidates that the answer shows for each token.
    pub n_top: usize,
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
    let n_top = probabilities(&mut body)?;
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
    Ok(Request { inputs, rest: body, budget: reasoning.budget, include_usage, n_top, media })
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
        // Some tools by name: the template receives only these.
        Some(choice) => {
            let (mode, names) = named_tools(&choice)?;
            let missing = names.iter().find(|name| !tools.iter().any(|tool| tool_name(tool) == Some(name)));
            if let Some(name) = missing {
                return Err(ApiError::invalid(format!("Invalid tool_choice: there is no tool '{name}'")));
            }
            tools.retain(|tool| tool_name(tool).is_some_and(|name| names.contains(&name)));
            mode
        }
    };
    if !jinja && choice != ToolChoice::Auto {
        return Err(ApiError::invalid("tool_choice param requires --jinja flag"));
    }
    let tools = (!tools.is_empty()).then(|| Value::Array(tools).to_string());
    Ok((tools, choice))
}

fn tool_name(tool: &Value) -> Option<&str> {
    tool.pointer("/function/name").or_else(|| tool.get("name")).and_then(Value::as_str)
}

/// The tools that `tool_choice` names, and whether one must be called: a single one must, `allowed_tools` has a mode.
fn named_tools(choice: &Value) -> Result<(ToolChoice, Vec<&str>), ApiError> {
    let wrong = || ApiError::invalid(format!("Invalid tool_choice: {choice}"));
    if choice.get("type").is_none_or(|kind| kind != "allowed_tools") {
        return Ok((ToolChoice::Required, vec![tool_name(choice).ok_or_else(wrong)?]));
    }
    // A chat completion nests them one level deeper than Responses.
    let allowed = choice.get("allowed_tools").unwrap_or(choice);
    let mode = allowed.get("mode").and_then(Value::as_str).unwrap_or("auto").parse().map_err(|_| wrong())?;
    let names: Option<Vec<&str>> =
        allowed.get("tools").and_then(Value::as_array).ok_or_else(wrong)?.iter().map(tool_name).collect();
    Ok((mode, names.filter(|names| !names.is_empty()).ok_or_else(wrong)?))
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
    let schema = |fields: &mut Fields| fields.remove("schema").filter(|schema| !schema.is_null());
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
    let mut continuation = match get(body, "continue_final_message") {
        None | Some(Value::Bool(false)) => Continuation::None,
        Some(Value::Bool(true)) => Continuation::Auto,
        Some(Value::String(word)) => word.parse().map_err(|error| ApiError::field("continue_final_message", error))?,
        Some(_) => return Err(ApiError::field("continue_final_message", "expected true, false or a string")),
    };
    if continuation != Continuation::None && opens == Some(true) {
        return Err(ApiError::invalid("Cannot set both add_generation_prompt and continue_final_message to true."));
    }
    let messages = conversation.as_array().map_or(&[][..], Vec::as_slice);
    let last = messages.last().filter(|last| is_assistant(last));
    if continuation == Continuation::None && defaults.prefills_assistant && last.is_some() {
        if messages.len() >= 2 && is_assistant(&messages[messages.len() - 2]) {
            return Err(ApiError::invalid("Cannot have 2 or more assistant messages at the end of the list."));
        }
        continuation = Continuation::Auto;
    }
    let has_calls =
        |message: &Value| message.get("tool_calls").and_then(Value::as_array).is_some_and(|all| !all.is_empty());
    if continuation != Continuation::None && last.is_some_and(has_calls) {
        return Err(ApiError::invalid("Cannot continue an assistant message that contains tool calls."));
    }
    Ok((continuation, continuation == Continuation::None && opens.unwrap_or(true)))
}

/// Settings of the model's reasoning.
struct ReasoningFields {
    enabled: bool,
    format: ReasoningFormat,
    kwargs: std::collections::BTreeMap<String, String>,
    budget: ReasoningBudget,
}

fn reasoning(body: &Fields, defaults: &Defaults) -> Result<ReasoningFields, ApiError> {
    let usual = defaults.reasoning;
    let format = match text(body, "reasoning_format")? {
        None => usual.format,
        Some(word) => word.parse().map_err(|error| ApiError::field("reasoning_format", error))?,
    };
    let mut kwargs = usual.template_kwargs.clone();
    let more = object(body, "chat_template_kwargs")?.into_iter().flatten();
    kwargs.extend(more.map(|(name, value)| (name.clone(), value.to_string())));
    let enabled = usual.enable_thinking(&kwargs, defaults.template_reasons);
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
    let mut budget = usual.sampled();
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

/// `logprobs` and `top_logprobs` become `n_probs`. Returns how many candidates the answer shows for each token: 0 asks
/// for the chosen tokens only.
fn probabilities(body: &mut Fields) -> Result<usize, ApiError> {
    let are_wanted = boolean(body, "logprobs")?.unwrap_or(false);
    let top = whole(body, &["top_logprobs"], 0..=i64::from(i32::MAX))?;
    for name in ["logprobs", "top_logprobs"] {
        body.remove(name);
    }
    if !are_wanted {
        return match top {
            // The default of some clients.
            None | Some(0) => Ok(usize::MAX),
            Some(_) => Err(ApiError::invalid("top_logprobs requires logprobs to be set to true")),
        };
    }
    let top = top.unwrap_or(TOP_LOGPROBS);
    body.insert("n_probs".to_owned(), json!(top.max(1)));
    Ok(top as usize)
}

/// Whether a message has the assistant's role.
fn is_assistant(message: &Value) -> bool {
    message.get("role").is_some_and(|role| role == "assistant")
}

#[cfg(test)]
mod tests;
