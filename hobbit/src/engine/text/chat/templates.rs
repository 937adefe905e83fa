//! A model's chat templates, parsed once, and their results: a prompt, and how to sample and parse the answer.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::{fmt, ptr};

use ggml_sys::llama;
use ggml_sys::llama::llama_vocab;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::isolation;
use super::isolation::{Failure, Task};
use super::kept::MarkedChat;
use super::reply::ChatParser;
use super::{ChatInputs, ToolChoice};
use crate::engine::error::ChatError;
use crate::engine::ggml::limits;
use crate::engine::model::Model;
use hobbit_core::grammar::either;
use hobbit_core::options::{GrammarKind, GrammarTrigger, SamplingOptions, Token};

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
    /// [`ChatError::Template`] for an invalid template, and for one that takes too much time, memory or stack.
    pub fn new(model: &Model, template_override: Option<&str>) -> Result<Self, ChatError> {
        Self::read(Texts::of(model, template_override))
    }

    /// A template without a model: BOS and EOS are empty.
    ///
    /// # Errors
    /// As for [`ChatTemplates::new`].
    pub fn from_text(template: &str) -> Result<Self, ChatError> {
        Self::read(Texts { source: template.to_owned(), ..Texts::default() })
    }

    pub(super) fn read(texts: Texts) -> Result<Self, ChatError> {
        texts.check().map_err(ChatError::Template)?;
        let (was_explicit, is_built_in) = (texts.are_explicit(), texts.is_built_in());
        let texts = serde_json::to_string(&texts).map_err(|error| ChatError::Template(error.to_string()))?;
        let described = isolation::run(&Task::Describe { template: texts.clone() }).map_err(error_of)?;
        let description = serde_json::from_str(&described).map_err(|error| ChatError::Template(error.to_string()))?;
        let mut made = Self { texts, description, was_explicit, is_built_in };
        made.try_message()?;
        made.try_calls();
        Ok(made)
    }

    /// Requires that the template writes the user's message: a misspelt name renders as itself.
    fn try_message(&self) -> Result<(), ChatError> {
        const MESSAGE: &str = "hobbit-trial";
        let messages = json!([{"role": "user", "content": MESSAGE}]).to_string();
        match self.write(&ChatInputs { messages, ..ChatInputs::default() }) {
            Ok(written) if !written.prompt.contains(MESSAGE) => {
                let mut shown = self.source().trim().to_owned();
                shown.truncate(shown.floor_char_boundary(40));
                Err(ChatError::Template(format!(
                    "it does not write the user's message: '{shown}' is no template, or a misspelt name; chatml is one"
                )))
            }
            // A template may refuse a message that stands alone.
            _ => Ok(()),
        }
    }

    /// Adds capabilities that llama.cpp does not tell, where the template lets a trial through.
    fn try_calls(&mut self) {
        const WORD: &str = "hobbit-trial";
        if self.is_built_in {
            return;
        }
        let arguments = json!({"type": "object", "properties": {"value": {"type": "string", "enum": [WORD]}},
                               "required": ["value"]});
        let tools = json!([{"type": "function", "function": {"name": "trial", "description": "A trial.",
                                                             "parameters": arguments}}]);
        let user = json!({"role": "user", "content": "Begin."});
        let call = json!({"id": "trial0000", "type": "function",
                          "function": {"name": "trial", "arguments": "{\"value\": \"\"}"}});
        let answer = json!({"role": "assistant", "content": WORD, "tool_calls": [call]});
        let result = json!({"role": "tool", "tool_call_id": "trial0000", "name": "trial", "content": "Done."});
        let asked = ChatInputs { tools: Some(tools.to_string()), ..ChatInputs::default() };
        let asked = ChatInputs { messages: json!([user]).to_string(), tool_choice: ToolChoice::Required, ..asked };
        let mut found = BTreeMap::new();
        if let Some(grammar) = self.write(&asked).ok().and_then(|prompt| prompt.grammar) {
            found.insert(Self::ARGUMENT_SCHEMAS.to_owned(), grammar.text.contains(WORD));
        }
        let called = ChatInputs { messages: json!([user, answer, result]).to_string(), ..ChatInputs::default() };
        if let Ok(prompt) = self.write(&called) {
            found.insert(Self::CONTENT_WITH_CALLS.to_owned(), prompt.prompt.contains(WORD));
        }
        self.description.capabilities.extend(found);
    }

    /// The template's text, or its built-in name.
    pub fn source(&self) -> &str {
        &self.description.source
    }

    /// The text of the model's second template, for conversations with tools; empty if it has none.
    pub fn source_tool_use(&self) -> &str {
        &self.description.source_tool_use
    }

    /// Capability: texts in a tool's arguments follow their schema, because the grammar of calls has it.
    pub const ARGUMENT_SCHEMAS: &str = "supports_argument_schemas";
    /// Capability: the text of an assistant's message is written where the message has calls, too.
    pub const CONTENT_WITH_CALLS: &str = "supports_content_with_calls";

    /// The template's capabilities by llama.cpp's names (`supports_tools`, `supports_system_role`, ...), and those that
    /// a trial shows: [`ChatTemplates::ARGUMENT_SCHEMAS`], [`ChatTemplates::CONTENT_WITH_CALLS`].
    pub fn capabilities(&self) -> &BTreeMap<String, bool> {
        &self.description.capabilities
    }

    /// Whether answers may begin with reasoning. Also false for a template that fails on a single user message.
    pub fn supports_thinking(&self) -> bool {
        !self.is_built_in && self.description.supports_thinking
    }

    /// Whether the model or the caller provides a template; otherwise `chatml` is used.
    pub fn was_explicit(&self) -> bool {
        self.was_explicit
    }

    /// Renders a conversation. Where the template drops or refuses a second system message, the first takes its text.
    ///
    /// # Errors
    /// [`ChatError::Input`] for messages and tools that cannot be understood, messages that the template does not
    /// write, and constraints that would not be kept,
    /// [`ChatError::Template`] if the template fails on them, or takes too much time, memory or stack,
    /// [`ChatError::Busy`] if it is slow and got no turn.
    pub fn apply(&self, inputs: &ChatInputs) -> Result<ChatPrompt, ChatError> {
        let prompt = self.write_all_systems(inputs)?;
        if let Some(marked) = MarkedChat::of(inputs, &prompt.prompt)
            && let Ok(tried) = self.write_all_systems(&marked.inputs)
        {
            marked.check(&tried.prompt).map_err(ChatError::Input)?;
        }
        Ok(prompt)
    }

    fn write_all_systems(&self, inputs: &ChatInputs) -> Result<ChatPrompt, ChatError> {
        let written = self.write(inputs);
        let Some((joined, texts)) = inputs.with_one_system_message() else { return written };
        let has_all = |prompt: &ChatPrompt| texts.iter().all(|text| prompt.prompt.contains(text.trim()));
        match written {
            Ok(prompt) if has_all(&prompt) => Ok(prompt),
            Err(error @ (ChatError::Input(_) | ChatError::Busy(_))) => Err(error),
            _ => self.write(&joined),
        }
    }

    fn write(&self, inputs: &ChatInputs) -> Result<ChatPrompt, ChatError> {
        let (text, schema_stack) = inputs.to_json(inputs.use_jinja && !self.is_built_in)?;
        let task = Task::Render { template: self.texts.clone(), inputs: text, schema_stack };
        let applied = isolation::run(&task).map_err(error_of)?;
        let fields: Fields = serde_json::from_str(&applied).map_err(|error| ChatError::Template(error.to_string()))?;
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
        let vocab = model.shared.raw.vocab();
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
            let nested = limits::open_brackets(&[text]).max(limits::open_parentheses(text));
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

fn error_of(failure: Failure) -> ChatError {
    match failure {
        Failure::Inputs(reason) => ChatError::Input(reason),
        Failure::Work(reason) => ChatError::Template(reason),
        Failure::Slow => ChatError::Template("it takes too long".to_owned()),
        Failure::Busy(reason) => ChatError::Busy(reason),
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

/// A rendered conversation: llama.cpp's `common_chat_params`.
#[derive(Clone, Debug)]
pub struct ChatPrompt {
    /// The text, to be tokenised with special tokens.
    pub prompt: String,
    /// The end of the prompt, which opens the model's answer.
    pub generation_prompt: String,
    /// Grammar of the answer, because of tools or a schema.
    pub grammar: Option<LazyGrammar>,
    /// Texts of control tokens that belong to the answer.
    pub preserved_tokens: Vec<String>,
    /// Texts at which the answer ends.
    pub additional_stops: Vec<String>,
    /// Tags around reasoning, if the template has any.
    pub thinking: Option<ThinkingTags>,
    /// llama.cpp's name of the answer's format.
    pub format: String,
    /// Parses the answer.
    pub parser: ChatParser,
}

/// A grammar that may apply only after a trigger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LazyGrammar {
    /// GBNF.
    pub text: String,
    /// Whether it waits for a trigger.
    pub lazy: bool,
    /// Texts or tokens that activate it.
    pub triggers: Vec<GrammarTrigger>,
}

/// Texts around reasoning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinkingTags {
    /// Begins it; may be empty.
    pub start: String,
    /// End it; there is at least one.
    pub ends: Vec<String>,
}

impl ChatPrompt {
    /// Applies the template's sampling settings to `options`: its grammar (replacing the user's, if it has one), the
    /// tags of reasoning, and the preserved tokens. Keeps the reasoning budget.
    pub fn constrain(&self, options: &mut SamplingOptions) {
        if let Some(grammar) = &self.grammar {
            options.grammar = Some(grammar.text.clone());
            options.grammar_kind = GrammarKind::Template;
            options.grammar_lazy = grammar.lazy;
            options.grammar_triggers.clone_from(&grammar.triggers);
        }
        options.preserved_tokens.clone_from(&self.preserved_tokens);
        options.generation_prompt.clone_from(&self.generation_prompt);
        let (start, ends) = self.thinking.clone().map(|tags| (tags.start, tags.ends)).unwrap_or_default();
        (options.reasoning.start, options.reasoning.ends) = (start, ends);
    }
}

/// The shim's result.
#[derive(Deserialize)]
struct Fields {
    prompt: String,
    generation_prompt: String,
    grammar: String,
    grammar_lazy: bool,
    grammar_triggers: Vec<Trigger>,
    preserved_tokens: Vec<String>,
    additional_stops: Vec<String>,
    thinking_start_tag: String,
    thinking_end_tags: Vec<String>,
    format: i32,
    format_name: String,
    parser: String,
    calls_grammar: String,
    calls_format: i32,
    calls_parser: String,
}

#[derive(Deserialize)]
struct Trigger {
    r#type: i32,
    value: String,
    token: Token,
}

impl Fields {
    /// # Errors
    /// [`ChatError::Template`] for a parser or trigger that llama.cpp itself does not understand.
    fn into_prompt(self, inputs: &ChatInputs) -> Result<ChatPrompt, ChatError> {
        let format = (self.format, self.format_name.as_str());
        let calls = (self.calls_format, self.calls_parser.as_str());
        let parser = ChatParser::new(format, &self.parser, calls, &self.generation_prompt, inputs)?;
        let triggers = self.grammar_triggers.into_iter().map(Trigger::read).collect::<Result<_, _>>()?;
        let text =
            if self.calls_grammar.is_empty() { self.grammar } else { either(&self.grammar, &self.calls_grammar) };
        inputs.check_constraints(&self.prompt, &text).map_err(ChatError::Input)?;
        let grammar = LazyGrammar { text, lazy: self.grammar_lazy, triggers };
        let thinking = ThinkingTags { start: self.thinking_start_tag, ends: self.thinking_end_tags };
        Ok(ChatPrompt {
            prompt: self.prompt,
            generation_prompt: self.generation_prompt,
            grammar: Some(grammar).filter(|grammar| !grammar.text.is_empty()),
            preserved_tokens: self.preserved_tokens,
            additional_stops: self.additional_stops,
            thinking: Some(thinking).filter(|tags| !tags.ends.is_empty()),
            format: self.format_name,
            parser,
        })
    }
}

impl Trigger {
    /// By `common_grammar_trigger_type`.
    fn read(self) -> Result<GrammarTrigger, ChatError> {
        Ok(match self.r#type {
            0 => GrammarTrigger::Token(self.token),
            1 => GrammarTrigger::Word(self.value),
            2 => GrammarTrigger::Pattern(self.value),
            3 => GrammarTrigger::PatternFull(self.value),
            other => return Err(ChatError::Template(format!("llama.cpp has a trigger of an unknown kind, {other}"))),
        })
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
