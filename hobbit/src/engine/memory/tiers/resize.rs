//! Resizes caches while a model is open.

use super::{Lending, Tiers};
use crate::engine::memory::device_tier::Tier;
use hobbit_core::cache::ShareId;
use hobbit_core::expert::Precision;
use hobbit_core::plan::ExpertCache;

/// A share of the host's cache: its layer and number there, the bytes of its slots.
type HostShare = (u16, u16, ShareId, u64);

impl Tiers {
    /// Bytes of the slots on the host.
    pub(crate) fn host_cache_bytes(&self) -> u64 {
        let bytes = |(_, _, id, stride): HostShare| self.host.cache().pools().slots_of_share(id).len() as u64 * stride;
        self.host_shares().into_iter().map(bytes).sum()
    }

    /// Resizes the host's slots to `wanted`, at most those of the plan. Pinned memory, and memory that a device
    /// computes in, cannot be given back and stays as it is. Returns the bytes of the slots.
    pub(crate) fn resize_host(&mut self, wanted: ExpertCache) -> u64 {
        self.wanted = wanted;
        self.fit_host();
        self.host_cache_bytes()
    }

    /// As [`Model::lend`](crate::Model::lend). `None`: the layer in evaluation keeps its experts until it is computed;
    /// to be called again.
    pub(crate) fn lend(&mut self, bytes: u64) -> Option<bool> {
        if bytes > self.lending.spare.saturating_add(self.lending.most) {
            return Some(false);
        }
        let before = std::mem::replace(&mut self.lending.bytes, bytes);
        let is_spare = self.lending.most == 0 || before.max(bytes) <= self.lending.spare;
        let keeps_slots = is_spare && self.free_compute == 0;
        (keeps_slots || self.fit_host()).then_some(true)
    }

    /// Whether experts may have more slots while tokens decode.
    pub(crate) fn follows_phases(&self) -> bool {
        !self.prompt_slots.is_empty()
    }

    /// Bytes of the compute buffer that only prompts touch.
    pub(crate) fn prompt_only(&self) -> u64 {
        let plan = &self.description.plan;
        plan.decode.as_ref().map_or(0, |decode| plan.fixed.compute - decode.compute)
    }

    /// Gives the host the slots that it has with so much of the compute buffer.
    pub(crate) fn use_compute(&mut self, bytes: u64) {
        self.divide(bytes, self.wide_staging);
    }

    /// As [`Tiers::use_compute`], and lends `staging` bytes of the slots to staging, half of them at most.
    pub(crate) fn divide(&mut self, compute: u64, staging: u64) {
        if self.follows_phases() && (self.free_compute, self.wide_staging) != (compute, staging) {
            (self.free_compute, self.wide_staging) = (compute, staging);
            self.fit_host();
        }
    }

    /// Slots of a share now. While memory is lent, they are those of prompts: the plan lends from these.
    fn planned_slots(&self, id: ShareId) -> u32 {
        let most = self.host.cache().pools().most_of_share(id);
        let Some(of_prompts) = self.prompt_slots.get(&id) else { return most };
        let bytes = if self.lending.bytes == 0 { self.free_compute } else { 0 };
        let more = u64::from(most.saturating_sub(*of_prompts)) * bytes / self.prompt_only().max(1);
        most.min(of_prompts + more as u32) // `more` is a part of the difference
    }

    /// Gives the host the planned slots, at most those that were asked for, less those whose memory is lent. False if
    /// experts in use kept theirs.
    fn fit_host(&mut self) -> bool {
        self.rest();
        self.host.quiesce();
        let shares = self.host_shares();
        let planned: u64 = shares.iter().map(|&(_, _, id, stride)| u64::from(self.planned_slots(id)) * stride).sum();
        let catalog = self.host.reads().catalog();
        let strides = catalog.layers.iter().flat_map(|layer| &layer.high);
        let all = strides.map(|version| catalog.classes[usize::from(version.class)].stride).sum();
        let Lending { bytes: lent, spare, .. } = self.lending;
        let bytes = bytes_of(self.wanted, planned - lent.saturating_sub(spare).min(planned), all);
        if self.tiers.iter().any(Tier::is_unified) || !self.has_staging() {
            return true;
        }
        let stride = self.host.reads().staging_stride() as u64;
        let n_more = self.wide_staging.min(bytes / 2) / stride;
        let n_staging = self.description.plan.staging_slots as usize + n_more as usize;
        let bytes = bytes - n_more * stride;
        if self.host.memory.n_staging() > n_staging {
            self.set_staging(n_staging);
        }
        let mut is_done = true;
        for (layer, share, id, _) in shares {
            let most = self.host.cache().pools().most_of_share(id);
            let n = (u128::from(self.planned_slots(id)) * u128::from(bytes) / u128::from(planned.max(1))) as u32;
            if !self.host.reads().is_discardable(id.pool) {
                continue;
            }
            if !self.host.memory.resize_share(id, n) {
                is_done = false;
                continue;
            }
            self.host.reads().restore(layer, share, 0..n);
            // SAFETY: the slots are empty and can no longer be taken, nothing is being read, and no split is running,
            // for this value is borrowed mutably; devices have been waited for.
            unsafe { self.host.reads().discard(layer, share, n..most) };
        }
        if is_done && self.host.memory.n_staging() < n_staging {
            self.set_staging(n_staging);
        }
        is_done
    }

