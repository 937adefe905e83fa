//! Warm start: what was resident when the model was closed is read again before the first token.

use std::collections::BTreeSet;

use super::{Demand, Need, PRELOAD_AT_ONCE, Residency, Tier, class_of};
use crate::cache::{Cache, CacheState, SavedCache, SlotId};
use crate::expert::{Precision, Version};
use crate::stats::WarmStart;
use crate::store::StoreError;

/// Versions that are asked for at once: enough that the store is never without a read.
const READ_AT_ONCE: usize = 32;

/// The host's cache in a state.
const HOST: &str = "";

impl Residency {
    /// Fills the caches with what the state file has, as far as their slots go. Reads that fail are made again when they
    /// are needed: then it is told.
    pub(in super::super) fn warm_up(&mut self) {
        let Some(mut state) = self.state_file.as_mut().and_then(|file| file.read()) else { return };
        // A cache has one entry. That of a hostile file's second one would be filled as if it were empty.
        let mut seen = BTreeSet::new();
        state.caches.retain(|saved| seen.insert(saved.name.clone()));
        let before = self.counters.bytes_read;
        let mut warm = WarmStart::default();
        let hosts = || state.caches.iter().filter(|saved| saved.name == HOST);
        for saved in hosts() {
            self.cache.load_statistics(saved);
        }
        // Devices first: what they are given passes through the host's slots.
        for saved in state.caches.iter().filter(|saved| saved.name != HOST) {
            warm.saved += saved.residents.len() as u64;
            warm.experts += self.warm_up_device(saved);
        }
        for saved in hosts() {
            warm.saved += saved.residents.len() as u64;
            warm.experts += self.warm_up_host(saved);
        }
        warm.bytes = self.counters.bytes_read - before;
        self.description.warm_start = Some(warm);
    }

    /// How many came.
    fn warm_up_host(&mut self, saved: &SavedCache) -> u64 {
        // What only passed through on its way to a device makes room; the rest of it need not be read again.
        let wanted: BTreeSet<Version> = saved.residents.iter().copied().collect();
        let passed = self.cache.residents().map(|(version, _)| version).filter(|version| !wanted.contains(version));
        for version in passed.collect::<Vec<_>>() {
            self.cache.release(version);
        }
        let mut taken = self.cache.restore(saved);
        taken.sort_by_key(|(_, version)| (version.expert.layer, version.precision, version.expert.index));
        let is_alike = |a: &(SlotId, Version), b: &(SlotId, Version)| {
            (a.1.expert.layer, a.1.precision) == (b.1.expert.layer, b.1.precision)
        };
        for reads in taken.chunk_by(is_alike).flat_map(|alike| alike.chunks(READ_AT_ONCE)) {
            let Version { expert, precision } = reads[0].1;
            let order = self.load_order(expert.layer, &[]);
            for &(slot, _) in reads {
                order.iter().for_each(|&kind| self.cache.set_loading(slot, kind));
            }
            self.read_slots(class_of(precision), reads, &order);
            while self.loader.outstanding() > READ_AT_ONCE && self.wait() {}
        }
        self.settle();
        let is_ready = |cache: &Cache, version| cache.lookup(version).is_some_and(|slot| cache.is_ready(slot));
        for (_, version) in taken {
            if !is_ready(&self.cache, version) {
                self.cache.release(version);
            }
        }
        wanted.into_iter().filter(|&version| is_ready(&self.cache, version)).count() as u64
    }

    /// How many came. Layers that are on the device as a whole are there already.
    fn warm_up_device(&mut self, saved: &SavedCache) -> u64 {
        let is_of = |tier: &Option<Tier>| tier.as_ref().is_some_and(|tier| tier.report().name == saved.name);
        let Some(place) = self.tiers.iter().position(is_of) else { return 0 };
        let Some(mut tier) = self.tiers[place].take() else { return 0 };
        let whole = tier.whole_layers();
        let mut versions = tier.begin_warm_up(saved);
        versions.retain(|version| !whole.contains(&version.expert.layer) && self.catalog.source(*version).is_some());
        // Layer by layer; the order within a layer is that of their last uses.
        versions.sort_by_key(|version| version.expert.layer);
        let is_alike = |a: &Version, b: &Version| (a.expert.layer, a.precision) == (b.expert.layer, b.precision);
        let mut came = 0;
        for versions in versions.chunk_by(is_alike).flat_map(|alike| alike.chunks(PRELOAD_AT_ONCE)) {
            match self.upload(&mut tier, versions) {
                Ok(true) => came += versions.len() as u64,
                _ => {
                    self.settle();
                    break;
                }
            }
        }
        self.tiers[place] = Some(tier);
        came
    }

    /// Brings versions of one layer and precision onto a device. Whether all came.
    ///
    /// # Errors
    /// A read that fails.
    pub(super) fn upload(&mut self, tier: &mut Tier, versions: &[Version]) -> Result<bool, StoreError> {
        let Some(&Version { expert, precision }) = versions.first() else { return Ok(true) };
        let kinds = self.layer(expert.layer).kinds.clone();
        let n_expert = usize::from(self.layer(expert.layer).n_expert);
        let demand = if precision == Precision::High { Demand::High } else { Demand::Low };
        let experts: Vec<u16> = versions.iter().map(|version| version.expert.index).collect();
        let need = Need {
            layer: expert.layer,
            experts: &experts,
            uses: &|_| 0,
            weights: &|_| 0.0,
            demands: &vec![demand; n_expert],
            kinds: &kinds,
            dense: false,
            // Nobody uses them yet: nothing is counted.
            chosen: Some(&vec![Some(precision); n_expert]),
            elsewhere: &|_| false,
        };
        let step = self.begin(&need);
        let result = tier.fill(self, &step, &kinds);
        let (pins, staged) = tier.settled();
        self.unpin(pins);
        staged.into_iter().for_each(|slice| self.staging.release(slice));
        let pins = self.finish(step);
        self.unpin(pins);
        result
    }

    /// Saves what is resident, unless nothing was computed: then what an earlier run left is as good.
    fn save_state(&mut self) {
        let Some(file) = self.state_file.take() else { return };
        if self.counters.hits + self.counters.misses == 0 {
            return;
        }
        self.settle();
        self.settle_upgrades();
        let mut state = CacheState { caches: vec![self.cache.save(HOST)], ..CacheState::default() };
        state.caches.extend(self.tiers.iter_mut().flatten().filter(|tier| !tier.is_unified()).map(Tier::save));
        file.write(state);
    }
}

impl Drop for Residency {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.save_state();
        }
        let measured = self.loader.stats();
        self.recorder.take().into_iter().for_each(|recorder| recorder.end(&measured));
    }
}
