//! From a loaded model and a context to slots: measures llama.cpp's memory, plans the rest, allocates it and starts the
//! loader.

mod costs;
mod devices;
mod host;
mod norms;
mod report;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::error::OpenError;
use crate::engine::ggml::context::Context;
use crate::engine::ggml::memory_use::MemoryUse;
use crate::engine::memory::device_tier::{self, Clock, Tier};
use crate::engine::memory::host_reads::{Host, HostReads, Interleavings, layout_of};
use crate::engine::memory::norms::NormsJob;
use crate::engine::memory::recorder::Recorder;
use crate::engine::memory::state_file::StateFile;
use crate::engine::memory::tiers::{Description, Lending, Routers, Tiers};
use crate::engine::memory::virtual_disk::VirtualDisk;
use crate::engine::model::needs::{beside_passthrough, bounds};
use crate::engine::model::run_mode::room;
use crate::engine::model::{Model, Shared};
pub use costs::{MemorySignal, take_memory_signal, watch_memory_signals};
use costs::{checkpoint_bytes, fixed_costs, runtime_bytes, scratch_bytes};
use hobbit_core::cache::ModelMark;
use hobbit_core::load::prefetch::{Governor, PrefetchOptions, Prefetcher};
use hobbit_core::load::{Loader, LoaderOptions};
use hobbit_core::options::{PrecisionMode, Prefetch, Repack, RoutingOptions, SessionOptions, VirtualExperts};
use hobbit_core::plan::{
    DeviceExperts, ExpertCache, FixedCosts, MemoryLimits, MemoryPlan, PlanInput, PoolPlan, RunMode, Setup, SetupInput,
    StagingWish, cache_of,
};
use hobbit_core::predict;
use hobbit_core::profile::LayerNorms;
use hobbit_core::residency::{
    self, Latency, Lookahead, LookaheadOptions, Observer, Precisions, Residency, StagingOptions, VirtualExpertsOptions,
};
use hobbit_core::route::Thresholds;
use hobbit_core::stats::CacheSlots;
use hobbit_core::store::{Arena, StoreKind};
use hobbit_core::trace::Walk;

/// Plans memory for the model's first session and allocates it; later sessions share it.
pub(crate) fn set_up(model: &Model, options: &SessionOptions, context: &Context) -> Result<Description, OpenError> {
    let shared = &model.shared;
    let mut memories = shared.experts.memories();
    if let Some(memories) = memories.as_ref() {
        return Ok(memories.description.clone());
    }
    if let RunMode::Passthrough { repack, gives_back } = shared.placed.run_mode {
        return passthrough(model, options, context, (repack, gives_back));
    }
    let mut catalog = shared.source.catalog.clone();
    if shared.source.precisions.is_exact() {
        catalog.drop_low();
    }
    let (tiers, hold_all) = devices::set_up(model, &catalog, scratch_bytes(model, options))?;
    if tiers.iter().any(Tier::is_unified) {
        catalog.make_room(|slice| device_tier::padding_bytes(slice) as u64);
    }
    // Devices may have taken their memory from the host's.
    let limits = MemoryLimits::read();
    let input = setup_input(model, options, context, &limits, devices::experts(&tiers, hold_all))?;
    let setup = Setup::new(&input, catalog)?;
    let rules = rules_of(shared, &setup, report::has_misses(&setup.plan, &tiers))?;
    if setup.catalog.layers.is_empty() {
        let _ = shared.loan.spare.set(setup.spare);
        let io_choice = "none: a dense model, run as plain llama.cpp".to_owned();
        return Ok(describe(model, &setup, &[], &rules, io_choice));
    }
    let copies = input.devices.copy();
    let (mut new, store) = build(model, setup, tiers, rules, &limits)?;
    // The cache was made with the slots of decoding.
    new.free_compute = new.prompt_only();
    new.preload()?;
    new.warm_up();
    if let (None, Some((_, table))) = (new.description.warm_start, &shared.source.path_table)
        && shared.options.caching.fill
        && !new.description.plan.is_fully_resident()
        && new.host.precisions.loads_high()
    {
        new.begin_with(table.by_frequency());
    }
    new.record_residents();
    if shared.options.caching.fill && shared.wrap_store.is_none() {
        // Filling from the page cache costs the same CPU time now as on demand. Direct reads take the disk's time
        // instead, and where a device computes, the CPU's time is free.
        new.fill_free_slots(shared.options.caching.policy, store == StoreKind::Direct || copies, own_state_file(model));
    }
    let description = new.description.clone();
    *memories = Some(new);
    Ok(description)
}

