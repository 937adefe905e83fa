//! Decides whether llama.cpp runs a model by itself, and the default context length. Near the border of fitting,
//! llama.cpp estimates its needs without allocating them.

use ggml_sys::llama::ggml_backend_dev_t;

use crate::engine::error::OpenError;
use crate::engine::ggml;
use crate::engine::ggml::repack::Interleaving;
use crate::engine::gpu::devices;
use crate::engine::memory::pinned::Reach;
use crate::engine::model::needs::{ask, ask_on_devices, beside_passthrough, bounds, tensor_bytes};
use crate::engine::model::placement::{Placement, n_layer};
use crate::engine::source::model_source::ModelSource;
use crate::engine::source::tables::Tables;
use hobbit_core::gguf::{Catalog, ExpertMap, Gguf};
use hobbit_core::options::{ModelOptions, Repack, SessionOptions};
use hobbit_core::plan::{
    Budget, BudgetSource, Holds, MemoryLimits, MemoryPlan, PlanError, RepackInput, Room, RunMode, context_tokens,
    device_headroom,
};
use hobbit_core::store::PLANE_BUFFERS_BYTES;

/// Bytes by which the memory of a process differs from run to run.
const DIFFERS_BYTES: u64 = 1 << 20;

/// Chooses the run mode for a model with experts, and the context length if the options name none: 0 for the length the
/// model was trained with. `adapters` is the size of other loaded data, in bytes.
///
/// # Errors
/// A device that cannot be used.
pub(crate) fn choose(source: &ModelSource, options: &ModelOptions, adapters: u64) -> Result<(RunMode, u32), OpenError> {
    let limits = MemoryLimits::read();
    let room = room(options, &limits);
    let chosen = if options.n_gpu_layers == 0 { Vec::new() } else { devices::choose(&options.device)? };
    if !chosen.is_empty() {
        return on_devices(source, options, adapters, (&chosen, room));
    }
    let Some(room) = room else { return Ok((RunMode::Seam, 0)) };
    let whole_room = Room { bytes: room, enforced: enforced(options, &limits) };
    let may_passthrough = may_passthrough(source, options);
    let run_mode = |expects: &SessionOptions| -> RunMode {
        let (mut least, mut most) = bounds(&source.gguf, expects);
        if options.mtp {
            // The second context has a few layers of the first.
            (most.kv, most.compute) = (most.kv.saturating_mul(2), most.compute.saturating_mul(2));
        }
        for needs in [&mut least, &mut most] {
            needs.runtime = needs.runtime.saturating_add(adapters);
        }
        let beside = beside_passthrough(&source.gguf, &source.map, expects);
        most.compute = most.compute.saturating_add(beside);
        if options.repack == Repack::Off {
            most.repacked = 0;
        }
        // If llama.cpp cannot estimate, the seam reports the reason.
        let asked = || {
            ask(&source.gguf, options, expects, beside + adapters)
                .map_or(RunMode::Seam, |needs| RunMode::of(&needs, whole_room))
        };
        match RunMode::within(&least, &most, whole_room).unwrap_or_else(asked) {
            RunMode::Passthrough { repack, gives_back } => {
                RunMode::Passthrough { repack: repack && options.repack != Repack::Off, gives_back }
            }
            RunMode::Seam => RunMode::Seam,
        }
    };
    Ok(with_context(source, options, room, |expects| if may_passthrough { run_mode(expects) } else { RunMode::Seam }))
}

/// The run mode with the whole context, or else with a default one that is fitted to `room`.
fn with_context(
    source: &ModelSource,
    options: &ModelOptions,
    room: u64,
    run_mode: impl Fn(&SessionOptions) -> RunMode,
) -> (RunMode, u32) {
    let whole = run_mode(&options.expects);
    if whole.is_passthrough() || options.expects.n_ctx != 0 {
        return (whole, 0);
    }
    let n_ctx = fitted_context(&source.gguf, &options.expects, room);
    let expects = SessionOptions { n_ctx, ..options.expects.clone() };
    (if n_ctx > 0 { run_mode(&expects) } else { whole }, n_ctx)
}

