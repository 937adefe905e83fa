//! Opening a model: reads its header, chooses the run mode, places the layers, and shows llama.cpp the rest.

use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ggml_sys::llama;

use super::{Followed, Loan, Model, ModelInfo, Opened, Placed, Shared, WrapStore};
use crate::engine::cpu::expert_device::Device;
use crate::engine::error::OpenError;
use crate::engine::ggml;
use crate::engine::ggml::log;
use crate::engine::ggml::params::kv_overrides;
use crate::engine::ggml::raw::RawModel;
use crate::engine::model::needs::{HeaderNeeds, Unloaded};
use crate::engine::model::placement::Placement;
use crate::engine::model::run_mode;
use crate::engine::seam::calling::{self, while_loading};
use crate::engine::seam::experts::Experts;
use crate::engine::source::adapters::CheckedAdapters;
use crate::engine::source::cookie_stream::CookieStream;
use crate::engine::source::model_source::ModelSource;
use crate::engine::source::tables::Tables;
use crate::engine::source::validate;
use hobbit_core::gguf::Gguf;
use hobbit_core::options::{Idle, KernelChoice, KvValue, ModelOptions, Parts, Repack, RoutingOptions, VirtualExperts};
use hobbit_core::plan::RunMode;
use hobbit_core::predict::PredictorKind;
use hobbit_core::profile::{ProfileError, VirtualPlan, VirtualPlanError};
use hobbit_core::store::{Original, Store};
use hobbit_core::trace::{Routes, TraceError};

impl Model {
    /// Opens `path`, which may be any shard of a split model. Ordinary weights are read into memory; experts stay in
    /// the file.
    ///
    /// # Errors
    /// A damaged, incomplete or unsupported file ([`OpenError::Gguf`], [`OpenError::Load`]), an I/O error.
    pub fn open(path: &Path, options: &ModelOptions) -> Result<Model, OpenError> {
        load(path, options, None, |_| true)
    }

    /// As [`Model::open`]. `progress` is called with 0..=1 and stops loading by returning false.
    ///
    /// # Errors
    /// As [`Model::open`], and [`OpenError::Cancelled`].
    pub fn open_with(
        path: &Path,
        options: &ModelOptions,
        progress: impl FnMut(f32) -> bool,
    ) -> Result<Model, OpenError> {
        load(path, options, None, progress)
    }

    /// As [`Model::open`]; every read of an expert goes through the store that `wrap` makes of the real one.
    pub fn open_with_store(
        path: &Path,
        options: &ModelOptions,
        wrap: impl Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync + 'static,
    ) -> Result<Model, OpenError> {
        load(path, options, Some(Box::new(wrap)), |_| true)
    }
}

