//! Flags of the context: its length, batches, threads, KV cache and position encoding.

use std::str::FromStr;

use clap::Args;

use super::{finite, number, positive};
use crate::argv::{Switch, Tri};
use hobbit::options::{FlashAttn, KvType, RopeScaling};

#[derive(Args, Debug)]
#[command(next_help_heading = "Context and speed")]
pub struct ContextArgs {
    /// Context length in tokens; 0 takes the model's own or, if that does not fit, what an eighth of the memory holds
    /// (at least 4096)
    #[arg(short, long, value_name = "N", default_value = "0", env = "LLAMA_ARG_CTX_SIZE")]
    pub ctx_size: u32,
    /// Prompt tokens submitted at once
    #[arg(short, long, value_name = "N", default_value = "2048", env = "LLAMA_ARG_BATCH",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_size: u32,
    /// Prompt tokens computed at once; auto: 512, and up to 16384 where reading experts takes most of a prompt's time.
    /// More read them less often, with other last bits than at 512
    #[arg(long, value_name = "N|auto", default_value = "auto", env = "LLAMA_ARG_UBATCH")]
    pub ubatch_size: UbatchSize,
    /// Threads for generation; -1 lets hobbit choose
    #[arg(short, long, value_name = "N", default_value = "-1", env = "LLAMA_ARG_THREADS",
          value_parser = threads)]
    pub threads: i32,
    /// Threads for prompts (default: as --threads)
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads_batch: Option<i32>,
    /// Fused attention
    #[arg(long, value_name = Tri::NAME, default_value = "auto", env = "LLAMA_ARG_FLASH_ATTN")]
    pub flash_attn: FlashAttn,
    /// Element type of the K cache: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1
    #[arg(long, value_name = "TYPE", default_value = "f16", env = "LLAMA_ARG_CACHE_TYPE_K")]
    pub cache_type_k: KvType,
    /// Element type of the V cache
    #[arg(long, value_name = "TYPE", default_value = "f16", env = "LLAMA_ARG_CACHE_TYPE_V")]
    pub cache_type_v: KvType,
    /// Keep the KV cache on the device
    #[arg(long, default_value = "on", env = "LLAMA_ARG_KV_OFFLOAD")]
    pub kv_offload: Switch,
    /// Run one empty step first
    #[arg(long, default_value = "on")]
    pub warmup: Switch,
    /// When the context is full, drop its older half and go on
    #[arg(long, env = "LLAMA_ARG_CONTEXT_SHIFT")]
    pub context_shift: Switch,
    /// Tokens of the prompt that a context shift keeps; -1 keeps all
    #[arg(long, value_name = "N", default_value = "0", value_parser = clap::value_parser!(i32).range(-1..))]
    pub keep: i32,
    /// Keep the whole context for sliding-window layers
    #[arg(long, env = "LLAMA_ARG_SWA_FULL")]
    pub swa_full: Switch,
    /// Copies of the state of a recurrent model or a sliding window to go back to, at most N for each
    /// conversation or slot, in a sixteenth of the memory; 0 (in hobbit-cli always with --mmproj): prompts that do not
    /// continue the context are read again
    #[arg(long, value_name = "N", default_value = "32", env = "LLAMA_ARG_CTX_CHECKPOINTS")]
    pub ctx_checkpoints: u32,
    /// Make such a copy every N tokens of a long prompt, besides those at messages and at its end
    #[arg(long, value_name = "N", default_value = "8192", env = "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT")]
    pub checkpoint_min_step: u32,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Position encoding (default: the model's)")]
pub struct RopeArgs {
    /// Scaling method: none, linear, yarn
    #[arg(long, value_name = "METHOD", env = "LLAMA_ARG_ROPE_SCALING_TYPE")]
    pub rope_scaling: Option<RopeScaling>,
    /// Factor by which the context grows
    #[arg(long, value_name = "N", env = "LLAMA_ARG_ROPE_SCALE", value_parser = positive)]
    pub rope_scale: Option<f32>,
    /// Base frequency
    #[arg(long, value_name = "N", default_value = "0", env = "LLAMA_ARG_ROPE_FREQ_BASE", value_parser = finite)]
    pub rope_freq_base: f32,
    /// Frequency scale, 1 / --rope-scale
    #[arg(long, value_name = "N", env = "LLAMA_ARG_ROPE_FREQ_SCALE", value_parser = finite)]
    pub rope_freq_scale: Option<f32>,
    /// YaRN: context of the training
    #[arg(long, value_name = "N", default_value = "0", env = "LLAMA_ARG_YARN_ORIG_CTX")]
    pub yarn_orig_ctx: u32,
    /// YaRN: extrapolation mix
    #[arg(long, value_name = "N", default_value = "-1", env = "LLAMA_ARG_YARN_EXT_FACTOR", value_parser = finite)]
    pub yarn_ext_factor: f32,
    /// YaRN: magnitude scale
    #[arg(long, value_name = "N", default_value = "-1", env = "LLAMA_ARG_YARN_ATTN_FACTOR", value_parser = finite)]
    pub yarn_attn_factor: f32,
    /// YaRN: high correction dimension
    #[arg(long, value_name = "N", default_value = "-1", env = "LLAMA_ARG_YARN_BETA_SLOW", value_parser = finite)]
    pub yarn_beta_slow: f32,
    /// YaRN: low correction dimension
    #[arg(long, value_name = "N", default_value = "-1", env = "LLAMA_ARG_YARN_BETA_FAST", value_parser = finite)]
    pub yarn_beta_fast: f32,
}

/// Tokens of a prompt computed at once; `None`: [`UBATCH_MAX`](hobbit_core::plan::UBATCH_MAX) at most, as costs decide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UbatchSize(pub Option<u32>);

impl FromStr for UbatchSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self(None)),
            text => number(1..=u32::MAX, "a number from 1, or auto")(text).map(|n| Self(Some(n))),
        }
    }
}

/// At most as many as ggml runs (`GGML_MAX_N_THREADS`).
fn threads(text: &str) -> Result<i32, String> {
    number(i32::MIN..=512, "a number up to 512, or -1")(text)
}