    /// Replaces the staging slots, where memory follows the phase: the plan has some then. Keeps them if the system
    /// refuses.
    fn set_staging(&mut self, n_slots: usize) {
        if self.follows_phases() && self.host.reads_mut().make_staging(n_slots) {
            self.host.memory.set_staging(n_slots);
        }
    }

    /// Resizes the slots of all devices to `wanted`, at most their initial size. Returns the bytes of the slots.
    pub(crate) fn resize_devices(&mut self, wanted: ExpertCache) -> u64 {
        self.rest();
        let planned: u64 = self.tiers.iter().map(|tier| tier.slots.planned_bytes()).sum();
        let bytes = bytes_of(wanted, planned, self.host.reads().catalog().bytes(Precision::High));
        let part = |of: u64| (u128::from(of) * u128::from(bytes) / u128::from(planned.max(1))) as u64;
        for tier in &mut self.tiers {
            tier.resize(part(tier.slots.planned_bytes()));
        }
        self.fill_again();
        self.tiers.iter().map(|tier| tier.report.cache_bytes).sum()
    }

    /// Resizes devices that could not be resized during an evaluation.
    pub(crate) fn catch_up(&mut self) {
        let is_due = |tier: &Tier| tier.slots.pending.is_some() && !tier.slots.is_lent();
        if self.tiers.iter().any(is_due) {
            self.rest();
            for tier in self.tiers.iter_mut().filter(|tier| is_due(tier)) {
                let bytes = tier.slots.pending.unwrap_or_default();
                tier.resize(bytes);
            }
            self.fill_again();
        }
    }

    /// Layers that have a slot for every expert again are computed as a whole again. If a read fails, their experts are
    /// loaded when needed, and the error is reported then.
    fn fill_again(&mut self) {
        if self.preload().is_err() {
            self.host.memory.settle();
        }
    }

    /// Waits for all work submitted to devices.
    fn rest(&mut self) {
        self.tiers.iter_mut().for_each(|tier| tier.rest(&mut self.host));
    }

    fn host_shares(&self) -> Vec<HostShare> {
        let (layout, reads) = (self.host.layout(), self.host.reads());
        let of_layer = |layer: u16| {
            let shares = layout.shares(layer).iter().zip(0..);
            shares.map(move |(share, number)| (layer, number, share.id, reads.stride(layer, number)))
        };
        layout.layers().flat_map(of_layer).collect()
    }

    /// Experts without a slot pass through staging, which may be missing if each had one.
    fn has_staging(&mut self) -> bool {
        if self.host.memory.n_staging() > 0 {
            return true;
        }
        let layout = self.host.layout();
        let n_kinds = layout.layers().map(|layer| layout.kinds(layer).len()).max().unwrap_or(1);
        if !self.host.reads_mut().make_staging(n_kinds) {
            return false;
        }
        self.host.memory.set_staging(n_kinds);
        true
    }
}

/// The requested bytes, at most `planned`. `all`: bytes of every expert.
fn bytes_of(wanted: ExpertCache, planned: u64, all: u64) -> u64 {
    let bytes = match wanted {
        ExpertCache::Auto => planned,
        ExpertCache::Bytes(bytes) => bytes,
        // As in the plan. Negative and undefined numbers become 0.
        ExpertCache::Percent(percent) => (all as f64 * percent / 100.0).round() as u64,
    };
    bytes.min(planned)
}
