//! How the next token is chosen: llama.cpp's `common_params_sampling`, name for name where names are shared.

use std::fmt;
use std::str::FromStr;

use super::Token;
use crate::words::UnknownWord;

/// Settings of a sampler chain.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// Seed of the random choice; [`SamplingOptions::RANDOM_SEED`] draws one.
    pub seed: u32,
    /// Samplers in the order in which they act.
    pub samplers: Vec<SamplerKind>,
    /// Temperature; 0 and below is greedy.
    pub temp: f32,
    /// Half width of the dynamic temperature; 0 disables it.
    pub dynatemp_range: f32,
    /// Exponent of the dynamic temperature.
    pub dynatemp_exponent: f32,
    /// Candidates kept by top-k; 0 and below keeps all.
    pub top_k: i32,
    /// Probability mass kept by top-p; 1 disables it.
    pub top_p: f32,
    /// Least probability, relative to the best candidate, kept by min-p; 0 disables it.
    pub min_p: f32,
    /// Locally typical mass; 1 disables it.
    pub typical_p: f32,
    /// Standard deviations below the best logit kept by top-n-sigma; negative disables it.
    pub top_n_sigma: f32,
    /// Exclude-top-choices.
    pub xtc: XtcOptions,
    /// Factor on the logits of repeated tokens; 1 disables it.
    pub repeat_penalty: f32,
    /// Tokens that the penalties look back over; 0 disables them.
    pub repeat_last_n: i32,
    /// Subtracted once from the logits of tokens present; 0 disables it.
    pub presence_penalty: f32,
    /// Subtracted per occurrence; 0 disables it.
    pub frequency_penalty: f32,
    /// Don't-repeat-yourself.
    pub dry: DryOptions,
    /// Adaptive-p: probability aimed at, 0..1; negative disables it.
    pub adaptive_target: f32,
    /// Adaptive-p: decay of the moving average, 0..0.99.
    pub adaptive_decay: f32,
    /// Mirostat; replaces the truncating samplers when on.
    pub mirostat: MirostatOptions,
    /// Never choose an end-of-generation token.
    pub ignore_eos: bool,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(Token, f32)>,
    /// GBNF grammar that the output must follow.
    pub grammar: Option<String>,
    /// The least number of candidates that truncating samplers keep.
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

impl Default for SamplingOptions {
    fn default() -> Self {
        Self {
            seed: Self::RANDOM_SEED,
            samplers: SamplerKind::DEFAULT_ORDER.to_vec(),
            temp: 0.8,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc: XtcOptions::default(),
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            dry: DryOptions::default(),
            adaptive_target: -1.0,
            adaptive_decay: 0.9,
            mirostat: MirostatOptions::default(),
            ignore_eos: false,
            logit_bias: Vec::new(),
            grammar: None,
            min_keep: 0,
        }
    }
}

/// Exclude-top-choices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct XtcOptions {
    /// Chance that it acts on a token; 0 disables it.
    pub probability: f32,
    /// Candidates above this probability, but for the last, are removed; above 0.5 disables it.
    pub threshold: f32,
}

impl Default for XtcOptions {
    fn default() -> Self {
        Self { probability: 0.0, threshold: 0.1 }
    }
}

/// Don't-repeat-yourself.
#[derive(Clone, Debug, PartialEq)]
pub struct DryOptions {
    /// Strength; 0 disables it.
    pub multiplier: f32,
    /// Base of the penalty's growth with the repeated length.
    pub base: f32,
    /// Repeated length in tokens that costs nothing.
    pub allowed_length: i32,
    /// Tokens scanned for repetitions; 0 disables it.
    pub penalty_last_n: i32,
    /// Strings that end a repetition.
    pub sequence_breakers: Vec<String>,
}

impl Default for DryOptions {
    fn default() -> Self {
        Self {
            multiplier: 0.0,
            base: 1.75,
            allowed_length: 2,
            penalty_last_n: 64,
            sequence_breakers: ["\n", ":", "\"", "*"].map(String::from).to_vec(),
        }
    }
}

/// Mirostat.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MirostatOptions {
    /// 0 off, 1 Mirostat, 2 Mirostat 2.0.
    pub version: u8,
    /// Target entropy.
    pub tau: f32,
    /// Learning rate.
    pub eta: f32,
}

