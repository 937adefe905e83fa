//! Memory that a model needs, before it is loaded: bounds from its header, llama.cpp's own estimate, and the check that
//! refuses a budget while nothing is loaded.

use ggml_sys::llama;

use crate::engine::cpu::backend;
use crate::engine::error::OpenError;
use crate::engine::ggml::context::Context;
use crate::engine::ggml::memory_use::{MemoryUse, trim_heap};
use crate::engine::ggml::params::{NEVER_INTERRUPTED, context_params, kv_overrides};
use crate::engine::ggml::raw::RawModel;
use crate::engine::memory::gates;
use crate::engine::model::placement::Placement;
use crate::engine::source::adapters::{CheckedAdapters, graph_bytes};
use crate::engine::source::cookie_stream::CookieStream;
use crate::engine::source::tables::{self, Tables};
use hobbit_core::cache::policy;
use hobbit_core::gguf::adapter::LoraSummary;
use hobbit_core::gguf::{Catalog, ExpertMap, Gguf};
use hobbit_core::options::{KvType, ModelOptions, Repack, SessionOptions, VirtualExperts};
use hobbit_core::plan::{
    CONTEXT_TOKENS_MIN, ExpertCache, FixedCosts, MemoryLimits, MemoryPlan, Needs, PlanError, PlanInput, RunMode,
    pool_specs, pools_of, staging_of,
};
use hobbit_core::predict::PredictorKind;
use hobbit_core::stats::rss_bytes;
use hobbit_core::store::{Original, PLANE_BUFFERS_BYTES};

/// Host memory for code, allocator and thread stacks, in bytes.
pub(crate) const PROCESS_BYTES: u64 = 24 << 20;

/// Step, in bytes, to which the process's memory is rounded up if a run must be repeatable.
const PROCESS_BYTES_STEP: u64 = 64 << 20;

/// Bytes by which a process that has loaded a model may be larger than one that has estimated it.
const LOADED_BYTES: u64 = 4 << 20;

/// Bytes per token of the vocabulary: text, score, type, and the tokenizer's data. An upper estimate.
const VOCABULARY_BYTES: u64 = 400;

/// Most bytes of a vocabulary and recurrent states for which llama.cpp is asked about a model that certainly does not
/// fit: its estimate takes them.
const ESTIMATE_BYTES_MAX: u64 = 64 << 20;

/// A model before it is loaded.
pub(crate) struct Unloaded<'a> {
    pub(crate) gguf: &'a Gguf,
    pub(crate) map: &'a ExpertMap,
    pub(crate) catalog: &'a Catalog,
    pub(crate) tables: &'a Tables,
    pub(crate) placement: &'a Placement,
    pub(crate) adapters: &'a CheckedAdapters,
    pub(crate) is_exact: bool,
    pub(crate) predictor: PredictorKind,
    pub(crate) run_mode: RunMode,
    pub(crate) n_expert_used: u32,
    pub(crate) options: &'a ModelOptions,
}

/// A model's memory, as far as its files' headers tell.
pub(crate) struct HeaderNeeds {
    /// Input of a plan without a context. `fixed` are lower bounds.
    input: PlanInput,
    /// Bytes of weights in llama.cpp's estimate that stay in the files.
    in_files: u64,
    /// Whether all of a context is in host memory, and stays there.
    counts_contexts: bool,
    is_deterministic: bool,
    /// Buffers that join planes or rearrange experts.
    buffers: u64,
    pub(crate) adapters: u64,
    lora: Vec<LoraSummary>,
    n_vocab: u64,
    /// Bytes of the policy's tables and of copies of routers.
    pub(crate) prediction: u64,
    /// A session that has been checked.
    checked: Option<SessionOptions>,
}