/// As [`choose`], with devices: llama.cpp runs a model by itself if each device has memory for its part.
fn on_devices(
    source: &ModelSource,
    options: &ModelOptions,
    adapters: u64,
    (chosen, host): (&[ggml_backend_dev_t], Option<u64>),
) -> Result<(RunMode, u32), OpenError> {
    let rooms: Vec<(ggml_backend_dev_t, u64)> = chosen.iter().map(|dev| (*dev, device_room(options, *dev))).collect();
    // Their memory is the host's, which the budget divides.
    let is_unified = chosen.iter().any(|dev| Reach::of(*dev, options.device.unified).is_unified());
    let room = rooms.iter().fold(0, |sum: u64, (_, room)| sum.saturating_add(*room));
    let room = if is_unified { room.min(host.unwrap_or(u64::MAX)) } else { room };
    // A device that does not say how much memory it has.
    if room == 0 {
        return Ok((RunMode::Seam, 0));
    }
    let asked = |expects: &SessionOptions, host: u64| {
        let mut plain = Placement::plain(options, &source.gguf).ok()?;
        let beside = beside_passthrough(&source.gguf, &source.map, expects) + adapters;
        let (needs, on_devices) = ask_on_devices(&source.gguf, options, expects, (&mut plain, beside))?;
        let fits = |&(dev, bytes)| rooms.iter().any(|&(known, room)| known == dev && bytes <= room);
        let run_mode = RunMode::of(&needs, Room { bytes: host, enforced: 0 });
        Some(run_mode).filter(|_| on_devices.iter().all(fits))
    };
    // hobbit sends experts to other machines in less time than llama.cpp (benches/results/devices.md).
    let is_remote = chosen.iter().any(|dev| ggml::is_remote(*dev));
    let may_passthrough = may_passthrough(source, options)
        && !is_unified
        && !is_remote
        && options.leaves_devices_whole(n_layer(&source.gguf));
    // llama.cpp keeps the embeddings on the host.
    let embeddings = source.gguf.tensor("token_embd.weight").map_or(0, |tensor| tensor.extent.len);
    let least = tensor_bytes(&source.gguf).saturating_sub(embeddings);
    let host = host.filter(|_| may_passthrough && least <= room);
    let run_mode = |expects: &SessionOptions| host.and_then(|host| asked(expects, host)).unwrap_or(RunMode::Seam);
    Ok(with_context(source, options, room, run_mode))
}

/// Bytes that a model may take on a device.
fn device_room(options: &ModelOptions, dev: ggml_backend_dev_t) -> u64 {
    let (free, total) = ggml::memory(dev);
    free.saturating_sub(device_headroom(options.device.headroom, free, total))
}

/// As `error`, with the memory with which llama.cpp would run the model by itself where that is less than hobbit needs:
/// a small model fits without the margin that a plan keeps free.
pub(crate) fn or_whole(
    error: PlanError,
    source: &ModelSource,
    map: &ExpertMap,
    options: &ModelOptions,
    adapters: u64,
) -> PlanError {
    let PlanError::TooSmall { minimum, holds: Holds::NoExpert, .. } = &error else { return error };
    let beside = options.reserved_bytes.saturating_add(options.lent_bytes).saturating_add(DIFFERS_BYTES);
    let mut room = bounds(&source.gguf, &options.expects).0.least();
    let on_devices = options.n_gpu_layers != 0 && devices::choose(&options.device).is_ok_and(|all| !all.is_empty());
    if on_devices || !may_passthrough(source, options) {
        return error;
    }
    while room.saturating_add(beside) < *minimum {
        // A default context grows with the memory.
        let n_ctx = match options.expects.n_ctx {
            0 => fitted_context(&source.gguf, &options.expects, room),
            given => given,
        };
        let expects = SessionOptions { n_ctx, ..options.expects.clone() };
        let products = beside_passthrough(&source.gguf, map, &expects).saturating_add(adapters);
        let Some(needs) = ask(&source.gguf, options, &expects, products) else { return error };
        if needs.least() <= room {
            let PlanError::TooSmall { budget, origin, available, .. } = error else { return error };
            let minimum = room.saturating_add(beside);
            return PlanError::TooSmall { budget, origin, minimum, available, holds: Holds::AllExperts };
        }
        room = needs.least();
    }
    error
}

/// Chooses the weights to repack on the CPU: hobbit repacks experts, llama.cpp all others. `auto` repacks all if that
/// pays ([`RepackInput`]) and nothing else changes the experts' bytes. `n_ctx` as [`choose`] returned it.
pub(crate) fn rearranges(gguf: &Gguf, catalog: &Catalog, options: &ModelOptions, n_ctx: u32) -> Repack {
    let has_low = || catalog.layers.iter().any(|layer| layer.low.iter().any(Option::is_some));
    match options.repack {
        Repack::On | Repack::Ordinary | Repack::Off => return options.repack,
        // Available memory differs between runs, and repeatable texts must not.
        Repack::Auto if options.precision.deterministic || catalog.has_planes() || has_low() => return Repack::Off,
        Repack::Auto => {}
    }
    let Some(room) = room(options, &MemoryLimits::read()) else { return Repack::Off };
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
    let pays = RepackInput { expert_bytes, expert_cache: options.expert_cache, room, besides }
        .pays(slices().map(|slice| slice.dtype))
        && slices().all(|slice| Interleaving::of(slice.dtype, slice.ne0, slice.ne1).is_some());
    if pays { Repack::On } else { Repack::Off }
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
pub(crate) fn room(options: &ModelOptions, limits: &MemoryLimits) -> Option<u64> {
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

/// Whether llama.cpp may run the model by itself if there is room.
fn may_passthrough(source: &ModelSource, options: &ModelOptions) -> bool {
    !source.is_pack && options.passthrough && !options.wants_a_cache()
}
