//! The pools of a model's slots, and who decides which experts leave them.

use super::allocation::SlotDivision;
use super::model::Model;
use crate::cache::policy::{self, Policy, Shape};
use crate::cache::{LayerLayout, PoolLayout, SliceKinds};
use crate::expert::{ExpertId, Precision, Version};
use crate::gguf::Catalog;
use crate::plan::PoolSpec;

/// Who decides which of these experts leave.
pub(super) fn policy_of(model: &Model, catalog: &Catalog) -> Box<dyn Policy> {
    let caching = &model.shared.options.caching;
    let bytes = |precision| catalog.bytes(precision) as f32 / catalog.layers.len().max(1) as f32;
    let low_cost =
        if catalog.bytes(Precision::Low) == 0 { 1.0 } else { bytes(Precision::Low) / bytes(Precision::High) };
    let n_layers = catalog.layers.last().map_or(1, |layer| layer.layer + 1);
    policy::build(caching.policy, &model.policy_weights(), Shape { n_layers, low_cost })
}

/// Versions of one class and precision.
pub(super) struct Pool {
    precision: Precision,
    pub(super) class: u16,
    /// By layer, ascending; none empty.
    layers: Vec<(u16, Vec<Version>)>,
}

impl Pool {
    pub(super) fn spec(&self, catalog: &Catalog) -> PoolSpec {
        let class = &catalog.classes[usize::from(self.class)];
        PoolSpec {
            precision: self.precision,
            n_versions: self.layers.iter().map(|(_, members)| members.len() as u16).collect(),
            expert_stride: class.stride,
            slice_stride_max: class.slices.iter().map(|slice| slice.capacity).max().unwrap_or(0),
        }
    }

    pub(super) fn layout(&self, catalog: &Catalog, n_slots: u32, division: &SlotDivision) -> PoolLayout {
        let kinds: SliceKinds = catalog.classes[usize::from(self.class)].slices.iter().map(|s| s.kind).collect();
        let layers =
            self.layers.iter().map(|(layer, members)| LayerLayout { layer: *layer, members: members.clone(), kinds });
        let capacities = division.capacities(self.precision, &self.layers, n_slots);
        PoolLayout { layers: layers.collect(), n_slots, capacities }
    }
}

/// Versions of equal shape and precision share a pool.
pub(super) fn pools_of(catalog: &Catalog) -> Vec<Pool> {
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