/// Experts keep this part of their memory beside a context's buffers for wide ubatches: slots get the rest back as
/// tokens decode.
const PART_BESIDE_WIDE: u64 = 4;

/// Wide ubatches may keep this part for good: cells of a sliding window, and buffers for products; beside a device, all
/// of their buffers.
const WIDE_PART_KEPT: u64 = 16;

/// Checks that a context for ubatches wider than usual leaves the experts their memory.
///
/// # Errors
/// Buffers that are too large, as an error of the context.
pub(crate) fn check_width(model: &Model, options: &SessionOptions, context: &Context) -> Result<(), OpenError> {
    let MemoryUse { weights, kv, compute, mtp, compute_on_devices, .. } = MemoryUse::of(context)?;
    let room = room(&model.shared.options, &MemoryLimits::read()).unwrap_or(0).saturating_sub(weights + kv);
    // A sliding window's layers keep the cells of a ubatch beside those of the window.
    let (_, of_256) = bounds(model.gguf(), &SessionOptions { n_ctx: 256, n_seq_max: 1, ..options.clone() });
    let cells = if model.window() > 0 { of_256.kv / 256 * u64::from(options.n_ubatch) } else { 0 };
    let scratch = scratch_bytes(model, options);
    let kept = scratch + mtp + cells;
    let has_devices = !model.shared.placed.devices.is_empty();
    let most = if has_devices { room / WIDE_PART_KEPT } else { room - room / PART_BESIDE_WIDE };
    let on_host = compute + kept <= most && kept <= room / WIDE_PART_KEPT;
    if on_host && (!has_devices || devices::can_widen(model, compute_on_devices + scratch)) {
        return Ok(());
    }
    let reason = format!("ubatches of {} tokens leave too little for experts", options.n_ubatch);
    Err(OpenError::Context { n_ctx: options.n_ctx, reason })
}

/// Sizes and options that decide about the host's memory.
fn setup_input<'a>(
    model: &'a Model,
    options: &SessionOptions,
    context: &Context,
    limits: &MemoryLimits,
    devices: DeviceExperts,
) -> Result<SetupInput<'a>, OpenError> {
    let (wanted, precisions) = (&model.shared.options, &model.shared.source.precisions);
    let virtual_plan = match (&model.shared.followed.virtual_plan, &wanted.routing.virtual_experts) {
        (Some(plan), VirtualExperts::Plan(path)) => Some((plan, path.as_path())),
        _ => None,
    };
    let checkpoints = checkpoint_bytes(model, options);
    let fixed = fixed_costs(model, options, context)?;
    // Traces and texts of deterministic runs go by a fixed number of slots.
    let is_fixed = precisions.options.deterministic || wanted.trace.is_some() || devices.exist;
    let follows = !is_fixed && cfg!(target_os = "linux");
    let prompt_only = if follows { fixed.prompt_only(options.n_ubatch.min(options.n_batch)) } else { 0 };
    Ok(SetupInput {
        plan: PlanInput {
            budget: wanted.budget,
            limits: limits.clone(),
            overcommit: wanted.overcommit,
            expert_cache: wanted.expert_cache,
            low_share: wanted.low_share,
            fixed,
            prompt_only,
            margin: None,
            pools: Vec::new(),
            n_expert_used: model.info().n_expert_used,
            staging: StagingWish::default(),
        },
        is_exact: precisions.is_exact(),
        virtual_experts: wanted.routing.virtual_experts != VirtualExperts::Off,
        virtual_plan,
        loss_bound: wanted.loss_bound.as_ref(),
        devices,
        checkpoints,
        lent: wanted.lent_bytes,
    })
}