impl HeaderNeeds {
    pub(crate) fn of(model: &Unloaded) -> Self {
        let Unloaded { gguf, map, tables, placement, adapters, run_mode, options, .. } = *model;
        let is_seam = !map.is_empty() && !run_mode.is_passthrough();
        let has_devices = !placement.devices.is_empty();
        let mut catalog = model.catalog.clone();
        if model.is_exact {
            catalog.drop_low();
        }
        let pools = if is_seam { pool_specs(&pools_of(&catalog), &catalog) } else { Vec::new() };
        let experts = map.layers.iter().filter(|layer| placement.is_on_host(layer.layer.into()));
        let experts = experts.fold(0, |sum: u64, layer| sum.saturating_add(layer.bytes()));
        // On devices the embeddings are not counted.
        let rows = if has_devices { 0 } else { tables.row_bytes() };
        let in_files = if is_seam { experts.saturating_add(rows) } else { 0 };
        let weights = host_bytes(gguf, placement, options).saturating_sub(in_files);
        // A plan of virtual experts may be smaller than the cache, and devices need none on the host.
        let has_plan = matches!(options.routing.virtual_experts, VirtualExperts::Plan(_));
        let expert_cache = if has_plan || has_devices { ExpertCache::Auto } else { options.expert_cache };
        let gives_back = matches!(run_mode, RunMode::Passthrough { gives_back: true, .. });
        let has_buffers = is_seam && (catalog.has_planes() || options.repack == Repack::On);
        Self {
            input: PlanInput {
                budget: options.budget,
                limits: MemoryLimits::default(),
                overcommit: options.overcommit,
                expert_cache,
                low_share: options.low_share,
                fixed: FixedCosts { weights, ..FixedCosts::default() },
                prompt_only: 0,
                margin: run_mode.is_passthrough().then_some(0),
                n_expert_used: model.n_expert_used,
                staging: staging_of(&pools, &catalog),
                pools,
            },
            in_files,
            counts_contexts: !has_devices && !gives_back,
            is_deterministic: options.precision.deterministic,
            buffers: if has_buffers { PLANE_BUFFERS_BYTES } else { 0 },
            adapters: adapters.bytes(),
            lora: adapters.summaries().to_vec(),
            n_vocab: n_vocab(gguf),
            prediction: if is_seam {
                prediction_bytes(gguf, &catalog, model.predictor, options, has_devices)
            } else {
                0
            },
            checked: None,
        }
    }

    /// Bytes that a session takes besides llama.cpp's memory and that of the process.
    pub(crate) fn beside(&self, map: &ExpertMap, session: &SessionOptions, options: &ModelOptions) -> u64 {
        let vocabulary = vocabulary_bytes(self.n_vocab, session);
        let scratch = backend::products_bytes(map, self.input.n_expert_used.into(), session);
        let graph = graph_bytes(&self.lora, session);
        [scratch, self.buffers, graph, vocabulary, options.reserved_bytes].into_iter().fold(0, u64::saturating_add)
    }

    /// Memory that the process holds, of which `resident` are measured.
    pub(crate) fn process_bytes(&self, resident: u64) -> u64 {
        let resident = resident.max(PROCESS_BYTES);
        // The last pages differ from run to run, and one slot more or less may change a text.
        if self.is_deterministic { resident.next_multiple_of(PROCESS_BYTES_STEP) } else { resident }
    }

    /// Checks that the model fits with the session that its options expect, as far as they name one.
    ///
    /// # Errors
    /// [`PlanError`].
    pub(crate) fn check_model(&mut self, model: &Unloaded, n_ctx: u32) -> Result<(), PlanError> {
        let Unloaded { gguf, map, options, run_mode, .. } = *model;
        let expects = SessionOptions { n_ctx: options.expects.n_ctx.max(n_ctx), ..options.expects.clone() };
        if run_mode.is_passthrough() {
            // It was chosen because this session fits.
            self.checked = Some(expects);
            return Ok(());
        }
        if options.expects == SessionOptions::default() {
            let mut least = self.input.clone();
            least.limits = MemoryLimits::read();
            let program = options.reserved_bytes.saturating_add(options.lent_bytes);
            least.fixed.runtime = self.process_bytes(self.adapters).saturating_add(program);
            return MemoryPlan::check(&least, least.fixed);
        }
        // A default context gives way.
        let trained = gguf.metadata.get_u64(&format!("{}.context_length", gguf.architecture())).unwrap_or(0);
        let least = if trained > CONTEXT_TOKENS_MIN.into() { CONTEXT_TOKENS_MIN } else { 0 };
        let n_ctx = if options.expects.n_ctx == 0 { least } else { options.expects.n_ctx };
        let expects = SessionOptions { n_ctx, ..expects };
        self.check(gguf, map, options, &expects, 0)?;
        self.checked = Some(expects);
        Ok(())
    }

