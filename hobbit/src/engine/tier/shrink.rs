//! Slots that become fewer while a model runs: the device has run out of memory, or the user wants some of it back.
//!
//! A layer's slots are one allocation. It is freed and made again for fewer slots; what was in them is lost, and comes back
//! from the host as it is needed.

use super::Tier;
use crate::engine::ggml::Stream;
use crate::engine::log;
use hobbit_core::cache::{Cache, ShareId};
use hobbit_core::expert::Precision;

/// What part of the slots goes when nobody knows how much is missing.
const SHRINK_PART: u64 = 4;

impl Tier {
    /// The device refused memory: frees `bytes` bytes of slots at least, and a quarter of all. `stream` is waited for, so
    /// that nothing reads what goes; slots of the layer that is being computed stay. Says how much, in bytes: 0 where nothing
    /// is left to free.
    pub(in crate::engine) fn shrink(&mut self, stream: &Stream, bytes: u64) -> u64 {
        stream.synchronize();
        self.copy.synchronize();
        let before = self.report.cache_bytes;
        let target = bytes.max(before / SHRINK_PART).max(1);
        let mut stuck: Vec<u16> = self.busy.into_iter().collect();
        let mut freed = 0;
        while freed < target {
            let Some(layer) = self.largest_layer(&stuck) else { break };
            match self.resize_layer(layer, |n, _| n * 3 / 4) {
                0 => stuck.push(layer),
                n => freed += n,
            }
        }
        if freed > 0 {
            self.counters.cache_shrunk += 1;
            log::notice(format_args!(
                "{}: out of device memory; its expert cache has {} MiB instead of {}; give a smaller device cache or a larger head-room",
                self.report.name,
                self.report.cache_bytes >> 20,
                before >> 20
            ));
        }
        freed
    }

    /// The layer with the most bytes of slots.
    fn largest_layer(&self, except: &[u16]) -> Option<u16> {
        let layers = self.cache.shares().map(|share| share.layer).filter(|layer| !except.contains(layer));
        layers
            .map(|layer| (self.bytes_of_layer(layer), layer))
            .filter(|(bytes, _)| *bytes > 0)
            .max()
            .map(|(_, layer)| layer)
    }

    fn shares_of_layer(&self, layer: u16) -> Vec<ShareId> {
        self.cache.shares().filter(|share| share.layer == layer).collect()
    }

    fn bytes_of_layer(&self, layer: u16) -> u64 {
        let bytes = |share: ShareId| self.cache.slots_of_share(share).len() as u64 * self.memory.slot_bytes(share.pool);
        self.shares_of_layer(layer).into_iter().map(bytes).sum()
    }

    /// Gives each of a layer's shares as many slots as `size` makes of what it has and what it was made with, or as many
    /// as the device still has. What was in them is lost. How many bytes were freed: 0 where slots are in use.
    ///
    /// Nothing on the device may be reading or writing the layer's slots.
    pub(super) fn resize_layer(&mut self, layer: u16, size: impl Fn(u32, u32) -> u32) -> u64 {
        let shares = self.shares_of_layer(layer);
        if !shares.iter().all(|share| self.cache.is_share_idle(*share)) {
            return 0;
        }
        let before = self.bytes_of_layer(layer);
        let n_slots = |cache: &Cache, share| cache.slots_of_share(share).len() as u32;
        let mut wanted: Vec<(ShareId, u32)> = shares
            .iter()
            .map(|&share| (share, size(n_slots(&self.cache, share), self.cache.most_of_share(share))))
            .collect();
        if wanted.iter().all(|&(share, n)| n_slots(&self.cache, share) == n) {
            return 0;
        }
        if !self.dissolve(layer) {
            return 0;
        }
        loop {
            for &(share, n) in &wanted {
                for n in [0, n] {
                    self.cache.resize_share(share, n).expect("nothing in it is in use");
                }
            }
            if self.memory.allocate_layer(layer, &self.cache).is_ok() {
                break;
            }
            wanted.iter_mut().for_each(|(_, n)| *n /= 2);
        }
        let after = self.bytes_of_layer(layer);
        self.count_slots();
        before.saturating_sub(after)
    }

    /// Gives the slots `bytes` bytes in all, as far as they were made with so many and the device has them; what was in
    /// layers that change is lost. Where [`Tier::rest`] was called just before. How many bytes they have then.
    pub(in crate::engine) fn resize(&mut self, bytes: u64) -> u64 {
        self.copy.synchronize();
        let planned = self.planned_bytes().max(1);
        let share_of = |most: u32| (u128::from(most) * u128::from(bytes.min(planned)) / u128::from(planned)) as u32;
        for layer in self.layers() {
            self.resize_layer(layer, |_, most| share_of(most));
        }
        self.pending = (self.is_lent() && self.report.cache_bytes != bytes.min(planned)).then_some(bytes);
        self.report.cache_bytes
    }

    /// Bytes of all slots that there were at the start.
    pub(in crate::engine) fn planned_bytes(&self) -> u64 {
        let bytes = |share: ShareId| u64::from(self.cache.most_of_share(share)) * self.memory.slot_bytes(share.pool);
        self.cache.shares().map(bytes).sum()
    }

    /// Layers with slots, or that had some.
    fn layers(&self) -> Vec<u16> {
        let mut layers: Vec<u16> = self.cache.shares().map(|share| share.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// Brings the report up to date.
    fn count_slots(&mut self) {
        let layers = self.layers();
        self.report.cache_bytes = layers.iter().map(|layer| self.bytes_of_layer(*layer)).sum();
        let high = |layer: &u16| u64::from(self.cache.capacity_of_layer(*layer, Precision::High));
        self.report.slots = layers.iter().map(high).sum();
    }
}