fn load(
    path: &Path,
    options: &ModelOptions,
    wrap_store: Option<WrapStore>,
    mut progress: impl FnMut(f32) -> bool,
) -> Result<Model, OpenError> {
    let started = Instant::now();
    let prepared = prepare(path, options, wrap_store.is_some(), &mut progress)?;
    let Prepared { mut source, experts, mut placement, adapters, run_mode, n_ctx, options, idle } = prepared;

    // Without memory for experts, llama.cpp may only use their addresses.
    let is_plain = experts.map().is_empty() || run_mode.is_passthrough();
    if options.check_tensors && !is_plain {
        let paths: Vec<&Path> = source.originals.iter().map(|file| file.path.as_path()).collect();
        validate::check_tensors(&source.gguf, experts.map(), &source.catalog, &paths, &mut progress)?;
    }
    source.catalog.retain_layers(|layer| experts.map().layer(layer).is_some());
    let gguf = &source.gguf;
    let unloaded = Unloaded {
        gguf,
        map: experts.map(),
        catalog: &source.catalog,
        tables: experts.tables(),
        placement: &placement,
        adapters: &adapters,
        is_exact: source.precisions.is_exact(),
        predictor: predictor(&options, !placement.devices.is_empty()),
        run_mode,
        n_expert_used: n_expert_used(gguf, &options),
        options: &options,
    };
    let mut needs = HeaderNeeds::of(&unloaded);
    let checked = needs.check_model(&unloaded, n_ctx);
    checked.map_err(|error| run_mode::or_whole(error, &source, experts.map(), &options, adapters.bytes()))?;
    let loading = Loading { gguf, originals: &source.originals, experts: &experts, run_mode, options: &options };
    let raw = loading.load(&mut placement, &mut progress)?;

    if !run_mode.is_passthrough() {
        // SAFETY: the model is live.
        experts.loaded(unsafe { llama::llama_model_n_layer(raw.as_ptr()) });
    }
    let adapters = adapters.load(&raw, gguf)?;
    let info = describe(&raw, gguf, &experts, &options);
    // An override may have taken layers away.
    source.catalog.retain_layers(|layer| experts.map().layer(layer).is_some());
    let mut shared = Shared {
        raw,
        adapters,
        experts,
        source,
        followed: Followed::default(),
        options,
        wrap_store,
        placed: Placed { run_mode, n_ctx, devices: placement.devices, needs, idle },
        opened: Opened { at: started, took: started.elapsed() },
        info,
        pieces: OnceLock::new(),
        loan: Loan::default(),
    };
    shared.finish()?;
    let model = Model { shared: Arc::new(shared) };
    if let Some((path, table)) = &model.shared.source.path_table {
        let checked = table.check_shape(&model.predict_shape());
        checked.map_err(|error| ProfileError::PathTable { path: path.clone(), error })?;
    }
    Ok(model)
}

/// A model whose headers are read and checked, and whose layers are placed.
struct Prepared {
    source: ModelSource,
    experts: Arc<Experts>,
    placement: Placement,
    adapters: CheckedAdapters,
    run_mode: RunMode,
    /// Context length for sessions that request none.
    n_ctx: u32,
    /// The options in effect.
    options: ModelOptions,
    /// Options that cannot act.
    idle: Vec<Idle>,
}

/// Reads the headers, chooses the run mode, and places the layers.
fn prepare(
    path: &Path,
    options: &ModelOptions,
    has_store: bool,
    progress: &mut impl FnMut(f32) -> bool,
) -> Result<Prepared, OpenError> {
    options.check_outputs(path)?;
    let mut source = ModelSource::open(path, options, progress)?;
    check_mtp(&source, options)?;
    validate::check_header(&source.gguf, options)?;
    validate::check_layers(&source.gguf)?;
    validate::check_tables_of_experts(&source.gguf, &source.map)?;
    ggml::ready();
    let adapters = CheckedAdapters::read(&options.adapters, &source.gguf)?;
    let (run_mode, n_ctx) = choose_run_mode(&source, has_store, options, &adapters)?;
    let map = std::mem::take(&mut source.map);
    let ModelSource { gguf, catalog, originals, .. } = &source;
    let is_plain = map.is_empty() || run_mode.is_passthrough();
    let mut tables = if is_plain { Tables::default() } else { Tables::of(gguf, options) };
    tables.open(originals)?;
    let placement = match is_plain {
        true => Placement::plain(options, gguf)?,
        false => Placement::new(options, gguf, &map, catalog, &tables)?,
    };
    let idle = options.idle(Parts {
        experts: !map.is_empty(),
        low: catalog.has_low(),
        n_devices: placement.devices.iter().filter(|part| part.n_layers > 0).count(),
        device_experts: placement.devices.iter().any(|part| !part.experts.is_empty()),
        passthrough: run_mode.is_passthrough(),
    });
    let experts = Arc::new(Experts::new(map, tables, placement.offloaded()));
    Device::get()?;
    let mut options = options.clone();
    options.caching = options.caching.acting();
    if idle.iter().any(|idle| idle.setting == "kernels") {
        options.kernels = KernelChoice::default();
    }
    if !is_plain {
        options.repack = match placement.devices.is_empty() {
            true => run_mode::rearranges(gguf, catalog, &options, n_ctx),
            false => Repack::Off,
        };
    }
    Ok(Prepared { source, experts, placement, adapters, run_mode, n_ctx, options, idle })
}

