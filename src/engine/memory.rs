//! From a loaded model and a context to slots: measures what llama.cpp holds, plans the rest, allocates it and
//! starts the loader.

use std::path::PathBuf;
use std::ptr::NonNull;

use ggml_sys::{llama, shim};

use super::compute::GATHER_BYTES_MAX;
use super::device::Device;
use super::error::Error;
use super::model::Model;
use super::residency::{PoolMemory, Residency};
use crate::cache::{Cache, LayerLayout, Lru, PoolLayout};
use crate::expert::SliceKind;
use crate::gguf::{ExpertMap, LayerExperts};
use crate::load::{Loader, LoaderOptions};
use crate::options::SessionOptions;
use crate::plan::{ExpertCache, FixedCosts, MemoryLimits, MemoryPlan, PlanInput, PoolSpec, StagingWish};
use crate::stats::rss_bytes;
use crate::store::{self, Arena, Regime, choose, probe, slot_stride};

/// Staging that keeps reads in flight while a product runs, in bytes.
const STAGING_BYTES_WANTED: u64 = 64 << 20;

/// What the process needs beside weights, KV cache and compute buffers, at the least, in bytes.
const RUNTIME_BYTES_MIN: u64 = 24 << 20;

/// Plans memory for the model's first session and allocates it; later sessions share it.
pub(super) fn set_up(
    model: &Model,
    options: &SessionOptions,
    context: NonNull<llama::llama_context>,
) -> Result<(MemoryPlan, String), Error> {
    let shared = &model.shared;
    let mut residency = shared.experts.residency();
    if let Some(description) = residency.as_ref().and_then(Residency::description) {
        return Ok(description.clone());
    }
    let map = shared.experts.map();
    let pools = pools_of(map);
    let strides: Vec<Vec<u64>> = pools
        .iter()
        .map(|layers| layers[0].tensors.iter().map(|tensor| slot_stride(tensor.slice_bytes)).collect())
        .collect();
    let expert_stride: u64 = strides.iter().flatten().sum::<u64>().max(1);
    let wanted = (STAGING_BYTES_WANTED / expert_stride).clamp(1, 8) as u32;
    let limits = MemoryLimits::read();
    let plan = MemoryPlan::new(&PlanInput {
        budget: shared.options.budget,
        limits: limits.clone(),
        expert_cache: shared.options.expert_cache,
        fixed: fixed_costs(model, options, context)?,
        margin: None,
        pools: pools
            .iter()
            .zip(&strides)
            .map(|(layers, strides)| PoolSpec {
                n_expert: layers.iter().map(|layer| n_expert(layer)).collect(),
                slice_strides: strides.clone(),
            })
            .collect(),
        n_expert_used: model.info().n_expert_used,
        staging: StagingWish { min: 1, wanted },
    })?;
    if map.is_empty() {
        return Ok((plan, "none: a dense model, run as plain llama.cpp".to_owned()));
    }

    let files: Vec<PathBuf> = shared.gguf.files.iter().map(|file| file.path.clone()).collect();
    let ours = plan.budget - plan.unused();
    let regime = Regime {
        expert_bytes: model.info().expert_bytes.saturating_sub(plan.expert_cache),
        page_cache_bytes_available: limits.budget().map_or(0, |(bytes, _)| bytes.saturating_sub(ours)),
        direct: files.iter().try_for_each(|path| probe::direct(path)),
        io_uring: probe::io_uring(),
    };
    let choice = choose(shared.options.io, &regime);
    let mut store = store::open(choice.kind, &files)?;
    if let Some(wrap) = &shared.wrap_store {
        store = wrap(store);
    }

    let layouts: Vec<PoolLayout> = pools
        .iter()
        .zip(&plan.pools)
        .map(|(layers, pool)| PoolLayout {
            layers: layers
                .iter()
                .map(|layer| LayerLayout {
                    layer: layer.layer,
                    n_expert: n_expert(layer),
                    kinds: layer.tensors.iter().map(|tensor| tensor.kind).collect(),
                })
                .collect(),
            n_slots: pool.n_slots,
        })
        .collect();
    let memory = layouts.iter().zip(&pools).map(|(layout, layers)| pool_memory(layout, layers[0]));
    let memory = memory.collect::<Result<Vec<_>, _>>()?;
    let staging_stride = strides.iter().flatten().copied().max().unwrap_or(0) as usize;
    // No cache at all is asked for to see the engine at its smallest: everything through one slot.
    let n_staging = match shared.options.expert_cache {
        ExpertCache::Bytes(0) => 1,
        _ => plan.staging as usize / staging_stride,
    };
    let staging = arena(n_staging * staging_stride)?;
    let pool_of_layer = |layer: u16| {
        pools.iter().position(|layers| layers.iter().any(|l| l.layer == layer)).expect("every MoE layer has a pool")
    };
    let cache = Cache::new(layouts, Box::new(Lru::default()));
    let loader = Loader::new(store, LoaderOptions::default());
    let mut new = Residency::new(map, cache, memory, pool_of_layer, staging, staging_stride, loader);
    new.describe(plan.clone(), choice.to_string());
    *residency = Some(new);
    Ok((plan, choice.to_string()))
}

/// Layers whose experts have the same shape share a pool.
fn pools_of(map: &ExpertMap) -> Vec<Vec<&LayerExperts>> {
    let shape = |layer: &LayerExperts| -> Vec<_> {
        layer.tensors.iter().map(|t| (t.kind, t.dtype, t.ne0, t.ne1, t.slice_bytes)).collect()
    };
    let mut pools: Vec<Vec<&LayerExperts>> = Vec::new();
    for layer in &map.layers {
        match pools.iter_mut().find(|pool| shape(pool[0]) == shape(layer)) {
            Some(pool) => pool.push(layer),
            None => pools.push(vec![layer]),
        }
    }
    pools
}

fn n_expert(layer: &LayerExperts) -> u16 {
    u16::try_from(layer.n_expert).expect("the reader caps the number of experts")
}

fn pool_memory(layout: &PoolLayout, shape: &LayerExperts) -> Result<PoolMemory, Error> {
    let mut arenas = [const { None }; SliceKind::COUNT];
    for tensor in &shape.tensors {
        let bytes = layout.n_slots as usize * slot_stride(tensor.slice_bytes) as usize;
        arenas[tensor.kind.index()] = Some(arena(bytes)?);
    }
    Ok(PoolMemory { arenas })
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
