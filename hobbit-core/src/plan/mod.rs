//! How a memory budget becomes slots: pure arithmetic, except for [`MemoryLimits::read`].
//!
//! The budget covers the whole process. Weights, KV cache, compute buffers and run time come first, a margin stays
//! free, and experts get the rest: pools of slots, and, unless all experts fit, a few *staging* slots of one slice each
//! for experts without a slot. The minimum is one staging slot and no cached expert; results are exact even then.
//!
//! Most of the compute buffer is for a prompt's tokens ([`PlanInput::prompt_only`]). While tokens decode, its pages are
//! given back, and experts get that memory ([`MemoryPlan::decode`]).
//!
//! Where experts have low-precision versions, these get a share of the cache ([`PlanInput::low_share`]), though no more
//! than all of them need; and none where all high versions fit.
//!
//! [`Setup`] takes all of this from a catalog of versions and the options of a session: the versions that get slots,
//! and the memory that can be lent.
//!
//! [`DevicePlan`] divides a device's memory in the same way; [`layer_devices`] assigns layers to devices.
//!
//! The margin covers memory that cannot be counted (page tables, allocator slack, the kernel's own): 1 % of a given
//! budget, at least 32 MiB; 2 % of a control group's limit, at least 48 MiB, because the kernel charges more to it.
//! Available memory also changes with other processes: 5 %, at least 64 MiB.
//!
//! A given budget may not exceed the system's limit, except with [`PlanInput::overcommit`].
//!
//! [`RunMode`] comes first: a model that fits as a whole needs no division. If it does not fit, a default context is no
//! longer than [`context_tokens`].

mod choices;
mod device;
mod layers;
mod limits;
mod pools;
mod setup;
mod size;
#[cfg(test)]
mod tests;
mod versions;
mod width;

pub use choices::{CONTEXT_TOKENS_MIN, Needs, RepackInput, Room, RunMode, context_tokens};
pub use device::{DevicePlan, DevicePlanInput, device_headroom, divide_wanted};
pub use layers::layer_devices;
#[cfg(not(windows))]
pub(crate) use limits::kib_field;
pub use limits::{BudgetSource, CgroupMemory, MemoryLimits};
pub use pools::{PoolPlan, PoolSpec, StagingWish};
pub use setup::{DeviceExperts, Setup, SetupError, SetupInput};
pub use size::{Budget, ExpertCache, LowShare, SizeError};
pub use versions::{LayerDivision, Pool, cache_of, pool_specs, pools_of, staging_of, types_of};
pub use width::{PromptCosts, UBATCH_MAX, WidthInput, WidthReport};

use crate::expert::Precision;
use crate::route::DECODE_TOKENS_MAX;
use crate::units::{MIB, ShortBytes};
use pools::{Division, Experts, NoFit, all_slots, has_more, slots_of};
use serde::Serialize;
use size::whole_mib_up;
use std::fmt;

/// Input of a plan. Sizes are bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanInput {
    pub budget: Budget,
    /// System limits: the value of [`Budget::Auto`], and the maximum of any other budget.
    pub limits: MemoryLimits,
    /// A given budget may exceed the system limits.
    pub overcommit: bool,
    /// How much of the budget experts may take; a percentage is of all high versions.
    pub expert_cache: ExpertCache,
    pub low_share: LowShare,
    pub fixed: FixedCosts,
    /// Part of [`FixedCosts::compute`] that experts may have while tokens decode.
    pub prompt_only: u64,
    /// Memory that stays free; `None` applies this module's rule.
    pub margin: Option<u64>,
    /// Classes of versions with equal shapes; empty for a dense model. Every expert has a high version.
    pub pools: Vec<PoolSpec>,
    pub n_expert_used: u32,
    pub staging: StagingWish,
}

