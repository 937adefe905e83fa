//! Options of reasoning, the text that models write before they answer.

use crate::named::named;

/// Handling of reasoning in answers: llama.cpp's `common_reasoning_format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Kept in the answer's text, with its tags.
    None,
    /// llama.cpp's choice, which is currently `Deepseek`.
    #[default]
    Auto,
    /// Separate from the answer (`reasoning_content`).
    Deepseek,
    /// As `Deepseek`; llama.cpp's server once left the tags in streamed answers.
    DeepseekLegacy,
}

named! {
    ReasoningFormat, "reasoning format":
    None = "none", Auto = "auto", Deepseek = "deepseek", DeepseekLegacy = "deepseek-legacy",
}

/// Limit on reasoning, and the text that ends it: llama.cpp's `reasoning_budget_*`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReasoningBudget {
    /// Tokens of one block of reasoning; 0 ends it at once, `None` is unlimited.
    pub tokens: Option<u32>,
    /// Text inserted before the end tag when the budget is spent.
    pub message: String,
    /// Text that begins reasoning; if empty, nothing is counted.
    pub start: String,
    /// Texts that end reasoning; the first one is forced. If there are none, nothing is counted.
    pub ends: Vec<String>,
    /// Track reasoning without a budget too, so that it can be ended (`Sampler::end_thought`).
    pub control: bool,
}
