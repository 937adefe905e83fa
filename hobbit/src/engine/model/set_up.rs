//! From a loaded model and a context to slots: measures llama.cpp's memory, plans the rest, allocates it and starts the
//! loader.

mod costs;
mod devices;
mod report;

use std::collections::BTreeMap;
use std::time::Duration;

use ggml_sys::llama::ggml_backend_dev_t;

use crate::engine::error::OpenError;
use crate::engine::ggml;
use crate::engine::ggml::log;
use crate::engine::ggml::memory_use::MemoryUse;
use crate::engine::ggml::raw::RawContext;
use crate::engine::memory::device_tier::{self, Tier};
use crate::engine::memory::host_reads::{HostReads, Interleavings, layout_of};
use crate::engine::memory::pinned::{HostMemory, Reach};
use crate::engine::memory::pools::{Pool, cache_of, pools_of};
use crate::engine::memory::recorder::Recorder;
use crate::engine::memory::state_file::StateFile;
use crate::engine::memory::tiers::{Description, Lending, Routers, Tiers};
use crate::engine::model::Model;
use crate::engine::model::needs::{beside_passthrough, staging_of};
pub use costs::{MemorySignal, take_memory_signal, watch_memory_signals};
use costs::{checkpoint_bytes, fixed_costs, runtime_bytes, scratch_bytes};
use hobbit_core::cache::ModelMark;
use hobbit_core::expert::Precision;
use hobbit_core::load::prefetch::{Governor, PrefetchOptions, Prefetcher};
use hobbit_core::load::{Loader, LoaderOptions};
use hobbit_core::options::{
    DeviceOptions, PrecisionMode, Prefetch, Repack, RoutingOptions, SessionOptions, VirtualExperts,
};
use hobbit_core::plan::{ExpertCache, FixedCosts, MemoryLimits, MemoryPlan, PlanInput, PoolSpec, RunMode, StagingWish};
use hobbit_core::predict::{self, PredictorKind};
use hobbit_core::profile::VirtualPlanError;
use hobbit_core::residency::{
    self, Latency, Lookahead, LookaheadOptions, Observer, Precisions, Residency, StagingOptions, VirtualExpertsOptions,
};
use hobbit_core::route::Thresholds;
use hobbit_core::stats::CacheSlots;
use hobbit_core::store::{self, Arena, BLOCK_BYTES, StoreKind, choose, probe};
use hobbit_core::trace::Walk;

