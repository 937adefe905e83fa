//! Division of the experts' room between cache and staging, high and low precision, and among pools.

use serde::Serialize;
use smart_default::SmartDefault;

use super::{ExpertCache, LowShare};
use crate::expert::Precision;
use crate::gguf::ExpertClass;

/// Default percentage of the expert cache for low versions: none, they stream through staging.
///
/// Measured on the demo model and on two larger shapes (Mixtral, Qwen3-MoE): every share above 0 moves more bytes per
/// token (demo model, 25 % cache: 1118 KiB at 0 %, 1164 at 5 and 10 %, 1208 at 15 %). The reason: a byte of a high slot
/// saves reads of experts wanted high and of those wanted low; a byte of a low slot only saves the latter.
pub(crate) const LOW_SHARE_AUTO_PERCENT: f64 = 0.0;

/// Versions of experts that have the same shape, as a plan needs them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    pub precision: Precision,
    /// Versions of this shape in each layer of the pool.
    pub n_versions: Vec<u16>,
    /// Bytes of one slot, all its slices together.
    pub expert_stride: u64,
    /// Bytes of the largest slice; a staging slot must hold it.
    pub slice_stride_max: u64,
}

impl PoolSpec {
    /// Pool of a class of versions: slots take whole windows of the file.
    pub fn of(class: &ExpertClass, precision: Precision, n_versions: Vec<u16>) -> Self {
        let slice_stride_max = class.slices.iter().map(|slice| slice.capacity).max().unwrap_or(0);
        Self { precision, n_versions, expert_stride: class.stride, slice_stride_max }
    }

    fn n_versions(&self) -> u64 {
        self.n_versions.iter().map(|n| u64::from(*n)).sum()
    }

    pub fn bytes(&self) -> u64 {
        self.n_versions() * self.expert_stride
    }
}

/// Number of staging slots. One slot holds any slice of the model. One is enough for correct results; the slices of
/// eight experts make it fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, SmartDefault)]
pub struct StagingWish {
    /// Minimum without which there is no plan.
    #[default(1)]
    pub min: u32,
    /// Slots that keep reads in flight while products run. Reduced where they would take more than a tenth of the
    /// experts' room.
    #[default(24)]
    pub wanted: u32,
}

impl StagingWish {
    /// Bytes of staging that keep reads in flight while a product runs.
    const BYTES_WANTED: u64 = 64 << 20;

    /// Staging for slices of at most `slice_bytes_max` bytes, at most `n_slices_max` per expert.
    pub fn of(slice_bytes_max: u64, n_slices_max: usize) -> Self {
        let n_slices = n_slices_max.max(1) as u32;
        let wanted = (Self::BYTES_WANTED / slice_bytes_max.max(1)).clamp(u64::from(n_slices), 8 * u64::from(n_slices));
        Self { min: 1, wanted: wanted as u32 }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolPlan {
    pub precision: Precision,
    /// Slots: versions that can be resident at once.
    pub n_slots: u32,
    pub n_versions: u32,
    pub expert_stride: u64,
    pub expert_cache: u64,
}

pub(super) struct Division {
    pub(super) pools: Vec<PoolPlan>,
    pub(super) staging_slots: u32,
}

/// Slots for versions of a precision, and their bytes.
pub(super) fn slots_of(pools: &[PoolPlan], precision: Precision) -> (u64, u64) {
    let of = pools.iter().filter(|pool| pool.precision == precision);
    of.fold((0, 0), |(n, bytes), pool| (n + u64::from(pool.n_slots), bytes + pool.expert_cache))
}

pub(super) fn all_slots(pools: &[PoolPlan]) -> u64 {
    pools.iter().map(|pool| u64::from(pool.n_slots)).sum()
}

/// Whether `wide` has more slots than `pools`, and in no pool fewer.
pub(super) fn has_more(wide: &[PoolPlan], pools: &[PoolPlan]) -> bool {
    let none_fewer = wide.iter().zip(pools).all(|(wide, pool)| wide.n_slots >= pool.n_slots);
    none_fewer && all_slots(wide) > all_slots(pools)
}

pub(super) enum NoFit {
    Room,
    /// There is no room for `asked` bytes of cache, but for `fits`.
    Cache {
        asked: u64,
        fits: u64,
    },
}

/// All experts of a model, and the requirements on their room.
pub(super) struct Experts<'a> {
    pools: &'a [PoolSpec],
    n_expert_used: u32,
    staging: StagingWish,
    /// Share in parts of [`LOW_SHARE_WHOLE`]. Integers keep the division monotone in the divided bytes.
    low_share: u64,
}

const LOW_SHARE_WHOLE: u64 = 1_000_000;

impl<'a> Experts<'a> {
    pub(super) fn new(pools: &'a [PoolSpec], n_expert_used: u32, staging: StagingWish, low_share: LowShare) -> Self {
        let percent = match low_share {
            LowShare::Auto => LOW_SHARE_AUTO_PERCENT,
            LowShare::Percent(percent) => percent,
        };
        let low_share = (percent * (LOW_SHARE_WHOLE / 100) as f64).round() as u64;
        Self { pools, n_expert_used, staging, low_share: low_share.min(LOW_SHARE_WHOLE) }
    }

