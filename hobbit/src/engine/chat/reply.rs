//! A parsed answer: llama.cpp's `common_chat_msg`, and its changes while it grows.

use serde::{Deserialize, Serialize};

use crate::engine::error::Error;

/// A parsed answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatReply {
    /// The answer's text.
    pub content: String,
    /// The thought before it.
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
    /// A piece of the thought.
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
    /// [`Error::ChatReply`] if this does not continue `before`.
    pub fn changes_since(&self, before: &Self) -> Result<Vec<ChatDelta>, Error> {
        let mut changes = Vec::new();
        let thought = added(&before.reasoning_content, &self.reasoning_content)?;
        if !thought.is_empty() {
            changes.push(ChatDelta::Reasoning(thought.to_owned()));
        }
        let said = added(&before.content, &self.content)?;
        if !said.is_empty() {
            changes.push(ChatDelta::Content(said.to_owned()));
        }
        let n_before = before.tool_calls.len();
        if self.tool_calls.len() < n_before {
            let (n, n_before) = (self.tool_calls.len(), n_before);
            return Err(Error::ChatReply(format!("of {n_before} tool calls only {n} are left when it goes on")));
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
fn grown(index: usize, before: &ToolCall, now: &ToolCall) -> Result<Option<ToolCallDelta>, Error> {
    if !before.name.is_empty() && !now.name.is_empty() && !now.name.starts_with(&before.name) {
        let (before, now) = (&before.name, &now.name);
        return Err(Error::ChatReply(format!("a call of '{before}' becomes one of '{now}' when it goes on")));
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
fn added<'a>(before: &str, now: &'a str) -> Result<&'a str, Error> {
    match now.strip_prefix(before) {
        Some(added) => Ok(added),
        None if before.starts_with(now) => Ok(""),
        None => Err(Error::ChatReply("what was said before is read in another way when it goes on".into())),
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
    fn what_is_new() {
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
