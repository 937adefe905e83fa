//! Chat templates, tools and thoughts: renders conversations for the model, and parses its answers.

mod call;
mod inputs;
mod isolation;
mod nesting;
mod parser;
mod plain;
mod prompt;
mod render;
mod reply;
mod stream;
mod templates;

use serde::Serialize;

use super::error::Error;
use super::model::Model;

pub use inputs::{ChatInputs, Continuation, ToolChoice};
pub use isolation::isolate_chat_templates;
pub use parser::ChatParser;
pub use prompt::{ChatPrompt, LazyGrammar, ThinkingTags};
pub use reply::{ChatDelta, ChatReply, ToolCall, ToolCallDelta};
pub use stream::ChatStream;
pub use templates::ChatTemplates;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    /// The role: `system`, `user` or `assistant` in most templates.
    pub role: String,
    /// The text.
    pub content: String,
}

impl ChatMessage {
    /// A message with this role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// How to render a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatOptions {
    /// A built-in template's name (`chatml`, `llama3`) or a Jinja text; `None` uses the model's own, or `chatml`.
    pub template: Option<String>,
    /// Runs the template's text. Without it llama.cpp recognises well-known templates and writes their format itself,
    /// as it always does for built-in names.
    pub jinja: bool,
    /// Ends the prompt with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { template: None, jinja: true, add_generation_prompt: true }
    }
}

impl Model {
    /// Renders a conversation with the model's chat template.
    ///
    /// # Errors
    /// A missing template, or one that fails on these messages.
    pub fn render_chat(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, Error> {
        render(&ChatTemplates::new(self, options.template.as_deref())?, messages, options)
    }
}

fn render(templates: &ChatTemplates, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, Error> {
    let inputs = ChatInputs {
        messages: serde_json::to_string(messages).map_err(|error| Error::ChatInput(error.to_string()))?,
        use_jinja: options.jinja,
        add_generation_prompt: options.add_generation_prompt,
        ..ChatInputs::default()
    };
    Ok(templates.apply(&inputs)?.prompt)
}

#[cfg(test)]
mod tests;