/// Memory that is not available to experts, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FixedCosts {
    pub weights: u64,
    pub kv: u64,
    pub compute: u64,
    /// Other memory of the process: code, tokenizer, thread stacks.
    pub runtime: u64,
    /// Memory of policy and predictor: tables, copies of routers.
    pub prediction: u64,
}

/// Bytes of pages that a decoding batch touches beyond the sizes of its tensors, each of which begins and ends within a
/// page.
const PARTIAL_PAGES_BYTES: u64 = 4 * MIB;

impl FixedCosts {
    fn total(&self) -> u64 {
        let Self { weights, kv, compute, runtime, prediction } = *self;
        [weights, kv, compute, runtime, prediction].into_iter().fold(0, u64::saturating_add)
    }

    /// The part of llama.cpp's compute buffer that only prompts touch. The buffer has the size for ubatches of
    /// `n_ubatch` tokens; tensors of fewer tokens begin at the same places and are smaller. A quarter is added for
    /// tensors whose size does not depend on the number of tokens.
    pub fn prompt_only(&self, n_ubatch: u32) -> u64 {
        let of_tokens = u128::from(self.compute) * DECODE_TOKENS_MAX as u128 / u128::from(n_ubatch.max(1));
        let decoding = u64::try_from(of_tokens * 5 / 4).unwrap_or(u64::MAX);
        self.compute.saturating_sub(decoding.saturating_add(PARTIAL_PAGES_BYTES))
    }
}

/// The division of the memory. `Display` prints it as aligned rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    pub budget: u64,
    pub budget_source: BudgetSource,
    /// The budget that was given, if it is above what is available and the model does not need the excess.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<u64>,
    pub fixed: FixedCosts,
    pub margin: u64,
    /// Slots, one entry per [`PoolSpec`].
    pub pools: Vec<PoolPlan>,
    /// Slots while tokens decode; `None`: the same.
    pub decode: Option<DecodePlan>,
    /// High versions that can be resident at once.
    pub n_slots: u64,
    pub n_experts: u64,
    /// Low versions that can be resident at once.
    pub n_low_slots: u64,
    /// Bytes of all slots, high and low.
    pub expert_cache: u64,
    pub low_cache: u64,
    /// Slots for slices of versions without a slot; 0 when every high version has one, and every low one that is used.
    pub staging_slots: u32,
    /// Bytes of a staging slot: the largest slice of the model.
    pub staging_slot_bytes: u64,
    pub staging: u64,
    /// Set when there are fewer slots than one token uses.
    pub warning: Option<BelowTokenCycle>,
}

/// Slots while tokens decode: in every pool at least as many as for prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecodePlan {
    pub pools: Vec<PoolPlan>,
    /// High versions that can be resident at once.
    pub n_slots: u64,
    /// Bytes of all slots, high and low.
    pub expert_cache: u64,
    /// Bytes of the compute buffer that tokens use as they decode: all of it but [`PlanInput::prompt_only`].
    pub compute: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error(
    "the expert cache holds {n_slots} experts, but one token uses {n_cycle}: most of them will be read again for \
     every token"
)]
pub struct BelowTokenCycle {
    /// Experts that can be resident at once, in either precision.
    pub n_slots: u64,
    pub n_cycle: u64,
    /// The budget that holds them, in bytes; `None` when the present one does.
    pub mem_budget: Option<u64>,
    /// The expert cache that holds them, in bytes; `None` when it follows from the budget.
    pub expert_cache: Option<u64>,
}

