//! A model's chat templates, read once.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt;
use std::ptr::{self, NonNull};

use ggml_sys::chat;
use ggml_sys::llama::{self, llama_model};
use serde::Deserialize;

use super::call;
use super::inputs::ChatInputs;
use super::prompt::{ChatPrompt, Fields};
use crate::engine::error::Error;
use crate::engine::model::Model;

/// What `hobbit_chat_apply` returns for inputs that are none.
const INPUTS_FAILED: i32 = 1;

/// The chat templates of a model, or one in their place.
pub struct ChatTemplates {
    raw: Raw,
    description: Description,
    supports_thinking: bool,
    /// The name of a format that llama.cpp writes itself: as Jinja it would be a text that renders as itself.
    is_built_in: bool,
}

struct Raw(NonNull<c_void>);

// SAFETY: immutable once made; the shim's functions only read it, and may be called from several threads at once.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: made by `hobbit_chat_templates_init`, freed once.
        unsafe { chat::hobbit_chat_templates_free(self.0.as_ptr()) };
    }
}

#[derive(Deserialize)]
struct Description {
    source: String,
    source_tool_use: String,
    was_explicit: bool,
    capabilities: BTreeMap<String, bool>,
}

impl ChatTemplates {
    /// The templates of `model`, or `template_override`: a built-in template's name (`chatml`, `llama3`) or a Jinja text. With
    /// neither it is `chatml`.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] for a text that is no template.
    pub fn new(model: &Model, template_override: Option<&str>) -> Result<Self, Error> {
        Self::read(model.shared.raw.as_ptr(), template_override)
    }

    /// As [`ChatTemplates::new`]; `model` is live, or null where there is a template.
    pub(super) fn read(model: *const llama_model, template_override: Option<&str>) -> Result<Self, Error> {
        // To the shim an empty template means none.
        let template = template_override.unwrap_or("");
        if template.is_empty() && model.is_null() {
            return Err(Error::ChatTemplate("there is neither a model nor a template".into()));
        }
        let is_built_in = template != "chatml" && is_built_in(template);
        let template =
            CString::new(template).map_err(|_| Error::ChatTemplate("the template contains a NUL byte".into()))?;
        // SAFETY: the template is NUL-terminated, the message buffer valid for its capacity, the model live or not looked at.
        let make = |message, capacity| unsafe {
            chat::hobbit_chat_templates_init(model, template.as_ptr(), message, capacity)
        };
        let raw = Raw(call::made(make).map_err(Error::ChatTemplate)?);
        // SAFETY: the templates are live; the message buffer is valid for its capacity.
        let described = call::text(true, |output, context, message, capacity| unsafe {
            chat::hobbit_chat_templates_describe(raw.0.as_ptr(), output, context, message, capacity)
        });
        let described = described.map_err(|(_, reason)| Error::ChatTemplate(reason))?;
        let description = serde_json::from_str(&described).map_err(|error| Error::ChatTemplate(error.to_string()))?;
        let supports_thinking = !is_built_in && supports_thinking(&raw);
        Ok(Self { raw, description, supports_thinking, is_built_in })
    }

    /// The template's text, or its built-in name.
    pub fn source(&self) -> &str {
        &self.description.source
    }

    /// The text of the model's second template, for conversations with tools; empty if it has none.
    pub fn source_tool_use(&self) -> &str {
        &self.description.source_tool_use
    }

    /// What the template can write: llama.cpp's names (`supports_tools`, `supports_system_role`, ...).
    pub fn capabilities(&self) -> &BTreeMap<String, bool> {
        &self.description.capabilities
    }

    /// Whether answers may begin with a thought. False, too, for a template that fails on a single message of the user.
    pub fn supports_thinking(&self) -> bool {
        self.supports_thinking
    }

    /// Whether the model, or the caller, has a template: otherwise it is `chatml`.
    pub fn was_explicit(&self) -> bool {
        self.description.was_explicit
    }

    /// Writes a conversation down.
    ///
    /// # Errors
    /// [`Error::ChatInput`] for messages and tools that cannot be understood, [`Error::ChatTemplate`] where the template fails
    /// on them.
    pub fn apply(&self, inputs: &ChatInputs) -> Result<ChatPrompt, Error> {
        let text = inputs.to_json(inputs.use_jinja && !self.is_built_in)?;
        let raw = self.raw.0.as_ptr();
        // SAFETY: the templates are live; the text is valid for its length, the message buffer for its capacity.
        let applied = call::text(0, |output, context, message, capacity| unsafe {
            chat::hobbit_chat_apply(raw, text.as_ptr().cast(), text.len(), output, context, message, capacity)
        });
        let applied = applied.map_err(|(code, reason)| match code {
            INPUTS_FAILED => Error::ChatInput(reason),
            _ => Error::ChatTemplate(reason),
        })?;
        let fields: Fields = serde_json::from_str(&applied).map_err(|error| Error::ChatTemplate(error.to_string()))?;
        fields.into_prompt(inputs)
    }
}

impl fmt::Debug for ChatTemplates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("ChatTemplates");
        shown.field("was_explicit", &self.was_explicit()).field("capabilities", self.capabilities());
        shown.finish_non_exhaustive()
    }
}

fn supports_thinking(raw: &Raw) -> bool {
    let mut supported = false;
    // SAFETY: the templates are live; no room for a message is given.
    let done =
        unsafe { chat::hobbit_chat_templates_support_thinking(raw.0.as_ptr(), &raw mut supported, ptr::null_mut(), 0) };
    done && supported
}

/// Whether llama.cpp knows a template by this name.
fn is_built_in(name: &str) -> bool {
    // SAFETY: with room for none the function only counts; then it writes at most `len` pointers to static strings.
    unsafe {
        let count = usize::try_from(llama::llama_chat_builtin_templates(ptr::null_mut(), 0)).unwrap_or(0);
        let mut names: Vec<*const c_char> = vec![ptr::null(); count];
        llama::llama_chat_builtin_templates(names.as_mut_ptr(), names.len());
        names.iter().any(|known| !known.is_null() && CStr::from_ptr(*known).to_bytes() == name.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_built_in_templates() {
        assert!(is_built_in("llama2"));
        assert!(!is_built_in(""));
        assert!(!is_built_in("hobbit"));
    }
}
