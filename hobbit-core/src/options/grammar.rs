//! Lazy grammars, which take effect when the model writes a trigger.

use super::Token;

/// Origin of a grammar: llama.cpp's `common_grammar_type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GrammarKind {
    /// The user: it describes the model's output without the text that the template adds for the model.
    #[default]
    User,
    /// The chat template, for an answer of a certain form (a JSON schema) or with tool calls: it also describes the
    /// text that the template adds for the model.
    Template,
}

/// Trigger of a lazy grammar: llama.cpp's `common_grammar_trigger`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrammarTrigger {
    /// This text.
    Word(String),
    /// A regular expression (ECMAScript), found anywhere. The grammar applies from its first group on, if it has one.
    Pattern(String),
    /// A regular expression for the whole output.
    PatternFull(String),
    /// This token.
    Token(Token),
}