/// The rules by which experts are used: precision and routing, with the mix of a loss bound.
type Rules = (Precisions, RoutingOptions);

fn rules_of(shared: &Shared, setup: &Setup, has_misses: bool) -> Result<Rules, OpenError> {
    let (mut precisions, mut routing) = (shared.source.precisions.clone(), shared.options.routing.clone());
    if let Some(chosen) = &setup.mix {
        routing = RoutingOptions { loss_bound: Some(chosen.words.clone()), ..routing.with(chosen.mix) };
        shared.check_routing(&routing)?;
        precisions.thresholds = chosen.mix.thresholds();
    }
    if setup.is_exact {
        precisions.mode = PrecisionMode::Exact;
    }
    if !has_misses {
        // An approximation would save one read of each expert.
        routing = RoutingOptions { cache_bias: 0.0, substitute: 0.0, drop: 0.0, target_latency: None, ..routing };
    }
    Ok((precisions, routing))
}

fn describe(model: &Model, setup: &Setup, tiers: &[Tier], rules: &Rules, io_choice: String) -> Description {
    let is_complete = !setup.catalog.layers.is_empty() && !report::has_misses(&setup.plan, tiers);
    let Shared { options, placed, .. } = &*model.shared;
    let mut idle = if is_complete { options.idle_without_misses() } else { Vec::new() };
    idle.retain(|idle| placed.idle.iter().all(|known| known.setting != idle.setting));
    Description {
        plan: setup.plan.clone(),
        io_choice,
        precision: report::precision(model, rules, &setup.plan, &setup.catalog, tiers),
        caching: model.shared.caching_report(),
        devices: devices::reports(&placed.devices, tiers),
        warm_start: None,
        idle,
        checkpoint_bytes: setup.checkpoints,
    }
}

