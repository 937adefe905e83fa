//! Everything one can ask the cache, against the model.

use super::super::evict::{UPGRADE_HYSTERESIS, UPGRADE_USES_MIN};
use super::super::{Cache, LayerLayout, Lru, PoolLayout, ShareId, SlotId};
use super::{Member, Model, ROUNDING, Resident};
use crate::expert::{Precision, Version};
use std::collections::{HashMap, HashSet};

impl Model {
    /// Whether the expert may be upgraded, its uses taken `factor` times.
    fn may_be_upgraded(&self, high: &Member, factor: f64) -> bool {
        let low_is_ready = self.residents.get(&Version::low(high.version.expert)).is_some_and(Resident::is_ready);
        let uses = self.uses_of(high.version) * factor;
        let yields = || self.coldest(high.share).is_some_and(|coldest| coldest * f64::from(UPGRADE_HYSTERESIS) < uses);
        high.version.precision == Precision::High
            && low_is_ready
            && !self.residents.contains_key(&high.version)
            && uses >= f64::from(UPGRADE_USES_MIN)
            && (self.empty_slot(high.share).is_some() || yields())
    }

    pub(super) fn compare(&self) {
        for &Member { version, share, .. } in &self.members {
            let resident = self.residents.get(&version);
            assert_eq!(self.cache.lookup(version), resident.map(|r| r.slot), "slot of {version}");
            assert_eq!(self.cache.pools().share_of(version), Some(share), "share of {version}");
            assert_eq!(self.cache.has_empty_slot(version), self.empty_slot(share).is_some(), "room for {version}");
            let Some(resident) = resident else { continue };
            assert_eq!(self.cache.pools().occupant(resident.slot), Some(version), "who is in the slot of {version}");
            assert_eq!(self.cache.is_ready(resident.slot), resident.is_ready(), "{version} ready");
            assert!(resident.slot.pool == share.pool, "pool of {version}");
            assert!(
                self.cache.pools().slots_of_share(share).contains(&resident.slot.index),
                "{version} left its share"
            );
            for (&kind, &state) in &resident.states {
                assert_eq!(self.cache.state(resident.slot, kind), state, "{kind:?} of {version}");
            }
        }
        let listed: HashMap<Version, SlotId> = self.cache.residents().collect();
        let slots: HashSet<SlotId> = listed.values().copied().collect();
        for (&share, &(n_slots, most)) in &self.sizes {
            let first = self.firsts[&share];
            assert_eq!(self.cache.pools().slots_of_share(share), first..first + n_slots, "slots of {share:?}");
            assert_eq!(self.cache.pools().most_of_share(share), most, "most slots of {share:?}");
            let of_share = |version: &Version| self.share_of(*version) == share;
            let is_idle =
                self.residents.iter().filter(|(v, _)| of_share(v)).all(|(_, resident)| resident.is_evictable());
            assert_eq!(self.cache.pools().is_share_idle(share), is_idle, "{share:?} idle");
        }
        assert_eq!(listed.len(), self.residents.len(), "residents");
        assert_eq!(slots.len(), listed.len(), "two versions in one slot");
        for layer in 0..6 {
            self.compare_upgrade(layer);
        }
    }

    fn compare_upgrade(&self, layer: u16) {
        let upgrade = self.cache.upgrade(layer);
        let of_layer = || self.members.iter().filter(|member| member.version.expert.layer == layer);
        let chosen = upgrade.and_then(|expert| of_layer().find(|member| member.version == Version::high(expert)));
        assert_eq!(upgrade.is_some(), chosen.is_some(), "{upgrade:?} has no high version");
        assert!(
            chosen.is_none_or(|member| self.may_be_upgraded(member, 1.0 + ROUNDING)),
            "upgrade of {upgrade:?}: {:?}",
            self.uses
        );
        let most = chosen.map_or(0.0, |member| self.uses_of(member.version));
        for member in of_layer().filter(|member| self.may_be_upgraded(member, 1.0 - ROUNDING)) {
            let uses = self.uses_of(member.version) * (1.0 - ROUNDING);
            assert!(uses <= most, "{} before {upgrade:?}: {:?}", member.version, self.uses);
        }
    }
}

pub(super) fn shares_are_as_asked(pools: &[PoolLayout]) {
    let cache = Cache::new(pools.to_vec(), Box::new(Lru));
    let size = |number: u16, layout: &LayerLayout| {
        let pool = &pools[usize::from(number)];
        let of = if pool.is_common { &pool.layers[0] } else { layout };
        cache.pools().slots_of_share(ShareId { pool: number, layer: of.layer }).len()
    };
    for (pool, number) in pools.iter().zip(0..) {
        if pool.is_common {
            let n_member: usize = pool.layers.iter().map(|layout| layout.members.len()).sum();
            assert_eq!(size(number, &pool.layers[0]), n_member.min(pool.n_slots as usize), "slots of {pool:?}");
            continue;
        }
        let sizes: Vec<usize> = pool.layers.iter().map(|layout| size(number, layout)).collect();
        let n_member: usize = pool.layers.iter().map(|layout| layout.members.len()).sum();
        assert_eq!(sizes.iter().sum::<usize>(), n_member.min(pool.n_slots as usize), "slots of {pool:?}");
        let largest = sizes.iter().copied().max().unwrap_or(0);
        for (layout, size) in pool.layers.iter().zip(sizes) {
            let is_even = size + 1 >= largest || size == layout.members.len();
            assert!(is_even || pool.capacities.is_some(), "shares of {pool:?}");
        }
    }
    for layer in pools.iter().flat_map(|pool| &pool.layers).map(|layout| layout.layer) {
        for precision in Precision::ALL {
            let layouts = pools.iter().zip(0..).flat_map(|(pool, number)| pool.layers.iter().map(move |l| (number, l)));
            let holds = |layout: &LayerLayout| layout.members.iter().any(|member| member.precision == precision);
            let of_precision = layouts.filter(|(_, layout)| layout.layer == layer && holds(layout));
            let expected: usize = of_precision.map(|(number, layout)| size(number, layout)).sum();
            assert_eq!(
                cache.pools().capacity_of_layer(layer, precision) as usize,
                expected,
                "{precision} of layer {layer}"
            );
        }
    }
}
