//! A model's chat templates, parsed once.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::fmt;
use std::ptr;

use ggml_sys::llama::{self, llama_vocab};
use serde::{Deserialize, Serialize};

use super::inputs::ChatInputs;
use super::isolation;
use super::nesting;
use super::prompt::{ChatPrompt, Fields};
use super::render::{Failure, Task};
use crate::engine::error::Error;
use crate::engine::model::Model;
use hobbit_core::options::Token;

/// The chat templates of a model, or a replacement.
pub struct ChatTemplates {
    /// [`Texts`] as JSON.
    texts: String,
    description: Description,
    was_explicit: bool,
    /// The name of a format that llama.cpp writes itself; as Jinja it would render as its own name.
    is_built_in: bool,
}

/// The model's data that rendering needs, as the shim reads it.
#[derive(Default, Serialize)]
pub(super) struct Texts {
    pub(super) source: String,
    pub(super) source_tool_use: String,
    pub(super) bos: String,
    pub(super) eos: String,
    pub(super) add_bos: bool,
    pub(super) add_eos: bool,
}

#[derive(Deserialize)]
struct Description {
    source: String,
    source_tool_use: String,
    supports_thinking: bool,
    capabilities: BTreeMap<String, bool>,
}

impl ChatTemplates {
    /// The templates of `model`, or `template_override`: a built-in template's name (`chatml`, `llama3`) or a Jinja
    /// text. Without either, `chatml`. The template is tried on a message.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] for an invalid template, and for one that takes too much time, memory or stack.
    pub fn new(model: &Model, template_override: Option<&str>) -> Result<Self, Error> {
        Self::read(Texts::of(model, template_override))
    }

    /// A template without a model: BOS and EOS are empty.
    ///
    /// # Errors
    /// As for [`ChatTemplates::new`].
    pub fn from_text(template: &str) -> Result<Self, Error> {
        Self::read(Texts { source: template.to_owned(), ..Texts::default() })
    }

    pub(super) fn read(texts: Texts) -> Result<Self, Error> {
        texts.check().map_err(Error::ChatTemplate)?;
        let (was_explicit, is_built_in) = (texts.are_explicit(), texts.is_built_in());
        let texts = serde_json::to_string(&texts).map_err(|error| Error::ChatTemplate(error.to_string()))?;
        let task = Task { template: texts, inputs: None, schema_stack: 0 };
        let described = isolation::run(&task).map_err(error_of)?;
        let description = serde_json::from_str(&described).map_err(|error| Error::ChatTemplate(error.to_string()))?;
        Ok(Self { texts: task.template, description, was_explicit, is_built_in })
    }

    /// The template's text, or its built-in name.
    pub fn source(&self) -> &str {
        &self.description.source
    }

    /// The text of the model's second template, for conversations with tools; empty if it has none.
    pub fn source_tool_use(&self) -> &str {
        &self.description.source_tool_use
    }

    /// The template's capabilities by llama.cpp's names (`supports_tools`, `supports_system_role`, ...).
    pub fn capabilities(&self) -> &BTreeMap<String, bool> {
        &self.description.capabilities
    }

    /// Whether answers may begin with a thought. Also false for a template that fails on a single user message.
    pub fn supports_thinking(&self) -> bool {
        !self.is_built_in && self.description.supports_thinking
    }

    /// Whether the model or the caller provides a template; otherwise `chatml` is used.
    pub fn was_explicit(&self) -> bool {
        self.was_explicit
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`Error::ChatInput`] for messages and tools that cannot be understood, [`Error::ChatTemplate`] if the template
    /// fails on them, or takes too much time, memory or stack.
    pub fn apply(&self, inputs: &ChatInputs) -> Result<ChatPrompt, Error> {
        let (text, schema_stack) = inputs.to_json(inputs.use_jinja && !self.is_built_in)?;
        let task = Task { template: self.texts.clone(), inputs: Some(text), schema_stack };
        let applied = isolation::run(&task).map_err(error_of)?;
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

/// Limits of a template: its length in bytes, nested brackets, and `not`s within it. llama.cpp's parser recurses for
/// each.
const TEMPLATE_MAX: usize = 256 << 10;
const TEMPLATE_NESTING_MAX: usize = 1000;
const TEMPLATE_NOTS_MAX: usize = 1000;

impl Texts {
    /// The model's templates, or `template` instead. An empty `template` counts as none.
    fn of(model: &Model, template: Option<&str>) -> Self {
        let (source, source_tool_use) = match template.filter(|template| !template.is_empty()) {
            Some(template) => (template.to_owned(), String::new()),
            None => (own_template(model, ptr::null()), own_template(model, c"tool_use".as_ptr())),
        };
        let vocab = model.vocab();
        let piece = |token| String::from_utf8_lossy(&model.piece(token, true)).into_owned();
        // SAFETY: the vocabulary lives as long as the model.
        let ask = |of: unsafe extern "C" fn(*const llama_vocab) -> Token| unsafe { of(vocab) };
        // SAFETY: as above.
        let add_eos = unsafe { llama::llama_vocab_get_add_eos(vocab) };
        Self {
            source,
            source_tool_use,
            bos: piece(ask(llama::llama_vocab_bos)),
            eos: piece(ask(llama::llama_vocab_eos)),
            add_bos: model.adds_bos(),
            add_eos,
        }
    }

    fn are_explicit(&self) -> bool {
        !(self.source.is_empty() && self.source_tool_use.is_empty())
    }

    fn is_built_in(&self) -> bool {
        self.source != "chatml" && is_built_in(&self.source)
    }

    /// # Errors
    /// A template that is too long or too deeply nested, or ends early.
    fn check(&self) -> Result<(), String> {
        for text in [&self.source, &self.source_tool_use] {
            let nested = nesting::open_brackets(&[text]).max(nesting::open_parentheses(text));
            if text.len() > TEMPLATE_MAX
                || nested > TEMPLATE_NESTING_MAX
                || text.matches("not ").count() > TEMPLATE_NOTS_MAX
            {
                let bound = format!("{TEMPLATE_MAX} bytes, or {TEMPLATE_NESTING_MAX} brackets within each other");
                return Err(format!("the template has more than {bound}"));
            }
            if text.contains('\0') {
                return Err("the template contains a NUL byte".to_owned());
            }
        }
        Ok(())
    }
}

/// The text of a template in a model's file; empty if it has none. `name` is NUL-terminated or null.
fn own_template(model: &Model, name: *const c_char) -> String {
    // SAFETY: the model is live, and owns the text, which is NUL-terminated.
    unsafe {
        let own = llama::llama_model_chat_template(model.shared.raw.as_ptr(), name);
        if own.is_null() { String::new() } else { CStr::from_ptr(own).to_string_lossy().into_owned() }
    }
}

fn error_of(failure: Failure) -> Error {
    match failure {
        Failure::Inputs(reason) => Error::ChatInput(reason),
        Failure::Template(reason) => Error::ChatTemplate(reason),
    }
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
