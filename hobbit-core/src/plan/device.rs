//! How one device's memory is divided: ordinary weights and the context lie there already, head-room stays free, what
//! llama.cpp computes in is set aside, and experts get the rest, in slots and staging as in host memory.
//!
//! The head-room is a share of the whole memory, not of what is free: drivers, the compositor and other programs take
//! theirs from the whole.

use serde::Serialize;

use super::pools::{Division, Experts};
use super::{ExpertCache, LowShare, PlanError, PoolPlan, PoolSpec, StagingWish};

/// What a device's plan is made from. Sizes are bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct DevicePlanInput {
    /// The device, as messages name it.
    pub name: String,
    /// What it has free now, with ordinary weights and KV cache in place.
    pub free: u64,
    /// What it has in all; 0 where it does not tell.
    pub total: u64,
    /// Percent of `total` to leave free, `0.0..=100.0`.
    pub headroom_percent: f64,
    /// How much experts may take; a percentage is of all high versions of the layers on this device. Nothing (`0`,
    /// `0%`) means that they are computed elsewhere: the plan is empty then, whatever is free.
    pub wanted: ExpertCache,
    /// Classes of versions with equal shapes, only of layers on this device. Slots of a device are contiguous tensors:
    /// the strides are the slices' own bytes.
    pub pools: Vec<PoolSpec>,
    /// Experts a token uses in each layer.
    pub n_expert_used: u32,
    /// What computing takes beside weights and KV cache and is not allocated yet.
    pub scratch: u64,
    /// Slots that slices of experts without a slot pass through.
    pub staging: StagingWish,
    /// How much of the slots low versions may take.
    pub low_share: LowShare,
}

/// Where a device's memory goes. Sizes are bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DevicePlan {
    /// The device.
    pub name: String,
    /// What it had free.
    pub free: u64,
    /// What it has in all.
    pub total: u64,
    /// What stays free.
    pub headroom: u64,
    /// What computing takes.
    pub scratch: u64,
    /// All slots, high and low.
    pub cache: u64,
    /// Slots, one entry per [`PoolSpec`].
    pub pools: Vec<PoolPlan>,
    /// Slots for slices that pass through; 0 when every high version has a slot.
    pub staging_slots: u32,
    /// A staging slot: the largest slice on this device.
    pub staging_slot_bytes: u64,
    /// Whether every high version has a slot: each is copied once.
    pub is_fully_resident: bool,
}

impl DevicePlan {
    /// Divides a device's memory. What is free beside head-room and scratch is never exceeded, not even by a size that
    /// was asked for.
    ///
    /// # Errors
    /// [`PlanError::DeviceTooSmall`] when not even one wave of staging fits, [`PlanError::DeviceCacheTooLarge`] when
    /// the size asked for does not.
    pub fn new(input: &DevicePlanInput) -> Result<Self, PlanError> {
        let experts = Experts::new(&input.pools, input.n_expert_used, input.staging, input.low_share);
        let headroom = headroom(input);
        let taken = headroom.saturating_add(input.scratch);
        let asked = input.wanted.of(experts.bytes());
        let is_elsewhere = matches!(input.wanted, ExpertCache::Bytes(0) | ExpertCache::Percent(0.0));
        if is_elsewhere || experts.bytes() == 0 {
            let none =
                Experts::new(&input.pools, input.n_expert_used, StagingWish { min: 0, wanted: 0 }, input.low_share);
            return Ok(Self::of(input, headroom, &none, none.divide(0, Some(0))));
        }
        let Some(room) = input.free.checked_sub(taken).filter(|room| *room >= experts.minimum()) else {
            return Err(PlanError::DeviceTooSmall {
                device: input.name.clone(),
                free: input.free,
                minimum: taken.saturating_add(experts.minimum()),
                headroom,
            });
        };
        if let Some(asked) = asked.filter(|asked| experts.room_for(*asked) > room) {
            let fits = experts.largest_cache(room);
            return Err(PlanError::DeviceCacheTooLarge {
                device: input.name.clone(),
                asked,
                fits,
                free: input.free,
                headroom,
            });
        }
        Ok(Self::of(input, headroom, &experts, experts.divide(room, asked)))
    }

    fn of(input: &DevicePlanInput, headroom: u64, experts: &Experts, division: Division) -> Self {
        let Division { pools, staging_slots } = division;
        let n_high: u64 = pools.iter().filter(|pool| is_high(pool)).map(|pool| u64::from(pool.n_slots)).sum();
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

    /// Bytes of all staging slots.
    pub fn staging(&self) -> u64 {
        self.staging_slot_bytes * u64::from(self.staging_slots)
    }
}

fn is_high(pool: &PoolPlan) -> bool {
    pool.precision == crate::expert::Precision::High
}

/// Rounded up; of what is free where the device does not say what it has.
fn headroom(input: &DevicePlanInput) -> u64 {
    let percent = input.headroom_percent.clamp(0.0, 100.0);
    (input.total.max(input.free) as f64 * percent / 100.0).ceil() as u64
}

/// What each device may spend on experts when all of them together may spend `wanted`: sizes are divided in proportion
/// to the bytes of the experts on each, everything else holds for each alike. A device that has experts gets at least
/// a byte of a size above 0, since nothing would mean that the CPU computes them.
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

#[cfg(test)]
mod tests;
