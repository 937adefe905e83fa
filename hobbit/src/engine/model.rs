//! An open model: its vocabulary, its ordinary weights in memory, its experts left in the file.

mod experts_seen;
mod load;
mod pieces;
mod vocabulary;

pub use experts_seen::{ExpertPlace, LayerPlaces};
pub use vocabulary::SpecialTokens;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ggml_sys::llama;

use self::pieces::Pieces;
use super::adapters::{AdapterInfo, Adapters};
use super::error::Error;
use super::experts::Experts;
use super::log;
use super::placement::DeviceLayers;
use super::raw::RawModel;
use super::tuned::Tuned;
use hobbit_core::cache::policy::Weights;
use hobbit_core::expert::ExpertId;
use hobbit_core::gguf::{Catalog, Gguf};
use hobbit_core::options::{ModelOptions, RoutingOptions, Token};
use hobbit_core::plan::{ExpertCache, Regime};
use hobbit_core::predict::{PathTable, PredictShape};
use hobbit_core::profile::{LayerNorms, VirtualPlan};
use hobbit_core::residency::Precisions;
use hobbit_core::route::Thresholds;
use hobbit_core::stats::{CachingReport, DeviceReport, TunedReport};
use hobbit_core::store::{Original, Store};
use hobbit_core::trace::Routes;
use hobbit_core::tuned::TunedError;

/// Wraps a store, for tests that inject faults.
pub(super) type WrapStore = Box<dyn Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync>;

/// What is known about an open model.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ModelInfo {
    /// llama.cpp's one-line description, such as `llama 8x7B Q8_0`.
    pub description: String,
    /// `general.architecture`.
    pub architecture: String,
    /// The file that was opened (the first shard of a split model).
    pub path: PathBuf,
    /// Context length the model was trained with, in tokens.
    pub n_ctx_train: u32,
    /// Number of parameters.
    pub n_params: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of all expert weights.
    pub expert_bytes: u64,
    /// Blocks.
    pub n_layer: u32,
    /// Experts per MoE layer (the largest number); 0 for a dense model.
    pub n_expert: u32,
    /// Experts used per token.
    pub n_expert_used: u32,
    /// The model's own chat template, if it has one.
    pub chat_template: Option<String>,
}

impl ModelInfo {
    /// Whether hobbit serves the experts; a dense model runs as plain llama.cpp.
    pub fn is_moe(&self) -> bool {
        self.n_expert > 0
    }
}

/// An open model. Cheap to share: sessions keep it alive.
#[derive(Clone)]
pub struct Model {
    pub(super) shared: Arc<Shared>,
}

/// What sessions of a model share.
pub(super) struct Shared {
    // Freed first.
    pub(super) raw: RawModel,
    /// Freed with it.
    pub(super) adapters: Adapters,
    gguf: Gguf,
    pub(super) experts: Arc<Experts>,
    /// Where every version of every expert lies, in `originals`.
    pub(super) catalog: Catalog,
    /// As they were when their headers were read; open.
    pub(super) originals: Vec<Original>,
    pub(super) low_name: Option<String>,
    pub(super) precisions: Precisions,
    /// How its experts are run; of a dense model as if there were any.
    pub(super) regime: Regime,
    /// Tokens of a context that nobody asked for; 0 for as many as the model was trained on.
    pub(super) n_ctx: u32,
    pub(super) tuned: Option<Tuned>,
    /// How many virtual experts each layer keeps, if somebody planned that.
    pub(super) virtual_plan: Option<VirtualPlan>,
    /// ‖W‖ of every expert, if the pack says.
    pub(super) norms: Vec<LayerNorms>,
    /// The devices that hold layers.
    pub(super) placement: Vec<DeviceLayers>,
    pub(super) options: ModelOptions,
    /// Which experts follow which, if a predictor wants to know.
    pub(super) path_table: Option<Arc<PathTable>>,
    /// Routes to follow, and the share of them that is foretold.
    pub(super) routes: Option<(Arc<Routes>, f64)>,
    pub(super) wrap_store: Option<WrapStore>,
    pub(super) load_time: Duration,
    pub(super) opened_at: Instant,
    info: ModelInfo,
    expert_bytes_read_at_load: u64,
    /// Made when something first asks.
    pieces: OnceLock<Pieces>,
}

impl Model {
    /// What is known about the model.
    pub fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    /// Whether llama.cpp runs the model by itself, because all of it fits, or hobbit keeps its experts.
    #[doc(hidden)]
    pub fn regime(&self) -> Regime {
        self.shared.regime
    }

    /// The LoRA adapters that were loaded beside it, in the order of [`AdapterOptions::lora`](hobbit_core::options::AdapterOptions).
    pub fn adapters(&self) -> impl ExactSizeIterator<Item = &AdapterInfo> {
        self.shared.adapters.infos()
    }