    fn pools_of(&self, precision: Precision) -> impl Iterator<Item = &PoolSpec> {
        self.pools.iter().filter(move |pool| pool.precision == precision)
    }

    fn bytes_of(&self, precision: Precision) -> u64 {
        self.pools_of(precision).map(PoolSpec::bytes).sum()
    }

    /// Experts of the model: every one has a high version.
    pub(super) fn n_experts(&self) -> u64 {
        self.pools_of(Precision::High).map(PoolSpec::n_versions).sum()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes_of(Precision::High)
    }

    /// Bytes of a staging slot: room for any slice.
    pub(super) fn staging_slot_bytes(&self) -> u64 {
        self.pools.iter().map(|pool| pool.slice_stride_max).max().unwrap_or(0)
    }

    pub(super) fn staging_bytes(&self, n_slots: u32) -> u64 {
        self.staging_slot_bytes() * u64::from(n_slots)
    }

    pub(super) fn minimum(&self) -> u64 {
        self.room_for(0)
    }

    /// Bytes needed to cache `cache` bytes of experts: with staging, but no more than all high versions without it.
    pub(super) fn room_for(&self, cache: u64) -> u64 {
        cache.saturating_add(self.staging_bytes(self.staging.min)).min(self.bytes())
    }

    /// The largest `cache` whose `room_for` is at most `room`, which is at least the minimum.
    fn largest_cache(&self, room: u64) -> u64 {
        if room >= self.bytes() { self.bytes() } else { room - self.staging_bytes(self.staging.min) }
    }

    pub(super) fn n_cycle(&self) -> u64 {
        self.pools_of(Precision::High).map(|pool| self.cycle_of(pool)).sum()
    }

    fn cycle_of(&self, pool: &PoolSpec) -> u64 {
        pool.n_versions.iter().map(|n| u64::from(*n).min(u64::from(self.n_expert_used))).sum()
    }

    /// Minimum cache, in bytes, whose division has a slot for every expert of one token's cycle: in each high pool,
    /// less the experts that low slots cover.
    pub(super) fn cache_for_cycle(&self) -> u64 {
        let (mut too_little, mut enough) = (0, self.bytes());
        while too_little < enough {
            let cache = too_little + (enough - too_little) / 2;
            if self.holds_cycle(cache) { enough = cache } else { too_little = cache + 1 }
        }
        enough
    }

    /// Whether a cache holds one token's cycle. Monotone, and never more optimistic than [`Experts::slots_within`].
    fn holds_cycle(&self, cache: u64) -> bool {
        let low = self.low_part(cache);
        let slots_at_least = |pool: &PoolSpec, bytes: u64| {
            portion(pool.n_versions(), bytes, self.bytes_of(pool.precision).max(1), false)
        };
        let n_low: u64 = self.pools_of(Precision::Low).map(|pool| slots_at_least(pool, low)).sum();
        self.pools_of(Precision::High).all(|pool| {
            let cycle = self.cycle_of(pool);
            let taken_off = portion(cycle, n_low, self.n_cycle().max(1), false);
            slots_at_least(pool, cache - low) >= cycle.saturating_sub(taken_off)
        })
    }

    /// Room whose automatic division holds one token's cycle: staging takes its minimum or a tenth, no more.
    pub(super) fn auto_room_for_cycle(&self) -> u64 {
        let cache = self.cache_for_cycle();
        self.room_for(cache).max(portion(cache, 10, 9, true)).min(self.bytes())
    }

    /// Slots and staging within `free` bytes less `taken`.
    pub(super) fn fit(&self, free: u64, taken: u64, wanted: ExpertCache) -> Result<Division, NoFit> {
        let room = free.checked_sub(taken).filter(|room| *room >= self.minimum()).ok_or(NoFit::Room)?;
        let asked = wanted.of(self.bytes());
        match asked.filter(|asked| self.room_for(*asked) > room) {
            Some(asked) => Err(NoFit::Cache { asked, fits: self.largest_cache(room) }),
            None => Ok(self.divide(room, asked)),
        }
    }

