//! What a model, a context and hobbit itself hold besides experts.

use crate::engine::compute::scratch;
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

/// To what the process's memory is rounded up where a run must be repeatable, in bytes.
const RUNTIME_BYTES_STEP: u64 = 64 << 20;

/// What the process needs beside weights, KV cache and compute buffers, at the least, in bytes.
const RUNTIME_BYTES_MIN: u64 = 24 << 20;

/// Bytes that the process holds besides `weights` and `kv` bytes, now that a model was loaded.
pub(super) fn runtime_bytes(weights: u64, kv: u64) -> u64 {
    trim_heap();
    rss_bytes().saturating_sub(weights + kv).max(RUNTIME_BYTES_MIN)
}

pub(super) fn fixed_costs(model: &Model, options: &SessionOptions, context: &RawContext) -> Result<FixedCosts, Error> {
    let MemoryUse { weights, kv, compute, .. } = MemoryUse::of(context)?;
    // A dense model is mapped: what of it is resident already is among the weights.
    let resident = runtime_bytes(weights, kv);
    // The last pages differ from run to run, and a slot more or less may change a text.
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

/// Bytes of the scratch that products use ([`scratch::products_bytes`]), of a model that is loaded.
pub(super) fn scratch_bytes(model: &Model, options: &SessionOptions) -> u64 {
    scratch::products_bytes(model.shared.experts.map(), model.info().n_expert_used.into(), options)
}
