//! Decides whether llama.cpp runs a model by itself, and the default context length. Near the border of fitting,
//! llama.cpp estimates its needs without allocating them.

use ggml_sys::llama;

use super::compute;
use super::devices;
use super::error::OpenError;
use super::memory::MemoryUse;
use super::params::{NEVER_INTERRUPTED, context_params, kv_overrides};
use super::raw::{RawContext, RawModel};
use super::repack::Interleaving;
use super::source::ModelSource;
use super::tables::Tables;
use hobbit_core::gguf::{Catalog, Gguf};
use hobbit_core::options::{CachingOptions, KvType, ModelOptions, PrecisionOptions, Repack, SessionOptions};
use hobbit_core::plan::{
    Budget, BudgetSource, ExpertCache, FixedCosts, MemoryLimits, MemoryPlan, Needs, RepackInput, Room, RunMode,
    context_tokens,
};
use hobbit_core::store::{IoMode, PLANE_BUFFERS_BYTES};

/// Host memory for code, allocator and thread stacks, in bytes.
const PROCESS_BYTES: u64 = 24 << 20;

/// Bytes per token of the vocabulary: text, score, type, and the tokenizer's data. An upper estimate.
const VOCABULARY_BYTES: u64 = 400;

/// Chooses the run mode for a model with experts, and the context length if the options name none: 0 for the length the
/// model was trained with. `adapters` is the size of other loaded data, in bytes.
///
/// # Errors
/// A budget that certainly exceeds the system's memory.
pub(super) fn choose(source: &ModelSource, options: &ModelOptions, adapters: u64) -> Result<(RunMode, u32), OpenError> {
    let on_devices = options.n_gpu_layers != 0 && !devices::choose(&options.device)?.is_empty();
    let experts: u64 = source.map.layers.iter().map(|layer| layer.bytes()).sum();
    let limits = MemoryLimits::read();
    if !options.overcommit && !on_devices {
        let in_files = experts.saturating_add(Tables::of(&source.gguf, options).file_bytes());
        let ordinary = tensor_bytes(&source.gguf).saturating_sub(in_files);
        MemoryPlan::check_budget(options.budget, &limits, options.expert_cache, ordinary, experts)?;
    }
    // On devices the context does not use host memory.
    let Some(room) = room(options, &limits).filter(|_| !on_devices) else { return Ok((RunMode::Seam, 0)) };
    let whole_room = Room { bytes: room, enforced: enforced(options, &limits) };
    let may_passthrough = !source.is_pack && options.passthrough && !wants_a_cache(options);
    let run_mode = |expects: &SessionOptions| -> RunMode {
        let (mut least, mut most) = bounds(&source.gguf, expects);
        if options.mtp {
            // The second context has a few layers of the first.
            (most.kv, most.compute) = (most.kv.saturating_mul(2), most.compute.saturating_mul(2));
        }
        for needs in [&mut least, &mut most] {
            needs.runtime = needs.runtime.saturating_add(adapters);
        }
        let products = products_bytes(source, expects);
        most.compute = most.compute.saturating_add(products);
        if options.repack == Repack::Off {
            most.repacked = 0;
        }
        // If llama.cpp cannot estimate, the seam reports the reason.
        let asked = || {
            ask(&source.gguf, options, expects, products + adapters)
                .map_or(RunMode::Seam, |needs| RunMode::of(&needs, whole_room))
        };
        match RunMode::within(&least, &most, whole_room).unwrap_or_else(asked) {
            RunMode::Passthrough { repack, gives_back } => {
                RunMode::Passthrough { repack: repack && options.repack != Repack::Off, gives_back }
            }
            RunMode::Seam => RunMode::Seam,
        }
    };
    let whole = if may_passthrough { run_mode(&options.expects) } else { RunMode::Seam };
    if whole.is_passthrough() || options.expects.n_ctx != 0 {
        return Ok((whole, 0));
    }
    let n_ctx = fitted_context(&source.gguf, &options.expects, room);
    let expects = SessionOptions { n_ctx, ..options.expects.clone() };
    Ok((if may_passthrough && n_ctx > 0 { run_mode(&expects) } else { whole }, n_ctx))
}