/// Checks that the model has the layers that draft-mtp needs, if it is wanted.
fn check_mtp(source: &ModelSource, options: &ModelOptions) -> Result<(), OpenError> {
    if !options.mtp || !source.is_pack && source.gguf.mtp_layers().is_some() {
        return Ok(());
    }
    let why =
        if source.is_pack { "a pack has these layers in pieces" } else { "the model has none that llama.cpp can run" };
    Err(OpenError::Speculation(format!("draft-mtp needs layers for multi-token prediction: {why}")))
}

/// The run mode, and the context length for sessions that request none. At the seam, adapters must leave the experts.
fn choose_run_mode(
    source: &ModelSource,
    has_store: bool,
    options: &ModelOptions,
    adapters: &CheckedAdapters,
) -> Result<(RunMode, u32), OpenError> {
    if source.map.is_empty() {
        return Ok((RunMode::Seam, 0));
    }
    let (run_mode, n_ctx) =
        if has_store { (RunMode::Seam, 0) } else { run_mode::choose(source, options, adapters.bytes())? };
    if !run_mode.is_passthrough() {
        adapters.leave_experts()?;
    }
    Ok((run_mode, n_ctx))
}

/// A model that llama.cpp is about to load.
struct Loading<'a> {
    gguf: &'a Gguf,
    originals: &'a [Original],
    experts: &'a Arc<Experts>,
    run_mode: RunMode,
    options: &'a ModelOptions,
}

impl Loading<'_> {
    fn load(&self, placement: &mut Placement, progress: &mut dyn FnMut(f32) -> bool) -> Result<RawModel, OpenError> {
        let is_plain = self.experts.map().is_empty() || self.run_mode.is_passthrough();
        let overrides = kv_overrides(self.options);
        let mut progress = Progress { callback: progress, cancelled: false };
        // SAFETY: returns a struct of plain values.
        let mut params = unsafe { llama::llama_model_default_params() };
        placement.apply(&mut params, !is_plain);
        params.check_tensors = self.options.check_tensors && is_plain;
        params.load_mtp = self.options.mtp;
        params.kv_overrides = overrides.as_ptr();
        params.progress_callback = Some(on_progress);
        params.progress_callback_user_data = (&raw mut progress).cast();

        log::clear_errors();
        let raw = if is_plain {
            let has_room = !matches!(self.run_mode, RunMode::Passthrough { repack: false, .. });
            params.use_extra_bufts = has_room && self.options.repack != Repack::Off;
            if self.run_mode.is_passthrough() && !placement.devices.is_empty() {
                // Mapped pages of weights that go to devices would count as this process's memory.
                params.load_mode = llama::LLAMA_LOAD_MODE_NONE;
            }
            // SAFETY: everything that params point to outlives the call.
            unsafe { RawModel::load_path(&self.gguf.files[0].path, params) }
        } else {
            // SAFETY: as above.
            unsafe { self.load_without_experts(params)? }
        };
        let cancelled = progress.cancelled;
        raw.map_err(|message| if cancelled { OpenError::Cancelled } else { self.refused(message) })
    }

    /// Loads a virtual file, in which experts have no bytes. The inner error is llama.cpp's.
    ///
    /// # Safety
    /// Everything that `params` point to outlives the call.
    unsafe fn load_without_experts(
        &self,
        mut params: llama::llama_model_params,
    ) -> Result<Result<RawModel, String>, OpenError> {
        let Self { gguf, originals, experts, options, .. } = *self;
        params.load_mode = llama::LLAMA_LOAD_MODE_NONE;
        // llama.cpp would map the file, and our stream is none.
        params.lazy_mode = llama::LLAMA_LAZY_MODE_OFF;
        params.use_extra_bufts = options.repack != Repack::Off;
        let resident: Vec<String> = experts.tables().resident_layers().map(|layer| format!("blk.{layer}.")).collect();
        let is_left = |tensor: u32, is_expert: bool| {
            let name = &gguf.tensors[tensor as usize].name;
            let is_resident = || resident.iter().any(|layer| name.starts_with(layer));
            experts.tables().contains(name) || is_expert && !is_resident()
        };
        let mut stream = CookieStream::open(gguf.virtual_file().leaving(is_left), originals)?;
        let reads_experts = || OpenError::Unsupported("this system's stdio reads experts at load".into());
        if !stream.skips_experts() {
            return Err(reads_experts());
        }
        let file = stream.as_file();
        // SAFETY: the stream outlives the call; by the caller.
        let raw = while_loading(experts, || unsafe { RawModel::load_stream(file, params) });
        if stream.expert_bytes_read() > 0 {
            return Err(reads_experts());
        }
        Ok(raw.map_err(|message| stream.error().unwrap_or(message)))
    }

    /// The error for a model that llama.cpp did not load, with the first reason there is.
    fn refused(&self, message: String) -> OpenError {
        let reasons = [message, calling::take_failure().unwrap_or_default(), log::take_errors()];
        let reason = reasons.into_iter().find(|reason| !reason.is_empty());
        let reason = reason.unwrap_or_else(|| "it gave no reason".to_owned());
        let path = self.gguf.files[0].path.clone();
        let keys: Vec<String> = self.options.kv_overrides.iter().map(|replaced| replaced.key.clone()).collect();
        if keys.is_empty() { OpenError::Load { path, reason } } else { OpenError::Overridden { path, keys, reason } }
    }
}