/// Experts that are in memory with a model's smallest budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// No expert: each is read when it is used.
    NoExpert,
    /// All experts of a small model: llama.cpp runs it by itself, and needs no margin.
    AllExperts,
    /// The model has no experts.
    Dense,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error(
        "a memory budget of {} ({}) is too small: this model {}needs at least {}{}",
        ShortBytes(*budget), origin,
        if *holds == Holds::Dense { "has no experts that could stay in its file, and " } else { "" },
        ShortBytes(whole_mib_up(*minimum)), if *holds == Holds::NoExpert { ", with no expert cached" } else { "" }
    )]
    TooSmall {
        budget: u64,
        origin: BudgetSource,
        /// The smallest budget that works, in bytes.
        minimum: u64,
        /// Bytes that the system leaves, if known and limiting.
        available: Option<u64>,
        holds: Holds,
    },
    #[error(
        "a memory budget of {} cannot be had here: this model would take {} of it, and {} are available ({})",
        ShortBytes(*budget), ShortBytes(*takes), ShortBytes(*available), origin.to_string().trim_start_matches("auto: ")
    )]
    AboveLimit {
        budget: u64,
        takes: u64,
        /// Bytes that the system leaves, what the process holds included.
        available: u64,
        origin: BudgetSource,
    },
    #[error("an expert cache of {} does not fit into a memory budget of {}", ShortBytes(*asked), ShortBytes(*budget))]
    ExpertCacheTooLarge {
        asked: u64,
        fits: u64,
        budget: u64,
        /// The smallest budget that holds the requested cache, in bytes.
        minimum: u64,
        /// Bytes that the system leaves, if known and limiting.
        available: Option<u64>,
    },
    #[error(
        "not even one wave of experts fits on {device}: {} are free there, {} are needed (head-room {})",
        ShortBytes(*free), ShortBytes(*minimum), ShortBytes(*headroom)
    )]
    DeviceTooSmall {
        device: String,
        free: u64,
        /// The least free bytes that suffice.
        minimum: u64,
        headroom: u64,
    },
    #[error(
        "a device cache of {} does not fit on {device}: of the {} that are free there, experts can have {}MiB \
         (head-room {})",
        ShortBytes(*asked), ShortBytes(*free), fits >> 20, ShortBytes(*headroom)
    )]
    DeviceCacheTooLarge { device: String, asked: u64, fits: u64, free: u64, headroom: u64 },
    #[error("this system does not say how much memory is available; give a budget")]
    NoLimitKnown,
}

/// Rule for the memory of a budget that stays free: `percent`, at least `floor` bytes.
#[derive(Clone, Copy)]
struct Margin {
    percent: u64,
    floor: u64,
}

impl Margin {
    fn of(input: &PlanInput, source: BudgetSource) -> Self {
        input.margin.map_or_else(|| Self::of_source(source), |floor| Self { percent: 0, floor })
    }

    fn of_source(source: BudgetSource) -> Self {
        match source {
            BudgetSource::Given => Self { percent: 1, floor: 32 * MIB },
            BudgetSource::Cgroup => Self { percent: 2, floor: 48 * MIB },
            BudgetSource::MemAvailable => Self { percent: 5, floor: 64 * MIB },
        }
    }

    fn bytes(self, budget: u64) -> u64 {
        let share = (u128::from(budget) * u128::from(self.percent)).div_ceil(100) as u64; // <= budget
        share.max(self.floor)
    }

    /// The smallest budget that leaves `need` bytes.
    fn budget_for(self, need: u64) -> u64 {
        let by_share = (u128::from(need) * 100).div_ceil(u128::from(100 - self.percent));
        u64::try_from(by_share).unwrap_or(u64::MAX).max(need.saturating_add(self.floor))
    }
}

impl MemoryPlan {
    pub fn new(input: &PlanInput) -> Result<Self, PlanError> {
        let limit = input.limits.budget().filter(|_| !input.overcommit);
        let (Budget::Bytes(given), Some((available, origin))) = (input.budget, limit) else {
            return Self::within_budget(input);
        };
        let plan = Self::within_budget(input)?;
        if given <= available {
            return Ok(plan);
        }
        // A budget above the system's limit is fine as long as the model does not need the excess.
        let held = Self::within_budget(&PlanInput { budget: Budget::Bytes(available), ..input.clone() });
        match held {
            Ok(held) if held.pools == plan.pools && held.staging_slots == plan.staging_slots => {
                Ok(Self { budget_source: origin, asked: Some(given), ..held })
            }
            _ => {
                let takes = plan.fixed.total().saturating_add(plan.expert_cache).saturating_add(plan.staging);
                Err(PlanError::AboveLimit { budget: given, takes, available, origin })
            }
        }
    }

