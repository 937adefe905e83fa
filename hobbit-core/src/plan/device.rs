//! Division of one device's memory. Ordinary weights and the context are there already, head-room stays free,
//! llama.cpp's compute buffers are set aside, and experts get the rest, in slots and staging as in host memory.
//!
//! The head-room is a share of the total memory, not of the free memory: drivers, the compositor and other programs
//! allocate from the total.

use serde::Serialize;

use super::pools::{Division, Experts, NoFit, slots_of};
use super::{ExpertCache, LowShare, PlanError, PoolPlan, PoolSpec, StagingWish};
use crate::expert::Precision;

/// Input of a device's plan. Sizes are bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct DevicePlanInput {
    pub name: String,
    /// Free memory, with ordinary weights and KV cache in place.
    pub free: u64,
    /// Total memory; 0 if the device does not report it.
    pub total: u64,
    /// Percent of `total` to leave free, `0.0..=100.0`.
    pub headroom_percent: f64,
    /// How much experts may take; a percentage is of all high versions of the layers on this device. With nothing (`0`,
    /// `0%`) the plan is empty, whatever is free: the experts are computed elsewhere.
    pub wanted: ExpertCache,
    /// Classes of versions with equal shapes, only of layers on this device. Slots of a device are contiguous tensors:
    /// the strides are the slices' own bytes.
    pub pools: Vec<PoolSpec>,
    pub n_expert_used: u32,
    /// Compute buffers that are not allocated yet, beside weights and KV cache.
    pub scratch: u64,
    pub staging: StagingWish,
    pub low_share: LowShare,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DevicePlan {
    pub name: String,
    pub free: u64,
    pub total: u64,
    pub headroom: u64,
    pub scratch: u64,
    pub cache: u64,
    /// Slots, one entry per [`PoolSpec`].
    pub pools: Vec<PoolPlan>,
    /// Slots for slices of experts without a slot; 0 when every high version has a slot.
    pub staging_slots: u32,
    /// A staging slot: the largest slice on this device.
    pub staging_slot_bytes: u64,
    /// Whether every high version has a slot: each is copied once.
    pub is_fully_resident: bool,
}

impl DevicePlan {
    /// Divides a device's memory. The plan never exceeds the free memory less head-room and scratch, even for a size
    /// that was asked for.
    pub fn new(input: &DevicePlanInput) -> Result<Self, PlanError> {
        let experts = Experts::new(&input.pools, input.n_expert_used, input.staging, input.low_share);
        let headroom = device_headroom(input.headroom_percent, input.free, input.total);
        let taken = headroom.saturating_add(input.scratch);
        let is_elsewhere = matches!(input.wanted, ExpertCache::Bytes(0) | ExpertCache::Percent(0.0));
        if is_elsewhere || experts.bytes() == 0 {
            let none =
                Experts::new(&input.pools, input.n_expert_used, StagingWish { min: 0, wanted: 0 }, input.low_share);
            return Ok(Self::of(input, headroom, &none, none.divide(0, Some(0))));
        }
        let (device, free) = (input.name.clone(), input.free);
        let division = experts.fit(free, taken, input.wanted).map_err(|no_fit| match no_fit {
            NoFit::Room => {
                let minimum = taken.saturating_add(experts.minimum());
                PlanError::DeviceTooSmall { device, free, minimum, headroom }
            }
            NoFit::Cache { asked, fits } => PlanError::DeviceCacheTooLarge { device, asked, fits, free, headroom },
        })?;
        Ok(Self::of(input, headroom, &experts, division))
    }

    fn of(input: &DevicePlanInput, headroom: u64, experts: &Experts, division: Division) -> Self {
        let (n_high, _) = slots_of(&division.pools, Precision::High);
        let Division { pools, staging_slots } = division;
        Self {
            name: input.name.clone(),
            free: input.free,
            total: input.total,
            headroom,
            scratch: input.scratch,
            cache: pools.iter().map(|pool| pool.expert_cache).sum(),
            staging_slots,
            staging_slot_bytes: experts.staging_slot_bytes(),
            is_fully_resident: n_high == experts.n_experts(),
            pools,
        }
    }

    pub fn staging(&self) -> u64 {
        self.staging_slot_bytes * u64::from(self.staging_slots)
    }
}

/// Bytes of `percent` head-room, rounded up; a share of the free memory if the device does not report its total.
pub fn device_headroom(percent: f64, free: u64, total: u64) -> u64 {
    (total.max(free) as f64 * percent.clamp(0.0, 100.0) / 100.0).ceil() as u64
}

/// Expert memory of each device when all of them together may take `wanted`. A size is divided in proportion to the
/// bytes of the experts on each; other values apply to each device unchanged. A device with experts gets at least a
/// byte of a size above 0, because nothing would mean that the CPU computes them.
pub fn divide_wanted(wanted: ExpertCache, bytes_per_device: &[u64]) -> Vec<ExpertCache> {
    let ExpertCache::Bytes(wanted) = wanted else { return vec![wanted; bytes_per_device.len()] };
    let all = bytes_per_device.iter().map(|bytes| u128::from(*bytes)).sum::<u128>().max(1);
    let mut before = 0;
    let parts = bytes_per_device.iter().map(|bytes| {
        // Differences of running sums: the parts add up to the whole.
        let after = before + u128::from(*bytes);
        let part = u128::from(wanted) * after / all - u128::from(wanted) * before / all;
        before = after;
        let least = u64::from(wanted > 0 && *bytes > 0);
        ExpertCache::Bytes((part as u64).max(least)) // at most `wanted`
    });
    parts.collect()
}