    /// Changes T1 and T2 for every session of the model, from the next evaluation on.
    #[doc(hidden)]
    pub fn set_thresholds(&self, thresholds: Thresholds) {
        if let Some(memories) = self.shared.experts.memories().as_mut() {
            memories.host.precisions.thresholds = thresholds;
        }
    }

    /// Changes where tokens may go in place of missing experts, for every session of the model, from the next evaluation on. Only once
    /// the model has a session, and where it was opened with some such freedom.
    #[doc(hidden)]
    pub fn set_routing(&self, routing: &RoutingOptions) {
        if let Some(memories) = self.shared.experts.memories().as_mut() {
            let host = &mut memories.host;
            (host.rerouting, host.reroutes_prompts, host.precisions.drop) =
                (routing.rerouting(), routing.prompts, routing.drop);
        }
    }

    /// Changes the share of a prompt's experts in low precision ([`PrecisionOptions::prefill_low`](crate::PrecisionOptions)), `0.0..=1.0`,
    /// for every session of the model, from the next evaluation on.
    #[doc(hidden)]
    pub fn set_prefill_low(&self, share: f32) {
        if let Some(memories) = self.shared.experts.memories().as_mut() {
            memories.host.precisions.options.prefill_low = Some(share);
        }
    }

    /// Has these experts used in low precision whatever else holds, where they have a low version; replaces the last
    /// such list. Only in dynamic mode, and once the model has a session. For measuring sensitivity.
    #[doc(hidden)]
    pub fn force_low(&self, experts: impl IntoIterator<Item = ExpertId>) {
        if let Some(memories) = self.shared.experts.memories().as_mut() {
            memories.host.precisions.forced_low = experts.into_iter().collect();
        }
    }

    /// Has these experts, and no others, count as missing wherever tokens use only what is present; `None` goes by what is in
    /// memory again. Once the model has a session. For measuring what absent experts cost.
    #[doc(hidden)]
    pub fn mask_experts(&self, experts: Option<HashSet<ExpertId>>) {
        if let Some(memories) = self.shared.experts.memories().as_mut() {
            memories.host.masked = experts;
        }
    }

