//! From a loaded model and a context to slots: measures what llama.cpp holds, plans the rest, allocates it and
//! starts the loader.

use std::ptr::NonNull;

use ggml_sys::llama::{self, ggml_backend_dev_t};

use super::allocation::{SlotDivision, cache_slots};
use super::compute::GATHER_BYTES_MAX;
use super::error::Error;
use super::gates;
use super::held::Held;
use super::log;
use super::model::Model;
use super::offload::{Tier, Wrapper};
use super::pinned::{HostMemory, Reach};
use super::precision::Precisions;
use super::recorder::Recorder;
use super::residency::foresee::Foresight;
use super::residency::{Description, Parts, Residency};
use super::state_file::StateFile;
use super::tiers;
use crate::cache::policy::{self, Policy, Shape};
use crate::cache::{Cache, LayerLayout, ModelMark, PoolLayout, SliceKinds};
use crate::expert::{ExpertId, Precision, Version};
use crate::gguf::{Catalog, LayerCatalog};
use crate::load::prefetch::PrefetchOptions;
use crate::load::{Loader, LoaderOptions};
use crate::options::{PrecisionMode, SessionOptions};
use crate::plan::{
    ExpertCache, FixedCosts, MemoryLimits, MemoryPlan, PlanInput, PoolPlan, PoolSpec, Regime, StagingWish,
};
use crate::predict::{self, PredictorKind};
use crate::route::Thresholds;
use crate::stats::{LowReport, PrecisionReport, VersionsReport, rss_bytes};
use crate::store::{self, Arena, BLOCK_BYTES, StoreKind, choose, probe};
use crate::trace;

/// Staging that keeps reads in flight while a product runs, in bytes.
const STAGING_BYTES_WANTED: u64 = 64 << 20;

/// To what the same is rounded up where a run must be repeatable, in bytes.
const RUNTIME_BYTES_STEP: u64 = 64 << 20;

/// What the process needs beside weights, KV cache and compute buffers, at the least, in bytes.
const RUNTIME_BYTES_MIN: u64 = 24 << 20;