/// Plans memory for the model's first session and allocates it; later sessions share it.
pub(crate) fn set_up(model: &Model, options: &SessionOptions, context: &RawContext) -> Result<Description, OpenError> {
    let shared = &model.shared;
    let mut memories = shared.experts.memories();
    if let Some(memories) = memories.as_ref() {
        return Ok(memories.description.clone());
    }
    if let RunMode::Passthrough { repack, gives_back } = shared.run_mode {
        return passthrough(model, options, context, (repack, gives_back));
    }
    let mut catalog = shared.catalog.clone();
    if shared.precisions.is_exact() {
        catalog.drop_low();
    }
    let (mut tiers, on_devices) = devices::set_up(model, &catalog, scratch_bytes(model, options))?;
    if tiers.iter().any(Tier::is_unified) {
        catalog.make_room(|slice| device_tier::padding_bytes(slice) as u64);
    }
    let mut pools = pools_of(&catalog);
    let specs: Vec<PoolSpec> = pools.iter().map(|pool| pool.spec(&catalog)).collect();
    let copies = !on_devices && tiers.iter().any(|tier| tier.has_layers && !tier.is_unified());
    let staging = staging_of(&specs, &catalog);
    // Devices may have taken their memory from the host's.
    let limits = MemoryLimits::read();
    // The host only passes on experts that the devices keep.
    let expert_cache = match shared.options.expert_cache {
        ExpertCache::Auto if on_devices => ExpertCache::Bytes(0),
        wanted => wanted,
    };
    // If devices have a slot for every expert, virtual experts never change.
    let changes = shared.options.routing.virtual_experts != VirtualExperts::Off && !on_devices;
    if changes && tiers.iter().any(|tier| tier.has_layers) && expert_cache == ExpertCache::Bytes(0) {
        let reason = "virtual experts change in the host's memory, from where a device has them, and the expert cache \
                      has no room there";
        return Err(OpenError::Routing(reason.to_owned()));
    }
    let high_slots = planned_slots(model, &pools, &specs)?;
    let expert_cache = high_slots.as_ref().map_or(expert_cache, |(bytes, _)| ExpertCache::Bytes(*bytes));
    let mut checkpoint_bytes = checkpoint_bytes(model, options);
    let mut fixed = fixed_costs(model, options, context)?;
    let lent_bytes = shared.options.lent_bytes;
    fixed.runtime += checkpoint_bytes + lent_bytes;
    // Traces and texts of deterministic runs go by a fixed number of slots.
    let is_fixed = shared.precisions.options.deterministic || shared.options.trace.is_some() || !tiers.is_empty();
    let follows = !is_fixed && cfg!(target_os = "linux");
    let prompt_only = if follows { fixed.prompt_only(options.n_ubatch.min(options.n_batch)) } else { 0 };
    let mut input = PlanInput {
        budget: shared.options.budget,
        limits: limits.clone(),
        overcommit: shared.options.overcommit,
        expert_cache,
        low_share: shared.options.low_share,
        fixed,
        prompt_only,
        margin: None,
        pools: specs,
        n_expert_used: model.info().n_expert_used,
        staging,
    };
    let mut plan = match MemoryPlan::new(&input) {
        // The model itself comes first.
        Err(_) if checkpoint_bytes > 0 => {
            input.fixed.runtime -= std::mem::take(&mut checkpoint_bytes);
            MemoryPlan::new(&input)?
        }
        plan => plan?,
    };
    let lends = tiers.is_empty() && high_slots.is_none() && !catalog.layers.is_empty();
    let staging_when_lent = plan.staging;
    if lends && lent_bytes > 0 {
        input.fixed.runtime -= lent_bytes;
        // Staging cannot shrink.
        input.staging.wanted = input.staging.wanted.min(plan.staging_slots.max(input.staging.min));
        plan = MemoryPlan::new(&input)?;
    }
    let (mut precisions, mut routing) = (shared.precisions.clone(), shared.options.routing.clone());
    if let Some(bound) = &shared.options.loss_bound {
        let mut high = catalog.clone();
        high.drop_low();
        let high_pools = pools_of(&high);
        let specs = high_pools.iter().map(|pool| pool.spec(&high)).collect();
        let high_plan = MemoryPlan::new(&PlanInput { pools: specs, ..input })?;
        let chosen = if on_devices || high_plan.is_fully_resident() && !copies {
            bound.exact()
        } else {
            bound.choose(&report::here(&high_plan, &catalog, &tiers))?
        };
        routing = RoutingOptions { loss_bound: Some(chosen.words), ..routing.with(chosen.mix) };
        shared.check_routing(&routing)?;
        precisions.thresholds = chosen.mix.thresholds();
        if !chosen.mix.uses_low() && !precisions.is_exact() && tiers.is_empty() {
            // Slots of low versions would stay empty.
            precisions.mode = PrecisionMode::Exact;
            (catalog, pools, plan) = (high, high_pools, high_plan);
        }
    }
    if let Some((_, slots)) = high_slots.filter(|_| !plan.is_fully_resident()) {
        plan.set_high_slots(&slots);
    }
    // Nothing is ever evicted, read twice or copied twice: low precision would save one read per expert. Copies from
    // the host to a device are saved at every miss.
    let saves_copies = copies && !precisions.is_exact() && plan.add_low_slots(expert_cache, staging);
    if on_devices || plan.is_fully_resident() && !saves_copies {
        precisions.mode = PrecisionMode::Exact;
        catalog.drop_low();
    }
    if on_devices {
        // Nothing is read twice, however few slots the host has.
        plan.warning = None;
    }
    let spare = match lends {
        // Experts without a slot need staging.
        true => plan.unused().saturating_sub(staging_when_lent.saturating_sub(plan.staging)),
        false => plan.unused().saturating_add(lent_bytes),
    };
    let lending = Lending { spare, most: if lends { plan.expert_cache } else { 0 }, ..Lending::default() };
    let precision = report::precision(model, (&precisions, &routing), &plan, &catalog, &tiers);
    if catalog.layers.is_empty() {
        let io_choice = "none: a dense model, run as plain llama.cpp".to_owned();
        let devices = devices::reports(&shared.placement, &[]);
        let caching = model.caching_report();
        let _ = shared.spare.set(spare);
        return Ok(Description { plan, io_choice, precision, caching, devices, warm_start: None, checkpoint_bytes });
    }

    let host = HostSlots::of(&tiers, &shared.options.device);
    let mut host_memory = Vec::new();
    // Memory that is not touched costs nothing.
    let most = plan.decode.as_ref().map_or(&plan.pools, |decode| &decode.pools);
    for (pool, planned) in pools.iter().zip(most) {
        let stride = catalog.classes[usize::from(pool.class)].stride as usize;
        host_memory.push(host.memory(planned.n_slots as usize * stride, stride)?);
    }
    let staging_stride = plan.staging_slot_bytes.max(BLOCK_BYTES) as usize;
    // Without any cache, the engine runs at its smallest: everything passes through one slot.
    let n_staging = match shared.options.expert_cache {
        ExpertCache::Bytes(0) => 1,
        _ => plan.staging_slots as usize,
    };
    host_memory.push(host.memory(n_staging * staging_stride, staging_stride)?);
    host.tell_of_refusal(&host_memory);
    tiers.iter_mut().for_each(|tier| host_memory.iter_mut().for_each(|memory| tier.show(memory)));

    let ours = plan.budget - plan.unused();
    let conditions = store::Conditions {
        expert_bytes: catalog.stored_bytes().saturating_sub(plan.expert_cache),
        page_cache_bytes_available: limits.budget().map_or(0, |(bytes, _)| bytes.saturating_sub(ours)),
        direct: shared.originals.iter().try_for_each(|file| {
            match host_memory.iter_mut().find(|own| own.dev.is_some()) {
                Some(own) => probe::direct_into(&file.path, &mut own.arena),
                None => probe::direct(&file.path),
            }
        }),
        io_uring: probe::io_uring(),
    };
    let choice = choose(shared.options.io, &conditions);
    let mut store = store::open_originals(choice.kind, &shared.originals)?;
    if let Some(wrap) = &shared.wrap_store {
        store = wrap(store);
    }

    let plan_bytes = plan.expert_cache;
    let mut arenas: Vec<Arena> = host_memory.into_iter().map(|memory| memory.arena).collect();
    let staging_memory = arenas.pop().expect("staging was put last");
    let devices = devices::reports(&shared.placement, &tiers);
    let of_prompts = cache_of(&model.division(), &catalog, &pools, &plan.pools);
    let host_slots = CacheSlots::of("the host", &of_prompts, catalog.layers.iter().map(|layer| layer.layer));
    let shares = of_prompts.pools();
    let prompt_slots = shares.shares().map(|id| (id, shares.slots_of_share(id).len() as u32)).collect();
    let (cache, prompt_slots) = match &plan.decode {
        Some(decode) => (cache_of(&model.division(), &catalog, &pools, &decode.pools), prompt_slots),
        None => (of_prompts, BTreeMap::new()),
    };
    let mut caching = model.caching_report();
    caching.slots_by_layer.extend(host_slots);
    caching.slots_by_layer.extend(tiers.iter().filter_map(Tier::slots_by_layer));
    // Devices need experts in the file's byte order, and combining two planes does, too.
    let is_rearranged = shared.options.repack == Repack::On && tiers.is_empty() && !catalog.has_planes();
    let interleavings = if is_rearranged { Interleavings::of(&catalog) } else { Interleavings::default() };
    let how = if interleavings.is_plain() { "" } else { "; experts rearranged for this CPU" };
    let io_choice = format!("{choice}{how}{}", shared.experts.tables().describe());
    let description = Description { plan, io_choice, precision, caching, devices, warm_start: None, checkpoint_bytes };
    let recorder = match &shared.options.trace {
        Some(path) => {
            Recorder::create(path, &report::trace_header(model, &catalog, &cache, (&precisions, &routing), plan_bytes))?
        }
        None => Recorder::default(),
    };
    // The completion time of a prefetch depends on the speed of reads, and promotions on the link's idle time.
    let predictor = model.predictor();
    let looks_ahead = predictor != PredictorKind::None && !precisions.options.deterministic;
    if !precisions.options.deterministic {
        let prefetches = looks_ahead.then(|| prefetch_options(model, &precisions));
        let promotes = !routing.is_off() || !precisions.is_exact() && precisions.options.upgrade;
        tiers.iter_mut().for_each(|tier| tier.copy_ahead(prefetches, promotes));
    }
    // The host does not see delays caused by copies to a device.
    let hides_waits = tiers.iter().any(|tier| tier.ahead.is_some());
    let lookahead = looks_ahead.then(|| lookahead_of(model, &precisions, hides_waits));
    let wants_scores = shared.options.caching.policy.needs_scores() || recorder.is_watching();
    let layout = layout_of(&catalog, &cache);
    let n_staging = staging_memory.len() / staging_stride;
    let loader = Loader::new(store, LoaderOptions::default());
    let mut host = Residency::new(residency::Parts {
        reads: HostReads::new(&layout, (catalog, interleavings), arenas, (staging_memory, staging_stride), loader),
        observer: recorder,
        cache,
        layout,
        staging: StagingOptions { n_slots: Some(n_staging), ahead: true },
        overlaps: shared.options.caching.overlap,
        precisions,
        lookahead,
    });
    if routing.virtual_experts != VirtualExperts::Off {
        let n_used = model.info().n_expert_used as usize;
        let planned = shared.virtual_plan.as_ref().map(|plan| &plan.norms).filter(|norms| !norms.is_empty());
        let planned = planned.unwrap_or(&shared.norms);
        let norms = planned.iter().map(|own| (own.layer, own.norms.clone())).collect();
        host.keep_virtual_experts(VirtualExpertsOptions { n_used, update: routing.virtual_update, norms });
    }
    (host.rerouting, host.reroutes_prompts, host.precisions.drop) =
        (routing.rerouting(), routing.prompts, routing.drop);
    let latency = |target: Duration| Latency::new(target.as_secs_f64(), routing.ladder());
    host.latency = routing.target_latency.map(latency);
    let unseen =
        host.layout().layers().flat_map(|layer| host.layout().kinds(layer).iter().map(move |kind| (layer, *kind)));
    let walk = shared.routes.as_ref().map(|(routes, recall)| Walk::new(std::sync::Arc::clone(routes), *recall));
    let mut new = Tiers {
        unseen: unseen.collect(),
        tiers,
        host,
        routers: Routers { wants_scores, walk, ..Routers::default() },
        free_compute: 0,
        prompt_slots,
        wanted: ExpertCache::Auto,
        n_sessions: 0,
        state_file: state_file(model),
        lending,
        description,
    };
    // The cache was made with the slots of decoding.
    new.free_compute = new.prompt_only();
    new.preload()?;
    new.warm_up();
    new.record_residents();
    if shared.options.caching.fill && shared.wrap_store.is_none() {
        // Filling from the page cache costs the same CPU time now as on demand. Direct reads take the disk's time
        // instead, and where a device computes, the CPU's time is free.
        new.fill_free_slots(shared.options.caching.policy, choice.kind == StoreKind::Direct || copies);
    }
    let description = new.description.clone();
    *memories = Some(new);
    Ok(description)
}

