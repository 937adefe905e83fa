//! Choices by their names, as flags and files spell them.

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} '{found}' (expected one of: {expected})")]
pub struct UnknownName {
    /// The kind of choice, as text.
    pub what: &'static str,
    pub found: String,
    pub expected: String,
}

impl UnknownName {
    pub fn new(what: &'static str, found: &str, expected: impl Into<String>) -> Self {
        Self { what, found: found.to_owned(), expected: expected.into() }
    }
}

/// Gives a choice its words: `ALL`, `name`, `Display`, and `FromStr`, which also takes the other words of a choice.
#[macro_export]
macro_rules! named {
    ($choice:ident, $what:literal: $($value:ident = $name:literal $(| $other:literal)*),+ $(,)?) => {
        impl $choice {
            /// Every choice.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$value),+];

            /// The word that chooses it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)+
                }
            }
        }

        impl std::str::FromStr for $choice {
            type Err = $crate::named::UnknownName;

            fn from_str(word: &str) -> Result<Self, Self::Err> {
                match word {
                    $($name $(| $other)* => Ok(Self::$value),)+
                    _ => Err($crate::named::UnknownName::new($what, word, Self::ALL.map(Self::name).join(", "))),
                }
            }
        }

        impl std::fmt::Display for $choice {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}
pub use crate::named;
