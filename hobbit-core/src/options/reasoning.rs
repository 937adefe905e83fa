//! What models think before they answer.

use crate::words::named;

/// What becomes of thoughts in answers: llama.cpp's `common_reasoning_format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// They stay in the answer's text, with their tags.
    None,
    /// As llama.cpp decides, which today is as `Deepseek`.
    #[default]
    Auto,
    /// Apart from the answer (`reasoning_content`).
    Deepseek,
    /// As `Deepseek`; llama.cpp's server once left the tags in streamed answers.
    DeepseekLegacy,
}

named! {
    ReasoningFormat, "reasoning format":
    None = "none", Auto = "auto", Deepseek = "deepseek", DeepseekLegacy = "deepseek-legacy",
}

/// How long a model may think, and how it is told to end: llama.cpp's `reasoning_budget_*`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReasoningBudget {
    /// Tokens of one thought; 0 ends it at once, `None` never does.
    pub tokens: Option<u32>,
    /// Said before the end tag when the budget is spent.
    pub message: String,
    /// Text that begins a thought; where it is empty nothing is counted.
    pub start: String,
    /// Texts that end a thought, of which the first is forced; where there are none nothing is counted.
    pub ends: Vec<String>,
    /// Thoughts are watched without a budget, too, so that they can be ended (`Sampler::end_thought`).
    pub control: bool,
}
