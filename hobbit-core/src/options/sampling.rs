//! Options of sampling: llama.cpp's `common_params_sampling`, with the same names where shared; lazy grammars, which
//! take effect when the model writes a trigger; and reasoning, the text that models write before they answer.

use smart_default::SmartDefault;

use super::Token;
use crate::named::{UnknownName, named};

#[derive(Clone, Debug, PartialEq, SmartDefault)]
pub struct SamplingOptions {
    /// Seed of the random choice; [`SamplingOptions::RANDOM_SEED`] draws one.
    #[default(Self::RANDOM_SEED)]
    pub seed: u32,
    #[default(SamplerKind::DEFAULT_ORDER.to_vec())]
    pub samplers: Vec<SamplerKind>,
    /// Temperature; 0 and below is greedy.
    #[default(0.8)]
    pub temp: f32,
    /// Half width of the dynamic temperature; 0 disables it.
    pub dynatemp_range: f32,
    #[default(1.0)]
    pub dynatemp_exponent: f32,
    /// Candidates kept by top-k; 0 and below keeps all.
    #[default(40)]
    pub top_k: i32,
    /// Probability mass kept by top-p; 1 disables it.
    #[default(0.95)]
    pub top_p: f32,
    /// Least probability, relative to the best candidate, kept by min-p; 0 disables it.
    #[default(0.05)]
    pub min_p: f32,
    /// Locally typical mass; 1 disables it.
    #[default(1.0)]
    pub typical_p: f32,
    /// Standard deviations below the best logit kept by top-n-sigma; negative disables it.
    #[default(-1.0)]
    pub top_n_sigma: f32,
    pub xtc: XtcOptions,
    /// Factor on the logits of repeated tokens; 1 disables it.
    #[default(1.0)]
    pub repeat_penalty: f32,
    /// Tokens that the penalties look back over; 0 disables them.
    #[default(64)]
    pub repeat_last_n: i32,
    /// Subtracted once from the logits of tokens present; 0 disables it.
    pub presence_penalty: f32,
    /// Subtracted per occurrence; 0 disables it.
    pub frequency_penalty: f32,
    pub dry: DryOptions,
    /// Adaptive-p: probability aimed at, 0..1; negative disables it.
    #[default(-1.0)]
    pub adaptive_target: f32,
    /// Adaptive-p: decay of the moving average, 0..0.99.
    #[default(0.9)]
    pub adaptive_decay: f32,
    /// Mirostat; replaces the truncating samplers when on.
    pub mirostat: MirostatOptions,
    /// Never choose an end-of-generation token.
    pub ignore_eos: bool,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(Token, f32)>,
    /// GBNF grammar that the output must follow.
    pub grammar: Option<String>,
    pub grammar_kind: GrammarKind,
    /// The grammar is inactive until a trigger is seen, and during reasoning.
    pub grammar_lazy: bool,
    pub grammar_triggers: Vec<GrammarTrigger>,
    /// Texts of control tokens that stay in the answer for a parser.
    pub preserved_tokens: Vec<String>,
    /// Text that the template adds for the model at the end of the prompt. A template's grammar and the reasoning
    /// budget continue from there.
    pub generation_prompt: String,
    pub reasoning: ReasoningBudget,
    /// Keep the model's logits of each token, for `Sampler::probabilities`.
    pub keep_logits: bool,
    /// Minimum number of candidates that truncating samplers keep.
    pub min_keep: u32,
}

impl SamplingOptions {
    /// llama.cpp's `LLAMA_DEFAULT_SEED`: a fresh seed for every run.
    pub const RANDOM_SEED: u32 = u32::MAX;

