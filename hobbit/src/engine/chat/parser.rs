//! Takes apart what the model says, by the rules that the chat template has given.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use ggml_sys::chat;
use serde::Serialize;

use super::call;
use super::inputs::{ChatInputs, Continuation};
use super::nesting;
use super::plain::Delimiters;
use super::reply::ChatReply;
use crate::engine::error::Error;

/// Takes answers apart. Cheap to clone.
#[derive(Clone)]
pub struct ChatParser(Arc<Inner>);

struct Inner {
    raw: NonNull<c_void>,
    /// What llama.cpp reads before the answer: of a message that is gone on with, its caller's text, too.
    generation_prompt: String,
    is_continuation: bool,
    delimiters: Option<Delimiters>,
}

// SAFETY: immutable once made; `hobbit_chat_parse` only reads it, and may be called from several threads at once.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: made by `hobbit_chat_parser_init`, freed once.
        unsafe { chat::hobbit_chat_parser_free(self.raw.as_ptr()) };
    }
}

/// What a parser is made from.
#[derive(Serialize)]
struct Fields<'a> {
    format: i32,
    parser: &'a str,
    generation_prompt: &'a str,
    reasoning_format: &'static str,
    reasoning_in_content: bool,
    parse_tool_calls: bool,
    is_continuation: bool,
}

impl ChatParser {
    /// Of what a template said: `parser` is llama.cpp's notation.
    pub(super) fn new(
        (format, format_name): (i32, &str),
        parser: &str,
        generation_prompt: &str,
        inputs: &ChatInputs,
    ) -> Result<Self, Error> {
        let is_continuation = inputs.continue_final_message != Continuation::None;
        let fields = Fields {
            format,
            parser,
            generation_prompt,
            reasoning_format: inputs.reasoning_format.name(),
            reasoning_in_content: inputs.reasoning_in_content,
            parse_tool_calls: inputs.parse_tool_calls,
            is_continuation,
        };
        let text = serde_json::to_string(&fields).map_err(|error| Error::ChatTemplate(error.to_string()))?;
        // SAFETY: the text is valid for its length, the message buffer for its capacity.
        let make = |message, capacity| unsafe {
            chat::hobbit_chat_parser_init(text.as_ptr().cast(), text.len(), message, capacity)
        };
        let raw = call::made(make).map_err(Error::ChatTemplate)?;
        let delimiters = Delimiters::of(format_name, parser);
        let generation_prompt = generation_prompt.to_owned();
        Ok(Self(Arc::new(Inner { raw, generation_prompt, is_continuation, delimiters })))
    }

    /// What may end contents and thoughts, where it is certain that nothing else does.
    pub(super) fn delimiters(&self) -> Option<&Delimiters> {
        self.0.delimiters.as_ref()
    }

    /// Takes `text` apart: all that the model has said, with the preserved tokens written out. `is_partial`: it goes on; the end
    /// may then be held back until it is known what it is.
    ///
    /// # Errors
    /// [`Error::ChatReply`] where the text is not of the form that the template asks for.
    pub fn parse(&self, text: &str, is_partial: bool) -> Result<ChatReply, Error> {
        let inner = &*self.0;
        let parse = || {
            // SAFETY: the parser is live; the text is valid for its length, the message buffer for its capacity.
            call::text(true, |output, context, message, capacity| unsafe {
                let (bytes, len) = (text.as_ptr().cast(), text.len());
                chat::hobbit_chat_parse(inner.raw.as_ptr(), bytes, len, is_partial, output, context, message, capacity)
            })
        };
        let parsed = nesting::with_stack_for(&[&inner.generation_prompt, text], parse).map_err(Error::ChatReply)?;
        let parsed = parsed.map_err(|(_, reason)| Error::ChatReply(reason))?;
        serde_json::from_str(&parsed).map_err(|error| Error::ChatReply(error.to_string()))
    }

    /// What the answer has before the model says anything: the part of a message that is gone on with.
    ///
    /// # Errors
    /// As [`ChatParser::parse`].
    pub fn prefilled(&self) -> Result<ChatReply, Error> {
        if self.0.is_continuation { self.parse("", true) } else { Ok(ChatReply::default()) }
    }
}

impl fmt::Debug for ChatParser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatParser").field("is_continuation", &self.0.is_continuation).finish_non_exhaustive()
    }
}