    fn within_budget(input: &PlanInput) -> Result<Self, PlanError> {
        let (budget, source) = match input.budget {
            Budget::Bytes(bytes) => (bytes, BudgetSource::Given),
            Budget::Auto => input.limits.budget().ok_or(PlanError::NoLimitKnown)?,
        };
        let experts = Experts::new(&input.pools, input.n_expert_used, input.staging, input.low_share);
        let given = Margin::of(input, BudgetSource::Given); // what the flags in our advice will be held to
        let fixed = input.fixed.total();
        // A found budget is accepted if it would suffice as a given one.
        let usual = Margin::of(input, source).bytes(budget);
        let least = fixed.saturating_add(experts.minimum());
        let margin = if least.saturating_add(usual) > budget { given.bytes(budget).min(usual) } else { usual };
        let budget_for = |for_experts: u64| given.budget_for(fixed.saturating_add(for_experts));
        let available = input.limits.budget().map(|(bytes, _)| bytes).filter(|_| !input.overcommit);

        let taken = fixed.saturating_add(margin);
        let division = experts.fit(budget, taken, input.expert_cache).map_err(|no_fit| match no_fit {
            NoFit::Room => {
                let minimum = budget_for(experts.minimum());
                let holds = if input.pools.is_empty() { Holds::Dense } else { Holds::NoExpert };
                PlanError::TooSmall { budget, origin: source, minimum, available, holds }
            }
            NoFit::Cache { asked, fits } => {
                let minimum = budget_for(experts.room_for(asked));
                PlanError::ExpertCacheTooLarge { asked, fits, budget, minimum, available }
            }
        })?;
        let Division { pools, staging_slots } = division;
        let [(n_slots, high_cache), (n_low_slots, low_cache)] =
            Precision::ALL.map(|precision| slots_of(&pools, precision));
        let asked = input.expert_cache.of(experts.bytes());
        let staging = experts.staging_bytes(staging_slots);
        // Staging stays, and so do slots that were asked for.
        let prompt_only = input.prompt_only.min(input.fixed.compute);
        let wider = (budget - taken - staging).saturating_add(prompt_only);
        let decode = (asked.is_none() && staging_slots > 0).then(|| experts.slots(wider));
        let decode = decode.filter(|wide| has_more(wide, &pools)).map(|pools| DecodePlan {
            n_slots: slots_of(&pools, Precision::High).0,
            expert_cache: pools.iter().map(|pool| pool.expert_cache).sum(),
            compute: input.fixed.compute - prompt_only,
            pools,
        });
        let n_at_once = decode.as_ref().map_or(n_slots + n_low_slots, |decode| all_slots(&decode.pools));
        let warning = (n_at_once < experts.n_cycle()).then(|| {
            let cache = asked.map(|_| whole_mib_up(experts.cache_for_cycle()));
            let needed = match cache {
                Some(cache) => experts.room_for(cache.min(experts.bytes())),
                None => experts.auto_room_for_cycle(),
            };
            let mem_budget = (asked.is_none() || needed > budget - taken).then(|| whole_mib_up(budget_for(needed)));
            BelowTokenCycle { n_slots: n_at_once, n_cycle: experts.n_cycle(), mem_budget, expert_cache: cache }
        });
        Ok(Self {
            budget,
            budget_source: source,
            asked: None,
            fixed: input.fixed,
            margin,
            n_slots,
            n_experts: experts.n_experts(),
            n_low_slots,
            expert_cache: high_cache + low_cache,
            low_cache,
            staging_slots,
            staging_slot_bytes: experts.staging_slot_bytes(),
            staging,
            pools,
            decode,
            warning,
        })
    }

