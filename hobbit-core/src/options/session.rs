//! Options of sessions: the context, its KV cache, threads and attention, and speculative decoding.

use std::path::PathBuf;

use smart_default::SmartDefault;

use crate::gguf::Gguf;
use crate::named::named;
use crate::route::DECODE_TOKENS_MAX;

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
    /// Most tokens computed at once where a prompt gains by more than `n_ubatch`
    /// ([`WidthInput`](crate::plan::WidthInput)); not more than `n_ubatch`: the width is fixed. Results then depend on
    /// measured times in their last bits. Deterministic and traced runs, devices, and models that fit have the fixed
    /// width.
    pub n_ubatch_max: u32,
    /// Entries of a batch whose logits may be requested at once; 0 for all. `Session::feed` needs one. The compute
    /// buffers keep room for this many; for a whole batch that is often most of the buffers.
    pub n_outputs_max: u32,
    /// Sequences that share the context.
    #[default(1)]
    pub n_seq_max: u32,
    /// Sequences share one KV cache of `n_ctx` tokens, and any batch of them is computed at once. Otherwise each
    /// sequence has its own part.
    pub kv_unified: bool,
    pub embeddings: bool,
    /// Pooling of each sequence's embeddings; `None` takes the model's, if it has one.
    pub pooling: Option<Pooling>,
    /// Threads for single tokens; `None` lets the engine choose.
    pub threads: Option<i32>,
    /// Threads for batches; `None` takes `threads`.
    pub threads_batch: Option<i32>,
    pub flash_attn: FlashAttn,
    pub type_k: KvType,
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
    /// Maximum copies of each sequence's state to go back to, where the model's memory cannot be rewound; 0 for none.
    /// Prompts are then evaluated in pieces that end where copies are taken.
    pub checkpoints: u32,
    /// Interval of copies within a long prompt, in tokens.
    #[default(8192)]
    pub checkpoint_step: u32,
    /// Tokens of the last batch that a recurrent state can go back, for drafts. Each takes memory as large as the
    /// state; architectures for which llama.cpp cannot do it take none.
    pub rollback: u32,
    /// Keep the KV cache on the device when there is one.
    #[default(true)]
    pub kv_offload: bool,
    pub rope: RopeOptions,
}

/// The projector of a model: a file with its encoder of images or sound.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProjectorOptions {
    pub path: PathBuf,
    /// Minimum tokens of an image, for encoders of any resolution; 0: the file's.
    pub image_min_tokens: i32,
    /// Maximum tokens of an image, likewise.
    pub image_max_tokens: i32,
    pub threads: i32,
}

/// Pooling of the embeddings of a text's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    None,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeScaling {
    None,
    /// Positions divided by a factor.
    Linear,
    Yarn,
}

named!(RopeScaling, "RoPE scaling method": None = "none", Linear = "linear", Yarn = "yarn");

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlashAttn {
    /// Where the backend supports it.
    #[default]
    Auto,
    On,
    Off,
}

named! { FlashAttn, "flash attention setting":
    On = "on" | "enabled" | "true" | "1",
    Off = "off" | "disabled" | "false" | "0",
    Auto = "auto" | "-1",
}

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
    F32 = "f32", F16 = "f16", Bf16 = "bf16", Q8_0 = "q8_0", Q4_0 = "q4_0", Q4_1 = "q4_1", Iq4Nl = "iq4_nl",
    Q5_0 = "q5_0", Q5_1 = "q5_1",
}

/// Where drafts come from, and how many there are. The text does not depend on it.
#[derive(Clone, Debug, PartialEq, SmartDefault)]
pub struct SpeculationOptions {
    /// Sources, each asked where those before it in [`DraftSource::ALL`] have no draft.
    pub sources: Vec<DraftSource>,
    /// Most drafts for a sequence in one step.
    #[default(8)]
    pub n_max: u32,
    /// Fewer drafts than this of a model are none.
    pub n_min: u32,
    /// A model drafts no further where its next token is less probable, `0.0..=1.0`.
    pub p_min: f32,
    /// Always draft `n_max` tokens, whatever they cost.
    pub fixed: bool,
    /// Lookup cache of a corpus, as llama.cpp writes it.
    pub lookup_static: Option<PathBuf>,
    /// Lookup cache of earlier texts.
    pub lookup_dynamic: Option<PathBuf>,
    /// Model of [`DraftSource::DraftSimple`], or a draft that follows ([`DraftSource::follows`]) in a file of its own.
    pub draft: Option<DraftOptions>,
}

