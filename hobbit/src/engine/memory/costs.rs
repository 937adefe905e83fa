//! Memory of a model, a context and hobbit itself besides experts.

use crate::engine::compute;
use crate::engine::error::Error;
use crate::engine::gates;
use crate::engine::memory_use::{MemoryUse, trim_heap};
use crate::engine::model::Model;
use crate::engine::raw::RawContext;
use hobbit_core::cache::policy;
use hobbit_core::options::{Repack, SessionOptions};
use hobbit_core::plan::FixedCosts;
use hobbit_core::stats::rss_bytes;
use hobbit_core::store::PLANE_BUFFERS_BYTES;

/// Step, in bytes, to which the process's memory is rounded up if a run must be repeatable.
const RUNTIME_BYTES_STEP: u64 = 64 << 20;

/// Minimum bytes of the process besides weights, KV cache and compute buffers.
const RUNTIME_BYTES_MIN: u64 = 24 << 20;

/// Bytes that the process holds besides `weights` and `kv`, measured after loading a model.
pub(super) fn runtime_bytes(weights: u64, kv: u64) -> u64 {
    trim_heap();
    rss_bytes().saturating_sub(weights + kv).max(RUNTIME_BYTES_MIN)
}

pub(super) fn fixed_costs(model: &Model, options: &SessionOptions, context: &RawContext) -> Result<FixedCosts, Error> {
    let MemoryUse { weights, kv, compute, .. } = MemoryUse::of(context)?;
    // A dense model is mapped: its resident pages count as weights.
    let resident = runtime_bytes(weights, kv);
    // The last pages differ from run to run, and one slot more or less may change a text.
    let resident = match model.shared.precisions.options.deterministic {
        true => resident.next_multiple_of(RUNTIME_BYTES_STEP),
        false => resident,
    };
    let has_buffers = model.shared.catalog.has_planes() || model.shared.options.repack == Repack::On;
    let buffers = if has_buffers { PLANE_BUFFERS_BYTES } else { 0 };
    let graph = model.shared.adapters.graph_bytes(options);
    let runtime = resident + scratch_bytes(model, options) + buffers + graph + model.shared.options.reserved_bytes;
    Ok(FixedCosts { weights, kv, compute, runtime, prediction: prediction_bytes(model) })
}

/// Bytes for the policy's tables and for copies of routers, which scores and prediction need.
fn prediction_bytes(model: &Model) -> u64 {
    let shared = &model.shared;
    let caching = &shared.options.caching;
    let layers = || shared.catalog.layers.iter();
    let tables: u64 = layers().map(|layer| policy::table_bytes(caching.policy, layer.n_expert)).sum();
    let asks_routers =
        caching.policy.needs_scores() || caching.predictor.needs_scores() || shared.options.trace.is_some();
    // With devices, llama.cpp decides which routers are on them, so every layer counts.
    let is_on_device = |_| !shared.placement.is_empty();
    let copied = gates::copied_bytes(model.gguf(), layers().map(|layer| layer.layer), is_on_device);
    tables + if asks_routers { copied } else { 0 }
}

/// Bytes of the scratch for products ([`compute::products_bytes`]), for a loaded model.
pub(super) fn scratch_bytes(model: &Model, options: &SessionOptions) -> u64 {
    compute::products_bytes(model.shared.experts.map(), model.info().n_expert_used.into(), options)
}
