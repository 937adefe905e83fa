//! Pools by the first bytes of a script.

use super::super::{Allocation, LayerDemand, LayerLayout, PoolLayout, SliceKinds, allocate};
use crate::expert::{ExpertId, Precision, SliceKind, Version};

/// Every version lies in any pool or in none, so that layers have several shares and shares mix precisions.
pub(super) fn read_pools(bytes: &mut impl Iterator<Item = u8>) -> Vec<PoolLayout> {
    let mut below = |n: u8| bytes.next().map_or(0, |byte| byte % n);
    let split = [SliceKind::Gate, SliceKind::Up, SliceKind::Down].into_iter().collect::<SliceKinds>();
    let fused = [SliceKind::GateUp, SliceKind::Down].into_iter().collect::<SliceKinds>();
    let first = u16::from(below(3)); // leading dense layers
    let layers = first..first + u16::from(below(3)) + 1;
    let mut pools: Vec<PoolLayout> = (0..below(4) + 1)
        .map(|_| {
            let kinds = if below(2) == 0 { split } else { fused };
            let layers = layers.clone().map(|layer| LayerLayout { layer, members: Vec::new(), kinds });
            PoolLayout { layers: layers.collect(), n_slots: 0, capacities: None, is_common: false }
        })
        .collect();
    for layer in 0..layers.len() {
        for index in 0..u16::from(below(6)) + 1 {
            let expert = ExpertId { layer: first + layer as u16, index };
            for precision in Precision::ALL {
                // The last choice is no pool at all.
                if let Some(pool) = pools.get_mut(usize::from(below(5))) {
                    pool.layers[layer].members.push(Version { expert, precision });
                }
            }
        }
    }
    for pool in &mut pools {
        let n_member: usize = pool.layers.iter().map(|layer| layer.members.len()).sum();
        pool.n_slots = below(n_member as u8 + 2).into();
        let demand = |layout: &LayerLayout| LayerDemand {
            members: layout.members.len() as u32,
            penalty: f64::from(layout.layer),
            depth: layout.layer - first,
            ..LayerDemand::default()
        };
        let demands: Vec<_> = pool.layers.iter().map(demand).collect();
        let kind = [None, Some(Allocation::ShallowFirst { layers: 1 }), Some(Allocation::ByPenalty), None];
        let choice = usize::from(below(kind.len() as u8));
        pool.capacities = kind[choice].map(|kind| allocate(kind, pool.n_slots, &demands));
        pool.is_common = choice == 3;
    }
    pools
}