/// Slots of each high pool under the plan of virtual experts, in order, and their total bytes; `None` without a plan.
///
/// # Errors
/// [`OpenError::VirtualPlan`] if the requested cache is smaller than the plan.
fn planned_slots(model: &Model, pools: &[Pool], specs: &[PoolSpec]) -> Result<Option<(u64, Vec<u32>)>, OpenError> {
    let options = &model.shared.options;
    let (Some(plan), VirtualExperts::Plan(path)) = (&model.shared.virtual_plan, &options.routing.virtual_experts)
    else {
        return Ok(None);
    };
    let high = || pools.iter().zip(specs).filter(|(_, spec)| spec.precision == Precision::High);
    let slots: Vec<u32> = high().map(|(pool, _)| pool.planned(plan).iter().sum()).collect();
    let bytes = high().zip(&slots).map(|((_, spec), slots)| spec.expert_stride * u64::from(*slots)).sum();
    let all = high().map(|(_, spec)| spec.bytes()).sum();
    match options.expert_cache.of(all) {
        Some(given) if given < bytes => {
            let (file, needed, given) = (path.display().to_string(), bytes.div_ceil(1 << 20), given >> 20);
            Err(VirtualPlanError::TooLarge { file, needed, given }.into())
        }
        _ => Ok(Some((bytes, slots))),
    }
}

