//! Options of models and sessions: plain data with the defaults of llama.cpp's `common_params`.

mod adapters;
mod caching;
mod device;
mod files;
mod grammar;
mod kernels;
mod precision;
mod preset;
mod reasoning;
mod routing;
mod sampling;

pub use adapters::{AdapterOptions, SCALE_MAX, ScaledFile};
pub use caching::{CachingOptions, Prefetch};
pub use device::{CpuHelper, DeviceChoice, DeviceOptions, SplitMode, TensorOverride};
pub use grammar::{GrammarKind, GrammarTrigger};
pub use kernels::KernelChoice;
pub use precision::{LowSource, PrecisionMode, PrecisionOptions};
pub use preset::{LowRules, Preset, PresetSettings, RoutingRules};
pub use reasoning::{ReasoningBudget, ReasoningFormat};
pub use routing::{Knob, RoutingOptions, VirtualExperts, VirtualUpdate, VirtualUpdateError};
pub use sampling::{DryOptions, MirostatOptions, SamplerKind, SamplingOptions, XtcOptions, sampler_order};

use std::path::PathBuf;
use std::str::FromStr;

use smart_default::SmartDefault;

use crate::named::named;
use crate::profile::LossBound;

#[doc(inline)]
pub use crate::cache::Allocation;
#[doc(inline)]
pub use crate::cache::policy::{PolicyKind, Weights};
#[doc(inline)]
pub use crate::named::UnknownName;
#[doc(inline)]
pub use crate::plan::{Budget, ExpertCache, LowShare};
#[doc(inline)]
pub use crate::predict::PredictorKind;
#[doc(inline)]
pub use crate::store::IoMode;

/// A token's id in the model's vocabulary.
pub type Token = i32;

/// Whether weights are rearranged for the CPU, as llama.cpp does by default. Rearranged weights multiply faster, but
/// change the last bits of some types' results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repack {
    /// If the model fits and llama.cpp runs it by itself; and if hobbit keeps experts on the CPU in one precision, of
    /// types that gain by it (MXFP4, Q4_0, IQ4_NL), with slots for at least half of them.
    #[default]
    Auto,
    /// As `Auto`, and wherever hobbit keeps experts on the CPU: each is rearranged on arrival, other weights while
    /// loading.
    On,
    /// Never.
    Off,
}

/// How a model is opened and how much memory it may take.
#[derive(Clone, Debug, PartialEq, SmartDefault)]
pub struct ModelOptions {
    /// Memory that weights, KV cache, compute buffers and experts share.
    pub budget: Budget,
    /// Bytes of the budget reserved for the program, besides what it holds when the first session opens.
    pub reserved_bytes: u64,
    /// The budget may exceed the memory that the system reports as available.
    pub overcommit: bool,
    /// If the whole model fits the budget and no option says how to keep experts, llama.cpp runs alone, on the mapped
    /// file. `false`: hobbit always manages the experts.
    #[default(true)]
    pub passthrough: bool,
    /// Whether weights are repacked for the CPU.
    pub repack: Repack,
    /// Session options to expect, as far as they are known: they decide what fits. A context length of 0 means the
    /// model's.
    pub expects: SessionOptions,
    /// Part of the budget that holds experts.
    pub expert_cache: ExpertCache,
    /// Where low-precision versions of experts come from; a pack brings its own.
    pub low: Option<LowSource>,
    /// Part of the expert cache for low-precision versions.
    pub low_share: LowShare,
    /// When a low-precision version may stand in.
    pub precision: PrecisionOptions,
    /// Routing changes that avoid experts that are not in memory.
    pub routing: RoutingOptions,
    /// A bound on the loss. It chooses [`ModelOptions::routing`], T1 and T2 from measurements of the model, once a
    /// session knows how many experts are in memory. Low versions are used only if the choice uses them.
    pub loss_bound: Option<LossBound>,
    /// Kernels for the experts' rows in batches. [`KernelChoice::Fastest`] counts as [`KernelChoice::Identical`] if
    /// [`ModelOptions::precision`] asks for [`PrecisionMode::Exact`] or for deterministic results.
    pub kernels: KernelChoice,
    /// Which experts stay in memory.
    pub caching: CachingOptions,
    /// The table of [`PredictorKind::PathTable`], as `gguf-tools profile` writes it; `None` takes the pack's.
    pub path_table: Option<PathBuf>,
    /// A tuned policy, made by `hobbit-sim calibrate` from traces of this model: weights for
    /// [`CachingOptions::policy`], thresholds for [`ModelOptions::precision`], penalties for [`CachingOptions::slots`].
    /// Explicit options have priority. `None` takes the pack's, if there is one.
    pub profile: Option<PathBuf>,
    /// File for a trace of routing and reads: see `trace`. An earlier trace is replaced; a file of another kind is not.
    pub trace: Option<PathBuf>,
    /// Recorded routes to follow instead of the routers' choices.
    pub routes: Option<RouteOptions>,
    /// A file that keeps which experts are resident and what the policy has learned, from one run to the next. It is
    /// read before the first token and replaced when the model closes, that is, when the last clone of the model and
    /// the last session are dropped. A state of another model, a damaged one, one of another version, and a failed
    /// write are logged (`set_log`) and do not fail the run; a file of another kind is left unchanged. Results are the
    /// same with and without the file, except that dynamic precision depends on residency.
    pub cache_state: Option<PathBuf>,
    /// How expert bytes are read.
    pub io: IoMode,
    /// Layers whose dense weights go to the device; -1 lets the engine choose, -2 means all.
    #[default(-1)]
    pub n_gpu_layers: i32,
    /// Which devices take those weights and the expert products.
    pub device: DeviceOptions,
    /// Look for NaN and infinities while loading.
    pub check_tensors: bool,
    /// Metadata values that replace the file's.
    pub kv_overrides: Vec<KvOverride>,
    /// LoRA adapters and control vectors.
    pub adapters: AdapterOptions,
}

