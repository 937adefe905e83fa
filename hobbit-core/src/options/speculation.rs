//! Options of speculative decoding.

use std::path::PathBuf;

use smart_default::SmartDefault;

use crate::named::named;
use crate::route::DECODE_TOKENS_MAX;

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
    /// The model that drafts.
    pub draft: Option<DraftOptions>,
}

impl SpeculationOptions {
    /// Most drafts of one step: with the token before them they are decoded, not read like a prompt.
    pub const DRAFTS_MAX: u32 = DECODE_TOKENS_MAX as u32 - 1;
}

/// The model of [`DraftSource::DraftSimple`]. Its other settings are the target's.
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
    /// The model's own layers for multi-token prediction ([`ModelOptions::mtp`](super::ModelOptions::mtp)).
    DraftMtp,
}

named! { DraftSource, "type of speculative decoding":
    NgramSimple = "ngram-simple", NgramMapK = "ngram-map-k", NgramMapK4v = "ngram-map-k4v", NgramMod = "ngram-mod",
    NgramCache = "ngram-cache", DraftSimple = "draft-simple", DraftMtp = "draft-mtp",
}
