//! An answer as it grows.

use super::parser::ChatParser;
use super::reply::{ChatDelta, ChatReply};
use crate::engine::error::Error;

/// Parses a growing answer, and reports its changes.
#[derive(Debug)]
pub struct ChatStream {
    parser: ChatParser,
    text: String,
    reply: ChatReply,
    /// Ids for tool calls that the model does not number.
    ids: Vec<String>,
    make_id: fn() -> String,
    /// The field that new text extends, as long as no delimiter begins in it.
    growing: Option<Growing>,
}

/// A field that may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growing {
    Reasoning,
    Content,
}

impl ChatStream {
    /// An empty answer. `make_id` numbers tool calls that the model does not number itself.
    ///
    /// # Errors
    /// [`Error::ChatReply`] if the continued message does not have the template's form.
    pub fn new(parser: ChatParser, make_id: fn() -> String) -> Result<Self, Error> {
        let reply = parser.prefilled()?;
        Ok(Self { parser, text: String::new(), reply, ids: Vec::new(), make_id, growing: None })
    }

    /// Appends `text` and returns the changes. The last call has `is_partial` false.
    ///
    /// # Errors
    /// [`Error::ChatReply`] if the answer does not have the template's form.
    pub fn push(&mut self, text: &str, is_partial: bool) -> Result<Vec<ChatDelta>, Error> {
        let goes_on = is_partial && !text.is_empty() && self.can_only_go_on(text);
        if goes_on && let Some(growing) = self.growing {
            return Ok(vec![self.grow(growing, text)]);
        }
        self.text.push_str(text);
        self.growing = None;
        let mut reply = self.parser.parse(&self.text, is_partial)?;
        if reply.is_empty() {
            return Ok(Vec::new());
        }
        for (at, call) in reply.tool_calls.iter_mut().enumerate() {
            if self.ids.len() <= at {
                self.ids.push(if call.id.is_empty() { (self.make_id)() } else { call.id.clone() });
            }
            call.id.clone_from(&self.ids[at]);
        }
        let changes = reply.changes_since(&self.reply)?;
        self.reply = reply;
        // The field that this text extended also takes the next.
        self.growing = match &changes[..] {
            [ChatDelta::Reasoning(added)] if goes_on && added == text => Some(Growing::Reasoning),
            [ChatDelta::Content(added)] if goes_on && added == text => Some(Growing::Content),
            _ => None,
        };
        self.growing = self.growing.filter(|_| self.reply.tool_calls.is_empty());
        Ok(changes)
    }

    /// Whether `text` neither begins a delimiter nor may end one.
    fn can_only_go_on(&self, text: &str) -> bool {
        self.parser.delimiters().is_some_and(|delimiters| {
            !delimiters.may_begin_in(text.as_bytes()) && !delimiters.may_be_open_after(&self.text)
        })
    }

    /// Appends without parsing the whole text again.
    fn grow(&mut self, growing: Growing, text: &str) -> ChatDelta {
        self.text.push_str(text);
        let reply = &mut self.reply;
        match growing {
            Growing::Reasoning => {
                reply.reasoning_content.push_str(text);
                ChatDelta::Reasoning(text.to_owned())
            }
            Growing::Content => {
                reply.content.push_str(text);
                ChatDelta::Content(text.to_owned())
            }
        }
    }

    /// The answer so far.
    pub fn reply(&self) -> &ChatReply {
        &self.reply
    }

    /// All text from the model.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the next text needs no full parse unless it may begin a delimiter.
    #[cfg(test)]
    pub(super) fn is_growing(&self) -> bool {
        self.growing.is_some()
    }
}