    /// Checks that a session of the loaded model fits, before its context is made.
    ///
    /// # Errors
    /// [`PlanError`].
    pub(crate) fn check_session(
        &self,
        gguf: &Gguf,
        map: &ExpertMap,
        options: &ModelOptions,
        session: &SessionOptions,
    ) -> Result<(), PlanError> {
        let is_checked = |checked: &SessionOptions| {
            *session == SessionOptions { checkpoints: session.checkpoints, ..checked.clone() }
        };
        if self.checked.as_ref().is_some_and(is_checked) {
            return Ok(());
        }
        self.check(gguf, map, options, session, self.input.fixed.weights.saturating_add(self.adapters))
    }

    /// `loaded` bytes are in memory already.
    fn check(
        &self,
        gguf: &Gguf,
        map: &ExpertMap,
        options: &ModelOptions,
        session: &SessionOptions,
        loaded: u64,
    ) -> Result<(), PlanError> {
        let beside = self.beside(map, session, options).saturating_add(options.lent_bytes);
        let mut least = self.input.clone();
        least.limits = MemoryLimits::read();
        if !self.counts_contexts {
            return MemoryPlan::check(&least, least.fixed);
        }
        least.fixed.runtime = self.process_bytes(self.adapters).saturating_add(beside);
        least.fixed.prediction = self.prediction;
        let (_, most) = bounds(gguf, session);
        let n_contexts = if options.mtp { 2 } else { 1 };
        let most = FixedCosts {
            kv: most.kv.saturating_mul(n_contexts),
            compute: most.compute.saturating_mul(n_contexts),
            runtime: self.process_bytes(most.runtime.saturating_add(self.adapters)).saturating_add(beside),
            ..least.fixed
        };
        if MemoryPlan::check(&PlanInput { fixed: most, ..least.clone() }, most).is_ok() {
            return Ok(());
        }
        // The estimate takes this memory.
        let taken = (self.n_vocab.saturating_mul(VOCABULARY_BYTES)).saturating_add(state_bytes(gguf, session));
        if taken > ESTIMATE_BYTES_MAX && MemoryPlan::check(&least, least.fixed).is_err() {
            return MemoryPlan::check(&least, FixedCosts { kv: most.kv, ..least.fixed });
        }
        let Some(Estimate { host, resident, .. }) = estimate(gguf, options, session, None) else {
            return MemoryPlan::check(&least, least.fixed);
        };
        let MemoryUse { weights, kv, compute, mtp, .. } = host;
        // Some tensors of a file may be unused.
        least.fixed.weights = least.fixed.weights.min(weights.saturating_sub(self.in_files));
        (least.fixed.kv, least.fixed.compute) = (kv, compute);
        least.fixed.runtime = least.fixed.runtime.saturating_add(mtp);
        let resident = resident.saturating_sub(loaded);
        let process = self.process_bytes(resident.saturating_add(self.adapters).saturating_add(LOADED_BYTES));
        let runtime = process.saturating_add(beside).saturating_add(mtp);
        MemoryPlan::check(&least, FixedCosts { runtime, ..least.fixed })
    }
}

/// Bytes of tensors that are certainly in host memory, experts included, if none stay in the files.
fn host_bytes(gguf: &Gguf, placement: &Placement, options: &ModelOptions) -> u64 {
    let has_devices = !placement.devices.is_empty();
    if has_devices && !options.device.override_tensors.is_empty() {
        return 0;
    }
    let n_run = if options.mtp { u64::MAX } else { tables::n_layers_run(gguf, options) };
    let is_there = |name: &str| match name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()) {
        Some(layer) => layer.parse().is_ok_and(|layer: u64| layer < n_run && placement.is_on_host(layer)),
        None => !has_devices,
    };
    let there = gguf.tensors.iter().filter(|tensor| is_there(&tensor.name));
    there.fold(0, |sum, tensor| sum.saturating_add(tensor.extent.len))
}

