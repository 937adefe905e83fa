//! The experts' memory on the host: which versions get slots, how many, and what can be lent.

use std::path::Path;

use super::versions::{Pool, pool_specs, pools_of, staging_of, types_of};
use super::{ExpertCache, MemoryPlan, PlanError, PlanInput, PoolSpec};
use crate::expert::Precision;
use crate::gguf::Catalog;
use crate::profile::{ChosenMix, Here, LossBound, LossBoundError, VirtualPlan, VirtualPlanError};
use crate::store::BLOCK_BYTES;
use crate::units::MIB;

/// Devices that compute experts, as far as the host's memory depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceExperts {
    /// There are some.
    pub exist: bool,
    /// Some compute the experts of layers.
    pub have_layers: bool,
    /// Together they have a slot for every expert of the model.
    pub hold_all: bool,
    /// Experts of the layers whose device copies them from the host.
    pub n_copied: u64,
    /// Slots for these experts on their devices.
    pub n_slots: u64,
}

impl DeviceExperts {
    /// Whether a missing expert is copied from the host.
    pub fn copy(&self) -> bool {
        !self.hold_all && self.n_copied > 0
    }
}

/// Input of a set-up. Sizes are bytes.
pub struct SetupInput<'a> {
    /// Without pools and staging, which follow from the versions. `fixed` lacks checkpoints and lent memory.
    pub plan: PlanInput,
    /// Low versions are not used.
    pub is_exact: bool,
    /// Tokens use only experts in memory, and these change.
    pub virtual_experts: bool,
    /// Number of experts of each layer, and the file that has them.
    pub virtual_plan: Option<(&'a VirtualPlan, &'a Path)>,
    pub loss_bound: Option<&'a LossBound>,
    pub devices: DeviceExperts,
    /// Checkpoints get memory only if the model still fits.
    pub checkpoints: u64,
    /// Memory that must be available to other parts of the program for a while.
    pub lent: u64,
}

/// The experts' memory on the host.
#[derive(Debug)]
pub struct Setup {
    pub plan: MemoryPlan,
    /// The versions that are used, and their pools, one for each pool of the plan.
    pub catalog: Catalog,
    pub pools: Vec<Pool>,
    /// Low versions are not used.
    pub is_exact: bool,
    /// Choice for the loss bound.
    pub mix: Option<ChosenMix>,
    pub checkpoints: u64,
    /// Bytes that can be lent while all slots stay.
    pub spare: u64,
    /// Bytes that slots can give up.
    pub lendable: u64,
    pub n_staging: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    VirtualPlan(#[from] VirtualPlanError),
    #[error(transparent)]
    LossBound(Box<LossBoundError>),
    #[error(
        "virtual experts change in the host's memory, from where a device has them, and the expert cache has no room \
         there"
    )]
    NoRoomForVirtual,
}

impl Setup {
    /// Divides the memory for the versions of `catalog`.
    pub fn new(input: &SetupInput, catalog: Catalog) -> Result<Self, SetupError> {
        let SetupInput { devices, lent, is_exact, .. } = *input;
        let pools = pools_of(&catalog);
        let specs = pool_specs(&pools, &catalog);
        let planned = input.planned_slots(&pools, &specs)?;
        let expert_cache = match input.plan.expert_cache {
            // The host only passes on experts that the devices keep.
            ExpertCache::Auto if devices.hold_all => ExpertCache::Bytes(0),
            given => given,
        };
        // If devices have a slot for every expert, virtual experts never change.
        let changes = input.virtual_experts && !devices.hold_all;
        if changes && devices.have_layers && expert_cache == ExpertCache::Bytes(0) {
            return Err(SetupError::NoRoomForVirtual);
        }
        let expert_cache = planned.as_ref().map_or(expert_cache, |(bytes, _)| ExpertCache::Bytes(*bytes));
        let staging = staging_of(&specs, &catalog);
        let mut wanted = PlanInput { expert_cache, pools: specs, staging, ..input.plan.clone() };
        let lends = !devices.exist && planned.is_none() && !catalog.layers.is_empty();
        let (plan, checkpoints, staging_when_lent) = input.fit(&mut wanted, lends)?;

        let (spare, lendable, n_staging) = (0, 0, 0);
        let mut new = Self { plan, catalog, pools, is_exact, mix: None, checkpoints, spare, lendable, n_staging };
        if let Some(bound) = input.loss_bound {
            new.bound_loss(bound, wanted, devices)?;
        }
        let plan = &mut new.plan;
        if let Some((_, slots)) = planned.filter(|_| !plan.is_fully_resident()) {
            plan.set_high_slots(&slots);
        }
        // Nothing is ever evicted, read twice or copied twice: low precision would save one read per expert. Copies
        // from the host to a device are saved at every miss.
        let saves_copies = devices.copy() && !new.is_exact && plan.add_low_slots(expert_cache, staging);
        if devices.hold_all || plan.is_fully_resident() && !saves_copies {
            new.is_exact = true;
            new.catalog.drop_low();
        }
        if devices.hold_all {
            // Nothing is read twice, however few slots the host has.
            plan.warning = None;
        }
        new.n_staging = match input.plan.expert_cache {
            // Without any cache, the engine runs at its smallest: everything passes through one slot.
            ExpertCache::Bytes(0) => 1,
            _ => plan.staging_slots as usize,
        };
        // Experts without a slot need staging.
        (new.spare, new.lendable) = if lends {
            let more_staging = staging_when_lent.saturating_sub(plan.staging);
            (plan.unused().saturating_sub(more_staging), plan.expert_cache)
        } else {
            (plan.unused().saturating_add(lent), 0)
        };
        Ok(new)
    }

