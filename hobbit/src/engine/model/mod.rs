//! An open model: its vocabulary, its ordinary weights in memory, its experts left in the file.

pub(crate) mod needs;
pub(crate) mod placement;
pub(crate) mod run_mode;
pub(crate) mod set_up;
pub(crate) mod stock;

mod load;
mod vocabulary;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ggml_sys::llama;

use crate::engine::ggml;
use crate::engine::ggml::log;
use crate::engine::ggml::raw::RawModel;
use crate::engine::ggml::vocabulary::Pieces;
use crate::engine::memory::host_reads::Host;
use crate::engine::model::needs::HeaderNeeds;
use crate::engine::model::placement::DeviceLayers;
use crate::engine::seam::experts::Experts;
use crate::engine::seam::hook::Shown;
use crate::engine::source::adapters::{AdapterInfo, Adapters};
use crate::engine::source::model_source::ModelSource;
use hobbit_core::expert::{ExpertId, Precision};
use hobbit_core::gguf::{Catalog, Gguf};
use hobbit_core::load::prefetch::PrefetchCounters;
use hobbit_core::options::{Idle, ModelOptions, RoutingOptions};
use hobbit_core::plan::{ExpertCache, LayerDivision, PlanError, RunMode};
use hobbit_core::predict::{PredictShape, PredictorKind};
use hobbit_core::profile::VirtualPlan;
use hobbit_core::route::Thresholds;
use hobbit_core::stats::{CachingReport, DeviceReport};
use hobbit_core::store::Store;
use hobbit_core::trace::Routes;
pub use vocabulary::SpecialTokens;

/// Wraps a store; tests use it to inject faults.
pub(crate) type WrapStore = Box<dyn Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync>;

/// Description of an open model.
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
    /// Number of blocks.
    pub n_layer: u32,
    /// Experts per MoE layer (the largest number); 0 for a dense model.
    pub n_expert: u32,
    /// Experts used per token.
    pub n_expert_used: u32,
    /// The model's own chat template, if it has one.
    pub chat_template: Option<String>,
}

impl ModelInfo {
    /// Whether the model has experts; a dense model runs as plain llama.cpp.
    pub fn is_moe(&self) -> bool {
        self.n_expert > 0
    }
}

/// An open model. Clones are cheap; sessions keep it alive.
#[derive(Clone)]
pub struct Model {
    pub(crate) shared: Arc<Shared>,
}

/// State that a model's sessions share.
pub(crate) struct Shared {
    // Dropped first: llama.cpp frees the adapters with the model.
    pub(crate) raw: RawModel,
    /// llama.cpp frees them with the model.
    pub(crate) adapters: Adapters,
    pub(crate) experts: Arc<Experts>,
    pub(crate) source: ModelSource,
    pub(crate) followed: Followed,
    pub(crate) options: ModelOptions,
    pub(crate) wrap_store: Option<WrapStore>,
    pub(crate) placed: Placed,
    pub(crate) opened: Opened,
    info: ModelInfo,
    /// Built on first use.
    pieces: OnceLock<Pieces>,
    pub(crate) loan: Loan,
}

/// Recordings and plans that the options name.
#[derive(Default)]
pub(crate) struct Followed {
    /// Routes to follow, and the share of them that is predicted.
    pub(crate) routes: Option<(Arc<Routes>, f64)>,
    /// Number of virtual experts per layer.
    pub(crate) virtual_plan: Option<VirtualPlan>,
}

/// How the model runs, decided before it was loaded.
pub(crate) struct Placed {
    /// How the experts are run; for a dense model as if it had some.
    pub(crate) run_mode: RunMode,
    /// Context length for sessions that request none; 0 for the length the model was trained with.
    pub(crate) n_ctx: u32,
    /// The devices that hold layers.
    pub(crate) devices: Vec<DeviceLayers>,
    /// Memory, by the headers.
    pub(crate) needs: HeaderNeeds,
    /// Options that cannot act.
    pub(crate) idle: Vec<Idle>,
}

/// The time of opening.
pub(crate) struct Opened {
    pub(crate) at: Instant,
    pub(crate) took: Duration,
}

/// Memory that is lent ([`Model::lend`]).
#[derive(Default)]
pub(crate) struct Loan {
    /// Bytes that can be lent where there are no slots; set by the first session.
    pub(crate) spare: OnceLock<u64>,
    /// Bytes lent now, to each [`Borrower`].
    lent: Mutex<[u64; 3]>,
}

