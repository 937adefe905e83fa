//! Flags of the sampler chain.

use std::path::PathBuf;

use clap::Args;

use super::{finite, number, positive};
use crate::argv::Switch;
use hobbit::options::{SamplingOptions, Token};

#[derive(Args, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Seed; -1 draws one
    #[arg(short, long, value_name = "SEED", default_value = "-1", value_parser = seed)]
    pub seed: u32,
    /// Samplers in their order, separated by ';'
    /// (default: penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature)
    #[arg(long, value_name = "SAMPLERS", overrides_with = "sampling_seq")]
    pub samplers: Option<String>,
    /// The same in letters (default: edskypmxt)
    #[arg(long, value_name = "SEQUENCE", overrides_with = "samplers")]
    pub sampling_seq: Option<String>,
    /// Temperature; 0 always takes the most probable token
    #[arg(long, value_name = "N", default_value = "0.8", value_parser = finite, env = "LLAMA_ARG_TEMPERATURE")]
    pub temp: f32,
    /// Keep the K most probable tokens; 0 keeps all
    #[arg(long, value_name = "N", default_value = "40", env = "LLAMA_ARG_TOP_K")]
    pub top_k: i32,
    /// Keep the tokens that make up this probability; 1 keeps all
    #[arg(long, value_name = "N", default_value = "0.95", value_parser = finite, env = "LLAMA_ARG_TOP_P")]
    pub top_p: f32,
    /// Keep tokens of at least this share of the best one's probability; 0 keeps all
    #[arg(long, value_name = "N", default_value = "0.05", value_parser = finite, env = "LLAMA_ARG_MIN_P")]
    pub min_p: f32,
    /// Locally typical sampling; 1 keeps all
    #[arg(long, value_name = "N", default_value = "1", value_parser = finite)]
    pub typical: f32,
    /// Keep logits within N standard deviations of the best; -1 keeps all
    #[arg(long, value_name = "N", default_value = "-1", value_parser = finite)]
    pub top_nsigma: f32,
    /// Chance of excluding the top choices; 0 never
    #[arg(long, value_name = "N", default_value = "0", value_parser = finite)]
    pub xtc_probability: f32,
    /// Probability from which a token is a top choice
    #[arg(long, value_name = "N", default_value = "0.1", value_parser = finite)]
    pub xtc_threshold: f32,
    /// Penalty on repeated tokens; 1 is none
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive, env = "LLAMA_ARG_REPEAT_PENALTY")]
    pub repeat_penalty: f32,
    /// Tokens that penalties look back over; 0 disables them
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(i32).range(0..))]
    pub repeat_last_n: i32,
    /// Penalty on tokens that are present
    #[arg(long, value_name = "N", default_value = "0", value_parser = finite, env = "LLAMA_ARG_PRESENCE_PENALTY")]
    pub presence_penalty: f32,
    /// Penalty for each occurrence of a token
    #[arg(long, value_name = "N", default_value = "0", value_parser = finite, env = "LLAMA_ARG_FREQUENCY_PENALTY")]
    pub frequency_penalty: f32,
    /// Strength of DRY (don't repeat yourself); 0 disables it
    #[arg(long, value_name = "N", default_value = "0", value_parser = finite)]
    pub dry_multiplier: f32,
    /// Base of DRY's growth
    #[arg(long, value_name = "N", default_value = "1.75", value_parser = dry_base)]
    pub dry_base: f32,
    /// Repeated length that DRY allows
    #[arg(long, value_name = "N", default_value = "2")]
    pub dry_allowed_length: i32,
    /// Tokens that DRY looks back over; 0 disables it
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(i32).range(0..))]
    pub dry_penalty_last_n: i32,
    /// Text that ends a repetition, in place of newline, ':', '"' and '*'; may be repeated; 'none' for none
    #[arg(long, value_name = "STRING")]
    pub dry_sequence_breaker: Vec<String>,
    /// Adaptive-p: probability to aim at, 0 to 1; negative disables it
    #[arg(long, value_name = "N", default_value = "-1", value_parser = finite)]
    pub adaptive_target: f32,
    /// Adaptive-p: decay, 0 to 0.99
    #[arg(long, value_name = "N", default_value = "0.9", value_parser = finite)]
    pub adaptive_decay: f32,
    /// Half width of the dynamic temperature; 0 disables it
    #[arg(long, value_name = "N", default_value = "0", value_parser = finite)]
    pub dynatemp_range: f32,
    /// Exponent of the dynamic temperature
    #[arg(long, value_name = "N", default_value = "1", value_parser = finite)]
    pub dynatemp_exp: f32,
    /// Mirostat: 0 off, 1 Mirostat, 2 Mirostat 2.0; replaces the truncating samplers
    #[arg(long, value_name = "N", default_value = "0", value_parser = clap::value_parser!(u8).range(0..=2))]
    pub mirostat: u8,
    /// Mirostat: learning rate
    #[arg(long, value_name = "N", default_value = "0.1", value_parser = finite)]
    pub mirostat_lr: f32,
    /// Mirostat: target entropy
    #[arg(long, value_name = "N", default_value = "5", value_parser = finite)]
    pub mirostat_ent: f32,
    /// Ignore the end-of-text token
    #[arg(long)]
    pub ignore_eos: Switch,
    /// Add to a token's logit, e.g. 15043+1 or 15043-inf; may be repeated
    #[arg(short, long, value_name = "TOKEN_ID(+/-)BIAS", value_parser = logit_bias)]
    pub logit_bias: Vec<(Token, f32)>,
    /// GBNF grammar that the output must follow
    #[arg(long, value_name = "GRAMMAR", group = "constraint")]
    pub grammar: Option<String>,
    /// File with the grammar
    #[arg(long, value_name = "FNAME", group = "constraint")]
    pub grammar_file: Option<PathBuf>,
    /// JSON schema that the output must follow; {"type": "object"} for any JSON object
    #[arg(short, long, value_name = "SCHEMA", group = "constraint")]
    pub json_schema: Option<String>,
    /// File with the JSON schema
    #[arg(long, value_name = "FILE", group = "constraint")]
    pub json_schema_file: Option<PathBuf>,
}

fn seed(text: &str) -> Result<u32, String> {
    match text {
        "-1" => Ok(SamplingOptions::RANDOM_SEED),
        _ => text.parse().map_err(|_| "expected a number from 0 to 4294967295, or -1".to_owned()),
    }
}

fn dry_base(text: &str) -> Result<f32, String> {
    number(1.0..=f32::MAX, "a number of at least 1")(text)
}

fn logit_bias(text: &str) -> Result<(Token, f32), String> {
    let wrong = || format!("'{text}' is not of the form TOKEN_ID+BIAS or TOKEN_ID-BIAS");
    let sign = text.find(['+', '-']).ok_or_else(wrong)?;
    let token = text[..sign].trim().parse::<Token>().map_err(|_| wrong())?;
    let bias = text[sign..].parse::<f32>().map_err(|_| wrong())?;
    if bias.is_nan() { Err(wrong()) } else { Ok((token, bias)) }
}