    /// Chooses the mix of a loss bound. Without low versions, their slots would stay empty.
    fn bound_loss(&mut self, bound: &LossBound, wanted: PlanInput, devices: DeviceExperts) -> Result<(), SetupError> {
        let mut high = self.catalog.clone();
        high.drop_low();
        let pools = pools_of(&high);
        let plan = MemoryPlan::new(&PlanInput { pools: pool_specs(&pools, &high), ..wanted })?;
        let chosen = if devices.hold_all || plan.is_fully_resident() && !devices.copy() {
            bound.exact()
        } else {
            let here = here(&plan, &self.catalog, devices);
            bound.choose(&here).map_err(|error| SetupError::LossBound(Box::new(error)))?
        };
        if !chosen.mix.uses_low() && !self.is_exact && !devices.exist {
            self.is_exact = true;
            (self.catalog, self.pools, self.plan) = (high, pools, plan);
        }
        self.mix = Some(chosen);
        Ok(())
    }

    /// For each pool, the bytes of its memory and of one of its slots. For the most slots that it ever has:
    /// untouched memory costs nothing.
    pub fn pool_bytes(&self) -> impl Iterator<Item = (usize, usize)> {
        let most = self.plan.decode.as_ref().map_or(&self.plan.pools, |decode| &decode.pools);
        self.pools.iter().zip(most).map(|(pool, planned)| {
            let stride = self.catalog.classes[usize::from(pool.class)].stride as usize;
            (planned.n_slots as usize * stride, stride)
        })
    }

    /// Bytes of a staging slot's memory.
    pub fn staging_stride(&self) -> usize {
        self.plan.staging_slot_bytes.max(BLOCK_BYTES) as usize
    }
}

impl SetupInput<'_> {
    /// Slots of each high pool under the plan of virtual experts, in order, and their total bytes; `None` without a
    /// plan.
    fn planned_slots(&self, pools: &[Pool], specs: &[PoolSpec]) -> Result<Option<(u64, Vec<u32>)>, VirtualPlanError> {
        let Some((plan, file)) = self.virtual_plan else { return Ok(None) };
        let high = || pools.iter().zip(specs).filter(|(_, spec)| spec.precision == Precision::High);
        let slots: Vec<u32> = high().map(|(pool, _)| pool.planned(plan).iter().sum()).collect();
        let bytes = high().zip(&slots).map(|((_, spec), slots)| spec.expert_stride * u64::from(*slots)).sum();
        let all = high().map(|(_, spec)| spec.bytes()).sum();
        match self.plan.expert_cache.of(all) {
            Some(given) if given < bytes => {
                let (file, needed, given) = (file.display().to_string(), bytes.div_ceil(MIB), given / MIB);
                Err(VirtualPlanError::TooLarge { file, needed, given })
            }
            _ => Ok(Some((bytes, slots))),
        }
    }

    /// The plan, bytes for checkpoints, and bytes of staging while memory is lent.
    fn fit(&self, wanted: &mut PlanInput, lends: bool) -> Result<(MemoryPlan, u64, u64), PlanError> {
        let mut checkpoints = self.checkpoints;
        wanted.fixed.runtime += checkpoints + self.lent;
        let mut plan = match MemoryPlan::new(wanted) {
            // The model itself comes first.
            Err(_) if checkpoints > 0 => {
                wanted.fixed.runtime -= std::mem::take(&mut checkpoints);
                MemoryPlan::new(wanted)?
            }
            plan => plan?,
        };
        let staging_when_lent = plan.staging;
        if lends && self.lent > 0 {
            wanted.fixed.runtime -= self.lent;
            // Staging cannot shrink.
            wanted.staging.wanted = wanted.staging.wanted.min(plan.staging_slots.max(wanted.staging.min));
            plan = MemoryPlan::new(wanted)?;
        }
        Ok((plan, checkpoints, staging_when_lent))
    }
}

/// Residency for a loss bound, by a plan of high versions alone: the share of experts that lie where products run, in
/// the memory where it is smallest.
fn here(plan: &MemoryPlan, catalog: &Catalog, devices: DeviceExperts) -> Here {
    let DeviceExperts { n_copied, n_slots, .. } = devices;
    let on_devices = if n_copied > 0 { n_slots as f64 / n_copied as f64 } else { 1.0 };
    let on_host = if n_copied < plan.n_experts { plan.cache_share() } else { 1.0 };
    Here {
        cache_share: on_host.min(on_devices),
        high: types_of(catalog, Precision::High),
        low: catalog.has_low().then(|| types_of(catalog, Precision::Low)),
    }
}