/// Architectures that use the router's choice before the products we compute, so that rewriting it there is too late.
const ROUTED_EARLIER: [(&str, &str); 2] =
    [("llama4", "weighs what its experts are given"), ("grovemoe", "chooses further experts by the router's choice")];

/// Architectures whose routers see another input than their experts, overwritten by the time these run: the router
/// hook copies it.
pub(crate) const ASKED_EARLIER: [&str; 2] = ["gemma4", "smallthinker"];

impl Shared {
    /// Checks the loaded model, and reads the routes and plans that it follows.
    fn finish(&mut self) -> Result<(), OpenError> {
        self.check_loaded()?;
        self.check_routing(&self.options.routing)?;
        if !self.options.routing.rerouting().is_off() {
            self.tell_layers_without_router();
        }
        let (routes, virtual_plan) = (self.followed_routes()?, self.read_virtual_plan()?);
        self.followed = Followed { routes, virtual_plan };
        Ok(())
    }

    /// Checks that the loaded files are those whose headers were read: llama.cpp itself opens models by name.
    fn check_loaded(&self) -> Result<(), OpenError> {
        for original in &self.source.originals {
            original.check()?;
            if self.experts.map().is_empty() || self.placed.run_mode.is_passthrough() {
                Original::open(&original.path, original.state)?;
            }
        }
        Ok(())
    }

    /// Number of experts that a token uses in a layer.
    pub(super) fn n_expert_used(&self, layer: u16) -> u32 {
        let replaced = replaced_n_expert_used(&self.options, &self.info.architecture);
        replaced.unwrap_or_else(|| self.source.gguf.n_expert_used(layer))
    }