/// Bytes for the policy's tables and for copies of routers, which scores and prediction need.
fn prediction_bytes(
    gguf: &Gguf,
    catalog: &Catalog,
    predictor: PredictorKind,
    options: &ModelOptions,
    has_devices: bool,
) -> u64 {
    let policy = options.caching.policy;
    let layers = || catalog.layers.iter();
    let tables: u64 = layers().map(|layer| policy::table_bytes(policy, layer.n_expert)).sum();
    let asks_routers = policy.needs_scores() || predictor.needs_scores() || options.trace.is_some();
    // With devices, llama.cpp decides which routers are on them, so every layer counts.
    let copied = gates::copied_bytes(gguf, layers().map(|layer| layer.layer), |_| has_devices);
    tables + if asks_routers { copied } else { 0 }
}

pub(crate) fn tensor_bytes(gguf: &Gguf) -> u64 {
    gguf.tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.extent.len))
}

fn n_vocab(gguf: &Gguf) -> u64 {
    gguf.tensor("token_embd.weight").and_then(|tensor| tensor.dims.get(1).copied()).unwrap_or(0)
}

/// Bytes that come later for each token of the vocabulary. The samplers of all sequences: each keeps its candidates,
/// for probabilities a copy of the logits, and has a row of llama.cpp's, whose buffer grows when more rows are asked
/// for than there are sequences.
fn vocabulary_bytes(n_vocab: u64, options: &SessionOptions) -> u64 {
    let candidate = (size_of::<llama::llama_token_data>() + 2 * size_of::<f32>()) as u64;
    let n_rows = u64::from(options.n_outputs_max.saturating_sub(options.n_seq_max).min(options.n_batch));
    let rows = n_rows.saturating_mul(size_of::<f32>() as u64);
    u64::from(options.n_seq_max.max(1)).saturating_mul(candidate).saturating_add(rows).saturating_mul(n_vocab)
}

/// Bytes of the recurrent states of all sequences.
fn state_bytes(gguf: &Gguf, session: &SessionOptions) -> u64 {
    let n_states = u64::from(session.n_seq_max.max(1)) * (1 + u64::from(session.rollback));
    gguf.state_elements().saturating_mul(n_states).saturating_mul(4)
}