/// Allocates the host's slots, opens the store that fills them, and puts the experts' memories together.
fn build(
    model: &Model,
    setup: Setup,
    mut tiers: Vec<Tier>,
    rules: Rules,
    limits: &MemoryLimits,
) -> Result<(Tiers, StoreKind), OpenError> {
    let shared = &model.shared;
    let Shared { options, .. } = &**shared;
    let mut memory = host::allocate(&setup, &mut tiers, &options.device)?;
    let (store, choice) = host::open_store(shared, &setup, limits, &mut memory)?;

    let cache_of = |planned: &[PoolPlan]| cache_of(&model.shared.division(), &setup.catalog, &setup.pools, planned);
    let of_prompts = cache_of(&setup.plan.pools);
    let layers = setup.catalog.layers.iter().map(|layer| layer.layer);
    let host_slots = CacheSlots::of("the host", &of_prompts, layers);
    let slots = |id| (id, of_prompts.pools().slots_of_share(id).len() as u32);
    let (prompt_slots, cache) = match &setup.plan.decode {
        Some(decode) => (of_prompts.pools().shares().map(slots).collect(), cache_of(&decode.pools)),
        None => (BTreeMap::new(), of_prompts),
    };
    // Devices need experts in the file's byte order, and combining two planes does, too.
    let is_rearranged = options.repack == Repack::On && tiers.is_empty() && !setup.catalog.has_planes();
    let interleavings = if is_rearranged { Interleavings::of(&setup.catalog) } else { Interleavings::default() };
    let how = if interleavings.is_plain() { "" } else { "; experts rearranged for this CPU" };
    let copies = store.copies();
    let io_choice = format!("{choice}{how}{}{}", shared.experts.tables().describe(), host::mirrors(&copies));
    let mut description = describe(model, &setup, &tiers, &rules, io_choice);
    let host_slots =
        host_slots.into_iter().chain(tiers.iter().filter_map(|tier| tier.slots.by_layer(&tier.report.name)));
    description.caching.slots_by_layer.extend(host_slots);
    let recorder = match &options.trace {
        Some(path) => {
            let header = report::trace_header(model, &setup.catalog, &cache, &rules, setup.plan.expert_cache);
            Recorder::create(path, &header)?
        }
        None => Recorder::default(),
    };
    let (precisions, routing) = rules;
    let lookahead = look_ahead(model, &precisions, &routing, &mut tiers);
    let wants_scores = options.caching.policy.needs_scores() || recorder.is_watching();
    // Where every expert has a slot, none is replaced.
    let kind = (!setup.plan.is_fully_resident()).then_some(choice.kind);
    let layout = layout_of(&setup.catalog, &cache);
    let mut arenas: Vec<Arena> = memory.into_iter().map(|memory| memory.arena).collect();
    let staging = (arenas.pop().expect("staging was put last"), setup.staging_stride());
    let n_staging = staging.0.len() / staging.1;
    let loader = Loader::new(store, LoaderOptions::over(copies.len().max(1)));
    let disk = tiers.first().and_then(|tier| VirtualDisk::of(Clock::of(tier.dev)));
    let mut host = Residency::new(residency::Parts {
        reads: HostReads::new(&layout, (setup.catalog, interleavings), arenas, staging, (loader, disk)),
        observer: recorder,
        cache,
        layout,
        staging: StagingOptions { n_slots: Some(n_staging), ahead: true },
        overlaps: options.caching.overlap,
        precisions,
        lookahead,
    });
    let norms = start_routing(model, &mut host, &routing, kind);
    let kinds = |layer| host.layout().kinds(layer).iter().map(move |kind| (layer, *kind));
    let unseen = host.layout().layers().flat_map(kinds).collect();
    let walk = shared.followed.routes.as_ref().map(|(routes, recall)| Walk::new(Arc::clone(routes), *recall));
    let new = Tiers {
        unseen,
        tiers,
        host,
        norms,
        routers: Routers { wants_scores, walk, ..Routers::default() },
        free_compute: 0,
        wide_staging: 0,
        prompt_slots,
        wanted: ExpertCache::Auto,
        n_sessions: 0,
        state_file: state_file(model),
        earlier: Vec::new(),
        lending: Lending { spare: setup.spare, most: setup.lendable, ..Lending::default() },
        description,
    };
    Ok((new, choice.kind))
}

/// The host's lookahead, if it predicts; devices copy ahead from then on.
fn look_ahead(
    model: &Model,
    precisions: &Precisions,
    routing: &RoutingOptions,
    tiers: &mut [Tier],
) -> Option<Lookahead> {
    // Promotions depend on the link's idle time.
    if precisions.options.deterministic {
        return None;
    }
    let looks_ahead = model.shared.looks_ahead();
    let prefetches = looks_ahead.then(|| prefetch_options(model, precisions));
    let promotes = !routing.is_off() || !precisions.is_exact() && precisions.options.upgrade;
    tiers.iter_mut().for_each(|tier| tier.copy_ahead(prefetches, promotes));
    // The host does not see delays caused by copies to a device.
    let hides_waits = tiers.iter().any(|tier| tier.ahead.is_some());
    looks_ahead.then(|| lookahead_of(model, precisions, hides_waits))
}

/// Sends tokens to experts in memory as `routing` says, if at all. Returns the job that computes the norms of virtual
/// experts, if some are read, as `kind` says.
fn start_routing(
    model: &Model,
    host: &mut Host,
    routing: &RoutingOptions,
    kind: Option<StoreKind>,
) -> Option<NormsJob> {
    let mut job = None;
    if routing.virtual_experts != VirtualExperts::Off {
        let (norms, norms_from, computing) = norms::norms_of(&model.shared, kind);
        let norms = norms.into_iter().map(|LayerNorms { layer, norms }| (layer, norms)).collect();
        let (n_used, update) = (model.info().n_expert_used as usize, routing.virtual_update);
        host.keep_virtual_experts(VirtualExpertsOptions { n_used, update, norms, norms_from });
        job = computing;
    }
    // Results must not depend on the speed of reads.
    if let (true, Some(virtual_experts)) = (host.precisions.options.deterministic, &mut host.virtual_experts)
        && let Some(mut job) = job.take()
    {
        job.hand_over(virtual_experts, true);
    }
    reroute(host, routing);
    let latency = |target: Duration| Latency::new(target.as_secs_f64(), routing.ladder());
    host.latency = routing.target_latency.map(latency);
    job
}