    /// Early check, before anything is loaded: refuses a budget that is certainly too small, and one that the model
    /// certainly fills beyond the system's memory. `input.fixed` are lower bounds, which decide; `expected` are
    /// estimates, which the message names.
    pub fn check(input: &PlanInput, expected: FixedCosts) -> Result<(), PlanError> {
        let limit = input.limits.budget().filter(|_| !input.overcommit);
        let budget = match (input.budget, limit) {
            (Budget::Bytes(given), Some((available, _))) => Budget::Bytes(given.min(available)),
            (budget, _) => budget,
        };
        if let Err(error) = Self::within_budget(&PlanInput { budget, ..input.clone() }) {
            let expected = Self::new(&PlanInput { fixed: expected, ..input.clone() });
            return Err(expected.err().unwrap_or(error));
        }
        let (Budget::Bytes(budget), Some((available, origin))) = (input.budget, limit) else { return Ok(()) };
        let experts = Experts::new(&input.pools, input.n_expert_used, input.staging, input.low_share).bytes();
        let cached = input.expert_cache.of(experts).unwrap_or(experts);
        let takes = input.fixed.total().saturating_add(cached).min(budget);
        if takes > available { Err(PlanError::AboveLimit { budget, takes, available, origin }) } else { Ok(()) }
    }

    /// Usable part of `available` bytes reported by the system.
    pub fn without_margin(available: u64, source: BudgetSource) -> u64 {
        available.saturating_sub(Margin::of_source(source).bytes(available))
    }

    /// Sets the slots of the high pools, in their order, and none for low versions, after a division made elsewhere.
    /// The slots take no more than the plan has for experts.
    pub fn set_high_slots(&mut self, slots: &[u32]) {
        let mut slots = slots.iter();
        for pool in &mut self.pools {
            let planned = if pool.precision == Precision::High { slots.next().copied().unwrap_or(0) } else { 0 };
            pool.n_slots = planned.min(pool.n_versions);
            pool.expert_cache = pool.expert_stride * u64::from(pool.n_slots);
        }
        self.n_slots = self.pools.iter().map(|pool| u64::from(pool.n_slots)).sum();
        self.expert_cache = self.pools.iter().map(|pool| pool.expert_cache).sum();
        (self.n_low_slots, self.low_cache, self.decode) = (0, 0, None);
    }

    /// Gives low versions beside all high ones the room that is left, for devices: there a miss copies the low version
    /// from the host. Whether low versions can be used then; one without a slot passes through staging.
    pub fn add_low_slots(&mut self, cache: ExpertCache, staging: StagingWish) -> bool {
        if !self.is_fully_resident() {
            return true;
        }
        let asked = if let ExpertCache::Bytes(bytes) = cache { bytes } else { u64::MAX };
        let room = self.unused().min(asked.saturating_sub(self.expert_cache));
        let all: u64 = self.low_pools().map(|pool| pool.expert_stride * u64::from(pool.n_versions)).sum();
        let slot_bytes = self.staging_slot_bytes.max(1);
        let staging = if room < all {
            (room / 10 / slot_bytes).clamp(u64::from(staging.min), u64::from(staging.wanted))
        } else {
            0
        };
        let Some(room) = room.checked_sub(staging * slot_bytes).filter(|_| all > 0) else { return false };
        for pool in self.pools.iter_mut().filter(|pool| pool.precision == Precision::Low) {
            let fitting = u128::from(pool.n_versions) * u128::from(room) / u128::from(all);
            pool.n_slots = fitting.min(pool.n_versions.into()) as u32; // at most the versions
            pool.expert_cache = pool.expert_stride * u64::from(pool.n_slots);
        }
        self.n_low_slots = self.low_pools().map(|pool| u64::from(pool.n_slots)).sum();
        self.low_cache = self.low_pools().map(|pool| pool.expert_cache).sum();
        self.expert_cache += self.low_cache;
        (self.staging_slots, self.staging) = (staging as u32, staging * slot_bytes);
        true
    }