    fn read_virtual_plan(&self) -> Result<Option<VirtualPlan>, OpenError> {
        let VirtualExperts::Plan(path) = &self.options.routing.virtual_experts else { return Ok(None) };
        let plan = VirtualPlan::read(path)?;
        let layers: Vec<(u16, u16)> =
            self.source.catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert)).collect();
        let checked = plan.check(&self.info.architecture, &layers, self.info.n_expert_used);
        checked.map_err(|reason| VirtualPlanError::Unusable { file: path.display().to_string(), reason })?;
        Ok(Some(plan))
    }

    /// Checks that this model can reroute tokens, if `routing` asks for it.
    pub(crate) fn check_routing(&self, routing: &RoutingOptions) -> Result<(), OpenError> {
        if routing.rerouting().is_off() && routing.target_latency.is_none() {
            return Ok(());
        }
        if self.options.routes.is_some() {
            return Err(OpenError::Routing("recorded routes have no scores of other experts".into()));
        }
        let architecture = &self.info.architecture;
        match ROUTED_EARLIER.iter().find(|(name, _)| name == architecture) {
            Some((_, reason)) => Err(OpenError::Routing(format!("{architecture} {reason}"))),
            None => Ok(()),
        }
    }

    /// Tells how many layers keep their experts, because these follow from the token alone.
    fn tell_layers_without_router(&self) {
        let is_table = |name: &str| name.ends_with(".ffn_gate_tid2eid.weight");
        let n = self.source.gguf.tensors.iter().filter(|tensor| is_table(&tensor.name)).count();
        if n > 0 && !self.placed.run_mode.is_passthrough() {
            log::notice(format_args!("{n} layers choose experts by the token alone: their tokens are not rerouted"));
        }
    }

    fn followed_routes(&self) -> Result<Option<(Arc<Routes>, f64)>, OpenError> {
        let Some(options) = &self.options.routes else { return Ok(None) };
        let architecture = &self.info.architecture;
        if let Some((_, reason)) = ROUTED_EARLIER.iter().find(|(name, _)| name == architecture) {
            let reason = format!("{architecture} {reason}");
            return Err(TraceError::Routes { path: options.trace.clone(), reason }.into());
        }
        let n_used = |layer: u16| self.n_expert_used(layer) as usize;
        let shape =
            self.source.catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert as usize, n_used(layer.layer)));
        let routes = Routes::open(&options.trace, &shape.collect::<Vec<_>>())?;
        Ok(Some((Arc::new(routes), options.recall)))
    }
}

/// The predictor in effect.
pub(super) fn predictor(options: &ModelOptions, has_devices: bool) -> PredictorKind {
    let default = if has_devices { PredictorKind::None } else { options.predictor() };
    options.caching.predictor.unwrap_or(default)
}

/// The largest number of experts that a token uses in a layer.
fn n_expert_used(gguf: &Gguf, options: &ModelOptions) -> u32 {
    replaced_n_expert_used(options, gguf.architecture()).unwrap_or_else(|| gguf.n_expert_used_max())
}

/// The number of experts that a token uses, if the caller replaces the header's.
fn replaced_n_expert_used(options: &ModelOptions, architecture: &str) -> Option<u32> {
    let key = format!("{architecture}.expert_used_count");
    match options.kv_overrides.iter().find(|chosen| chosen.key == key).map(|chosen| &chosen.value) {
        Some(KvValue::Int(n)) => u32::try_from(*n).ok(),
        _ => None,
    }
}

fn describe(model: &RawModel, gguf: &Gguf, experts: &Experts, options: &ModelOptions) -> ModelInfo {
    let architecture = gguf.architecture().to_owned();
    let (description, tensor_bytes, n_params) = model.describe();
    // SAFETY: the model is live, its template NUL-terminated or null.
    let (n_ctx_train, n_layer, chat_template) = unsafe {
        let template = llama::llama_model_chat_template(model.as_ptr(), ptr::null());
        (
            llama::llama_model_n_ctx_train(model.as_ptr()).max(0) as u32,
            llama::llama_model_n_layer(model.as_ptr()).max(0) as u32,
            template.as_ref().map(|text| CStr::from_ptr(text).to_string_lossy().into_owned()),
        )
    };
    ModelInfo {
        description,
        path: gguf.files[0].path.clone(),
        n_ctx_train,
        n_params,
        tensor_bytes,
        expert_bytes: experts.map().layers.iter().map(|layer| layer.bytes()).sum(),
        n_layer,
        n_expert: experts.map().layers.iter().map(|layer| layer.n_expert).max().unwrap_or(0),
        n_expert_used: n_expert_used(gguf, options),
        architecture,
        chat_template,
    }
}

struct Progress<'a> {
    callback: &'a mut dyn FnMut(f32) -> bool,
    cancelled: bool,
}

unsafe extern "C" fn on_progress(progress: f32, state: *mut c_void) -> bool {
    // SAFETY: `Loading::load` passes its `Progress`, alive for the whole load, from one thread.
    let state = unsafe { &mut *state.cast::<Progress<'_>>() };
    let go_on = catch_unwind(AssertUnwindSafe(|| (state.callback)(progress))).unwrap_or(false);
    state.cancelled |= !go_on;
    go_on
}