/// Plans memory for the model's first session and allocates it; later sessions share it.
pub(super) fn set_up(
    model: &Model,
    options: &SessionOptions,
    context: NonNull<llama::llama_context>,
) -> Result<Description, Error> {
    let shared = &model.shared;
    let mut residency = shared.experts.residency();
    if let Some(residency) = residency.as_ref() {
        return Ok(residency.description().clone());
    }
    if let Regime::StandAside { repack } = shared.regime {
        return stand_aside(model, context, repack);
    }
    let mut catalog = shared.catalog.clone();
    if shared.precisions.is_exact() {
        catalog.drop_low();
    }
    let pools = pools_of(&catalog);
    let specs: Vec<PoolSpec> = pools.iter().map(|pool| pool.spec(&catalog)).collect();
    let slice_bytes = specs.iter().map(|spec| spec.slice_stride_max).max().unwrap_or(0).max(1);
    let n_kinds = catalog.classes.iter().map(|class| class.slices.len()).max().unwrap_or(0).max(1) as u32;
    let wanted = (STAGING_BYTES_WANTED / slice_bytes).clamp(u64::from(n_kinds), 8 * u64::from(n_kinds)) as u32;
    let (mut tiers, on_devices) = tiers::set_up(model, &catalog, scratch_bytes(model, options))?;
    // Devices may have taken their memory from the host's.
    let limits = MemoryLimits::read();
    // The host only passes on what the devices keep.
    let expert_cache = match shared.options.expert_cache {
        ExpertCache::Auto if on_devices => ExpertCache::Bytes(0),
        wanted => wanted,
    };
    let mut plan = MemoryPlan::new(&PlanInput {
        budget: shared.options.budget,
        limits: limits.clone(),
        overcommit: shared.options.overcommit,
        expert_cache,
        low_share: shared.options.low_share,
        fixed: fixed_costs(model, options, context)?,
        margin: None,
        pools: specs,
        n_expert_used: model.info().n_expert_used,
        staging: StagingWish { min: 1, wanted },
    })?;
    let mut precisions = shared.precisions.clone();
    // Nothing is ever evicted: low precision would save one read per expert.
    if plan.is_fully_resident() || on_devices {
        precisions.mode = PrecisionMode::Exact;
        catalog.drop_low();
    }
    if on_devices {
        // Nothing is read twice, however few slots the host has.
        plan.warning = None;
    }
    let precision = report(model, &precisions, &plan, &catalog);
    let (cpu_helper, divided) = (tiers.iter().any(Tier::has_helper), tiers.iter().any(Tier::is_divided));
    let precision = PrecisionReport { cpu_helper, divided, ..precision };
    if catalog.layers.is_empty() {
        let io_choice = "none: a dense model, run as plain llama.cpp".to_owned();
        let devices = tiers::reports(&shared.placement, &[]);
        let caching = model.caching_report();
        return Ok(Description { plan, io_choice, precision, caching, devices, warm_start: None });
    }

    let ours = plan.budget - plan.unused();
    let regime = store::Regime {
        expert_bytes: (catalog.bytes(Precision::High) + catalog.bytes(Precision::Low))
            .saturating_sub(plan.expert_cache),
        page_cache_bytes_available: limits.budget().map_or(0, |(bytes, _)| bytes.saturating_sub(ours)),
        direct: shared.files.iter().try_for_each(|path| probe::direct(path)),
        io_uring: probe::io_uring(),
    };
    let choice = choose(shared.options.io, &regime);
    let mut store = store::open_originals(choice.kind, &shared.originals)?;
    if let Some(wrap) = &shared.wrap_store {
        store = wrap(store);
    }

    let division = SlotDivision::of(model);
    let layout = |(pool, planned): (&Pool, &PoolPlan)| pool.layout(&catalog, planned.n_slots, &division);
    let layouts: Vec<PoolLayout> = pools.iter().zip(&plan.pools).map(layout).collect();
    let host = HostSlots::of(&tiers, shared.options.device.pinned);
    let mut host_memory = Vec::new();
    for (pool, planned) in pools.iter().zip(&plan.pools) {
        let stride = catalog.classes[usize::from(pool.class)].stride as usize;
        host_memory.push(host.memory(planned.n_slots as usize * stride, stride)?);
    }
    let staging_stride = plan.staging_slot_bytes.max(BLOCK_BYTES) as usize;
    // No cache at all is asked for to see the engine at its smallest: everything through one slot.
    let n_staging = match shared.options.expert_cache {
        ExpertCache::Bytes(0) => 1,
        _ => plan.staging_slots as usize,
    };
    host_memory.push(host.memory(n_staging * staging_stride, staging_stride)?);
    host.tell_of_refusal(&host_memory);
    tiers.iter_mut().for_each(|tier| host_memory.iter_mut().for_each(|memory| tier.show(memory)));
    let plan_bytes = plan.expert_cache;
    let mut arenas: Vec<Arena> = host_memory.into_iter().map(|memory| memory.arena).collect();
    let staging_memory = arenas.pop().expect("staging was put last");
    let devices = tiers::reports(&shared.placement, &tiers);
    let cache = Cache::new(layouts, policy_of(model, &catalog));
    let mut caching = model.caching_report();
    let host_slots = cache_slots("the host", &cache, catalog.layers.iter().map(|layer| layer.layer));
    caching.slots_by_layer.extend(host_slots);
    caching.slots_by_layer.extend(tiers.iter().filter_map(Tier::slots_by_layer));
    let io_choice = choice.to_string();
    let description = Description { plan, io_choice, precision, caching, devices, warm_start: None };
    let recorder = match &shared.options.trace {
        Some(path) => {
            let header = trace_header(model, &catalog, &cache, &precisions, plan_bytes);
            Some(Recorder::create(path, &header)?)
        }
        None => None,
    };
    let foresight = foresight_of(model, &precisions);
    if foresight.is_some() {
        tiers.iter_mut().for_each(|tier| tier.copy_ahead(prefetch_thresholds(&precisions)));
    }
    let parts = Parts {
        cache,
        foresight,
        overlaps: shared.options.caching.overlap,
        wants_scores: shared.options.caching.policy.needs_scores() || recorder.is_some(),
        recorder,
        state_file: state_file(model),
        catalog,
        pools: arenas,
        staging_memory,
        staging_stride,
        loader: Loader::new(store, LoaderOptions::default()),
        precisions,
        tiers,
    };
    let mut new = Residency::new(parts, description);
    new.preload()?;
    new.warm_up();
    new.record_residents();
    if shared.options.caching.fill && shared.wrap_store.is_none() {
        // What the page cache holds costs the cores as much now as when it is needed: only where reads take the disk's time
        // instead of theirs is it had between tokens.
        new.fill_free_slots(shared.options.caching.policy, choice.kind == StoreKind::Direct);
    }
    let description = new.description().clone();
    *residency = Some(new);
    Ok(description)
}

