//! A parsed answer: llama.cpp's `common_chat_msg`, its changes while it grows, and the parser that a chat template
//! defines.

use std::fmt;
use std::sync::Arc;

use ggml_sys::shim;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::isolation::shim_text;
use super::stream::Delimiters;
use super::{ChatInputs, Continuation};
use crate::engine::error::ChatError;
use crate::engine::ggml::limits;
use crate::engine::ggml::raw::{Owned, with_message};

/// A parsed answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatReply {
    /// The answer's text.
    pub content: String,
    /// The reasoning before it.
    pub reasoning_content: String,
    /// The tool calls.
    pub tool_calls: Vec<ToolCall>,
}

/// A tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The id given by the model; empty with most models.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// JSON, which may be incomplete while the answer grows.
    pub arguments: String,
}

/// A change of a growing answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatDelta {
    /// A piece of the reasoning.
    Reasoning(String),
    /// A piece of the content.
    Content(String),
    /// A piece of a tool call.
    ToolCall(ToolCallDelta),
}

/// A piece of a tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCallDelta {
    /// Index of the call in the answer.
    pub index: usize,
    /// Set in the first piece, and when the name or the id grows; otherwise empty.
    pub id: String,
    /// As `id`.
    pub name: String,
    /// Text to append to the arguments.
    pub arguments: String,
}

impl ChatReply {
    /// Whether the answer is empty.
    pub fn is_empty(&self) -> bool {
        self.content.is_empty() && self.reasoning_content.is_empty() && self.tool_calls.is_empty()
    }

    /// The difference to `before`, the same answer when it was shorter: as `common_chat_msg_diff::compute_diffs`.
    ///
    /// # Errors
    /// [`ChatError::Reply`] if this does not continue `before`.
    pub fn changes_since(&self, before: &Self) -> Result<Vec<ChatDelta>, ChatError> {
        let mut changes = Vec::new();
        let reasoning = added(&before.reasoning_content, &self.reasoning_content)?;
        changes.extend((!reasoning.is_empty()).then(|| ChatDelta::Reasoning(reasoning.to_owned())));
        let content = added(&before.content, &self.content)?;
        changes.extend((!content.is_empty()).then(|| ChatDelta::Content(content.to_owned())));
        let n_before = before.tool_calls.len();
        if self.tool_calls.len() < n_before {
            let n = self.tool_calls.len();
            return Err(ChatError::Reply(format!("only {n} of its {n_before} tool calls are left as it grows")));
        }
        // Only the last earlier call can have grown.
        if let Some((last, now)) = before.tool_calls.last().zip(self.tool_calls.get(n_before.wrapping_sub(1))) {
            changes.extend(grown(n_before - 1, last, now)?.map(ChatDelta::ToolCall));
        }
        for (index, call) in self.tool_calls.iter().enumerate().skip(n_before) {
            let ToolCall { id, name, arguments } = call.clone();
            changes.push(ChatDelta::ToolCall(ToolCallDelta { index, id, name, arguments }));
        }
        Ok(changes)
    }
}

/// The growth of call `index`, if any.
fn grown(index: usize, before: &ToolCall, now: &ToolCall) -> Result<Option<ToolCallDelta>, ChatError> {
    if !before.name.is_empty() && !now.name.is_empty() && !now.name.starts_with(&before.name) {
        let (before, now) = (&before.name, &now.name);
        return Err(ChatError::Reply(format!("a call of '{before}' becomes one of '{now}' as it grows")));
    }
    let arguments = added(&before.arguments, &now.arguments)?;
    let is_renamed = before.id != now.id || before.name != now.name;
    if arguments.is_empty() && !is_renamed {
        return Ok(None);
    }
    let (id, name) = if is_renamed { (now.id.clone(), now.name.clone()) } else { Default::default() };
    Ok(Some(ToolCallDelta { index, id, name, arguments: arguments.to_owned() }))
}

/// The suffix of `now` after `before`; empty if it is shorter, as when a stop word at the end is removed.
fn added<'a>(before: &str, now: &'a str) -> Result<&'a str, ChatError> {
    match now.strip_prefix(before) {
        Some(added) => Ok(added),
        None if before.starts_with(now) => Ok(""),
        None => Err(ChatError::Reply("its earlier text is read in another way as it grows".into())),
    }
}

/// Parses answers. Clones are cheap.
#[derive(Clone)]
pub struct ChatParser(Arc<Inner>);

struct Inner {
    raw: Owned<shim::hobbit_chat_parser>,
    /// Text that llama.cpp parses before the answer; for a continued message, this includes the caller's text.
    generation_prompt: String,
    is_continuation: bool,
    /// An answer has at most one call: some of llama.cpp's grammars repeat calls anyway.
    calls_once: bool,
    delimiters: Option<Delimiters>,
}

