//! Chat templates, tools and reasoning: renders conversations for the model, and parses its answers.

mod inputs;
mod isolation;
mod reply;
mod stream;
mod templates;

use serde::Serialize;

use super::error::ChatError;
use super::model::Model;

pub use inputs::{ChatInputs, Continuation, ToolChoice};
pub use isolation::isolate_chat_templates;
pub use reply::{ChatDelta, ChatParser, ChatReply, ToolCall, ToolCallDelta};
pub use stream::ChatStream;
pub use templates::{ChatPrompt, ChatTemplates, LazyGrammar, ThinkingTags};

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

impl Model {
    /// Renders a conversation with the model's chat template, or `chatml` if it has none. [`ChatTemplates`] has more.
    ///
    /// # Errors
    /// A template that fails on these messages.
    pub fn render_chat(&self, messages: &[ChatMessage]) -> Result<String, ChatError> {
        let messages = serde_json::to_string(messages).map_err(|error| ChatError::Input(error.to_string()))?;
        Ok(ChatTemplates::new(self, None)?.apply(&ChatInputs { messages, ..ChatInputs::default() })?.prompt)
    }
}

#[cfg(test)]
mod tests;
