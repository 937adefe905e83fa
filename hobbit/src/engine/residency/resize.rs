//! Caches that get smaller or larger while a model is open.

use super::{Residency, Staging};
use crate::cache::ShareId;
use crate::engine::offload::Tier;
use crate::expert::Precision;
use crate::plan::ExpertCache;
use crate::store::Arena;

impl Residency {
    /// Bytes of the slots on the host.
    pub(in super::super) fn host_cache_bytes(&self) -> u64 {
        self.host_shares().into_iter().map(|(id, stride, _)| self.cache.slots_of_share(id).len() as u64 * stride).sum()
    }

    /// Divides so much among the slots on the host, as far as they were made with so many. Memory that is pinned, or that a
    /// device computes in, cannot be given back and stays as it is. Bytes of the slots then.
    pub(in super::super) fn resize_host(&mut self, wanted: ExpertCache) -> u64 {
        self.rest();
        self.settle();
        self.settle_upgrades();
        let shares = self.host_shares();
        let planned: u64 = shares.iter().map(|(id, stride, _)| u64::from(self.cache.most_of_share(*id)) * stride).sum();
        let strides = self.catalog.layers.iter().flat_map(|layer| &layer.high);
        let all = strides.map(|version| self.catalog.classes[usize::from(version.class)].stride).sum();
        let bytes = bytes_of(wanted, planned, all);
        if self.tiers.iter().flatten().any(|tier| tier.is_unified()) || !self.has_staging() {
            return self.host_cache_bytes();
        }
        for (id, stride, first_slot) in shares {
            let most = self.cache.most_of_share(id);
            let n = (u128::from(most) * u128::from(bytes) / u128::from(planned.max(1))) as u32;
            let arena = &self.pools[usize::from(id.pool)];
            if !arena.is_discardable() || self.cache.resize_share(id, n).is_none() {
                continue;
            }
            let at = |slot: u32| (first_slot + slot) as usize * stride as usize;
            // SAFETY: the slots are empty and can no longer be taken, nothing is being read, and no split is running, for
            // this value is borrowed mutably; devices have been waited for.
            unsafe { arena.discard(at(n)..at(most)) };
        }
        self.fill_again_later();
        self.host_cache_bytes()
    }

    /// Divides so much among the slots of all devices, as far as they were made with so many. Bytes of the slots then.
    pub(in super::super) fn resize_devices(&mut self, wanted: ExpertCache) -> u64 {
        self.rest();
        let planned: u64 = self.tiers.iter().flatten().map(|tier| tier.planned_bytes()).sum();
        let bytes = bytes_of(wanted, planned, self.catalog.bytes(Precision::High));
        let part = |of: u64| (u128::from(of) * u128::from(bytes) / u128::from(planned.max(1))) as u64;
        self.tiers.iter_mut().flatten().for_each(|tier| {
            tier.resize(part(tier.planned_bytes()));
        });
        self.fill_again();
        self.tiers.iter().flatten().map(|tier| tier.report().cache_bytes).sum()
    }

    /// Gives devices the sizes that they could not take while an evaluation was under way.
    pub(in super::super) fn catch_up(&mut self) {
        let is_due = |tier: &Tier| tier.pending().is_some() && !tier.is_lent();
        if self.tiers.iter().flatten().any(is_due) {
            self.rest();
            for tier in self.tiers.iter_mut().flatten().filter(|tier| is_due(tier)) {
                let bytes = tier.pending().unwrap_or_default();
                tier.resize(bytes);
            }
            self.fill_again();
        }
    }

    /// Layers that have a slot for every expert again are computed as a whole again. Where a read fails, they come as
    /// they are needed: then it is told.
    fn fill_again(&mut self) {
        if self.preload().is_err() {
            self.settle();
        }
    }

    /// Waits for what devices have been told to do.
    fn rest(&mut self) {
        let mut tiers = std::mem::take(&mut self.tiers);
        for tier in tiers.iter_mut().flatten() {
            let (pins, staged) = tier.rest();
            self.unpin(pins);
            staged.into_iter().for_each(|slice| self.release(slice));
        }
        self.tiers = tiers;
    }

    /// Every share, the bytes of its slots, and its first slot.
    fn host_shares(&self) -> Vec<(ShareId, u64, u32)> {
        let layers = self.layers.iter().zip(0u16..).filter_map(|(layer, number)| Some((layer.as_ref()?, number)));
        let of_layer = |(layer, number): (&super::Layer, u16)| {
            let shares = layer.shares.iter().map(move |share| {
                let stride = self.catalog.classes[usize::from(share.class)].stride;
                (ShareId { pool: share.pool, layer: number }, stride, share.first_slot)
            });
            shares.collect::<Vec<_>>()
        };
        layers.flat_map(of_layer).collect()
    }

    /// Experts without a slot pass through staging, of which there may be none where each had one.
    fn has_staging(&mut self) -> bool {
        if self.staging.len() > 0 {
            return true;
        }
        let n_kinds = self.layers.iter().flatten().map(|layer| layer.kinds.len()).max().unwrap_or(1);
        let Ok(arena) = Arena::new(n_kinds * self.staging_stride) else { return false };
        self.staging_memory = arena;
        self.staging = Staging::new(n_kinds);
        true
    }
}

/// What is asked for, of `planned` bytes at most. `all`: bytes of every expert.
fn bytes_of(wanted: ExpertCache, planned: u64, all: u64) -> u64 {
    let bytes = match wanted {
        ExpertCache::Auto => planned,
        ExpertCache::Bytes(bytes) => bytes,
        // As in the plan. Negative and undefined numbers become 0.
        ExpertCache::Percent(percent) => (all as f64 * percent / 100.0).round() as u64,
    };
    bytes.min(planned)
}