    /// Slots and staging within `room` bytes. `cache` is the limit for the slots, `None` for as much as possible. The
    /// caller has checked `room_for(cache) <= room` and `minimum() <= room`.
    pub(super) fn divide(&self, room: u64, cache: Option<u64>) -> Division {
        let all = self.bytes();
        // All experts without staging may take less than almost all experts with it.
        let everything_fits = room >= all && cache.is_none_or(|cache| self.room_for(cache) >= all);
        let (staging_slots, cache) = match cache {
            _ if everything_fits => (0, all),
            Some(cache) => (self.staging_within(room - cache.min(room)), cache),
            None => {
                let staging_slots = self.staging_within(room / 10);
                (staging_slots, room - self.staging_bytes(staging_slots))
            }
        };
        // If no high version is ever missing, low versions have no use.
        let low = if everything_fits { 0 } else { self.low_part(cache) };
        Division { pools: self.slots_with(cache, low), staging_slots }
    }

    /// Slots within `cache` bytes.
    pub(super) fn slots(&self, cache: u64) -> Vec<PoolPlan> {
        self.slots_with(cache, self.low_part(cache))
    }

    /// The slots of a cache that gives `low` of its bytes to low versions.
    fn slots_with(&self, cache: u64, low: u64) -> Vec<PoolPlan> {
        let low_slots = self.slots_within(Precision::Low, low);
        let high_slots = self.slots_within(Precision::High, cache - self.bytes_of_slots(&low_slots));
        let slots = self.pools.iter().zip(low_slots.iter().zip(&high_slots));
        let of_pool = |(pool, (low, high)): (&PoolSpec, (&u64, &u64))| PoolPlan {
            precision: pool.precision,
            n_slots: (low + high) as u32,         // at most the versions
            n_versions: pool.n_versions() as u32, // layers and experts are u16
            expert_stride: pool.expert_stride,
            expert_cache: pool.expert_stride * (low + high),
        };
        slots.map(of_pool).collect()
    }

    /// Bytes of a cache for low versions: their share, but no more than all of them.
    fn low_part(&self, cache: u64) -> u64 {
        portion(cache, self.low_share, LOW_SHARE_WHOLE, false).min(self.bytes_of(Precision::Low))
    }

    /// The most staging slots within `bytes` bytes, between the minimum and the wanted number.
    fn staging_within(&self, bytes: u64) -> u32 {
        let fitting = bytes.checked_div(self.staging_slot_bytes()).unwrap_or(0);
        let wanted = self.staging.wanted.max(self.staging.min);
        u32::try_from(fitting).unwrap_or(u32::MAX).clamp(self.staging.min, wanted)
    }

    fn bytes_of_slots(&self, slots: &[u64]) -> u64 {
        self.pools.iter().zip(slots).map(|(pool, n)| pool.expert_stride * n).sum()
    }

    /// Slots of every pool, 0 in those of the other precision: the same fraction of every pool's versions. The
    /// remainder from rounding goes to the pools with the fewest slots.
    fn slots_within(&self, precision: Precision, cache: u64) -> Vec<u64> {
        let all = self.bytes_of(precision).max(1);
        let is_ours = |pool: &PoolSpec| pool.precision == precision;
        let count = |pool: &PoolSpec| if is_ours(pool) { pool.n_versions() } else { 0 };
        let counts: Vec<u64> = self.pools.iter().map(count).collect();
        let mut slots: Vec<u64> = counts.iter().map(|n| portion(*n, cache, all, false).min(*n)).collect();
        let mut left = cache - self.bytes_of_slots(&slots);
        let fill = |n: u64, count: u64| n as f64 / count as f64;
        while let Some(pool) = (0..slots.len())
            .filter(|&i| slots[i] < counts[i] && self.pools[i].expert_stride <= left)
            .min_by(|&a, &b| fill(slots[a], counts[a]).total_cmp(&fill(slots[b], counts[b])))
        {
            slots[pool] += 1;
            left -= self.pools[pool].expert_stride;
        }
        slots
    }
}

/// `whole * part / of`, rounded down or up, without overflow.
fn portion(whole: u64, part: u64, of: u64, up: bool) -> u64 {
    let product = u128::from(whole) * u128::from(part);
    let of = u128::from(of);
    let quotient = if up { product.div_ceil(of) } else { product / of };
    u64::try_from(quotient).unwrap_or(u64::MAX)
}
