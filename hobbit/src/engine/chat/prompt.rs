//! Result of a chat template: a prompt, and how to sample and parse the answer.

use serde::Deserialize;

use super::inputs::ChatInputs;
use super::parser::ChatParser;
use crate::engine::error::Error;
use hobbit_core::options::{GrammarKind, GrammarTrigger, SamplingOptions, Token};

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
    /// Tags around thoughts, if the template has any.
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

/// Texts around thoughts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinkingTags {
    /// Begins a thought; may be empty.
    pub start: String,
    /// End a thought; there is at least one.
    pub ends: Vec<String>,
}

impl ChatPrompt {
    /// Applies the template's sampling settings to `options`: its grammar (replacing the user's, if it has one), the
    /// tags of thoughts, and the preserved tokens. Keeps the reasoning budget.
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
pub(super) struct Fields {
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
}

#[derive(Deserialize)]
struct Trigger {
    r#type: i32,
    value: String,
    token: Token,
}

impl Fields {
    /// # Errors
    /// [`Error::ChatTemplate`] for a parser or trigger that llama.cpp itself does not understand.
    pub(super) fn into_prompt(self, inputs: &ChatInputs) -> Result<ChatPrompt, Error> {
        let format = (self.format, self.format_name.as_str());
        let parser = ChatParser::new(format, &self.parser, &self.generation_prompt, inputs)?;
        let triggers = self.grammar_triggers.into_iter().map(Trigger::read).collect::<Result<_, _>>()?;
        let grammar = LazyGrammar { text: self.grammar, lazy: self.grammar_lazy, triggers };
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
    fn read(self) -> Result<GrammarTrigger, Error> {
        Ok(match self.r#type {
            0 => GrammarTrigger::Token(self.token),
            1 => GrammarTrigger::Word(self.value),
            2 => GrammarTrigger::Pattern(self.value),
            3 => GrammarTrigger::PatternFull(self.value),
            other => return Err(Error::ChatTemplate(format!("llama.cpp has a trigger of an unknown kind, {other}"))),
        })
    }
}