// SAFETY: immutable once made; `hobbit_chat_parse` only reads it, and may be called from several threads at once.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl ChatParser {
    /// From the template's result: parsers are in llama.cpp's notation. `calls` reads answers that `parser` does not;
    /// empty if there is one parser.
    pub(super) fn new(
        (format, format_name): (i32, &str),
        parser: &str,
        (calls_format, calls): (i32, &str),
        generation_prompt: &str,
        inputs: &ChatInputs,
    ) -> Result<Self, ChatError> {
        let is_continuation = inputs.continue_final_message != Continuation::None;
        let text = json!({
            "format": format,
            "parser": parser,
            "calls_format": calls_format,
            "calls_parser": calls,
            "generation_prompt": generation_prompt,
            "reasoning_format": inputs.reasoning_format.name(),
            "reasoning_in_content": false,
            "parse_tool_calls": true,
            "is_continuation": is_continuation,
        })
        .to_string();
        // SAFETY: the text is valid for its length, the message buffer for its capacity.
        let make = |message, capacity| unsafe {
            shim::hobbit_chat_parser_init(text.as_ptr().cast(), text.len(), message, capacity)
        };
        let raw = Owned(with_message(make).map_err(ChatError::Template)?);
        let delimiters = Delimiters::of(format_name, parser).filter(|_| calls.is_empty());
        let (generation_prompt, calls_once) = (generation_prompt.to_owned(), !inputs.parallel_tool_calls);
        Ok(Self(Arc::new(Inner { raw, generation_prompt, is_continuation, calls_once, delimiters })))
    }

    /// Delimiters of contents and reasoning, if nothing else can end them.
    pub(super) fn delimiters(&self) -> Option<&Delimiters> {
        self.0.delimiters.as_ref()
    }

    /// Parses `text`: all that the model has generated, with the preserved tokens written out. `is_partial` means that
    /// the answer continues; its end may then be held back until it is unambiguous.
    ///
    /// # Errors
    /// [`ChatError::Reply`] if the text does not have the form that the template defines.
    pub fn parse(&self, text: &str, is_partial: bool) -> Result<ChatReply, ChatError> {
        let inner = &*self.0;
        let parse = || {
            // SAFETY: the parser is live; the text is valid for its length, the message buffer for its capacity.
            shim_text(true, |output, context, message, capacity| unsafe {
                let (bytes, len) = (text.as_ptr().cast(), text.len());
                shim::hobbit_chat_parse(inner.raw.as_ptr(), bytes, len, is_partial, output, context, message, capacity)
            })
        };
        let parsed = limits::with_stack_for(&[&inner.generation_prompt, text], parse).map_err(ChatError::Reply)?;
        let parsed = parsed.map_err(|(_, reason)| ChatError::Reply(reason))?;
        let mut reply: ChatReply =
            serde_json::from_str(&parsed).map_err(|error| ChatError::Reply(error.to_string()))?;
        if inner.calls_once {
            reply.tool_calls.truncate(1);
        }
        Ok(reply)
    }

    /// The answer before the model generates anything: the given part of a continued message.
    ///
    /// # Errors
    /// As [`ChatParser::parse`].
    pub fn prefilled(&self) -> Result<ChatReply, ChatError> {
        if self.0.is_continuation { self.parse("", true) } else { Ok(ChatReply::default()) }
    }
}

impl fmt::Debug for ChatParser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatParser").field("is_continuation", &self.0.is_continuation).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, name: &str, arguments: &str) -> ToolCall {
        ToolCall { id: id.into(), name: name.into(), arguments: arguments.into() }
    }

    fn reply(reasoning: &str, content: &str, tool_calls: &[ToolCall]) -> ChatReply {
        let (reasoning_content, content) = (reasoning.to_owned(), content.to_owned());
        ChatReply { content, reasoning_content, tool_calls: tool_calls.to_vec() }
    }

    fn delta(index: usize, call: ToolCall) -> ChatDelta {
        let ToolCall { id, name, arguments } = call;
        ChatDelta::ToolCall(ToolCallDelta { index, id, name, arguments })
    }

    #[test]
    fn changes_of_texts() {
        let nothing = ChatReply::default();
        assert!(nothing.is_empty() && nothing.changes_since(&nothing).unwrap().is_empty());
        let thinking = reply("hm", "", &[]);
        assert_eq!(thinking.changes_since(&nothing).unwrap(), [ChatDelta::Reasoning("hm".into())]);
        let saying = reply("hm, é", "Ja", &[]);
        let both = [ChatDelta::Reasoning(", é".into()), ChatDelta::Content("Ja".into())];
        assert_eq!(saying.changes_since(&thinking).unwrap(), both);
        let shorter = reply("hm, é", "J", &[]);
        assert_eq!(shorter.changes_since(&saying).unwrap(), [], "a stop word was taken away");
        assert!(reply("no", "", &[]).changes_since(&thinking).is_err());
    }

    #[test]
    fn tool_calls_grow() {
        let begun = reply("", "", &[call("", "get", "")]);
        let nothing = ChatReply::default();
        assert_eq!(begun.changes_since(&nothing).unwrap(), [delta(0, call("", "get", ""))]);
        let named = reply("", "", &[call("1", "get_time", "{\"a\"")]);
        assert_eq!(named.changes_since(&begun).unwrap(), [delta(0, call("1", "get_time", "{\"a\""))]);
        let two = reply("", "", &[call("1", "get_time", "{\"a\": 1}"), call("2", "stop", "{}")]);
        let more = [delta(0, call("", "", ": 1}")), delta(1, call("2", "stop", "{}"))];
        assert_eq!(two.changes_since(&named).unwrap(), more);
        assert!(two.changes_since(&two).unwrap().is_empty());
        assert!(named.changes_since(&two).is_err(), "fewer calls");
        assert!(reply("", "", &[call("1", "other", "")]).changes_since(&named).is_err(), "another call");
    }
}