/// Sets how tokens are sent to experts in memory, in place of what was set before.
pub(super) fn reroute(host: &mut Host, routing: &RoutingOptions) {
    (host.rerouting, host.reroutes_prompts, host.precisions.drop) =
        (routing.rerouting(), routing.prompts, routing.drop);
}

/// Description for a model that llama.cpp runs by itself: reports its memory, divides nothing.
fn passthrough(
    model: &Model,
    options: &SessionOptions,
    context: &Context,
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
    let _ = shared.loan.spare.set(plan.unused() - checkpoint_bytes + shared.options.lent_bytes);
    let loss_bound = shared.options.loss_bound.as_ref().map(|bound| bound.exact().words);
    let routing = RoutingOptions { loss_bound, ..shared.options.routing.clone() };
    let devices = devices::reports(&shared.placed.devices, &[]);
    let how = if repack { "mapped, weights rearranged for this CPU" } else { "mapped" };
    let io_choice = if devices.is_empty() {
        format!("none: all of the model fits, and llama.cpp runs it by itself ({how})")
    } else {
        let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        format!("none: all of the model fits on {}, and llama.cpp runs it by itself", names.join(" and "))
    };
    Ok(Description {
        precision: report::precision(
            model,
            &(shared.source.precisions.clone(), routing),
            &plan,
            &shared.source.catalog,
            &[],
        ),
        checkpoint_bytes,
        plan,
        io_choice,
        caching: model.shared.caching_report(),
        devices,
        warm_start: None,
        idle: Vec::new(),
    })
}

/// The predictor, prefetcher and governor of the model.
fn lookahead_of(model: &Model, precisions: &Precisions, hides_waits: bool) -> Lookahead {
    let caching = &model.shared.options.caching;
    let shape = model.predict_shape();
    let path_table = model.shared.source.path_table.as_ref().map(|(_, table)| Arc::clone(table));
    let predictor =
        predict::build(model.shared.predictor(), shape.clone(), path_table, caching.prefetch.rule().at_least());
    let prefetcher = Prefetcher::new(prefetch_options(model, precisions), Default::default());
    let governor = match caching.prefetch {
        Prefetch::Auto => Governor::of_prefetching(),
        fixed => Governor::fixed(fixed.is_fixed_on()),
    };
    let options = LookaheadOptions { shape, distance_max: caching.distance, hides_waits };
    Lookahead::new(predictor, prefetcher, governor, options)
}

/// Precision and rule of prefetches.
fn prefetch_options(model: &Model, precisions: &Precisions) -> PrefetchOptions {
    let thresholds = if precisions.is_exact() { Thresholds { t1: 1.0, t2: 1.0 } } else { precisions.thresholds };
    PrefetchOptions { thresholds, rule: model.shared.options.caching.prefetch.rule(), ..PrefetchOptions::default() }
}

/// The file that keeps the resident set between runs, if requested.
fn state_file(model: &Model) -> Option<StateFile> {
    let options = &model.shared.options;
    Some(StateFile::new(options.cache_state.as_ref()?, mark(model), options.caching.policy.to_string()))
}

/// The file that hobbit keeps by itself, if it may.
fn own_state_file(model: &Model) -> Option<StateFile> {
    let options = &model.shared.options;
    let directory = options.cache_state_dir.as_ref().filter(|_| options.cache_state.is_none())?;
    Some(StateFile::own(directory, mark(model), options.caching.policy.to_string()))
}

fn mark(model: &Model) -> ModelMark {
    ModelMark {
        name: report::file_name(model),
        bytes: model.info().tensor_bytes,
        // Low versions may differ between runs or be missing: they are then skipped, or read from their current place.
        catalog: model.shared.source.catalog.fingerprint(),
    }
}
