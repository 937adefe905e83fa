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
use super::nesting;
use super::prompt::{ChatPrompt, Fields};
use crate::engine::error::Error;
use crate::engine::model::Model;
use crate::engine::stack;

/// What `hobbit_chat_apply` returns for inputs that are none.
const INPUTS_FAILED: i32 = 1;

/// The chat templates of a model, or one in their place.
pub struct ChatTemplates {
    raw: Raw,
    description: Description,
    supports_thinking: bool,
    /// Stack that it takes to run them.
    stack_bytes: usize,
    /// The name of a format that llama.cpp writes itself: as Jinja it would be a text that renders as itself.
    is_built_in: bool,
}

struct Raw(NonNull<c_void>);

impl Raw {
    fn as_ptr(&self) -> *mut c_void {
        self.0.as_ptr()
    }
}

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
        // SAFETY: the model is live, or not looked at; its templates live as long.
        let stack_bytes = unsafe { stack_of(model, &template) }.map_err(Error::ChatTemplate)?;
        let shared = Shared(model);
        let make = || {
            let shared = &shared;
            // SAFETY: the template is NUL-terminated, the message buffer valid for its capacity, the model live or not looked at.
            let made = call::made(|message, capacity| unsafe {
                chat::hobbit_chat_templates_init(shared.0, template.as_ptr(), message, capacity)
            });
            let raw = Raw(made?);
            // SAFETY: the templates are live; the message buffer is valid for its capacity.
            let described = call::text(true, |output, context, message, capacity| unsafe {
                chat::hobbit_chat_templates_describe(raw.as_ptr(), output, context, message, capacity)
            });
            let described = described.map_err(|(_, reason)| reason)?;
            let supports_thinking = !is_built_in && supports_thinking(&raw);
            Ok((raw, described, supports_thinking))
        };
        let made = stack::with_bytes(READING_BYTES, make).and_then(|made| made);
        let (raw, described, supports_thinking) = made.map_err(Error::ChatTemplate)?;
        let description = serde_json::from_str(&described).map_err(|error| Error::ChatTemplate(error.to_string()))?;
        Ok(Self { raw, description, supports_thinking, stack_bytes, is_built_in })
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
        let (text, stack_bytes) = inputs.to_json(inputs.use_jinja && !self.is_built_in)?;
        let raw = &self.raw;
        let apply = || {
            // SAFETY: the templates are live; the text is valid for its length, the message buffer for its capacity.
            call::text(0, |output, context, message, capacity| unsafe {
                let (bytes, len) = (text.as_ptr().cast(), text.len());
                chat::hobbit_chat_apply(raw.as_ptr(), bytes, len, output, context, message, capacity)
            })
        };
        let applied = stack::with_bytes(stack_bytes.max(self.stack_bytes), apply).map_err(Error::ChatTemplate)?;
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

/// The model whose templates are read, on whatever thread.
struct Shared(*const llama_model);

// SAFETY: a model is immutable once loaded, and outlives the reading.
unsafe impl Sync for Shared {}

/// The longest template in bytes, brackets within each other, and `not`s in it: llama.cpp's reader calls itself for each.
const TEMPLATE_MAX: usize = 256 << 10;
const TEMPLATE_NESTING_MAX: usize = 1000;
const TEMPLATE_NOTS_MAX: usize = 1000;

/// Stack to read a template with, and to run one that is nested.
const READING_BYTES: usize = 32 << 20;

/// How many brackets a template may have within each other to be run on any thread.
const SHALLOW: usize = 50;

/// How much stack it takes to run a template, or those of a model.
///
/// # Safety
/// The model is live, or null.
unsafe fn stack_of(model: *const llama_model, template: &CStr) -> Result<usize, String> {
    let mut texts = vec![template.to_bytes()];
    if !model.is_null() {
        for name in [ptr::null(), c"tool_use".as_ptr()] {
            // SAFETY: the model is live, and owns what it answers.
            let own = unsafe { llama::llama_model_chat_template(model, name) };
            if !own.is_null() {
                // SAFETY: as above; the text is NUL-terminated.
                texts.push(unsafe { CStr::from_ptr(own) }.to_bytes());
            }
        }
    }
    let mut deepest = 0;
    for text in texts {
        let text = String::from_utf8_lossy(text);
        let nested = nesting::open_brackets(&[&text]).max(nesting::open_parentheses(&text));
        if text.len() > TEMPLATE_MAX
            || nested > TEMPLATE_NESTING_MAX
            || text.matches("not ").count() > TEMPLATE_NOTS_MAX
        {
            let bound = format!("{TEMPLATE_MAX} bytes, or {TEMPLATE_NESTING_MAX} brackets within each other");
            return Err(format!("the template has more than {bound}"));
        }
        deepest = deepest.max(nested);
    }
    Ok(if deepest > SHALLOW { READING_BYTES } else { 0 })
}

fn supports_thinking(raw: &Raw) -> bool {
    let mut supported = false;
    // SAFETY: the templates are live; no room for a message is given.
    let done =
        unsafe { chat::hobbit_chat_templates_support_thinking(raw.as_ptr(), &raw mut supported, ptr::null_mut(), 0) };
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
