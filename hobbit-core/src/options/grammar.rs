//! Grammars that begin to hold when the model says something.

use super::Token;

/// Who wrote a grammar: llama.cpp's `common_grammar_type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GrammarKind {
    /// The user: it describes what the model says, without what the template has said for it.
    #[default]
    User,
    /// The chat template, for an answer of a certain form (a JSON schema) or with tool calls: it describes what the template
    /// has said for the model, too.
    Template,
}

/// What wakes a lazy grammar: llama.cpp's `common_grammar_trigger`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrammarTrigger {
    /// This text.
    Word(String),
    /// A regular expression (ECMAScript), found anywhere. The grammar holds from its first group on, if it has one.
    Pattern(String),
    /// A regular expression for all that was said.
    PatternFull(String),
    /// This token.
    Token(Token),
}