impl Default for MirostatOptions {
    fn default() -> Self {
        Self { version: 0, tau: 5.0, eta: 0.1 }
    }
}

/// One link of the sampler chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SamplerKind {
    /// Repeat, presence and frequency penalties.
    Penalties,
    /// Don't-repeat-yourself.
    Dry,
    /// Top-n-sigma.
    TopNSigma,
    /// Top-k.
    TopK,
    /// Locally typical.
    TypicalP,
    /// Nucleus.
    TopP,
    /// Min-p.
    MinP,
    /// Exclude-top-choices.
    Xtc,
    /// Temperature, dynamic or fixed.
    Temperature,
    /// Fill-in-the-middle.
    Infill,
    /// Adaptive-p.
    AdaptiveP,
}

impl SamplerKind {
    /// Every kind.
    pub const ALL: [Self; 11] = [
        Self::Penalties,
        Self::Dry,
        Self::TopNSigma,
        Self::TopK,
        Self::TypicalP,
        Self::TopP,
        Self::MinP,
        Self::Xtc,
        Self::Temperature,
        Self::Infill,
        Self::AdaptiveP,
    ];

    /// llama.cpp's order.
    pub const DEFAULT_ORDER: [Self; 9] = [
        Self::Penalties,
        Self::Dry,
        Self::TopNSigma,
        Self::TopK,
        Self::TypicalP,
        Self::TopP,
        Self::MinP,
        Self::Xtc,
        Self::Temperature,
    ];

    /// llama.cpp's canonical name (`common_sampler_type_to_str`).
    pub const fn name(self) -> &'static str {
        match self {
            Self::Penalties => "penalties",
            Self::Dry => "dry",
            Self::TopNSigma => "top_n_sigma",
            Self::TopK => "top_k",
            Self::TypicalP => "typ_p",
            Self::TopP => "top_p",
            Self::MinP => "min_p",
            Self::Xtc => "xtc",
            Self::Temperature => "temperature",
            Self::Infill => "infill",
            Self::AdaptiveP => "adaptive_p",
        }
    }

    /// The letter of `--sampling-seq` (`common_sampler_type_to_chr`).
    pub const fn letter(self) -> char {
        match self {
            Self::Penalties => 'e',
            Self::Dry => 'd',
            Self::TopNSigma => 's',
            Self::TopK => 'k',
            Self::TypicalP => 'y',
            Self::TopP => 'p',
            Self::MinP => 'm',
            Self::Xtc => 'x',
            Self::Temperature => 't',
            Self::Infill => 'i',
            Self::AdaptiveP => 'a',
        }
    }

    /// The kind whose letter this is.
    pub fn from_letter(letter: char) -> Result<Self, UnknownWord> {
        Self::ALL.into_iter().find(|kind| kind.letter() == letter).ok_or_else(|| {
            let expected = Self::ALL.map(|kind| format!("{} ({})", kind.letter(), kind.name())).join(", ");
            UnknownWord::new("sampler letter", &letter.to_string(), expected)
        })
    }
}

impl FromStr for SamplerKind {
    type Err = UnknownWord;

    /// Understands llama.cpp's spellings: canonical, with dashes, without separators, and a few aliases.
    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let plain: String = word.to_ascii_lowercase().chars().filter(|c| !matches!(c, '_' | '-')).collect();
        match plain.as_str() {
            "nucleus" => return Ok(Self::TopP),
            "temp" => return Ok(Self::Temperature),
            "typ" | "typicalp" | "typical" => return Ok(Self::TypicalP),
            _ => {}
        }
        Self::ALL
            .into_iter()
            .find(|kind| kind.name().replace('_', "") == plain)
            .ok_or_else(|| UnknownWord::new("sampler", word, Self::ALL.map(Self::name).join(", ")))
    }
}

impl fmt::Display for SamplerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reads an order such as `penalties;dry;top_k;temperature`; an empty text is an empty chain.
pub fn sampler_order(text: &str) -> Result<Vec<SamplerKind>, UnknownWord> {
    text.split(';').filter(|word| !word.is_empty()).map(str::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_letters_round_trip() {
        for kind in SamplerKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!(kind.name().replace('_', "-").parse(), Ok(kind));
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
            assert_eq!(word.parse(), Ok(kind), "{word}");
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