impl ModelOptions {
    /// [`ModelOptions::kernels`] after the rule above.
    pub fn kernels_taken(&self) -> KernelChoice {
        match self.precision.demands_exactness() {
            true => KernelChoice::Identical,
            false => self.kernels,
        }
    }
}

/// Recorded routes to follow: compute takes as long as a real model's, but the output means nothing. One session at a
/// time.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteOptions {
    /// A trace of a model with as many experts per layer and as many used per token. Its tokens are followed in order,
    /// and again from the first one in every new sequence and after the end.
    pub trace: PathBuf,
    /// Routers cannot predict recorded routes. Instead [`PredictorKind::StackedGate`] and [`PredictorKind::CrossLayer`]
    /// get this share of the later layers' experts right, `0.0..=1.0`, and wrong experts for the rest.
    pub recall: f64,
}

/// How one sequence of tokens is evaluated.
#[derive(Clone, Debug, PartialEq, SmartDefault)]
pub struct SessionOptions {
    /// Context length in tokens; 0 takes the model's training context. If the model does not fit with that, 0 takes the
    /// context that an eighth of the memory holds, at least 4096.
    pub n_ctx: u32,
    /// Tokens submitted at once while a prompt is read.
    #[default(2048)]
    pub n_batch: u32,
    /// Tokens computed at once, at most `n_batch`.
    #[default(512)]
    pub n_ubatch: u32,
    /// Entries of a batch whose logits may be requested at once; 0 for all. `Session::feed` needs one. The compute
    /// buffers keep room for this many; for a whole batch that is often most of the buffers.
    pub n_outputs_max: u32,
    /// Sequences that share the context.
    #[default(1)]
    pub n_seq_max: u32,
    /// Sequences share one KV cache of `n_ctx` tokens, and any batch of them is computed at once. Otherwise each
    /// sequence has its own part.
    pub kv_unified: bool,
    /// Compute embeddings in place of logits, with this pooling for each sequence (`Some(None)`: the model's, or none).
    pub embeddings: Option<Option<Pooling>>,
    /// Threads for single tokens; `None` lets the engine choose.
    pub threads: Option<i32>,
    /// Threads for batches; `None` takes `threads`.
    pub threads_batch: Option<i32>,
    /// Fused attention.
    pub flash_attn: FlashAttn,
    /// Element type of the K cache.
    pub type_k: KvType,
    /// Element type of the V cache.
    pub type_v: KvType,
    /// Run one empty step before the first prompt.
    #[default(true)]
    pub warmup: bool,
    /// When the context is full, drop the older half instead of ending.
    pub context_shift: bool,
    /// Tokens at the start that a context shift keeps; -1 keeps the whole prompt.
    pub n_keep: i32,
    /// Keep the full context for sliding-window layers.
    pub swa_full: bool,
    /// Keep the KV cache on the device when there is one.
    #[default(true)]
    pub kv_offload: bool,
    /// Rotary position settings.
    pub rope: RopeOptions,
}

/// Pooling of the embeddings of a text's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// No pooling.
    None,
    /// Mean of all tokens.
    Mean,
    /// Embedding of the first token.
    Cls,
    /// Embedding of the last token.
    Last,
    /// A score of how well a document answers a question, by the model's own head.
    Rank,
}

named!(Pooling, "pooling": None = "none", Mean = "mean", Cls = "cls", Last = "last", Rank = "rank");

/// Rotary position settings; the defaults leave every choice to the model file.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct RopeOptions {
    /// Scaling method; `None` takes the model's.
    pub scaling: Option<RopeScaling>,
    /// Base frequency; 0 takes the model's.
    pub freq_base: f32,
    /// Frequency scale, the inverse of the context's growth; 0 takes the model's.
    pub freq_scale: f32,
    /// YaRN: context the model was trained with; 0 takes the model's.
    pub yarn_orig_ctx: u32,
    /// YaRN: extrapolation mix; negative takes the model's.
    #[default(-1.0)]
    pub yarn_ext_factor: f32,
    /// YaRN: magnitude scale; negative takes the model's.
    #[default(-1.0)]
    pub yarn_attn_factor: f32,
    /// YaRN: low correction dimension; negative takes the model's.
    #[default(-1.0)]
    pub yarn_beta_fast: f32,
    /// YaRN: high correction dimension; negative takes the model's.
    #[default(-1.0)]
    pub yarn_beta_slow: f32,
}

