//! The pools of a model's slots, their division among layers, and the eviction policy.

use super::{PoolPlan, PoolSpec, StagingWish};
use crate::cache::policy::{self, Policy, PolicyKind, Shape, Weights};
use crate::cache::{Allocation, Cache, LayerDemand, LayerLayout, PoolLayout, SliceKinds, allocate};
use crate::expert::{ExpertId, Precision, Version};
use crate::gguf::Catalog;
use crate::profile::VirtualPlan;

/// How a model's slots are divided among its layers.
pub struct LayerDivision<'a> {
    pub policy: PolicyKind,
    pub weights: Weights,
    pub slots: Allocation,
    /// All layers with experts, of which a pool may have some.
    pub all: &'a Catalog,
    pub virtual_plan: Option<&'a VirtualPlan>,
    pub n_expert_used: u32,
}

/// A cache whose pools have the planned numbers of slots.
pub fn cache_of(division: &LayerDivision, catalog: &Catalog, pools: &[Pool], planned: &[PoolPlan]) -> Cache {
    let layouts =
        pools.iter().zip(planned).map(|(pool, planned)| pool.layout(division, catalog, planned.n_slots)).collect();
    Cache::new(layouts, policy_of(division, catalog))
}

/// The eviction policy for these experts.
fn policy_of(division: &LayerDivision, catalog: &Catalog) -> Box<dyn Policy> {
    let bytes = |precision| catalog.read_bytes(precision) as f32 / catalog.layers.len().max(1) as f32;
    let low_cost =
        if catalog.read_bytes(Precision::Low) == 0 { 1.0 } else { bytes(Precision::Low) / bytes(Precision::High) };
    let n_layers = catalog.layers.last().map_or(1, |layer| layer.layer + 1);
    policy::build(division.policy, &division.weights, Shape { n_layers, low_cost })
}

/// Versions of one class and precision, which share slots.
#[derive(Debug)]
pub struct Pool {
    precision: Precision,
    pub class: u16,
    /// Members by layer, ascending; no list is empty.
    layers: Vec<(u16, Vec<Version>)>,
}

impl Pool {
    pub fn spec(&self, catalog: &Catalog) -> PoolSpec {
        let class = &catalog.classes[usize::from(self.class)];
        let n_versions = self.layers.iter().map(|(_, members)| members.len() as u16).collect();
        PoolSpec::of(class, self.precision, n_versions)
    }

    /// Slots of each layer by the plan of virtual experts.
    pub fn planned(&self, plan: &VirtualPlan) -> Vec<u32> {
        self.layers.iter().map(|(layer, members)| plan.slots_of(*layer, members.len() as u32)).collect()
    }

    fn layout(&self, division: &LayerDivision, catalog: &Catalog, n_slots: u32) -> PoolLayout {
        let kinds: SliceKinds = catalog.classes[usize::from(self.class)].slices.iter().map(|s| s.kind).collect();
        let layers =
            self.layers.iter().map(|(layer, members)| LayerLayout { layer: *layer, members: members.clone(), kinds });
        // Low versions always share their slots equally: what is known of shallow layers applies to high versions.
        let allocation = division.slots;
        let is_even = allocation == Allocation::Even || self.precision == Precision::Low;
        let planned = division.virtual_plan.filter(|_| self.precision == Precision::High);
        let planned = planned.map(|plan| self.planned(plan)).filter(|slots| slots.iter().sum::<u32>() <= n_slots);
        let capacities = planned.or_else(|| {
            (!is_even).then(|| {
                let demands: Vec<LayerDemand> =
                    self.layers.iter().map(|(layer, members)| demand(division, *layer, members.len() as u32)).collect();
                allocate(allocation, n_slots, &demands)
            })
        });
        PoolLayout { layers: layers.collect(), n_slots, capacities, is_common: false }
    }
}

/// Demand of a layer with `members` experts in the pool.
fn demand(division: &LayerDivision, layer: u16, members: u32) -> LayerDemand {
    let all = &division.all.layers;
    let depth = all.partition_point(|other| other.layer < layer);
    LayerDemand { depth: depth as u16, members, needs: division.n_expert_used }
}

/// Groups versions into pools: equal shape and precision share one.
pub fn pools_of(catalog: &Catalog) -> Vec<Pool> {
    let mut pools: Vec<Pool> = Vec::new();
    for precision in Precision::ALL {
        for layer in &catalog.layers {
            for index in 0..layer.n_expert {
                let Some(class) = layer.source(index, precision).map(|source| source.class) else { continue };
                let known = pools.iter().position(|pool| pool.precision == precision && pool.class == class);
                let known = known.unwrap_or_else(|| {
                    pools.push(Pool { precision, class, layers: Vec::new() });
                    pools.len() - 1
                });
                let version = Version { expert: ExpertId { layer: layer.layer, index }, precision };
                let layers = &mut pools[known].layers;
                match layers.last_mut() {
                    Some((last, members)) if *last == layer.layer => members.push(version),
                    _ => layers.push((layer.layer, vec![version])),
                }
            }
        }
    }
    pools
}

/// Sizes of these pools for a plan.
pub fn pool_specs(pools: &[Pool], catalog: &Catalog) -> Vec<PoolSpec> {
    pools.iter().map(|pool| pool.spec(catalog)).collect()
}

/// Staging for experts of these shapes.
pub fn staging_of(pools: &[PoolSpec], catalog: &Catalog) -> StagingWish {
    let slice_bytes = pools.iter().map(|pool| pool.slice_stride_max).max().unwrap_or(0);
    let n_kinds = catalog.classes.iter().map(|class| class.slices.len()).max().unwrap_or(0);
    StagingWish::of(slice_bytes, n_kinds)
}

/// The types of a precision's versions, the most frequent first: `q4_K/q6_K`.
pub fn types_of(catalog: &Catalog, precision: Precision) -> String {
    let mut counts: Vec<(&'static str, usize)> = Vec::new();
    for layer in &catalog.layers {
        for source in (0..layer.n_expert).filter_map(|index| layer.source(index, precision)) {
            for slice in &catalog.classes[usize::from(source.class)].slices {
                let name = slice.dtype.name();
                match counts.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((name, 1)),
                }
            }
        }
    }
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts.iter().map(|(name, _)| *name).collect::<Vec<_>>().join("/")
}