/// Whether hobbit repacks experts on the CPU, and llama.cpp all other weights: if requested, or if it pays
/// ([`RepackInput`]) and nothing else changes their bytes. `n_ctx` as [`choose`] returned it.
pub(super) fn rearranges(gguf: &Gguf, catalog: &Catalog, options: &ModelOptions, n_ctx: u32) -> bool {
    let has_low = || catalog.layers.iter().any(|layer| layer.low.iter().any(Option::is_some));
    match options.repack {
        Repack::On => return true,
        Repack::Off => return false,
        // Available memory differs between runs, and repeatable texts must not.
        Repack::Auto if options.precision.deterministic || catalog.has_planes() || has_low() => return false,
        Repack::Auto => {}
    }
    let Some(room) = room(options, &MemoryLimits::read()) else { return false };
    // The plan keeps a margin below a given budget: do the same here.
    let room = match options.budget {
        Budget::Bytes(_) => MemoryPlan::without_margin(room, BudgetSource::Given),
        Budget::Auto => room,
    };
    let slices = || catalog.classes.iter().flat_map(|class| &class.slices);
    let expert_bytes = catalog.layers.iter().flat_map(|layer| &layer.high).map(|version| version.bytes()).sum();
    let expects = SessionOptions { n_ctx: options.expects.n_ctx.max(n_ctx), ..options.expects.clone() };
    let (_, most) = bounds(gguf, &expects);
    let in_files = Tables::of(gguf, options).file_bytes().saturating_add(expert_bytes);
    let weights = tensor_bytes(gguf).saturating_sub(in_files);
    let besides = [weights, most.kv, most.compute, most.runtime, PLANE_BUFFERS_BYTES];
    let besides = besides.into_iter().fold(0, u64::saturating_add);
    RepackInput { expert_bytes, expert_cache: options.expert_cache, room, besides }
        .pays(slices().map(|slice| slice.dtype))
        && slices().all(|slice| Interleaving::of(slice.dtype, slice.ne0, slice.ne1).is_some())
}

/// Context length for a model that does not fit with its training length; 0 if it is unknown, or not shorter.
fn fitted_context(gguf: &Gguf, session: &SessionOptions, room: u64) -> u32 {
    let trained = gguf.metadata.get_u64(&format!("{}.context_length", gguf.architecture()));
    let trained = trained.and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
    // Long contexts, because short ones are padded.
    let kv = |n_ctx: u32| bounds(gguf, &SessionOptions { n_ctx, ..session.clone() }).1.kv;
    let n_ctx = context_tokens(trained, kv(2 << 20).saturating_sub(kv(1 << 20)) >> 20, room);
    if n_ctx < trained { n_ctx } else { 0 }
}

/// Bytes that plain llama.cpp may use.
pub(super) fn room(options: &ModelOptions, limits: &MemoryLimits) -> Option<u64> {
    let available = limits.budget().map(|(bytes, source)| MemoryPlan::without_margin(bytes, source));
    let room = match options.budget {
        Budget::Auto => available,
        Budget::Bytes(given) if options.overcommit => Some(given),
        Budget::Bytes(given) => Some(available.map_or(given, |available| available.min(given))),
    };
    room.map(|room| room.saturating_sub(options.reserved_bytes.saturating_add(options.lent_bytes)))
}

/// [`Room::enforced`].
fn enforced(options: &ModelOptions, limits: &MemoryLimits) -> u64 {
    let Some((limit, BudgetSource::Cgroup)) = limits.budget() else { return 0 };
    match options.budget {
        Budget::Bytes(given) if given < limit => 0,
        _ if !cfg!(target_os = "linux") => 0,
        _ => limit.saturating_sub(options.reserved_bytes.saturating_add(options.lent_bytes)),
    }
}

/// Whether the options configure the expert cache, or request figures that only the seam has.
fn wants_a_cache(options: &ModelOptions) -> bool {
    options.expert_cache != ExpertCache::Auto
        || options.low.is_some()
        || options.low_share != Default::default()
        || options.precision != PrecisionOptions::default()
        || options.caching != CachingOptions::default()
        || options.io != IoMode::default()
        || options.device.n_cpu_moe > 0
        || !options.device.override_tensors.is_empty()
        || options.routes.is_some()
        || [&options.path_table, &options.trace, &options.cache_state].into_iter().any(Option::is_some)
}

pub(super) fn tensor_bytes(gguf: &Gguf) -> u64 {
    gguf.tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.extent.len))
}