    /// Always the most probable token: every penalty and truncation off.
    pub fn greedy() -> Self {
        Self { temp: 0.0, samplers: vec![SamplerKind::Temperature], ..Self::default() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct XtcOptions {
    /// Chance that it acts on a token; 0 disables it.
    pub probability: f32,
    /// Candidates above this probability, but for the last, are removed; above 0.5 disables it.
    #[default(0.1)]
    pub threshold: f32,
}

#[derive(Clone, Debug, PartialEq, SmartDefault)]
pub struct DryOptions {
    /// Strength; 0 disables it.
    pub multiplier: f32,
    /// Base of the penalty's growth with the repeated length.
    #[default(1.75)]
    pub base: f32,
    /// Repeated length in tokens that costs nothing.
    #[default(2)]
    pub allowed_length: i32,
    /// Tokens scanned for repetitions; 0 disables it.
    #[default(64)]
    pub penalty_last_n: i32,
    /// Strings that end a repetition.
    #[default(["\n", ":", "\"", "*"].map(String::from).to_vec())]
    pub sequence_breakers: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct MirostatOptions {
    /// 0 off, 1 Mirostat, 2 Mirostat 2.0.
    pub version: u8,
    #[default(5.0)]
    pub tau: f32,
    #[default(0.1)]
    pub eta: f32,
}

/// One link of the sampler chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SamplerKind {
    /// Repeat, presence and frequency penalties.
    Penalties,
    Dry,
    TopNSigma,
    TopK,
    TypicalP,
    TopP,
    MinP,
    Xtc,
    Temperature,
    Infill,
    AdaptiveP,
}

named! { SamplerKind, "sampler":
    Penalties = "penalties", Dry = "dry", TopNSigma = "top_n_sigma" | "topnsigma", TopK = "top_k" | "topk",
    TypicalP = "typ_p" | "typp" | "typ" | "typical_p" | "typicalp" | "typical",
    TopP = "top_p" | "topp" | "nucleus", MinP = "min_p" | "minp", Xtc = "xtc", Temperature = "temperature" | "temp",
    Infill = "infill", AdaptiveP = "adaptive_p" | "adaptivep",
}

impl SamplerKind {
    /// llama.cpp's order.
    pub(crate) const DEFAULT_ORDER: &[Self] = Self::ALL.split_at(9).0;

    /// Letters of the kinds in llama.cpp's sampling sequences (`common_sampler_type_to_chr`), in their order.
    const LETTERS: [char; Self::ALL.len()] = ['e', 'd', 's', 'k', 'y', 'p', 'm', 'x', 't', 'i', 'a'];

    pub const fn letter(self) -> char {
        Self::LETTERS[self as usize]
    }

    pub fn from_letter(letter: char) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|kind| kind.letter() == letter).ok_or_else(|| {
            let expected = Self::ALL.map(|kind| format!("{} ({})", kind.letter(), kind.name())).join(", ");
            UnknownName::new("sampler letter", &letter.to_string(), expected)
        })
    }

    /// The kind of this name, in any of llama.cpp's spellings: canonical, with dashes, without separators, capitals.
    pub fn from_name(name: &str) -> Result<Self, UnknownName> {
        name.to_ascii_lowercase().replace('-', "_").parse()
    }
}

/// Reads an order such as `penalties;dry;top_k;temperature`; an empty text is an empty chain.
pub fn sampler_order(text: &str) -> Result<Vec<SamplerKind>, UnknownName> {
    text.split(';').filter(|word| !word.is_empty()).map(SamplerKind::from_name).collect()
}

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
    Word(String),
    /// A regular expression (ECMAScript), found anywhere. The grammar applies from its first group on, if it has one.
    Pattern(String),
    /// A regular expression for the whole output.
    PatternFull(String),
    Token(Token),
}

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
    /// Track reasoning without a budget too, so that it can be ended (`Sampler::end_reasoning`).
    pub control: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_letters_round_trip() {
        for kind in SamplerKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!(SamplerKind::from_name(&kind.name().replace('_', "-")), Ok(kind));
            assert_eq!(SamplerKind::from_letter(kind.letter()), Ok(kind));
        }
        assert!(SamplerKind::from_letter('z').is_err());
    }

    #[test]
    fn aliases() {
        for (word, kind) in [
            ("nucleus", SamplerKind::TopP),
            ("temp", SamplerKind::Temperature),
            ("typ", SamplerKind::TypicalP),
            ("TOP_K", SamplerKind::TopK),
            ("minp", SamplerKind::MinP),
        ] {
            assert_eq!(SamplerKind::from_name(word), Ok(kind), "{word}");
        }
    }

    #[test]
    fn default_order_is_llama_cpps() {
        let text = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature";
        assert_eq!(sampler_order(text).unwrap(), SamplerKind::DEFAULT_ORDER);
        let letters: String = SamplerKind::DEFAULT_ORDER.iter().map(|kind| kind.letter()).collect();
        assert_eq!(letters, "edskypmxt");
        assert_eq!(sampler_order(""), Ok(vec![]));
        assert!(sampler_order("top_k;bogus").is_err());
    }
}
