//! What became of virtual experts.

use serde::Serialize;

/// Of all sessions of a model, since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VirtualExpertsReport {
    /// Experts that were brought in the background, most of them in the place of less important ones.
    pub replacements: u64,
    /// Replacements whose reads failed: the old expert stayed.
    pub failed: u64,
    /// Tokens from one replacement of a layer to its next.
    pub period_tokens: u32,
}