/// Lower and approximate upper bounds of a model's needs, from its header.
pub(super) fn bounds(gguf: &Gguf, session: &SessionOptions) -> (Needs, Needs) {
    let architecture = gguf.architecture();
    let number = |key: &str| gguf.metadata.get_u64(&format!("{architecture}.{key}"));
    let mapped = tensor_bytes(gguf);
    let quantised = gguf.tensors.iter().filter(|tensor| tensor.dtype.is_quantized()).map(|tensor| tensor.extent.len);
    let embeddings = gguf.tensors.iter().find(|tensor| tensor.name == "token_embd.weight");
    let n_vocab: u64 = embeddings.and_then(|tensor| tensor.dims.get(1).copied()).unwrap_or(0);
    let n_embd = number("embedding_length").unwrap_or(0);
    let n_head = number("attention.head_count").unwrap_or(n_embd);
    let n_ctx = if session.n_ctx == 0 { number("context_length").unwrap_or(0) } else { session.n_ctx.into() };
    // Sequences divide the context unless they share it; llama.cpp pads each part to 256 tokens.
    let n_parts = if session.kv_unified { 1 } else { u64::from(session.n_seq_max.max(1)) };
    let n_ctx = n_ctx.min(u32::MAX.into()).next_multiple_of(256 * n_parts);
    // The wider of both types; at most 4 bytes.
    let width = if [session.type_k, session.type_v].contains(&KvType::F32) { 4 } else { 2 };
    let n_states = u64::from(session.n_seq_max.max(1)) * (1 + u64::from(session.rollback));
    let state = gguf.state_elements().saturating_mul(n_states).saturating_mul(4);
    let kv = [gguf.kv_elements(), n_ctx, width].into_iter().fold(1, u64::saturating_mul).saturating_add(state);
    let n_tokens = u64::from(session.n_ubatch.min(session.n_batch));
    let n_used = u64::from(gguf.n_expert_used_max().max(1));
    let n_ff = number("expert_feed_forward_length").unwrap_or(0).max(number("feed_forward_length").unwrap_or(0));
    // Activations of a layer, including attention without fused kernels.
    let activations = 16 * n_embd + n_used.saturating_mul(3 * n_ff + 2 * n_embd) + n_head.saturating_mul(n_ctx);
    let n_outputs = if session.n_outputs_max == 0 { n_tokens } else { session.n_outputs_max.into() };
    let compute =
        n_tokens.saturating_mul(activations).saturating_add(n_outputs.saturating_mul(n_vocab)).saturating_mul(4);
    let runtime = PROCESS_BYTES + n_vocab.saturating_mul(VOCABULARY_BYTES);
    let least = Needs { mapped, runtime: PROCESS_BYTES, gives_way: PROCESS_BYTES, ..Needs::default() };
    (least, Needs { repacked: quantised.fold(0, u64::saturating_add), kv, compute, runtime, gives_way: 0, ..least })
}

/// Bytes that plain products of a batch's rows use beside llama.cpp's buffers.
fn products_bytes(source: &ModelSource, session: &SessionOptions) -> u64 {
    compute::products_bytes(&source.map, source.gguf.n_expert_used_max().max(1).into(), session)
}

/// Bytes of a model that llama.cpp runs by itself, from the mapped file, beside another: llama.cpp's own estimate.
///
/// # Errors
/// llama.cpp refuses the model, without a reason.
pub(super) fn bytes_beside(gguf: &Gguf, options: &ModelOptions, expects: &SessionOptions) -> Result<u64, OpenError> {
    let needs = ask(gguf, options, expects, 0).ok_or_else(|| OpenError::Load {
        path: gguf.files[0].path.clone(),
        reason: "it does not say how much memory it needs".to_owned(),
    })?;
    let (_, most) = bounds(gguf, expects);
    let vocabulary = most.runtime.saturating_sub(PROCESS_BYTES);
    Ok([needs.mapped, needs.kv, needs.compute, vocabulary].into_iter().fold(0, u64::saturating_add))
}

/// llama.cpp's own estimate, plus `products`: it creates model and context without allocating them. `None` if that
/// fails.
fn ask(gguf: &Gguf, options: &ModelOptions, expects: &SessionOptions, products: u64) -> Option<Needs> {
    let overrides = kv_overrides(options);
    let mut no_devices = [std::ptr::null_mut()];
    // SAFETY: returns a struct of plain values.
    let mut params = unsafe { llama::llama_model_default_params() };
    params.devices = no_devices.as_mut_ptr();
    params.n_gpu_layers = 0;
    params.load_mode = llama::LLAMA_LOAD_MODE_NONE;
    params.no_alloc = true;
    params.use_extra_bufts = options.repack != Repack::Off;
    params.kv_overrides = overrides.as_ptr();
    params.load_mtp = options.mtp;
    // SAFETY: all that params point to is valid for the call.
    let model = unsafe { RawModel::load_path(&gguf.files[0].path, params) }.ok()?;
    let params = context_params(expects, &raw const NEVER_INTERRUPTED);
    // SAFETY: the model outlives the context.
    let context =
        unsafe { if options.mtp { RawContext::with_mtp(&model, params) } else { RawContext::new(&model, params) } };
    let context = context.ok()?;
    let MemoryUse { weights, repacked, kv, compute, mtp } = MemoryUse::of(&context).ok()?;
    // The vocabulary and other data that the real model also holds are resident now.
    let runtime = hobbit_core::stats::rss_bytes().max(PROCESS_BYTES);
    let compute = compute.saturating_add(products);
    let prompt_only =
        FixedCosts { compute, ..FixedCosts::default() }.prompt_only(expects.n_ubatch.min(expects.n_batch));
    let gives_way = prompt_only.saturating_add(runtime.saturating_sub(MemoryLimits::read().own));
    let compute = compute.saturating_add(mtp);
    Some(Needs { mapped: tensor_bytes(gguf).max(weights), repacked, kv, compute, runtime, gives_way })
}