/// The parts of a program that borrow memory from experts ([`Model::lend`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Borrower {
    /// The encoder of images and sound.
    Projector,
    /// A copy of a sequence's state.
    State,
    /// Copies of all sequences' states, while the cells of the context are cleared.
    States,
}

impl Model {
    /// Description of the model.
    pub fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    /// Whether llama.cpp runs the model by itself, because it fits, or hobbit manages its experts.
    pub fn run_mode(&self) -> RunMode {
        self.shared.placed.run_mode
    }

    /// The options of [`Model::open`] that are set and cannot act here.
    pub fn idle_options(&self) -> &[Idle] {
        &self.shared.placed.idle
    }

    /// The loaded LoRA adapters, in the order of [`AdapterOptions::lora`](hobbit_core::options::AdapterOptions).
    pub fn adapters(&self) -> impl ExactSizeIterator<Item = &AdapterInfo> {
        self.shared.adapters.infos()
    }

    /// Changes T1 and T2 for every session of the model, starting with the next evaluation.
    pub fn set_thresholds(&self, thresholds: Thresholds) {
        self.shared.with_host(|host| host.precisions.thresholds = thresholds);
    }

    /// Changes the rerouting of tokens away from missing experts, for every session of the model, starting with the
    /// next evaluation. Requires a session, and a model that was opened with some rerouting.
    pub fn set_routing(&self, routing: &RoutingOptions) {
        self.shared.with_host(|host| set_up::reroute(host, routing));
    }

    /// Forces low precision for these experts, where they have a low version; replaces the previous list. Requires
    /// dynamic mode and a session. For measuring sensitivity.
    pub fn force_low(&self, experts: impl IntoIterator<Item = ExpertId>) {
        self.shared.with_host(|host| host.precisions.forced_low = experts.into_iter().collect());
    }

    /// Treats exactly these experts as missing wherever tokens use only resident experts; `None` restores real
    /// residency. Requires a session. For measuring the cost of absent experts.
    pub fn mask_experts(&self, experts: Option<HashSet<ExpertId>>) {
        self.shared.with_host(|host| host.masked = experts);
    }

    /// Blocks with experts in ascending order, each with its number of experts.
    pub fn layers_with_experts(&self) -> Vec<(u16, u16)> {
        self.shared.source.catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert)).collect()
    }

    /// Bytes of host memory that the cache may fill now; 0 before the first session.
    pub fn host_cache_bytes(&self) -> u64 {
        self.shared.experts.memories().as_ref().map_or(0, |memories| memories.host_cache_bytes())
    }

    /// Shrinks the cache in host memory, or restores it to at most the size planned at the start, which is also the
    /// size for [`ExpertCache::Auto`]. Experts that lose their slot are read again when they are needed; results stay
    /// the same, except that dynamic precision depends on residency. Takes effect at once, between two layers of an
    /// evaluation on another thread. Memory that is pinned for a device keeps its size.
    ///
    /// Returns the bytes the cache may fill now: whole slots, so somewhat less than requested; 0 before the first
    /// session.
    pub fn set_host_cache(&self, cache: ExpertCache) -> u64 {
        self.shared.experts.memories().as_mut().map_or(0, |memories| memories.resize_host(cache))
    }

    /// Lends `bytes` of the memory budget, in place of what the borrower had before; 0 takes all back. Free memory is
    /// lent first, then that of experts, whose cache shrinks as in [`Model::set_host_cache`]. Returns false, and
    /// changes nothing, if the budget has not so much. At least [`ModelOptions::lent_bytes`] can be lent to all
    /// together.
    pub fn lend(&self, borrower: Borrower, bytes: u64) -> bool {
        let mut lent = self.shared.loan.lent.lock().unwrap_or_else(PoisonError::into_inner);
        let mut wanted = *lent;
        wanted[borrower as usize] = bytes;
        let is_lent = self.shared.lend_in_all(wanted.into_iter().fold(0, u64::saturating_add));
        if is_lent {
            *lent = wanted;
        }
        is_lent
    }

    /// Whether [`Model::lend`] takes memory from experts. If not, memory that is taken back stays unused.
    pub fn lends(&self) -> bool {
        self.shared.experts.memories().as_ref().is_some_and(|memories| memories.lending.most > 0)
    }

    /// Waits until no fillable slot is free ([`CachingOptions::fill`](crate::CachingOptions::fill)); returns the bytes
    /// of experts in the slots. Without filling, returns the current value.
    pub fn finish_filling(&self) -> u64 {
        self.shared.experts.memories().as_mut().map_or(0, |memories| memories.host.finish_filling())
    }

    /// As [`Model::set_host_cache`], for the memory of all devices together, which is freed and allocated again. A
    /// layer whose number of slots changes loses their content. [`Model::device_reports`] shows each device's part.
    pub fn set_device_cache(&self, cache: ExpertCache) -> u64 {
        self.shared.set_device_cache(cache)
    }

    /// The devices that hold layers, and their current share of the model's experts; empty before the first session and
    /// for a dense model.
    pub fn device_reports(&self) -> Vec<DeviceReport> {
        self.shared.device_reports()
    }

    /// Completed share of the ubatch in evaluation, counted in layers with experts: 0..1. 0 when nothing is evaluated,
    /// and for a dense model. Waits for the layer being computed.
    pub fn evaluated_share(&self) -> f64 {
        let layer = self.shared.experts.memories().as_ref().map_or(0, |memories| memories.host.counters().layer);
        f64::from(layer) / f64::from(self.info().n_layer.max(1))
    }

    /// Location of every version of every expert.
    pub fn catalog(&self) -> &Catalog {
        &self.shared.source.catalog
    }

    /// The model's shape for a predictor: the layers with experts that run.
    pub fn predict_shape(&self) -> PredictShape {
        let layers = self.shared.source.catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert));
        PredictShape::new(layers, |layer| self.shared.n_expert_used(layer))
    }

    /// The parsed header of the model's files.
    pub fn gguf(&self) -> &Gguf {
        &self.shared.source.gguf
    }
}

