//! From a placement to device tiers: divides and allocates each device's free memory.

use crate::engine::error::OpenError;
use crate::engine::ggml;
use crate::engine::ggml::log;
use crate::engine::memory::device_tier::{Memory, Refused, Tier, staging_stride};
use crate::engine::memory::pinned::Reach;
use crate::engine::model::Model;
use crate::engine::model::placement::DeviceLayers;
use hobbit_core::expert::Precision;
use hobbit_core::gguf::Catalog;
use hobbit_core::load::balance::{Balancer, Costs, HelperMode};
use hobbit_core::options::CpuHelper;
use hobbit_core::plan::{
    DeviceExperts, DevicePlan, DevicePlanInput, ExpertCache, Pool, PoolSpec, StagingWish, cache_of, device_headroom,
    divide_wanted, pools_of,
};
use hobbit_core::stats::DeviceReport;

/// Staging size that keeps uploads in flight while a product runs, in bytes.
const STAGING_BYTES_WANTED: u64 = 128 << 20;

/// Factor by which the cache shrinks when the device refuses its memory.
const SHRINK: f64 = 0.85;

/// Buffers for wide ubatches may add this part to the experts that devices lack: they take it for good.
const WIDE_PART_MISSING: u64 = 32;

/// Whether the devices can give `bytes` to buffers for wide ubatches, of a context that has them already.
pub(super) fn can_widen(model: &Model, bytes: u64) -> bool {
    let (shared, options) = (&model.shared, &model.shared.options.device);
    let parts = || {
        let devices = shared.placed.devices.iter();
        devices.filter(|part| !Reach::of(part.wrapper.inner, options.unified).is_unified())
    };
    let of_layers = |layers: &[u16]| {
        let mut catalog = shared.source.catalog.clone();
        catalog.retain_layers(|layer| layers.contains(&layer));
        catalog.bytes(Precision::High)
    };
    let own: Vec<u64> = parts().map(|part| of_layers(&part.experts)).collect();
    let lacks = |((part, own), wanted): ((&DeviceLayers, &u64), ExpertCache)| {
        let (free, total) = ggml::memory(part.wrapper.inner);
        let room = free.saturating_sub(device_headroom(options.headroom, free, total));
        own - wanted.of(*own).unwrap_or(*own).min(room) + of_layers(&part.offloaded)
    };
    let lacking: u64 = parts().zip(&own).zip(divide_wanted(options.cache, &own)).map(lacks).sum();
    bytes <= lacking / WIDE_PART_MISSING
}

/// Tiers for every device that computes experts, of its layers or of the CPU's large batches, and whether all of the
/// model's experts have slots in them.
///
/// # Errors
/// A device lacks memory for a single wave.
pub(super) fn set_up(model: &Model, catalog: &Catalog, scratch: u64) -> Result<(Vec<Tier>, bool), OpenError> {
    let shared = &model.shared;
    let options = &shared.options.device;
    let offloads = |part: &DeviceLayers| part.offloaded.iter().any(|&layer| catalog.layer(layer).is_some());
    let parts: Vec<(&DeviceLayers, Catalog)> = shared
        .placed
        .devices
        .iter()
        .map(|part| {
            let mut own = catalog.clone();
            own.retain_layers(|layer| part.experts.contains(&layer));
            (part, own)
        })
        .filter(|(part, catalog)| !catalog.layers.is_empty() || offloads(part))
        .collect();
    let bytes: Vec<u64> = parts.iter().map(|(_, catalog)| catalog.bytes(Precision::High)).collect();
    let mut tiers = Vec::new();
    let mut all = parts.iter().map(|(_, catalog)| catalog.layers.len()).sum::<usize>() == catalog.layers.len();
    for ((part, catalog), wanted) in parts.into_iter().zip(divide_wanted(options.cache, &bytes)) {
        let dev = part.wrapper.inner;
        // Only one device can use the host's slots directly: a second one has its own.
        if Reach::of(dev, options.unified).is_unified() && !tiers.iter().any(Tier::is_unified) {
            all = false;
            let report = DeviceReport { unified: true, experts: n_experts(&catalog), ..without_experts(part) };
            tiers.push(Tier::unified(dev, report).ok_or_else(|| refused(part))?);
            continue;
        }
        let (tier, is_fully_resident) = tier_of(model, part, &catalog, (wanted, scratch), offloads(part))?;
        all &= is_fully_resident;
        tiers.push(tier);
    }
    Ok((tiers, all && !bytes.is_empty()))
}

