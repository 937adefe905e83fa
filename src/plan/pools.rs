//! Dividing the experts' room among pools, and between cache and staging.

use serde::Serialize;

/// Layers whose experts have the same shape, as the plan sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    /// Experts of each layer of the pool.
    pub n_expert: Vec<u16>,
    /// Bytes between slots, for each kind of slice: gate, up, down; or gate-up fused, down.
    pub slice_strides: Vec<u64>,
}

impl PoolSpec {
    /// Bytes of one slot over all kinds.
    pub fn expert_stride(&self) -> u64 {
        self.slice_strides.iter().sum()
    }

    fn n_experts(&self) -> u64 {
        self.n_expert.iter().map(|n| u64::from(*n)).sum()
    }

    fn bytes(&self) -> u64 {
        self.n_experts() * self.expert_stride()
    }
}

/// How many staging slices to keep for each pool and kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingWish {
    /// Without them there is no plan.
    pub min: u32,
    /// With them reads stay in flight while products run. Given up as far as they would take more than a tenth of
    /// the experts' room.
    pub wanted: u32,
}

impl Default for StagingWish {
    fn default() -> Self {
        Self { min: 1, wanted: 8 }
    }
}

/// What one pool gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolPlan {
    /// Slots: experts that can be resident at once.
    pub n_slots: u32,
    /// Experts of the pool's layers.
    pub n_experts: u32,
    /// Staging slices of each kind; 0 when every expert of the model has a slot.
    pub staging_slices: u32,
    /// Bytes of one slot over all kinds.
    pub expert_stride: u64,
    /// Bytes of the slots.
    pub expert_cache: u64,
    /// Bytes of the staging slices.
    pub staging: u64,
}

/// All experts of a model, and what their room must hold.
pub(super) struct Experts<'a> {
    pools: &'a [PoolSpec],
    n_expert_used: u32,
    staging: StagingWish,
}

impl<'a> Experts<'a> {
    pub(super) fn new(pools: &'a [PoolSpec], n_expert_used: u32, staging: StagingWish) -> Self {
        Self { pools, n_expert_used, staging }
    }

    pub(super) fn n_experts(&self) -> u64 {
        self.pools.iter().map(PoolSpec::n_experts).sum()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.pools.iter().map(PoolSpec::bytes).sum()
    }

    /// Bytes without which the model cannot run.
    pub(super) fn minimum(&self) -> u64 {
        self.room_for(0)
    }

    /// Bytes needed to cache `cache` bytes of experts: with staging, but no more than all of them without it.
    pub(super) fn room_for(&self, cache: u64) -> u64 {
        cache.saturating_add(self.staging_bytes(self.staging.min)).min(self.bytes())
    }

    /// The largest `cache` whose `room_for` is at most `room`, which is at least the minimum.
    pub(super) fn largest_cache(&self, room: u64) -> u64 {
        if room >= self.bytes() { self.bytes() } else { room - self.staging_bytes(self.staging.min) }
    }

    /// Experts one token uses, over all layers.
    pub(super) fn n_cycle(&self) -> u64 {
        self.pools.iter().map(|pool| self.cycle_of(pool)).sum()
    }

    fn cycle_of(&self, pool: &PoolSpec) -> u64 {
        pool.n_expert.iter().map(|n| u64::from(*n).min(u64::from(self.n_expert_used))).sum()
    }

    /// Bytes of cache that, once divided, give every pool the slots of one token's cycle.
    pub(super) fn cache_for_cycle(&self) -> u64 {
        let pools = self.pools.iter().filter(|pool| pool.n_experts() > 0);
        pools.map(|pool| portion(self.bytes(), self.cycle_of(pool), pool.n_experts(), true)).max().unwrap_or(0)
    }

    /// Room whose automatic division holds one token's cycle: staging takes its minimum or a tenth, not more.
    pub(super) fn auto_room_for_cycle(&self) -> u64 {
        let cache = self.cache_for_cycle();
        self.room_for(cache).max(portion(cache, 10, 9, true)).min(self.bytes())
    }

    fn staging_bytes(&self, n_slices: u32) -> u64 {
        self.pools.iter().map(|pool| pool.expert_stride() * u64::from(n_slices)).sum()
    }

    /// Slots and staging of every pool within `room` bytes; `cache` is what the slots may take, `None` for as much as
    /// possible. The caller has checked `room_for(cache) <= room` and `minimum() <= room`.
    pub(super) fn divide(&self, room: u64, cache: Option<u64>) -> Vec<PoolPlan> {
        let all = self.bytes();
        // All of them without staging may be less than almost all of them with it.
        let everything_fits = room >= all && cache.is_none_or(|cache| self.room_for(cache) >= all);
        let (n_staging, cache) = match cache {
            _ if everything_fits => (0, all),
            Some(cache) => (self.staging_within(room - cache.min(room)), cache),
            None => {
                let n_staging = self.staging_within(room / 10);
                (n_staging, room - self.staging_bytes(n_staging))
            }
        };
        let slots = self.slots_within(cache);
        let plans = self.pools.iter().zip(slots).map(|(pool, n_slots)| PoolPlan {
            n_slots,
            n_experts: pool.n_experts() as u32, // layers and experts are u16
            staging_slices: n_staging,
            expert_stride: pool.expert_stride(),
            expert_cache: pool.expert_stride() * u64::from(n_slots),
            staging: pool.expert_stride() * u64::from(n_staging),
        });
        plans.collect()
    }

    /// The most staging slices of `bytes` bytes, between the minimum and what is wanted.
    fn staging_within(&self, bytes: u64) -> u32 {
        let fitting = bytes.checked_div(self.staging_bytes(1)).unwrap_or(0);
        let wanted = self.staging.wanted.max(self.staging.min);
        u32::try_from(fitting).unwrap_or(u32::MAX).clamp(self.staging.min, wanted)
    }

    /// The same fraction of every pool's experts; what rounding leaves goes to the pools that have the least.
    fn slots_within(&self, cache: u64) -> Vec<u32> {
        let all = self.bytes().max(1);
        let counts: Vec<u64> = self.pools.iter().map(PoolSpec::n_experts).collect();
        let mut slots: Vec<u64> = counts.iter().map(|n| portion(*n, cache, all, false)).collect();
        let used = |slots: &[u64]| -> u64 { self.pools.iter().zip(slots).map(|(p, n)| p.expert_stride() * n).sum() };
        let mut left = cache - used(&slots);
        let fill = |n: u64, count: u64| n as f64 / count as f64;
        while let Some(pool) = (0..slots.len())
            .filter(|&i| slots[i] < counts[i] && self.pools[i].expert_stride() <= left)
            .min_by(|&a, &b| fill(slots[a], counts[a]).total_cmp(&fill(slots[b], counts[b])))
        {
            slots[pool] += 1;
            left -= self.pools[pool].expert_stride();
        }
        slots.into_iter().map(|n| n as u32).collect()
    }
}

/// `whole * part / of`, rounded down or up, without overflow.
fn portion(whole: u64, part: u64, of: u64, up: bool) -> u64 {
    let product = u128::from(whole) * u128::from(part);
    let of = u128::from(of);
    let quotient = if up { product.div_ceil(of) } else { product / of };
    u64::try_from(quotient).unwrap_or(u64::MAX)
}