impl Shared {
    /// The error for a budget that is too small, with the least that suffices ([`run_mode::or_whole`]).
    pub(crate) fn or_whole(&self, error: PlanError) -> PlanError {
        run_mode::or_whole(error, &self.source, self.experts.map(), &self.options, self.placed.needs.adapters)
    }

    /// Changes the host's residency, once a session has made it.
    fn with_host(&self, change: impl FnOnce(&mut Host)) {
        if let Some(memories) = self.experts.memories().as_mut() {
            change(&mut memories.host);
        }
    }

    fn lend_in_all(&self, bytes: u64) -> bool {
        // Waits for a layer that another thread computes, however slow its reads are.
        const TRIES: u32 = 10_000;
        for _ in 0..TRIES {
            let lent = match self.experts.memories().as_mut() {
                Some(memories) => memories.lend(bytes),
                None => Some(self.loan.spare.get().is_none_or(|spare| bytes <= *spare)),
            };
            match lent {
                Some(lent) => return lent,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        true
    }

    fn set_device_cache(&self, cache: ExpertCache) -> u64 {
        self.experts.memories().as_mut().map_or(0, |memories| memories.resize_devices(cache))
    }

    fn device_reports(&self) -> Vec<DeviceReport> {
        self.experts.memories().as_ref().map_or_else(Vec::new, |memories| memories.device_reports())
    }

    /// Frees a quarter of the slots of earlier sessions when a new session lacks device memory. False if there was
    /// nothing to free.
    pub(crate) fn make_room_on_devices(&self) -> bool {
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

    /// The text of every token.
    pub(crate) fn pieces(&self) -> &Pieces {
        // SAFETY: the vocabulary lives as long as the model; ids are compared, not used as an index.
        let is_eog = |token| unsafe { llama::llama_vocab_is_eog(self.raw.vocab(), token) };
        self.pieces.get_or_init(|| Pieces::new(&self.raw, is_eog))
    }

    /// Parts of routers' choices that the expert backend needs from the hook: weights, if a layer with scales spans
    /// several splits, and inputs, if experts have others.
    pub(crate) fn shown(&self) -> Shown {
        let scaled = || self.source.gguf.tensors.iter().any(|tensor| tensor.name.ends_with("_exps.scale"));
        let options = &self.options;
        let reroutes = !options.routing.is_off() || options.loss_bound.is_some();
        let wants_weights = !self.source.precisions.is_exact() || self.followed.routes.is_some() || reroutes;
        let asks = options.caching.policy.needs_scores()
            || self.predictor().needs_scores()
            || options.trace.is_some()
            || reroutes;
        let is_other = || load::ASKED_EARLIER.contains(&self.info.architecture.as_str());
        Shown { weights: wants_weights && scaled(), input: asks && self.followed.routes.is_none() && is_other() }
    }

    /// The device whose host memory has the results of the CPU's experts, and embeddings. None where no device computes
    /// experts: slots then follow the phase, for which memory is given back.
    pub(crate) fn pins_results(&self) -> Option<ggml::Device> {
        let devices = &self.placed.devices;
        let computes = devices.iter().any(|part| !part.experts.is_empty() || !part.offloaded.is_empty());
        devices.first().filter(|_| computes).map(|part| ggml::Device(part.wrapper.raw))
    }

    /// The division of slots among layers.
    pub(crate) fn division(&self) -> LayerDivision<'_> {
        let caching = &self.options.caching;
        LayerDivision {
            policy: caching.policy,
            weights: caching.weights,
            slots: caching.slots,
            all: &self.source.catalog,
            virtual_plan: self.followed.virtual_plan.as_ref(),
            n_expert_used: self.info.n_expert_used,
        }
    }

    /// The predictor in effect.
    pub(crate) fn predictor(&self) -> PredictorKind {
        load::predictor(&self.options, !self.placed.devices.is_empty())
    }

    /// Whether experts are read, and copied to devices, before their layer's router decides.
    pub(crate) fn looks_ahead(&self) -> bool {
        // The completion time of a prefetch depends on the speed of reads.
        !self.source.precisions.options.deterministic && self.predictor() != PredictorKind::None
    }

    /// The caching configuration, without results.
    pub(crate) fn caching_report(&self) -> CachingReport {
        let caching = &self.options.caching;
        CachingReport {
            policy: caching.policy.to_string(),
            policy_weights: caching.weights.to_string(),
            slots: caching.slots.to_string(),
            slots_by_layer: Vec::new(),
        }
    }
}

/// Where an expert is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPlace {
    /// Only in the file.
    Absent,
    /// In the host's memory, in a precision.
    Held(Precision),
    /// Being read into the host's memory.
    Arriving(Precision),
    /// On a device.
    OnDevice,
}

/// Where the experts of one layer are, by index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPlaces {
    /// Block number.
    pub layer: u16,
    /// One entry for each expert, `[n_expert]`.
    pub experts: Vec<ExpertPlace>,
}

