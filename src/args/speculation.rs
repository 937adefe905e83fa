//! Flags of speculative decoding, with llama.cpp's names.

use std::path::{Path, PathBuf};

use clap::Args;

use super::{gpu_layers, probability};
use crate::argv::Switch;
use hobbit::options::{DeviceChoice, DraftOptions, DraftSource, SpeculationOptions};
use hobbit_core::gguf::Gguf;

#[derive(Args, Debug)]
#[command(next_help_heading = "Speculative decoding")]
pub struct SpeculationArgs {
    /// Where drafts come from: ngram-cache, ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod (the text itself),
    /// draft-simple (a draft model), draft-mtp (layers of the model's own, or in the file of -md), draft-eagle3,
    /// draft-dflash, draft-dspark (drafts made for this model), none; comma-separated. The text is that without drafts
    /// (default: with -md as its file says, ngram-cache with -lcs or -lcd)
    #[arg(long, value_name = "TYPES", value_delimiter = ',', env = "LLAMA_ARG_SPEC_TYPE", value_parser = source)]
    pub spec_type: Vec<Source>,
    /// Most tokens to draft in one step; at most 15 are (default: 8, with draft-mtp and draft-eagle3 3, with
    /// draft-dflash and draft-dspark 7)
    #[arg(long, value_name = "N", env = "LLAMA_ARG_SPEC_DRAFT_N_MAX")]
    pub spec_draft_n_max: Option<u32>,
    /// A model's drafts of fewer tokens are not evaluated
    #[arg(long, value_name = "N", default_value = "0", env = "LLAMA_ARG_SPEC_DRAFT_N_MIN")]
    pub spec_draft_n_min: u32,
    /// A model drafts no further where its next token is less probable
    #[arg(long, value_name = "P", default_value = "0", env = "LLAMA_ARG_SPEC_DRAFT_P_MIN", value_parser = probability)]
    pub spec_draft_p_min: f32,
    /// Always draft as many as --spec-draft-n-max, also where it is slower: for measurements
    #[arg(long, env = "HOBBIT_ARG_DRAFT_FIXED")]
    pub draft_fixed: Switch,
    /// The model that drafts. Its memory counts in --mem-budget
    #[arg(long, value_name = "FNAME", env = "LLAMA_ARG_SPEC_DRAFT_MODEL")]
    pub spec_draft_model: Option<PathBuf>,
    /// Its context length; 0 takes -c, and without that 8192. Longer texts have no drafts
    #[arg(long, value_name = "N", default_value = "0")]
    pub ctx_size_draft: u32,
    /// Devices of the draft model; 'none' for the CPU alone (default: the CPU)
    #[arg(long, value_name = "DEV1,DEV2")]
    pub spec_draft_device: Option<DeviceChoice>,
    /// Layers of the draft model that go to devices: a number, 'auto' or 'all'
    #[arg(long, value_name = "N", default_value = "auto", value_parser = gpu_layers,
          env = "LLAMA_ARG_N_GPU_LAYERS_DRAFT")]
    pub spec_draft_ngl: i32,
    /// Lookup cache of a corpus, as llama-lookup-create makes it
    #[arg(long, value_name = "FNAME")]
    pub lookup_cache_static: Option<PathBuf>,
    /// Lookup cache of earlier texts; it is read, not written
    #[arg(long, value_name = "FNAME")]
    pub lookup_cache_dynamic: Option<PathBuf>,
}

/// How the model of a file drafts. One that cannot be read is refused later.
fn drafts_as(path: &Path) -> DraftSource {
    Gguf::open(path).map_or(DraftSource::DraftSimple, |gguf| DraftSource::of(&gguf))
}

/// A word of `--spec-type`; `None` stands for `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source(Option<DraftSource>);

fn source(word: &str) -> Result<Source, String> {
    match word {
        "none" => Ok(Source(None)),
        _ => word.parse().map(|source| Source(Some(source))).map_err(|error| format!("{error}; or none")),
    }
}

impl SpeculationArgs {
    /// Options of speculation; `None` without it.
    pub fn options(&self) -> Option<SpeculationOptions> {
        let mut sources: Vec<DraftSource> = self.spec_type.iter().filter_map(|source| source.0).collect();
        if self.spec_type.is_empty() {
            let has_lookup = self.lookup_cache_static.is_some() || self.lookup_cache_dynamic.is_some();
            sources.extend(has_lookup.then_some(DraftSource::NgramCache));
            sources.extend(self.spec_draft_model.as_deref().map(drafts_as));
        }
        let usual = sources.iter().map(|source| source.usual_drafts()).min().unwrap_or_default();
        let n_max = self.spec_draft_n_max.unwrap_or(usual);
        if sources.is_empty() || self.spec_type.contains(&Source(None)) || n_max == 0 {
            return None;
        }
        let draft = self.spec_draft_model.clone().map(|path| DraftOptions {
            path,
            n_ctx: self.ctx_size_draft,
            n_gpu_layers: self.spec_draft_ngl,
            devices: self.spec_draft_device.clone(),
        });
        Some(SpeculationOptions {
            n_max: n_max.min(SpeculationOptions::DRAFTS_MAX),
            n_min: self.spec_draft_n_min,
            p_min: self.spec_draft_p_min,
            fixed: self.draft_fixed.0,
            lookup_static: self.lookup_cache_static.clone(),
            lookup_dynamic: self.lookup_cache_dynamic.clone(),
            draft: draft.filter(|_| sources.iter().any(|own| own.follows() || *own == DraftSource::DraftSimple)),
            sources,
        })
    }
}
