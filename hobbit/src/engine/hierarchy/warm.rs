//! Warm start: what was resident when the model was closed is read again before the first token.

use std::collections::BTreeSet;

use super::Hierarchy;
use super::devices::{UPLOAD_AT_ONCE, upload};
use crate::cache::{CacheState, SavedCache};
use crate::expert::Version;
use crate::stats::WarmStart;

/// The host's cache in a state.
const HOST: &str = "";

impl Hierarchy {
    /// Fills the caches with what the state file has, as far as their slots go. Reads that fail are made again when
    /// they are needed: then it is told.
    pub(in super::super) fn warm_up(&mut self) {
        let Some(mut state) = self.state_file.as_mut().and_then(|file| file.read()) else { return };
        // A cache has one entry. That of a hostile file's second one would be filled as if it were empty.
        let mut seen = BTreeSet::new();
        state.caches.retain(|saved| seen.insert(saved.name.clone()));
        let before = self.host.counters().bytes_read;
        let mut warm = WarmStart::default();
        let hosts = || state.caches.iter().filter(|saved| saved.name == HOST);
        for saved in hosts() {
            self.host.load_statistics(saved);
        }
        // Devices first: what they are given passes through the host's slots.
        for saved in state.caches.iter().filter(|saved| saved.name != HOST) {
            warm.saved += saved.residents.len() as u64;
            warm.experts += self.warm_up_device(saved);
        }
        for saved in hosts() {
            warm.saved += saved.residents.len() as u64;
            warm.experts += self.host.restore(saved);
        }
        warm.bytes = self.host.counters().bytes_read - before;
        self.description.warm_start = Some(warm);
    }

    /// How many came. Layers that are on the device as a whole are there already.
    fn warm_up_device(&mut self, saved: &SavedCache) -> u64 {
        let Self { tiers, host, .. } = self;
        let Some(tier) = tiers.iter_mut().find(|tier| tier.report.name == saved.name) else { return 0 };
        let whole = tier.whole_layers();
        let mut versions = tier.begin_warm_up(saved);
        versions.retain(|version| !whole.contains(&version.expert.layer) && host.layout().has_version(*version));
        // Layer by layer; the order within a layer is that of their last uses.
        versions.sort_by_key(|version| version.expert.layer);
        let is_alike = |a: &Version, b: &Version| (a.expert.layer, a.precision) == (b.expert.layer, b.precision);
        let mut came = 0;
        for versions in versions.chunk_by(is_alike).flat_map(|alike| alike.chunks(UPLOAD_AT_ONCE)) {
            match upload(host, tier, versions) {
                Ok(true) => came += versions.len() as u64,
                _ => {
                    host.settle();
                    break;
                }
            }
        }
        came
    }

    /// Saves what is resident, unless nothing was computed: then what an earlier run left is as good.
    pub(super) fn save_state(&mut self) {
        let Some(file) = self.state_file.take() else { return };
        let counters = self.host.counters();
        if counters.hits + counters.misses == 0 {
            return;
        }
        self.host.quiesce();
        let mut state = CacheState { caches: vec![self.host.save(HOST)], ..CacheState::default() };
        state.caches.extend(
            self.tiers.iter_mut().filter(|tier| !tier.is_unified()).map(|tier| tier.cache.save(&tier.report.name)),
        );
        file.write(state);
    }
}