/// Description for a model that llama.cpp runs by itself: reports its memory, divides nothing.
fn passthrough(
    model: &Model,
    options: &SessionOptions,
    context: &RawContext,
    (repack, gives_back): (bool, bool),
) -> Result<Description, OpenError> {
    let shared = &model.shared;
    let MemoryUse { weights, kv, compute, mtp, .. } = MemoryUse::of(context)?;
    let program = shared.options.reserved_bytes + shared.options.lent_bytes + mtp;
    let mut fixed = FixedCosts { weights, kv, compute, runtime: runtime_bytes(weights, kv) + program, prediction: 0 };
    let limits = MemoryLimits::read();
    if gives_back {
        // Prompts exceed the limit, and what is mapped gives way to them: the plan is that of decoding.
        fixed.compute -= fixed.prompt_only(options.n_ubatch.min(options.n_batch));
        let left = limits.budget().map_or(0, |(bytes, _)| bytes.saturating_sub(weights + kv + fixed.compute));
        fixed.runtime = (limits.own + program).min(left);
    } else {
        fixed.runtime += beside_passthrough(model.gguf(), shared.experts.map(), options);
    }
    let plan = MemoryPlan::new(&PlanInput {
        budget: shared.options.budget,
        limits,
        overcommit: shared.options.overcommit,
        expert_cache: ExpertCache::Auto,
        low_share: shared.options.low_share,
        fixed,
        prompt_only: 0,
        margin: Some(0),
        pools: Vec::new(),
        n_expert_used: model.info().n_expert_used,
        staging: StagingWish::default(),
    })?;
    let checkpoint_bytes = checkpoint_bytes(model, options).min(plan.unused());
    let _ = shared.spare.set(plan.unused() - checkpoint_bytes + shared.options.lent_bytes);
    let loss_bound = shared.options.loss_bound.as_ref().map(|bound| bound.exact().words);
    let routing = RoutingOptions { loss_bound, ..shared.options.routing.clone() };
    let how = if repack { "mapped, weights rearranged for this CPU" } else { "mapped" };
    Ok(Description {
        precision: report::precision(model, (&shared.precisions, &routing), &plan, &shared.catalog, &[]),
        checkpoint_bytes,
        plan,
        io_choice: format!("none: all of the model fits, and llama.cpp runs it by itself ({how})"),
        caching: model.caching_report(),
        devices: Vec::new(),
        warm_start: None,
    })
}