    fn low_pools(&self) -> impl Iterator<Item = &PoolPlan> {
        self.pools.iter().filter(|pool| pool.precision == Precision::Low)
    }

    /// Bytes of the budget that stay unused: everything fits, or less was asked for.
    pub fn unused(&self) -> u64 {
        self.budget - self.margin - self.fixed.total() - self.expert_cache - self.staging
    }

    /// Bytes of all slots, as a share of the bytes of all high versions, `0.0..=1.0`.
    pub fn cache_share(&self) -> f64 {
        let high = self.pools.iter().filter(|pool| pool.precision == Precision::High);
        let bytes: u64 = high.map(|pool| pool.expert_stride * u64::from(pool.n_versions)).sum();
        self.expert_cache as f64 / bytes.max(1) as f64
    }

    /// Bytes of the compute buffer that experts may have during a batch of `n_tokens`, if they have had those of
    /// [`DecodePlan`]: what decoding touches includes all that does not depend on the number of tokens, except for
    /// the most bytes of `logits`. The buffer has the size for `n_ubatch` tokens.
    pub fn free_compute(&self, n_tokens: u32, n_ubatch: u32, logits: u64) -> u64 {
        let of_tokens = u128::from(self.fixed.compute) * u128::from(n_tokens) / u128::from(n_ubatch.max(1));
        let of_tokens = u64::try_from(of_tokens).unwrap_or(u64::MAX);
        let touched = |decode: &DecodePlan| decode.compute.saturating_add(of_tokens).saturating_add(logits);
        self.decode.as_ref().map_or(0, |decode| self.fixed.compute.saturating_sub(touched(decode)))
    }

    /// Whether every high version has a slot: each is read once.
    pub fn is_fully_resident(&self) -> bool {
        self.n_slots == self.n_experts
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<14}{:>9}  {}", "memory budget", ShortBytes(self.budget), self.budget_source)?;
        let mut row = |name: &str, bytes: u64, note: &str| {
            let gap = if note.is_empty() { "" } else { "  " };
            write!(f, "\n  {name:<12}{:>9}{gap}{note}", ShortBytes(bytes))
        };
        row("weights", self.fixed.weights, "")?;
        row("KV cache", self.fixed.kv, "")?;
        row("compute", self.fixed.compute, "")?;
        row("runtime", self.fixed.runtime, "")?;
        if self.fixed.prediction >= 1 << 20 {
            row("prediction", self.fixed.prediction, "tables of policy and predictor")?;
        }
        row("margin", self.margin, "kept free")?;
        if let Some(note) = share(self.n_slots, self.n_experts) {
            row("expert cache", self.expert_cache - self.low_cache, &note)?;
            if let Some(DecodePlan { n_slots, expert_cache, .. }) = &self.decode {
                let note = share(*n_slots, self.n_experts).unwrap_or_default();
                row("at decoding", *expert_cache, &format!("{note}, in the compute buffer's memory too"))?;
            }
            let n_low = self.low_pools().map(|pool| u64::from(pool.n_versions)).sum();
            if let Some(note) = share(self.n_low_slots, n_low) {
                row("low cache", self.low_cache, &format!("{note} in low precision"))?;
            }
            let note = match self.staging_slots {
                0 => "not needed: every expert has a slot".to_owned(),
                1 => format!("1 slice of {}", ShortBytes(self.staging_slot_bytes)),
                n => format!("{n} slices of {}", ShortBytes(self.staging_slot_bytes)),
            };
            row("staging", self.staging, &note)?;
        }
        row("unused", self.unused(), "")
    }
}

fn share(n_slots: u64, n_experts: u64) -> Option<String> {
    let percent = (n_slots * 100).checked_div(n_experts)?;
    Some(format!("{n_slots} of {n_experts} experts ({percent} %)"))
}