/// llama.cpp runs by itself: its memory is told, nothing is divided.
fn stand_aside(model: &Model, context: NonNull<llama::llama_context>, repack: bool) -> Result<Description, Error> {
    let shared = &model.shared;
    let Held { weights, kv, compute, .. } = Held::of(context)?;
    let runtime = rss_bytes().saturating_sub(weights + kv).max(RUNTIME_BYTES_MIN);
    let plan = MemoryPlan::new(&PlanInput {
        budget: shared.options.budget,
        limits: MemoryLimits::read(),
        overcommit: shared.options.overcommit,
        expert_cache: ExpertCache::Auto,
        low_share: shared.options.low_share,
        fixed: FixedCosts { weights, kv, compute, runtime, prediction: 0 },
        margin: Some(0),
        pools: Vec::new(),
        n_expert_used: model.info().n_expert_used,
        staging: StagingWish::default(),
    })?;
    let how = if repack { "mapped, weights rearranged for this CPU" } else { "mapped" };
    Ok(Description {
        precision: report(model, &shared.precisions, &plan, &shared.catalog),
        plan,
        io_choice: format!("none: all of the model fits, and llama.cpp runs it by itself ({how})"),
        caching: model.caching_report(),
        devices: Vec::new(),
        warm_start: None,
    })
}

/// Who looks ahead; `None` where nobody is to.
fn foresight_of(model: &Model, precisions: &Precisions) -> Option<Foresight> {
    let caching = &model.shared.options.caching;
    // When a read ahead lands depends on how fast reads are.
    if caching.predictor == PredictorKind::None || precisions.options.deterministic {
        return None;
    }
    let shape = model.predict_shape();
    let thresholds = prefetch_thresholds(precisions);
    let predictor = predict::build(caching.predictor, shape.clone(), model.shared.path_table.clone());
    let options = PrefetchOptions { thresholds, ..PrefetchOptions::default() };
    Some(Foresight::new(predictor, shape, options, caching.prefetch, caching.distance))
}

/// What predicted experts are worth.
fn prefetch_thresholds(precisions: &Precisions) -> Thresholds {
    match precisions.is_exact() {
        true => Thresholds { t1: 1.0, t2: 1.0 },
        false => precisions.thresholds,
    }
}

/// Where what is resident is kept between runs, if that is wanted.
fn state_file(model: &Model) -> Option<StateFile> {
    let shared = &model.shared;
    let mark = ModelMark {
        name: file_name(model),
        bytes: model.info().tensor_bytes,
        // Low versions may be others, or none: then they are passed over, or read from where they are.
        catalog: shared.catalog.fingerprint(),
    };
    let path = shared.options.cache_state.as_ref()?;
    Some(StateFile::new(path, mark, shared.options.caching.policy.to_string()))
}