impl Model {
    /// Counters of prefetching since the model was opened; `None` without it.
    pub fn prefetch_counters(&self) -> Option<PrefetchCounters> {
        let memories = self.shared.experts.memories();
        Some(memories.as_ref()?.host.lookahead.as_ref()?.report().counters)
    }

    /// Names of expert tensors whose products have not reached hobbit yet; empty after a session's first evaluation.
    pub fn unseen_experts(&self) -> Vec<String> {
        self.shared.experts.memories().as_ref().map_or_else(Vec::new, |memories| memories.unseen_tensors())
    }

    /// Place of every expert; `None` where llama.cpp runs the model by itself, and before the first session. Waits for
    /// the layer being computed.
    pub fn expert_places(&self) -> Option<Vec<LayerPlaces>> {
        let memories = self.shared.experts.memories();
        let memories = memories.as_ref()?;
        let mut layers: Vec<LayerPlaces> = self
            .layers_with_experts()
            .into_iter()
            .map(|(layer, n)| LayerPlaces { layer, experts: vec![ExpertPlace::Absent; usize::from(n)] })
            .collect();
        let mut put = |layer: u16, index: u16, place: ExpertPlace| {
            let found = layers.binary_search_by_key(&layer, |places| places.layer).ok();
            let Some(cell) = found.and_then(|at| layers[at].experts.get_mut(usize::from(index))) else { return };
            if rank(place) > rank(*cell) {
                *cell = place;
            }
        };
        let cache = memories.host.cache();
        for (version, slot) in cache.residents() {
            let place = if cache.is_ready(slot) {
                ExpertPlace::Held(version.precision)
            } else {
                ExpertPlace::Arriving(version.precision)
            };
            put(version.expert.layer, version.expert.index, place);
        }
        for tier in &memories.tiers {
            for (version, _) in tier.slots.cache.residents() {
                put(version.expert.layer, version.expert.index, ExpertPlace::OnDevice);
            }
        }
        Some(layers)
    }
}

/// Precedence when an expert is in several places.
fn rank(place: ExpertPlace) -> u8 {
    match place {
        ExpertPlace::Absent => 0,
        ExpertPlace::Arriving(Precision::Low) => 1,
        ExpertPlace::Held(Precision::Low) => 2,
        ExpertPlace::Arriving(Precision::High) => 3,
        ExpertPlace::Held(Precision::High) => 4,
        ExpertPlace::OnDevice => 5,
    }
}
