//! Chat templates, tools and reasoning: renders conversations for the model, and parses its answers.

pub(crate) mod isolation;
mod kept;
mod reply;
pub(crate) mod schema;
mod stream;
mod templates;

use std::collections::BTreeMap;

use serde_json::{Value, json};
use smart_default::SmartDefault;

use crate::engine::error::ChatError;
use crate::engine::ggml::limits::{NAME_MAX, check_depth, read_json, schema_stack};
use hobbit_core::named::named;
use hobbit_core::options::ReasoningFormat;

pub use isolation::{isolate_chat_templates, when_templates_are_slow};
pub use reply::{ChatDelta, ChatParser, ChatReply, ToolCall, ToolCallDelta};
pub use stream::ChatStream;
pub use templates::{ChatPrompt, ChatTemplates, LazyGrammar, ThinkingTags};

/// Whether the model may, must or must not call tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// It must call one.
    Required,
    /// The model sees no tools, or must not call them.
    None,
}

named! {
    ToolChoice, "tool choice":
    Auto = "auto", Required = "required", None = "none",
}

/// How the last message continues, if it is the assistant's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Continuation {
    /// Not at all: it is complete.
    #[default]
    None,
    /// Continues its reasoning, if it has some and no content, otherwise its content.
    Auto,
    /// Continues its reasoning.
    Reasoning,
    /// Continues its content.
    Content,
}

named! {
    Continuation, "continuation":
    None = "none", Auto = "auto", Reasoning = "reasoning_content", Content = "content",
}

/// A conversation for [`ChatTemplates::apply`]: llama.cpp's `common_chat_templates_inputs`.
#[derive(Clone, Debug, PartialEq, Eq, SmartDefault)]
pub struct ChatInputs {
    /// JSON: an array of messages in OpenAI's form, text only.
    #[default("[]".to_owned())]
    pub messages: String,
    /// JSON: an array of tools in OpenAI's form.
    pub tools: Option<String>,
    /// Whether the model may call tools.
    pub tool_choice: ToolChoice,
    /// Several tools may be called in one answer.
    pub parallel_tool_calls: bool,
    /// JSON: a schema of the answer.
    pub json_schema: Option<String>,
    /// GBNF: the user's grammar, which excludes tools. Templates ignore it; without Jinja it is returned unchanged.
    pub grammar: Option<String>,
    /// End with the opening of the assistant's turn.
    #[default = true]
    pub add_generation_prompt: bool,
    /// Whether the last message is continued instead of starting a new turn.
    pub continue_final_message: Continuation,
    /// How reasoning is returned.
    pub reasoning_format: ReasoningFormat,
    /// Whether the model reasons, for templates that support it.
    #[default = true]
    pub enable_thinking: bool,
    /// Further variables of the template: names, and values in JSON.
    pub template_kwargs: BTreeMap<String, String>,
    /// Runs the template's text. Otherwise llama.cpp recognises well-known templates and writes their format itself,
    /// without tools, reasoning or the other settings above.
    #[default = true]
    pub use_jinja: bool,
    /// Returns answers unparsed, whatever the template defines: reasoning and tool calls stay in their content.
    pub pure_content: bool,
}

