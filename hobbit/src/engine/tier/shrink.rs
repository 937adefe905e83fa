//! Fewer slots while a model runs, because the device is out of memory.
//!
//! A layer's slots are one allocation. It is freed and allocated again with fewer slots; its contents are lost and are
//! copied from the host again when needed.

use super::Tier;
use crate::engine::ggml::Stream;
use crate::engine::log;
use hobbit_core::cache::{Cache, ShareId};
use hobbit_core::expert::Precision;

/// Divisor for the part of the slots freed when the missing size is unknown.
const SHRINK_PART: u64 = 4;

impl Tier {
    /// The device refused memory: frees at least `bytes` bytes of slots and a quarter of all, as far as possible. Waits
    /// for `stream`, so that nothing reads the freed slots; keeps the slots of the layer being computed. Returns the
    /// bytes freed: 0 if nothing is left to free.
    pub(in crate::engine) fn shrink(&mut self, stream: &Stream, bytes: u64) -> u64 {
        stream.synchronize();
        self.copy.synchronize();
        self.shrink_idle(bytes)
    }

    /// As [`Tier::shrink`]; nothing on the device reads or writes slots.
    pub(in crate::engine) fn shrink_idle(&mut self, bytes: u64) -> u64 {
        let before = self.report.cache_bytes;
        let target = bytes.max(before / SHRINK_PART).max(1);
        let mut stuck: Vec<u16> = self.busy.into_iter().collect();
        let mut freed = 0;
        while freed < target {
            let Some(layer) = self.largest_layer(&stuck) else { break };
            match self.shrink_layer(layer) {
                0 => stuck.push(layer),
                n => freed += n,
            }
        }
        if freed > 0 {
            self.counters.cache_shrunk += 1;
            log::notice(format_args!(
                "{}: out of device memory; its expert cache has {} MiB instead of {}; give a smaller device cache or a \
                 larger head-room",
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

    /// Shrinks each of a layer's shares by a quarter, or to as many slots as the device still has. The contents are
    /// lost. Returns the bytes freed: 0 if slots are in use.
    fn shrink_layer(&mut self, layer: u16) -> u64 {
        let shares = self.shares_of_layer(layer);
        if !shares.iter().all(|share| self.cache.is_share_idle(*share)) {
            return 0;
        }
        let before = self.bytes_of_layer(layer);
        let n_slots = |cache: &Cache, share| cache.slots_of_share(share).len() as u32;
        let mut wanted: Vec<(ShareId, u32)> =
            shares.iter().map(|&share| (share, n_slots(&self.cache, share) * 3 / 4)).collect();
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

    /// Layers that have or had slots.
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