/// Lower and approximate upper bounds of a model's needs, from its header.
pub(crate) fn bounds(gguf: &Gguf, session: &SessionOptions) -> (Needs, Needs) {
    let architecture = gguf.architecture();
    let number = |key: &str| gguf.metadata.get_u64(&format!("{architecture}.{key}"));
    let mapped = tensor_bytes(gguf);
    let quantised = gguf.tensors.iter().filter(|tensor| tensor.dtype.is_quantized()).map(|tensor| tensor.extent.len);
    let n_vocab = n_vocab(gguf);
    let n_embd = number("embedding_length").unwrap_or(0);
    let n_head = number("attention.head_count").unwrap_or(n_embd);
    let n_ctx = if session.n_ctx == 0 { number("context_length").unwrap_or(0) } else { session.n_ctx.into() };
    // Sequences divide the context unless they share it; llama.cpp pads each part to 256 tokens.
    let n_parts = if session.kv_unified { 1 } else { u64::from(session.n_seq_max.max(1)) };
    let n_ctx = n_ctx.min(u32::MAX.into()).next_multiple_of(256 * n_parts);
    // The wider of both types; at most 4 bytes.
    let width = if [session.type_k, session.type_v].contains(&KvType::F32) { 4 } else { 2 };
    let kv = [gguf.kv_elements(), n_ctx, width].into_iter().fold(1, u64::saturating_mul);
    let kv = kv.saturating_add(state_bytes(gguf, session));
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

/// Bytes that a session uses beside llama.cpp's buffers where llama.cpp runs the model by itself: plain products of a
/// batch's rows, and samplers.
pub(crate) fn beside_passthrough(gguf: &Gguf, map: &ExpertMap, session: &SessionOptions) -> u64 {
    let scratch = backend::products_bytes(map, gguf.n_expert_used_max().max(1).into(), session);
    scratch.saturating_add(vocabulary_bytes(n_vocab(gguf), session))
}

/// Bytes of a model that llama.cpp runs by itself, from the mapped file, beside another: llama.cpp's own estimate.
///
/// # Errors
/// llama.cpp refuses the model, without a reason.
pub(crate) fn bytes_beside(gguf: &Gguf, options: &ModelOptions, expects: &SessionOptions) -> Result<u64, OpenError> {
    let needs = ask(gguf, options, expects, 0).ok_or_else(|| OpenError::Load {
        path: gguf.files[0].path.clone(),
        reason: "it does not say how much memory it needs".to_owned(),
    })?;
    let (_, most) = bounds(gguf, expects);
    let vocabulary = most.runtime.saturating_sub(PROCESS_BYTES);
    Ok([needs.mapped, needs.kv, needs.compute, vocabulary].into_iter().fold(0, u64::saturating_add))
}

/// llama.cpp's own estimate for a model that it runs by itself, plus `products`. `None` if it fails.
pub(crate) fn ask(gguf: &Gguf, options: &ModelOptions, expects: &SessionOptions, products: u64) -> Option<Needs> {
    let Estimate { host: MemoryUse { weights, repacked, kv, compute, mtp, .. }, resident, .. } =
        estimate(gguf, options, expects, None)?;
    let runtime = resident.max(PROCESS_BYTES);
    let compute = compute.saturating_add(products);
    let prompt_only =
        FixedCosts { compute, ..FixedCosts::default() }.prompt_only(expects.n_ubatch.min(expects.n_batch));
    let gives_way = prompt_only.saturating_add(runtime.saturating_sub(MemoryLimits::read().own));
    let compute = compute.saturating_add(mtp);
    Some(Needs { mapped: tensor_bytes(gguf).max(weights), repacked, kv, compute, runtime, gives_way })
}

/// llama.cpp's own estimate for a model that it runs by itself on devices: host memory beside `products`, and bytes on
/// each device. `None` if it fails.
pub(crate) fn ask_on_devices(
    gguf: &Gguf,
    options: &ModelOptions,
    expects: &SessionOptions,
    (placement, products): (&mut Placement, u64),
) -> Option<(Needs, Vec<(llama::ggml_backend_dev_t, u64)>)> {
    let Estimate { host: MemoryUse { weights, kv, compute, mtp, .. }, devices, resident } =
        estimate(gguf, options, expects, Some(placement))?;
    let compute = compute.saturating_add(products).saturating_add(mtp);
    let runtime = resident.max(PROCESS_BYTES);
    Some((Needs { mapped: weights, kv, compute, runtime, ..Needs::default() }, devices))
}

/// llama.cpp's memory for a model and a context, in bytes.
struct Estimate {
    host: MemoryUse,
    devices: Vec<(llama::ggml_backend_dev_t, u64)>,
    /// What the process holds with the vocabulary.
    resident: u64,
}

/// Has llama.cpp create a model and a context without allocating them, on the CPU alone without a placement. `None` if
/// that fails.
fn estimate(
    gguf: &Gguf,
    options: &ModelOptions,
    session: &SessionOptions,
    placement: Option<&mut Placement>,
) -> Option<Estimate> {
    let overrides = kv_overrides(options);
    let mut no_devices = [std::ptr::null_mut()];
    // SAFETY: returns a struct of plain values.
    let mut params = unsafe { llama::llama_model_default_params() };
    params.devices = no_devices.as_mut_ptr();
    params.n_gpu_layers = 0;
    if let Some(placement) = placement {
        placement.apply(&mut params, false);
    }
    params.load_mode = llama::LLAMA_LOAD_MODE_NONE;
    params.lazy_mode = llama::LLAMA_LAZY_MODE_OFF;
    params.no_alloc = true;
    params.use_extra_bufts = options.repack != Repack::Off;
    params.kv_overrides = overrides.as_ptr();
    params.load_mtp = options.mtp;
    let originals: Result<Vec<Original>, _> =
        gguf.files.iter().map(|file| Original::open(&file.path, file.state)).collect();
    // A pack has no name by which llama.cpp could open the model.
    let mut stream = CookieStream::open(gguf.virtual_file(), &originals.ok()?).ok()?;
    // SAFETY: the stream, and all that params point to, outlive the call.
    let model = unsafe { RawModel::load_stream(stream.as_file(), params) }.ok()?;
    drop(stream);
    let params = context_params(session, &raw const NEVER_INTERRUPTED);
    // SAFETY: the model outlives the context.
    let context = unsafe { if options.mtp { Context::with_mtp(&model, params) } else { Context::new(&model, params) } };
    let context = context.ok()?;
    let (host, devices) = (MemoryUse::of_estimate(&context).ok()?, MemoryUse::by_device(&context).ok()?);
    trim_heap();
    Some(Estimate { host, devices, resident: rss_bytes() })
}
