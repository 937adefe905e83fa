//! An answer as it grows.

use super::parser::ChatParser;
use super::reply::{ChatDelta, ChatReply};
use crate::engine::error::Error;

/// Takes an answer apart while it grows, and tells what is new.
#[derive(Debug)]
pub struct ChatStream {
    parser: ChatParser,
    text: String,
    reply: ChatReply,
    /// Made up for tool calls that the model has not numbered.
    ids: Vec<String>,
    make_id: fn() -> String,
}

impl ChatStream {
    /// An answer that has not begun. `make_id` numbers tool calls that the model does not number itself.
    ///
    /// # Errors
    /// [`Error::ChatReply`] where the message that is gone on with is not of the template's form.
    pub fn new(parser: ChatParser, make_id: fn() -> String) -> Result<Self, Error> {
        let reply = parser.prefilled()?;
        Ok(Self { parser, text: String::new(), reply, ids: Vec::new(), make_id })
    }

    /// Goes on with `text`, and tells what is new. Once more with `is_partial` false at the end.
    ///
    /// # Errors
    /// [`Error::ChatReply`] where the answer is not of the template's form.
    pub fn push(&mut self, text: &str, is_partial: bool) -> Result<Vec<ChatDelta>, Error> {
        self.text.push_str(text);
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
        Ok(changes)
    }

    /// The answer so far.
    pub fn reply(&self) -> &ChatReply {
        &self.reply
    }

    /// All that the model has said.
    pub fn text(&self) -> &str {
        &self.text
    }
}