/// The predictor, prefetcher and governor of the model.
fn lookahead_of(model: &Model, precisions: &Precisions, hides_waits: bool) -> Lookahead {
    let caching = &model.shared.options.caching;
    let shape = model.predict_shape();
    let predictor = predict::build(model.predictor(), shape.clone(), model.shared.path_table.clone());
    let prefetcher = Prefetcher::new(prefetch_options(model, precisions), Default::default());
    let governor = match caching.prefetch {
        Prefetch::Auto => Governor::of_prefetching(),
        Prefetch::On | Prefetch::All => Governor::fixed(true),
        Prefetch::Off => Governor::fixed(false),
    };
    let options = LookaheadOptions { shape, distance_max: caching.distance, hides_waits };
    Lookahead::new(predictor, prefetcher, governor, options)
}

/// Precision and rule of prefetches.
fn prefetch_options(model: &Model, precisions: &Precisions) -> PrefetchOptions {
    let thresholds = if precisions.is_exact() { Thresholds { t1: 1.0, t2: 1.0 } } else { precisions.thresholds };
    PrefetchOptions {
        thresholds,
        rule: model.shared.options.caching.prefetch.rule(model.predictor()),
        ..PrefetchOptions::default()
    }
}

/// The file that keeps the resident set between runs, if requested.
fn state_file(model: &Model) -> Option<StateFile> {
    let shared = &model.shared;
    let mark = ModelMark {
        name: report::file_name(model),
        bytes: model.info().tensor_bytes,
        // Low versions may differ between runs or be missing: they are then skipped, or read from their current place.
        catalog: shared.catalog.fingerprint(),
    };
    let path = shared.options.cache_state.as_ref()?;
    Some(StateFile::new(path, mark, shared.options.caching.policy.to_string()))
}

/// The device for which host slots are allocated, and how it reaches them; `None` for plain memory.
struct HostSlots(Option<(ggml_backend_dev_t, Reach)>);

impl HostSlots {
    /// Selects the first device that reaches host memory better than by copying.
    fn of(tiers: &[Tier], options: &DeviceOptions) -> Self {
        let reach = |tier: &Tier| (tier.dev, Reach::of(tier.dev, options.unified));
        // A device that computes in host memory cannot do without it.
        let unified = tiers.iter().find(|tier| tier.is_unified());
        let pins = |tier: &&Tier| options.pinned && reach(tier).1 == Reach::Pinned;
        Self(unified.or_else(|| tiers.iter().find(pins)).map(reach))
    }

    /// Notifies the user of memory that could not be pinned: copies from it take a detour.
    fn tell_of_refusal(&self, memory: &[HostMemory]) {
        let Some((dev, Reach::Pinned)) = self.0 else { return };
        let plain: u64 = memory.iter().filter(|memory| !memory.pinned).map(|memory| memory.arena.len() as u64).sum();
        if plain > 0 {
            let name = ggml::name(dev);
            let mib = plain.div_ceil(1 << 20);
            log::notice(format_args!(
                "{name} cannot pin {mib} MiB of host memory: copies to it will be slower; a smaller expert cache may \
                 help"
            ));
        }
    }

    fn memory(&self, bytes: usize, slot_bytes: usize) -> Result<HostMemory, OpenError> {
        match self.0 {
            Some((dev, reach)) => HostMemory::of(dev, reach, bytes, slot_bytes),
            None => HostMemory::plain(bytes),
        }
    }
}