impl SpeculationOptions {
    /// Most drafts of one step: with the token before them they are decoded, not read like a prompt.
    pub const DRAFTS_MAX: u32 = DECODE_TOKENS_MAX as u32 - 1;

    /// Most tokens of a ubatch of which a drafter reads hidden states: it has buffers for as many.
    const READ_AT_ONCE: u32 = 2048;

    /// Gives a session what drafts need: logits of each draft, states to go back to, and ubatches that a drafter can
    /// read at once.
    pub fn prepare(&self, session: &mut SessionOptions) {
        session.n_outputs_max += self.n_max;
        session.rollback = self.n_max;
        if self.sources.iter().any(|source| source.follows()) {
            session.n_ubatch_max = session.n_ubatch_max.min(Self::READ_AT_ONCE);
        }
    }
}

/// A draft in a file of its own. Its other settings are the target's.
#[derive(Clone, Debug, PartialEq, SmartDefault)]
pub struct DraftOptions {
    pub path: PathBuf,
    /// Context length in tokens; 0 takes the target's. A longer text has no drafts.
    pub n_ctx: u32,
    /// Layers on devices; -1 lets the engine choose, -2 means all.
    #[default(-1)]
    pub n_gpu_layers: i32,
    /// Devices; `None` takes the target's.
    pub devices: Option<super::DeviceChoice>,
}

/// A source of drafts, by llama.cpp's names, in the order in which it asks them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DraftSource {
    /// The text after an earlier occurrence of the last twelve tokens.
    NgramSimple,
    /// As `NgramSimple`, with what was accepted before.
    NgramMapK,
    /// As `NgramMapK`, with up to four continuations.
    NgramMapK4v,
    /// The text after an occurrence of the last 24 tokens in any text of the run.
    NgramMod,
    /// Frequent continuations of the last one to four tokens, in the text and in lookup caches.
    NgramCache,
    /// A smaller model.
    DraftSimple,
    /// Layers for multi-token prediction: the model's own ([`ModelOptions::mtp`](super::ModelOptions::mtp)), or those of
    /// a file that has no others.
    DraftMtp,
    /// A layer that reads hidden states of three of the model's layers.
    DraftEagle3,
    /// Layers that read hidden states of the model's layers, and guess several tokens at once.
    DraftDflash,
    /// As `DraftDflash`, with a chain over the guesses.
    DraftDspark,
}

impl DraftSource {
    /// How a file's model drafts for another.
    pub fn of(gguf: &Gguf) -> Self {
        match gguf.architecture() {
            "eagle3" => Self::DraftEagle3,
            "dflash" if gguf.tensor("markov_w1.weight").is_some() => Self::DraftDspark,
            "dflash" => Self::DraftDflash,
            _ if gguf.is_mtp_head() => Self::DraftMtp,
            _ => Self::DraftSimple,
        }
    }

    /// Whether it reads the hidden states of every token that the model evaluates.
    pub fn follows(self) -> bool {
        matches!(self, Self::DraftMtp | Self::DraftEagle3 | Self::DraftDflash | Self::DraftDspark)
    }

    /// Most drafts of a step by default. Those that follow guess that many even where fewer are asked for.
    pub fn usual_drafts(self) -> u32 {
        match self {
            Self::DraftMtp | Self::DraftEagle3 => 3,
            Self::DraftDflash | Self::DraftDspark => 7,
            _ => 8,
        }
    }
}

named! { DraftSource, "type of speculative decoding":
    NgramSimple = "ngram-simple", NgramMapK = "ngram-map-k", NgramMapK4v = "ngram-map-k4v", NgramMod = "ngram-mod",
    NgramCache = "ngram-cache", DraftSimple = "draft-simple", DraftMtp = "draft-mtp",
    DraftEagle3 = "draft-eagle3", DraftDflash = "draft-dflash", DraftDspark = "draft-dspark",
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
}