impl ChatInputs {
    /// Checks the inputs and converts them for the shim. Returns the JSON, and the bytes of stack that it needs.
    ///
    /// # Errors
    /// [`ChatError::Input`] for invalid JSON, excessive depth or length, or settings that exclude each other.
    fn to_json(&self, use_jinja: bool) -> Result<(String, usize), ChatError> {
        let stack_bytes = self.check(use_jinja).map_err(ChatError::Input)?;
        let tools = self.tools.as_deref().map(schema::of_tools).transpose().map_err(ChatError::Input)?;
        let json_schema = self.json_schema.as_deref().map(schema::of_answer).transpose().map_err(ChatError::Input)?;
        let text = json!({
            "messages": self.messages,
            "tools": tools.unwrap_or_default(),
            "tool_choice": self.tool_choice.name(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "json_schema": json_schema.unwrap_or_default(),
            "grammar": self.grammar.as_deref().unwrap_or_default(),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message.name(),
            "reasoning_format": self.reasoning_format.name(),
            "enable_thinking": self.enable_thinking,
            "template_kwargs": self.template_kwargs,
            "use_jinja": use_jinja,
            "force_pure_content": self.pure_content,
        });
        Ok((text.to_string(), stack_bytes))
    }

    fn check(&self, use_jinja: bool) -> Result<usize, String> {
        let messages = read_json(&self.messages, "messages")?;
        check_arguments(&messages)?;
        if !use_jinja && has_nul(&messages) {
            return Err("messages: a text contains a NUL byte, at which templates that are not Jinja end".to_owned());
        }
        let mut stack_bytes = 0;
        if let Some(tools) = &self.tools {
            stack_bytes = stack_of_tools(&read_json(tools, "tools")?).map_err(|error| format!("tools: {error}"))?;
        }
        if let Some(schema) = &self.json_schema {
            let what = "the JSON schema";
            let needed = schema_stack(&read_json(schema, what)?).map_err(|error| format!("{what}: {error}"))?;
            stack_bytes = stack_bytes.max(needed);
        }
        for (name, value) in &self.template_kwargs {
            read_json(value, &format!("the template's variable '{name}'"))?;
        }
        if self.continue_final_message != Continuation::None && self.add_generation_prompt {
            let rule = "continue_final_message continues a message, add_generation_prompt opens a new turn: give one";
            return Err(rule.to_owned());
        }
        if self.tool_choice == ToolChoice::Required && self.tool_names().is_empty() {
            return Err("tool_choice requires a call, but there are no tools".to_owned());
        }
        Ok(stack_bytes)
    }

    /// The inputs with the texts of all system messages in the first one, and the texts; `None` if there are fewer than
    /// two, or one that is no text.
    fn with_one_system_message(&self) -> Option<(Self, Vec<String>)> {
        let mut messages: Vec<Value> = serde_json::from_str(&self.messages).ok()?;
        let is_system = |message: &Value| message.get("role").is_some_and(|role| role == "system");
        let systems = messages.iter().filter(|message| is_system(message));
        let text = |message: &Value| Some(message.get("content")?.as_str()?.to_owned());
        let texts: Vec<String> = systems.map(text).collect::<Option<_>>()?;
        if texts.len() < 2 {
            return None;
        }
        let first = messages.iter().position(is_system)?;
        messages[first]["content"] = texts.join("\n\n").into();
        let mut at = 0..;
        messages.retain(|message| at.next() == Some(first) || !is_system(message));
        Some((Self { messages: Value::Array(messages).to_string(), ..self.clone() }, texts))
    }

    /// Names of the tools.
    fn tool_names(&self) -> Vec<String> {
        let tools: Value = self.tools.as_deref().and_then(|tools| serde_json::from_str(tools).ok()).unwrap_or_default();
        let names = tools.as_array().into_iter().flatten().filter_map(|tool| tool.pointer("/function/name")?.as_str());
        names.map(str::to_owned).collect()
    }

    /// Refuses constraints that the template's result does not keep: `prompt` and `grammar` come from it.
    fn check_constraints(&self, prompt: &str, grammar: &str) -> Result<(), String> {
        let names = self.tool_names();
        if names.is_empty() || self.tool_choice == ToolChoice::None {
            return Ok(());
        }
        if !names.iter().any(|name| prompt.contains(name.as_str())) {
            return Err("the chat template does not write tools into its prompt, so that the model cannot call them: \
                        leave out the tools, or give the server another --chat-template"
                .to_owned());
        }
        if self.tool_choice == ToolChoice::Required && grammar.is_empty() {
            return Err(
                "tool_choice requires a call, but the chat template's format of calls has no grammar: leave out \
                        tool_choice, or give the server another --chat-template"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

/// Bytes of stack that the schemas of all tools need.
fn stack_of_tools(tools: &Value) -> Result<usize, String> {
    let all =
        |pointer: &'static str| tools.as_array().into_iter().flatten().filter_map(move |tool| tool.pointer(pointer));
    // llama.cpp processes names by recursion.
    if all("/function/name").filter_map(Value::as_str).any(|name| name.len() > NAME_MAX) {
        return Err(format!("a name is longer than {NAME_MAX} bytes"));
    }
    all("/function/parameters").try_fold(0, |most, schema| Ok(schema_stack(schema)?.max(most)))
}

/// Checks the depth of tool-call arguments, which are JSON within strings: some templates parse them.
fn check_arguments(messages: &Value) -> Result<(), String> {
    let calls = messages.as_array().into_iter().flatten().filter_map(|message| message.get("tool_calls")?.as_array());
    for call in calls.flatten() {
        if let Some(arguments) = call.pointer("/function/arguments").and_then(Value::as_str) {
            check_depth(arguments, "arguments of a tool call")?;
        }
    }
    Ok(())
}

fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(values) => values.iter().any(has_nul),
        Value::Object(values) => values.values().any(has_nul),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