/// Name of the model's file, without its directories.
fn file_name(model: &Model) -> String {
    model.info().path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// What a trace begins with.
fn trace_header(
    model: &Model,
    catalog: &Catalog,
    cache: &Cache,
    precisions: &Precisions,
    cache_bytes: u64,
) -> trace::Header {
    let bytes = |layer: &LayerCatalog, precision| {
        let sources = (0..layer.n_expert).filter_map(|index| layer.source(index, precision));
        sources.map(|source| catalog.classes[usize::from(source.class)].bytes()).max().unwrap_or(0)
    };
    let layer = |layer: &LayerCatalog| trace::Layer {
        layer: layer.layer,
        n_expert: layer.n_expert,
        n_used: (model.info().n_expert_used as u16).clamp(1, layer.n_expert),
        bytes_high: bytes(layer, Precision::High),
        bytes_low: bytes(layer, Precision::Low),
        slots_high: cache.capacity_of_layer(layer.layer, Precision::High),
        slots_low: cache.capacity_of_layer(layer.layer, Precision::Low),
    };
    let options = &model.shared.options;
    let Precisions { mode, thresholds, options: wanted, .. } = precisions;
    trace::Header {
        model: trace::ModelDescription {
            name: file_name(model),
            architecture: model.info().architecture.clone(),
            layers: catalog.layers.iter().map(layer).collect(),
        },
        settings: trace::Settings {
            policy: options.caching.policy.to_string(),
            predictor: options.caching.predictor.to_string(),
            prefetch: options.caching.prefetch.to_string(),
            distance: options.caching.distance,
            mode: mode.to_string(),
            t1: thresholds.t1,
            t2: thresholds.t2,
            prefill_low: wanted.prefill_low,
            upgrade: wanted.upgrade,
            deterministic: wanted.deterministic,
            cache_bytes,
            more: [
                ("policy_weights".to_owned(), model.policy_weights().to_string()),
                ("slots".to_owned(), options.caching.slots.to_string()),
            ]
            .into(),
        },
        host: Default::default(),
    }
}

/// Who decides which of these experts leave.
pub(super) fn policy_of(model: &Model, catalog: &Catalog) -> Box<dyn Policy> {
    let caching = &model.shared.options.caching;
    let bytes = |precision| catalog.bytes(precision) as f32 / catalog.layers.len().max(1) as f32;
    let low_cost =
        if catalog.bytes(Precision::Low) == 0 { 1.0 } else { bytes(Precision::Low) / bytes(Precision::High) };
    let n_layers = catalog.layers.last().map_or(1, |layer| layer.layer + 1);
    policy::build(caching.policy, &model.policy_weights(), Shape { n_layers, low_cost })
}

/// Versions of one class and precision.
pub(super) struct Pool {
    precision: Precision,
    pub(super) class: u16,
    /// By layer, ascending; none empty.
    layers: Vec<(u16, Vec<Version>)>,
}

impl Pool {
    pub(super) fn spec(&self, catalog: &Catalog) -> PoolSpec {
        let class = &catalog.classes[usize::from(self.class)];
        PoolSpec {
            precision: self.precision,
            n_versions: self.layers.iter().map(|(_, members)| members.len() as u16).collect(),
            expert_stride: class.stride,
            slice_stride_max: class.slices.iter().map(|slice| slice.capacity).max().unwrap_or(0),
        }
    }

    pub(super) fn layout(&self, catalog: &Catalog, n_slots: u32, division: &SlotDivision) -> PoolLayout {
        let kinds: SliceKinds = catalog.classes[usize::from(self.class)].slices.iter().map(|s| s.kind).collect();
        let layers =
            self.layers.iter().map(|(layer, members)| LayerLayout { layer: *layer, members: members.clone(), kinds });
        let capacities = division.capacities(self.precision, &self.layers, n_slots);
        PoolLayout { layers: layers.collect(), n_slots, capacities }
    }
}

/// Versions of equal shape and precision share a pool.
pub(super) fn pools_of(catalog: &Catalog) -> Vec<Pool> {
    let mut pools: Vec<Pool> = Vec::new();
    for precision in Precision::ALL {
        for layer in &catalog.layers {
            for index in 0..layer.n_expert {
                let Some(class) = layer.source(index, precision).map(|source| source.class) else { continue };
                let known = pools.iter().position(|pool| pool.precision == precision && pool.class == class);
                let known = known.unwrap_or_else(|| {
                    pools.push(Pool { precision, class, layers: Vec::new() });
                    pools.len() - 1
                });
                let version = Version { expert: ExpertId { layer: layer.layer, index }, precision };
                let layers = &mut pools[known].layers;
                match layers.last_mut() {
                    Some((last, members)) if *last == layer.layer => members.push(version),
                    _ => layers.push((layer.layer, vec![version])),
                }
            }
        }
    }
    pools
}

/// What users are told about precision.
fn report(model: &Model, precisions: &Precisions, plan: &MemoryPlan, catalog: &Catalog) -> PrecisionReport {
    let shared = &model.shared;
    let Precisions { mode, thresholds, options, .. } = precisions;
    let n_versions = |precision: Precision| {
        let layers = shared.catalog.layers.iter();
        let count =
            |layer: &LayerCatalog| (0..layer.n_expert).filter(|&i| layer.source(i, precision).is_some()).count();
        layers.map(count).sum::<usize>() as u64
    };
    let low = shared.low_name.as_ref().map(|source| LowReport {
        source: source.clone(),
        types: types_of(&shared.catalog, Precision::Low),
        bytes: shared.catalog.bytes(Precision::Low),
        slots: plan.n_low_slots,
        experts: n_versions(Precision::Low),
        cache_bytes: plan.low_cache,
    });
    PrecisionReport {
        mode: *mode,
        t1: thresholds.t1,
        t2: thresholds.t2,
        prefill_low: options.prefill_low,
        renormalise: options.renormalise,
        deterministic: options.deterministic,
        upgrade: options.upgrade,
        cpu_helper: false,
        divided: false,
        high: VersionsReport {
            types: types_of(catalog, Precision::High),
            bytes: catalog.bytes(Precision::High),
            slots: plan.n_slots,
            experts: n_versions(Precision::High),
        },
        low,
    }
}

/// The types of a precision's versions, the most frequent first: `q4_K/q6_K`.
fn types_of(catalog: &Catalog, precision: Precision) -> String {
    let mut counts: Vec<(&'static str, usize)> = Vec::new();
    for layer in &catalog.layers {
        for source in (0..layer.n_expert).filter_map(|index| layer.source(index, precision)) {
            for slice in &catalog.classes[usize::from(source.class)].slices {
                let name = slice.dtype.name();
                match counts.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((name, 1)),
                }
            }
        }
    }
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts.iter().map(|(name, _)| *name).collect::<Vec<_>>().join("/")
}

/// Where host slots are allocated.
struct HostSlots(Option<(ggml_backend_dev_t, Reach)>);

impl HostSlots {
    /// For the first device that reaches host memory better than by copying.
    fn of(tiers: &[Tier], pinned: bool) -> Self {
        // A device that computes in host memory can do nothing without it.
        let unified = tiers.iter().find(|tier| tier.is_unified()).map(|tier| (tier.dev(), Reach::of(tier.dev())));
        let pins = |tier: &&Tier| pinned && Reach::of(tier.dev()) == Reach::Pinned;
        Self(unified.or_else(|| tiers.iter().find(pins).map(|tier| (tier.dev(), Reach::Pinned))))
    }

    /// Copies from memory that is not pinned take a detour, which is worth a word.
    fn tell_of_refusal(&self, memory: &[HostMemory]) {
        let Some((dev, Reach::Pinned)) = self.0 else { return };
        let plain: u64 = memory.iter().filter(|memory| !memory.pinned).map(|memory| memory.arena.len() as u64).sum();
        if plain > 0 {
            let name = Wrapper::of(dev).name();
            let mib = plain.div_ceil(1 << 20);
            log::notice(format_args!(
                "{name} cannot pin {mib} MiB of host memory: copies to it will be slower; a smaller --host-cache may help, --no-pinned does \
                 not ask"
            ));
        }
    }

    fn memory(&self, bytes: usize, slot_bytes: usize) -> Result<HostMemory, Error> {
        match self.0 {
            Some((dev, reach)) => HostMemory::of(dev, reach, bytes, slot_bytes),
            None => HostMemory::plain(bytes),
        }
    }
}

fn fixed_costs(
    model: &Model,
    options: &SessionOptions,
    context: NonNull<llama::llama_context>,
) -> Result<FixedCosts, Error> {
    let Held { weights, kv, compute, .. } = Held::of(context)?;
    // A dense model is mapped: what of it is resident already is among the weights.
    let resident = rss_bytes().saturating_sub(weights + kv).max(RUNTIME_BYTES_MIN);
    // The last pages differ from run to run, and a slot more or less may change a text.
    let resident = match model.shared.precisions.options.deterministic {
        true => resident.next_multiple_of(RUNTIME_BYTES_STEP),
        false => resident,
    };
    let runtime = resident + scratch_bytes(model, options);
    Ok(FixedCosts { weights, kv, compute, runtime, prediction: prediction_bytes(model) })
}

/// What will be kept to decide who stays and what comes next.
fn prediction_bytes(model: &Model) -> u64 {
    let shared = &model.shared;
    let caching = &shared.options.caching;
    let layers = || shared.catalog.layers.iter();
    let tables: u64 = layers().map(|layer| policy::table_bytes(caching.policy, layer.n_expert)).sum();
    let asks_routers =
        caching.policy.needs_scores() || caching.predictor.needs_scores() || shared.options.trace.is_some();
    // With devices some layers' routers are there: which, llama.cpp decides.
    let is_on_device = |_| !shared.placement.is_empty();
    let copied = gates::copied_bytes(model.gguf(), layers().map(|layer| layer.layer), is_on_device);
    tables + if asks_routers { copied } else { 0 }
}

/// What products need besides the slots: gathered rows, their results, and ggml's quantised copies of the rows.
fn scratch_bytes(model: &Model, options: &SessionOptions) -> u64 {
    let tensors = || model.shared.experts.map().layers.iter().flat_map(|layer| &layer.tensors);
    let n_in = tensors().map(|tensor| tensor.ne0).max().unwrap_or(0);
    let row = tensors().map(|tensor| (tensor.ne0 + tensor.ne1) * 4).max().unwrap_or(0);
    let n_tokens = u64::from(options.n_ubatch.min(options.n_batch));
    let n_rows = n_tokens * u64::from(model.info().n_expert_used);
    // One expert may be chosen by every token; groups of several stay below the cap.
    let gathered = (n_tokens * row).max((n_rows * row).min(GATHER_BYTES_MAX as u64));
    gathered + n_rows * n_in * 5 / 4
}
