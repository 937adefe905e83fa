//! Choices by their names, as flags and files spell them.

/// A word that an option does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} '{found}' (expected one of: {expected})")]
pub struct UnknownWord {
    /// What the option chooses, in words.
    pub what: &'static str,
    /// What was given.
    pub found: String,
    /// What would have been understood.
    pub expected: String,
}

impl UnknownWord {
    pub(crate) fn new(what: &'static str, found: &str, expected: impl Into<String>) -> Self {
        Self { what, found: found.to_owned(), expected: expected.into() }
    }
}