/// Rotary scaling method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Positions divided by a factor.
    Linear,
    /// YaRN.
    Yarn,
}

named!(RopeScaling, "RoPE scaling method": None = "none", Linear = "linear", Yarn = "yarn");

/// Use of fused attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlashAttn {
    /// Where the backend supports it.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

named! { FlashAttn, "flash attention setting":
    On = "on" | "enabled" | "true" | "1",
    Off = "off" | "disabled" | "false" | "0",
    Auto = "auto" | "-1",
}

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum KvType {
    F32,
    #[default]
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Iq4Nl,
    Q5_0,
    Q5_1,
}

// ggml's names of the types, in llama.cpp's order.
named! { KvType, "KV cache type":
    F32 = "f32", F16 = "f16", Bf16 = "bf16", Q8_0 = "q8_0", Q4_0 = "q4_0", Q4_1 = "q4_1", Iq4Nl = "iq4_nl", Q5_0 = "q5_0",
    Q5_1 = "q5_1",
}

/// A metadata value that replaces the model file's: `KEY=TYPE:VALUE`.
#[derive(Clone, Debug, PartialEq)]
pub struct KvOverride {
    /// Metadata key, at most [`KvOverride::KEY_BYTES_MAX`] bytes.
    pub key: String,
    /// The value to use.
    pub value: KvValue,
}

/// The value of a [`KvOverride`].
#[derive(Clone, Debug, PartialEq)]
pub enum KvValue {
    /// `int:`.
    Int(i64),
    /// `float:`.
    Float(f64),
    /// `bool:`.
    Bool(bool),
    /// `str:`, at most [`KvOverride::KEY_BYTES_MAX`] bytes.
    Str(String),
}

impl KvOverride {
    /// llama.cpp's limit on keys and on string values (`llama_model_kv_override`).
    pub const KEY_BYTES_MAX: usize = 127;
}

/// Why a metadata override cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{found}': {why} (expected KEY=TYPE:VALUE with TYPE one of int, float, bool, str)")]
pub struct KvOverrideError {
    found: String,
    why: &'static str,
}

impl FromStr for KvOverride {
    type Err = KvOverrideError;

    fn from_str(text: &str) -> Result<Self, KvOverrideError> {
        let fail = |why| KvOverrideError { found: text.to_owned(), why };
        let (key, rest) = text.split_once('=').ok_or_else(|| fail("no '='"))?;
        if key.is_empty() || key.len() > Self::KEY_BYTES_MAX {
            return Err(fail("the key must have 1 to 127 bytes"));
        }
        let (kind, value) = rest.split_once(':').ok_or_else(|| fail("no type"))?;
        let value = match kind {
            "int" => KvValue::Int(value.parse().map_err(|_| fail("not an integer"))?),
            "float" => KvValue::Float(value.parse().map_err(|_| fail("not a number"))?),
            "bool" => KvValue::Bool(value.parse().map_err(|_| fail("neither true nor false"))?),
            "str" if value.len() > Self::KEY_BYTES_MAX => return Err(fail("the string is longer than 127 bytes")),
            "str" => KvValue::Str(value.to_owned()),
            _ => return Err(fail("unknown type")),
        };
        Ok(Self { key: key.to_owned(), value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        for kind in KvType::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        for (word, setting) in [
            ("auto", FlashAttn::Auto),
            ("-1", FlashAttn::Auto),
            ("on", FlashAttn::On),
            ("1", FlashAttn::On),
            ("off", FlashAttn::Off),
            ("false", FlashAttn::Off),
        ] {
            assert_eq!(word.parse(), Ok(setting), "{word}");
            assert_eq!(setting.to_string().parse(), Ok(setting));
        }
    }

    #[test]
    fn unknown_words_name_the_choices() {
        let error = "q9_9".parse::<KvType>().unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown KV cache type 'q9_9' (expected one of: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1)"
        );
    }

    #[test]
    fn overrides() {
        let parse = |text: &str| text.parse::<KvOverride>();
        assert_eq!(
            parse("llama.expert_used_count=int:4"),
            Ok(KvOverride { key: "llama.expert_used_count".into(), value: KvValue::Int(4) })
        );
        assert_eq!(parse("a=bool:true").unwrap().value, KvValue::Bool(true));
        assert_eq!(parse("a=float:0.5").unwrap().value, KvValue::Float(0.5));
        assert_eq!(parse("a=str:x=y:z").unwrap().value, KvValue::Str("x=y:z".into()));
        for bad in ["", "a", "=int:1", "a=int", "a=int:x", "a=bool:1", "a=u8:1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse(&format!("{}=int:1", "k".repeat(128))).is_err());
    }
}