/// The tier of a device with slots of its own, which may take `wanted` beside `scratch`, and whether all of its experts
/// have slots.
///
/// # Errors
/// The device lacks memory for a single wave.
fn tier_of(
    model: &Model,
    part: &DeviceLayers,
    catalog: &Catalog,
    (wanted, scratch): (ExpertCache, u64),
    offloads: bool,
) -> Result<(Tier, bool), OpenError> {
    let options = &model.shared.options.device;
    let dev = part.wrapper.inner;
    let (free, total) = ggml::memory(dev);
    let pools = pools_of(catalog);
    let staging_slot = staging_stride(&catalog.classes);
    let n_kinds = catalog.classes.iter().map(|class| class.slices.len()).max().unwrap_or(1) as u64;
    let staging = (STAGING_BYTES_WANTED / staging_slot).clamp(2 * n_kinds, 8 * n_kinds) as u32;
    // Layers without slots need staging even where the others need none.
    let mut staging_min = if offloads { staging } else { 0 };
    let mut input = DevicePlanInput {
        name: part.wrapper.name.clone(),
        free,
        total,
        headroom_percent: options.headroom,
        wanted,
        pools: pools.iter().map(|pool| spec(pool, catalog, staging_slot)).collect(),
        n_expert_used: model.info().n_expert_used,
        scratch: scratch + u64::from(staging_min) * staging_slot,
        staging: StagingWish { min: 1, wanted: staging },
        low_share: model.shared.options.low_share,
    };
    let mut refusals = Vec::new();
    let (plan, cache, memory) = loop {
        let plan = DevicePlan::new(&input)?;
        let cache = cache_of(&model.shared.division(), catalog, &pools, &plan.pools);
        let classes: Vec<u16> = pools.iter().map(|pool| pool.class).collect();
        let n_staging = plan.staging_slots.max(staging_min);
        match Memory::allocate(dev, catalog, &cache, &classes, n_staging as usize) {
            Ok(memory) => break (plan, cache, memory),
            Err(refused) if refused.is_staging && n_staging > plan.staging_slots => staging_min /= 2,
            Err(refused) => ask_for_less(&mut input, &plan, refused)?,
        }
        refusals.push(plan.cache);
    };
    refusals.dedup();
    let n_shrunk = refusals.iter().filter(|cache| **cache > plan.cache).count() as u32;
    if let Some(asked) = refusals.first().filter(|_| n_shrunk > 0) {
        log::notice(format_args!(
            "{}: the device refused memory; its expert cache has {} MiB instead of {}; give a smaller device cache \
             or a larger head-room",
            plan.name,
            plan.cache >> 20,
            asked >> 20
        ));
    }
    let slots = plan.pools.iter().filter(|pool| pool.precision == Precision::High);
    let report = DeviceReport {
        cache_bytes: plan.cache,
        slots: slots.map(|pool| u64::from(pool.n_slots)).sum(),
        staging_slots: plan.staging_slots,
        headroom_bytes: plan.headroom,
        takes_all: wanted == ExpertCache::Auto && n_shrunk == 0,
        experts: n_experts(catalog),
        helper: helper(model),
        copies_ahead: model.shared.looks_ahead(),
        ..without_experts(part)
    };
    let has_layers = !catalog.layers.is_empty();
    let report = if has_layers { report } else { without_experts(part) };
    let mut tier = Tier::new(dev, cache, memory, report).ok_or_else(|| refused(part))?;
    (tier.serves.layers, tier.serves.batches) = (has_layers, offloads);
    tier.counters.cache_shrunk = n_shrunk;
    let balancer = helper(model).map(|mode| Balancer::new(Costs::default(), mode));
    tier.helper.balancer = balancer.filter(|_| has_layers);
    tier.helper.of_prompts = tier.helper.balancer.clone();
    if let CpuHelper::Threads(threads) = options.cpu_helper {
        tier.helper.n_threads = Some(threads);
    }
    Ok((tier, plan.is_fully_resident))
}

