//! From a loaded model and a context to slots: measures what llama.cpp holds, plans the rest, allocates it and
//! starts the loader.

use std::ptr::NonNull;

use ggml_sys::{llama, shim};

use super::compute::GATHER_BYTES_MAX;
use super::device::Device;
use super::error::Error;
use super::model::Model;
use super::precision::Precisions;
use super::residency::{Description, Parts, Residency};
use crate::cache::{Cache, LayerLayout, Lru, PoolLayout, SliceKinds};
use crate::expert::{ExpertId, Precision, Version};
use crate::gguf::{Catalog, LayerCatalog};
use crate::load::{Loader, LoaderOptions};
use crate::options::{PrecisionMode, SessionOptions};
use crate::plan::{ExpertCache, FixedCosts, MemoryLimits, MemoryPlan, PlanInput, PoolSpec, StagingWish};
use crate::stats::{LowReport, PrecisionReport, VersionsReport, rss_bytes};
use crate::store::{self, Arena, BLOCK_BYTES, Regime, choose, probe};

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
    let mut catalog = shared.catalog.clone();
    if shared.precisions.is_exact() {
        catalog.drop_low();
    }
    let pools = pools_of(&catalog);
    let specs: Vec<PoolSpec> = pools.iter().map(|pool| pool.spec(&catalog)).collect();
    let slice_bytes = specs.iter().map(|spec| spec.slice_stride_max).max().unwrap_or(0).max(1);
    let n_kinds = catalog.classes.iter().map(|class| class.slices.len()).max().unwrap_or(0).max(1) as u32;
    let wanted = (STAGING_BYTES_WANTED / slice_bytes).clamp(u64::from(n_kinds), 8 * u64::from(n_kinds)) as u32;
    let limits = MemoryLimits::read();
    let plan = MemoryPlan::new(&PlanInput {
        budget: shared.options.budget,
        limits: limits.clone(),
        expert_cache: shared.options.expert_cache,
        low_share: shared.options.low_share,
        fixed: fixed_costs(model, options, context)?,
        margin: None,
        pools: specs,
        n_expert_used: model.info().n_expert_used,
        staging: StagingWish { min: 1, wanted },
    })?;
    let mut precisions = shared.precisions.clone();
    // Nothing is ever evicted: low precision would save one read per expert.
    if plan.is_fully_resident() {
        precisions.mode = PrecisionMode::Exact;
        catalog.drop_low();
    }
    let precision = report(model, &precisions, &plan, &catalog);
    if catalog.layers.is_empty() {
        let io_choice = "none: a dense model, run as plain llama.cpp".to_owned();
        return Ok(Description { plan, io_choice, precision });
    }

    let ours = plan.budget - plan.unused();
    let regime = Regime {
        expert_bytes: (catalog.bytes(Precision::High) + catalog.bytes(Precision::Low))
            .saturating_sub(plan.expert_cache),
        page_cache_bytes_available: limits.budget().map_or(0, |(bytes, _)| bytes.saturating_sub(ours)),
        direct: shared.files.iter().try_for_each(|path| probe::direct(path)),
        io_uring: probe::io_uring(),
    };
    let choice = choose(shared.options.io, &regime);
    let mut store = store::open(choice.kind, &shared.files)?;
    if let Some(wrap) = &shared.wrap_store {
        store = wrap(store);
    }

    let layouts: Vec<PoolLayout> =
        pools.iter().zip(&plan.pools).map(|(pool, planned)| pool.layout(&catalog, planned.n_slots)).collect();
    let arenas = pools.iter().zip(&plan.pools).map(|(pool, planned)| {
        arena(planned.n_slots as usize * catalog.classes[usize::from(pool.class)].stride as usize)
    });
    let arenas = arenas.collect::<Result<Vec<_>, _>>()?;
    let staging_stride = plan.staging_slot_bytes.max(BLOCK_BYTES) as usize;
    // No cache at all is asked for to see the engine at its smallest: everything through one slot.
    let n_staging = match shared.options.expert_cache {
        ExpertCache::Bytes(0) => 1,
        _ => plan.staging_slots as usize,
    };
    let staging_memory = arena(n_staging * staging_stride)?;
    let description = Description { plan, io_choice: choice.to_string(), precision };
    let parts = Parts {
        cache: Cache::new(layouts, Box::new(Lru::default())),
        catalog,
        pools: arenas,
        staging_memory,
        staging_stride,
        loader: Loader::new(store, LoaderOptions::default()),
        precisions,
    };
    *residency = Some(Residency::new(parts, description.clone()));
    Ok(description)
}

/// Versions of one class and precision.
struct Pool {
    precision: Precision,
    class: u16,
    /// By layer, ascending; none empty.
    layers: Vec<(u16, Vec<Version>)>,
}

impl Pool {
    fn spec(&self, catalog: &Catalog) -> PoolSpec {
        let class = &catalog.classes[usize::from(self.class)];
        PoolSpec {
            precision: self.precision,
            n_versions: self.layers.iter().map(|(_, members)| members.len() as u16).collect(),
            expert_stride: class.stride,
            slice_stride_max: class.slices.iter().map(|slice| slice.capacity).max().unwrap_or(0),
        }
    }

    fn layout(&self, catalog: &Catalog, n_slots: u32) -> PoolLayout {
        let kinds: SliceKinds = catalog.classes[usize::from(self.class)].slices.iter().map(|s| s.kind).collect();
        let layers =
            self.layers.iter().map(|(layer, members)| LayerLayout { layer: *layer, members: members.clone(), kinds });
        PoolLayout { layers: layers.collect(), n_slots }
    }
}

/// Versions of equal shape and precision share a pool.
fn pools_of(catalog: &Catalog) -> Vec<Pool> {
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

fn arena(bytes: usize) -> Result<Arena, Error> {
    Arena::new(bytes).map_err(|source| Error::OutOfMemory { bytes: bytes as u64, source })
}

fn fixed_costs(
    model: &Model,
    options: &SessionOptions,
    context: NonNull<llama::llama_context>,
) -> Result<FixedCosts, Error> {
    let (mut weights, mut kv, mut compute) = (0, 0, 0);
    let excluded = Device::get()?.buffer_type();
    // SAFETY: the context is live and the places are valid.
    let known =
        unsafe { shim::hobbit_memory_breakdown(context.as_ptr(), excluded, &mut weights, &mut kv, &mut compute) };
    if !known {
        return Err(Error::Seam("llama.cpp did not say how much memory it holds".into()));
    }
    let (weights, kv, compute) = (weights as u64, kv as u64, compute as u64);
    // A dense model is mapped: what of it is resident already is among the weights.
    let resident = rss_bytes().saturating_sub(weights + kv).max(RUNTIME_BYTES_MIN);
    // The last pages differ from run to run, and a slot more or less may change a text.
    let resident = match model.shared.precisions.options.deterministic {
        true => resident.next_multiple_of(RUNTIME_BYTES_STEP),
        false => resident,
    };
    Ok(FixedCosts { weights, kv, compute, runtime: resident + scratch_bytes(model, options) })
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
