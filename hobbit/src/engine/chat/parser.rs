//! Parses the model's answer by the rules of the chat template.

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

/// Parses answers. Clones are cheap.
#[derive(Clone)]
pub struct ChatParser(Arc<Inner>);

struct Inner {
    raw: NonNull<c_void>,
    /// Text that llama.cpp parses before the answer; for a continued message, this includes the caller's text.
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

/// Input for the construction of a parser.
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
    /// From the template's result: `parser` is in llama.cpp's notation.
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

    /// Delimiters of contents and thoughts, if nothing else can end them.
    pub(super) fn delimiters(&self) -> Option<&Delimiters> {
        self.0.delimiters.as_ref()
    }

    /// Parses `text`: all that the model has generated, with the preserved tokens written out. `is_partial` means that
    /// the answer continues; its end may then be held back until it is unambiguous.
    ///
    /// # Errors
    /// [`Error::ChatReply`] if the text does not have the form that the template defines.
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

    /// The answer before the model generates anything: the given part of a continued message.
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