fn n_experts(catalog: &Catalog) -> u64 {
    catalog.layers.iter().map(|layer| u64::from(layer.n_expert)).sum()
}

/// The devices' properties that the host's memory depends on.
pub(super) fn experts(tiers: &[Tier], hold_all: bool) -> DeviceExperts {
    let copying = || tiers.iter().filter(|tier| tier.serves.layers && !tier.is_unified());
    DeviceExperts {
        exist: !tiers.is_empty(),
        have_layers: tiers.iter().any(|tier| tier.serves.layers),
        hold_all,
        n_copied: copying().map(|tier| tier.report.experts).sum(),
        n_slots: copying().map(|tier| tier.report.slots).sum(),
    }
}

/// Reports on every device that holds layers, in order: from its tier, or with its experts on the CPU.
pub(super) fn reports(placement: &[DeviceLayers], tiers: &[Tier]) -> Vec<DeviceReport> {
    let holds = placement.iter().filter(|part| part.n_layers > 0 || !part.experts.is_empty());
    let report = |part: &DeviceLayers| {
        let tier = tiers.iter().find(|tier| tier.dev == part.wrapper.inner);
        tier.map_or_else(|| without_experts(part), |tier| tier.report.clone())
    };
    holds.map(report).collect()
}

fn without_experts(part: &DeviceLayers) -> DeviceReport {
    DeviceReport {
        name: part.wrapper.name.clone(),
        description: ggml::description(part.wrapper.inner),
        n_layers: part.n_layers,
        experts: part.n_experts,
        ..DeviceReport::default()
    }
}

/// How far the CPU computes experts that are missing on a device.
fn helper(model: &Model) -> Option<HelperMode> {
    let mode = HelperMode::from(model.shared.options.device.cpu_helper);
    // The CPU's share depends on its speed.
    let repeatable = mode == HelperMode::Auto && model.shared.source.precisions.options.deterministic;
    Some(mode).filter(|mode| *mode != HelperMode::Off && !repeatable)
}

fn refused(part: &DeviceLayers) -> OpenError {
    OpenError::Unsupported(format!(
        "{} gives no second stream; give it no expert cache, or leave it out",
        part.wrapper.name
    ))
}

fn spec(pool: &Pool, catalog: &Catalog, staging_slot: u64) -> PoolSpec {
    let class = &catalog.classes[usize::from(pool.class)];
    PoolSpec { expert_stride: class.bytes(), slice_stride_max: staging_slot, ..pool.spec(catalog) }
}

/// Requests less memory after `plan` was refused.
///
/// # Errors
/// The plan is already the smallest.
fn ask_for_less(input: &mut DevicePlanInput, plan: &DevicePlan, refused: Refused) -> Result<(), OpenError> {
    let StagingWish { min, wanted } = &mut input.staging;
    if refused.is_staging && plan.staging_slots > *min {
        *wanted = (plan.staging_slots / 2).max(*min);
        return Ok(());
    }
    if plan.cache == 0 {
        return Err(OpenError::DeviceMemory { device: plan.name.clone(), bytes: refused.bytes, free: plan.free });
    }
    let next = (plan.cache as f64 * SHRINK) as u64;
    // One byte means staging only.
    input.wanted = ExpertCache::Bytes(if plan.cache <= plan.staging() { 1 } else { next });
    Ok(())
}
