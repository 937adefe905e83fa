//! Parses the model's output by the chat template's format: content, reasoning, tool calls.

pub use hobbit::engine::{ChatDelta, ToolCall, ToolCallDelta};
use hobbit::engine::{ChatPrompt, ChatStream};
use serde::de::IgnoredAny;

use crate::error::ApiError;
use crate::ids::call_id;
use crate::job::Stop;

/// Parses an answer as it arrives.
pub struct Reader {
    stream: ChatStream,
    /// A tool call whose arguments have not begun: its name may still grow, and its id come.
    held: Option<ToolCallDelta>,
    /// The call within which a stop text ended the answer.
    cut: Option<usize>,
}

impl Reader {
    /// A reader of the answer to `prompt`.
    ///
    /// # Errors
    /// A message to continue that does not follow the template's format.
    pub fn new(prompt: &ChatPrompt) -> Result<Self, ApiError> {
        let stream = ChatStream::new(prompt.parser.clone(), call_id);
        let stream = stream.map_err(|error| ApiError::invalid(error.to_string()))?;
        Ok(Self { stream, held: None, cut: None })
    }

    /// Appends `text`; returns the deltas that are new and final.
    pub fn push(&mut self, text: &str) -> Vec<ChatDelta> {
        if text.is_empty() {
            return Vec::new();
        }
        // Output that does not parse yet may parse later.
        let new = self.stream.push(text, true).unwrap_or_default();
        settle(&mut self.held, new)
    }

    /// Ends the answer with `rest`. Text that does not follow the template's format is content, with a notice; an
    /// answer that was cut off may be incomplete.
    pub fn finish(&mut self, rest: &str, stop: &Stop) -> Vec<ChatDelta> {
        let new = self.stream.finish(rest, matches!(stop, Stop::Limit | Stop::Word(_)));
        let mut deltas = settle(&mut self.held, new);
        deltas.extend(self.held.take().map(|call| {
            let id = if call.id.is_empty() { call_id() } else { call.id };
            ChatDelta::ToolCall(ToolCallDelta { id, ..call })
        }));
        let calls = &self.stream.reply().tool_calls;
        let is_half = |call: &ToolCall| serde_json::from_str::<IgnoredAny>(&call.arguments).is_err();
        if matches!(stop, Stop::Word(_)) && calls.last().is_some_and(is_half) {
            let cut = calls.len() - 1;
            self.cut = Some(cut);
            deltas.retain(|delta| !matches!(delta, ChatDelta::ToolCall(call) if call.index == cut));
        }
        deltas
    }

    /// Ends a complete answer: the message that a stream sends piece by piece.
    pub fn message(&mut self, text: &str, stop: &Stop) -> Message {
        let mut message = Message::default();
        self.finish(text, stop).iter().for_each(|delta| message.add(delta));
        message
    }

    /// The call within which a stop text ended the answer. A stream may have sent its beginning; it is no call.
    pub fn cut(&self) -> Option<usize> {
        self.cut
    }
}

/// The deltas that can be sent: a call's name and id are held until they are complete, and sent with the first of its
/// arguments.
fn settle(held: &mut Option<ToolCallDelta>, new: Vec<ChatDelta>) -> Vec<ChatDelta> {
    let mut deltas = Vec::new();
    for delta in new {
        match delta {
            ChatDelta::ToolCall(mut call) => {
                if let Some(before) = held.take() {
                    if before.index != call.index {
                        deltas.push(ChatDelta::ToolCall(before));
                    } else {
                        call.arguments.insert_str(0, &before.arguments);
                        if call.name.is_empty() {
                            (call.id, call.name) = (before.id, before.name);
                        }
                    }
                }
                // The first brace comes with the name, before the id.
                let may_be_renamed = !call.name.is_empty() && call.arguments.len() <= 1;
                if call.arguments.is_empty() || may_be_renamed {
                    *held = Some(call);
                } else {
                    deltas.push(ChatDelta::ToolCall(call));
                }
            }
            other => {
                deltas.extend(held.take().map(ChatDelta::ToolCall));
                deltas.push(other);
            }
        }
    }
    deltas
}

/// A complete answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<ToolCall>,
}

impl Message {
    /// Appends a delta.
    pub fn add(&mut self, delta: &ChatDelta) {
        match delta {
            ChatDelta::Reasoning(text) => self.reasoning.push_str(text),
            ChatDelta::Content(text) => self.content.push_str(text),
            ChatDelta::ToolCall(call) => {
                if self.calls.len() <= call.index {
                    self.calls.resize_with(call.index + 1, ToolCall::default);
                }
                let known = &mut self.calls[call.index];
                if !call.name.is_empty() {
                    (known.id, known.name) = (call.id.clone(), call.name.clone());
                }
                known.arguments.push_str(&call.arguments);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(index: usize, name: &str, arguments: &str) -> ChatDelta {
        let id = if name.is_empty() { String::new() } else { format!("id{index}") };
        ChatDelta::ToolCall(ToolCallDelta { index, id, name: name.to_owned(), arguments: arguments.to_owned() })
    }

    #[test]
    fn names_wait_for_arguments() {
        let mut held = None;
        assert_eq!(settle(&mut held, vec![call(0, "get", "")]), []);
        assert_eq!(settle(&mut held, vec![call(0, "get_time", "")]), []);
        assert_eq!(settle(&mut held, vec![call(0, "", "{")]), []);
        assert_eq!(settle(&mut held, vec![call(0, "", "\"")]), [call(0, "get_time", "{\"")]);
        assert_eq!(settle(&mut held, vec![call(0, "", "}"), call(1, "stop", "")]), [call(0, "", "}")]);
        let content = ChatDelta::Content("x".to_owned());
        assert_eq!(settle(&mut held, vec![content.clone()]), [call(1, "stop", ""), content]);
        assert_eq!(held, None);
    }
}
