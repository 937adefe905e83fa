//! How a pool's slots are divided among layers: what the options say, applied to a model and its profile.

use super::model::Model;
use crate::cache::{Allocation, LayerDemand, allocate};
use crate::expert::{Precision, Version};
use crate::fitted::{FittedPolicy, LayerPenalty};

/// Divides slots among layers.
pub(super) struct SlotDivision<'a> {
    allocation: Allocation,
    /// Every layer with experts, wherever it is computed, and its number of experts.
    layers: Vec<(u16, u16)>,
    n_expert_used: u32,
    fitted: Option<&'a FittedPolicy>,
}

impl<'a> SlotDivision<'a> {
    pub(super) fn of(model: &'a Model) -> Self {
        let shared = &model.shared;
        Self {
            allocation: shared.options.caching.slots,
            layers: shared.catalog.layers.iter().map(|layer| (layer.layer, layer.n_expert)).collect(),
            n_expert_used: model.info().n_expert_used,
            fitted: shared.fitted.as_ref().map(|fitted| &fitted.policy),
        }
    }

    /// Slots of each layer of a pool; `None` divides them equally. Low versions share theirs equally in any case: what
    /// was measured, and what is known of shallow layers, is about high ones.
    pub(super) fn capacities(
        &self,
        precision: Precision,
        layers: &[(u16, Vec<Version>)],
        n_slots: u32,
    ) -> Option<Vec<u32>> {
        if self.allocation == Allocation::Even || precision == Precision::Low {
            return None;
        }
        let demands: Vec<LayerDemand> =
            layers.iter().map(|(layer, members)| self.demand(*layer, members.len())).collect();
        Some(allocate(self.allocation, n_slots, &demands))
    }

    fn demand(&self, layer: u16, n_members: usize) -> LayerDemand {
        let depth = self.layers.partition_point(|(other, _)| *other < layer);
        let n_expert = self.layers.get(depth).map_or(0, |(_, n)| *n);
        let members = n_members as u32; // experts of a layer: a u16
        let measured = self.fitted.and_then(|fitted| fitted.penalty_of(layer));
        let (penalty, hits) = measured.map_or((0.0, Vec::new()), |curve| saved(curve, members, n_expert));
        LayerDemand { depth: depth as u16, members, needs: self.n_expert_used, penalty, hits }
    }
}

/// A layer's penalty without slots, and the part of it which so many save. Of `n_expert` experts, `members` have slots in
/// the pool: which of them are used more is not known, so each stands for as many of the layer's.
fn saved(curve: &LayerPenalty, members: u32, n_expert: u16) -> (f64, Vec<f64>) {
    let part = f64::from(members) / f64::from(n_expert.max(1));
    let of_layer = |slots: u32| curve.at(f64::from(slots) / part.max(f64::MIN_POSITIVE)).unwrap_or(0.0);
    let all = of_layer(0);
    let saved = |slots| if all > 0.0 { (1.0 - of_layer(slots) / all).max(0.0) } else { 0.0 };
    (part * all, (0..=members).map(saved).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_of_some_of_a_layers_experts_has_its_part_of_the_penalty() {
        let curve = LayerPenalty { layer: 0, n_expert: 8, slots: vec![0, 4, 8], penalty: vec![2.0, 1.0, 0.5] };
        assert_eq!(saved(&curve, 8, 8).0, 2.0);
        assert_eq!(saved(&curve, 8, 8).1, [0.0, 0.125, 0.25, 0.375, 0.5, 0.5625, 0.625, 0.6875, 0.75]);
        assert_eq!(saved(&curve, 4, 8), (1.0, vec![0.0, 0.25, 0.5, 0.625, 0.75]));
        assert_eq!(saved(&curve, 0, 8), (0.0, vec![0.0]));
        let free = LayerPenalty { penalty: vec![0.0; 3], ..curve };
        assert_eq!(saved(&free, 2, 8), (0.0, vec![0.0; 3]));
    }
}