    /// Blocks with experts, and how many each has, ascending.
    #[doc(hidden)]
    pub fn layers_with_experts(&self) -> Vec<(u16, u16)> {
        self.shared.catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert)).collect()
    }

    /// Bytes of host memory that the cache may fill now; 0 before the first session.
    pub fn host_cache_bytes(&self) -> u64 {
        self.shared.experts.memories().as_ref().map_or(0, |memories| memories.host_cache_bytes())
    }

    /// Makes the cache in host memory smaller, or gives it back what it had: at most what was planned at the start, which is
    /// also what [`ExpertCache::Auto`] means. Experts that lose their slot are read again when they are needed; results stay
    /// the same, except that dynamic precision depends on what is resident. Takes effect at once, between two layers of an
    /// evaluation that runs elsewhere. Memory that is pinned for a device stays as it is.
    ///
    /// Says how many bytes the cache may fill now: whole slots, so somewhat less than asked for; 0 before the first session.
    pub fn set_host_cache(&self, cache: ExpertCache) -> u64 {
        self.shared.experts.memories().as_mut().map_or(0, |memories| memories.resize_host(cache))
    }

    /// Waits until no slot is free that could be filled ([`CachingOptions::fill`](crate::CachingOptions::fill)); says how many
    /// bytes of experts the slots hold then. Without filling, what happens to be there.
    #[doc(hidden)]
    pub fn finish_filling(&self) -> u64 {
        self.shared.experts.memories().as_mut().map_or(0, |memories| memories.host.finish_filling())
    }

    /// As [`Model::set_host_cache`], of the memory of all devices together: it is freed there, and allocated again. What
    /// the slots of a layer held is lost where their number changes. [`Model::device_reports`] tells each device's part.
    pub fn set_device_cache(&self, cache: ExpertCache) -> u64 {
        self.shared.experts.memories().as_mut().map_or(0, |memories| memories.resize_devices(cache))
    }

    /// A new session lacks device memory: takes a quarter away from the slots of earlier ones. Whether there was any.
    pub(super) fn make_room_on_devices(&self) -> bool {
        let before: u64 = self.device_reports().iter().map(|device| device.cache_bytes).sum();
        if before == 0 {
            return false;
        }
        let after = self.set_device_cache(ExpertCache::Bytes(before / 4 * 3));
        if after < before {
            log::notice(format_args!(
                "a session more: the expert caches of devices have {} MiB instead of {}",
                after >> 20,
                before >> 20
            ));
        }
        after < before
    }

    /// What the devices that hold layers have of the model's experts now; empty before the first session and of a dense
    /// model.
    pub fn device_reports(&self) -> Vec<DeviceReport> {
        let memories = self.shared.experts.memories();
        memories.as_ref().map_or_else(Vec::new, |memories| memories.device_reports())
    }

    /// How much of the ubatch that a session evaluates is done, by its layers with experts: 0..1. 0 where nothing is
    /// evaluated, and of a dense model. Waits for the layer that is computed.
    #[doc(hidden)]
    pub fn evaluated_share(&self) -> f64 {
        let layer = self.shared.experts.memories().as_ref().map_or(0, |memories| memories.host.counters().layer);
        f64::from(layer) / f64::from(self.info().n_layer.max(1))
    }

    /// Where every version of every expert lies.
    #[doc(hidden)]
    pub fn catalog(&self) -> &Catalog {
        &self.shared.catalog
    }

    /// What a predictor must know of the model: the layers with experts that run.
    #[doc(hidden)]
    pub fn predict_shape(&self) -> PredictShape {
        let layers = self.shared.catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert));
        PredictShape::new(layers, self.info().n_expert_used)
    }

    /// The parsed header of the model's files.
    #[doc(hidden)]
    pub fn gguf(&self) -> &Gguf {
        &self.shared.gguf
    }

    /// Bytes of experts that loading read from the files: 0 unless this system's stdio defeats the stream that leaves them out.
    #[doc(hidden)]
    pub fn expert_bytes_read_at_load(&self) -> u64 {
        self.shared.expert_bytes_read_at_load
    }

    /// The experts, if their backend must be told the router's weights: a layer with scales comes in several splits.
    pub(super) fn wants_router_weights(&self) -> Option<Arc<Experts>> {
        let scaled = || self.shared.gguf.tensors.iter().any(|tensor| tensor.name.ends_with("_exps.scale"));
        let options = &self.shared.options;
        let wanted = !self.shared.precisions.is_exact()
            || self.shared.routes.is_some()
            || !options.routing.is_off()
            || options.loss_bound.is_some();
        (wanted && scaled()).then(|| Arc::clone(&self.shared.experts))
    }

    /// Checks that the tuned policy belongs to this model.
    pub(super) fn check_tuned(&self) -> Result<(), TunedError> {
        let Some(tuned) = &self.shared.tuned else { return Ok(()) };
        let layers: Vec<(u16, u16)> =
            self.shared.catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert)).collect();
        tuned.policy.check_model(&self.info().architecture, &layers, &tuned.file, &self.info().path)
    }

    /// The weights of HOBBIT's policy: as given, as tuned, or by default.
    pub(super) fn policy_weights(&self) -> Weights {
        let tuned = || self.shared.tuned.as_ref()?.policy.hobbit_weights();
        self.shared.options.caching.weights.or_else(tuned).unwrap_or_default()
    }

    /// How experts are kept in memory, but for what came of it.
    pub(super) fn caching_report(&self) -> CachingReport {
        let caching = &self.shared.options.caching;
        CachingReport {
            policy: caching.policy.to_string(),
            policy_weights: self.policy_weights().to_string(),
            profile: self.shared.tuned.as_ref().map(|tuned| TunedReport {
                file: tuned.file.clone(),
                policy: tuned.policy.policy.clone(),
                thresholds: tuned.policy.thresholds().is_some(),
                penalties: tuned.policy.has_penalties(),
            }),
            slots: caching.slots.to_string(),
            slots_by_layer: Vec::new(),
        }
    }

    /// The tokens of `text`, which is UTF-8 or, as llama.cpp takes it, any bytes. `add_special` adds BOS and the like where
    /// the model wants them, `parse_special` reads special tokens written in the text.
    ///
    /// # Errors
    /// Text that the vocabulary cannot encode.
    pub fn tokenize(
        &self,
        text: impl AsRef<[u8]>,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<Token>, Error> {
        self.shared.raw.tokenize(text.as_ref(), add_special, parse_special).map_err(Error::Tokenize)
    }

    /// The bytes a token stands for; they may be part of a UTF-8 character. `special` spells out control tokens.
    pub fn piece(&self, token: Token, special: bool) -> Vec<u8> {
        self.shared.raw.piece(token, special)
    }

    /// What every token stands for.
    pub(super) fn pieces(&self) -> &Pieces {
        self.shared.pieces.get_or_init(|| Pieces::new(&self.shared.raw, |token| self.is_eog(token)))
    }

    /// Number of tokens in the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.shared.raw.n_vocab()
    }

    /// Whether generation ends at this token.
    pub fn is_eog(&self, token: Token) -> bool {
        // SAFETY: the vocabulary lives as long as the model; ids are compared, not used as an index.
        unsafe { llama::llama_vocab_is_eog(self.vocab(), token) }
    }

    /// Whether the model wants a BOS token before a prompt.
    pub fn adds_bos(&self) -> bool {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_get_add_bos(self.vocab()) }
    }

    pub(super) fn vocab(&self) -> *const llama::llama_vocab {
        self.shared.raw.vocab()
    }
}
