//! Fills caches: tiers that have slots for all experts, and at a warm start, before the first token, the experts that
//! were resident when the model was closed.

use std::collections::BTreeSet;

use ggml_sys::llama::ggml_backend_dev_t;

use super::Tiers;
use crate::engine::host_reads::Host;
use crate::engine::tier::Tier;
use hobbit_core::cache::{CacheState, SavedCache};
use hobbit_core::expert::{ExpertId, Version};
use hobbit_core::stats::{DeviceCounters, DeviceReport, WarmStart};
use hobbit_core::store::StoreError;

/// Experts of a layer that are uploaded to a device at once.
const UPLOAD_AT_ONCE: usize = 8;

/// Name of the host's cache in a saved state.
const HOST: &str = "";

impl Tiers {
    /// The tier of a device.
    pub(in super::super) fn tier(&mut self, dev: ggml_backend_dev_t) -> Option<&mut Tier> {
        self.tiers.iter_mut().find(|tier| tier.dev == dev)
    }

    /// Fills the tiers that have a slot for every expert of their layers, as llama.cpp loads a model: from then on
    /// these layers are computed like any other.
    ///
    /// # Errors
    /// A read that fails.
    pub(in super::super) fn preload(&mut self) -> Result<(), StoreError> {
        for tier in &mut self.tiers {
            for layer in tier.whole_layers() {
                if tier.is_empty(layer) {
                    preload_layer(&mut self.host, tier, layer)?;
                }
            }
        }
        Ok(())
    }

    /// Contents of every device now, in the order of the first session's reports.
    pub(in super::super) fn device_reports(&self) -> Vec<DeviceReport> {
        let now = |report: &DeviceReport| self.named(report).map_or_else(|| report.clone(), |tier| tier.report.clone());
        self.description.devices.iter().map(now).collect()
    }

    /// Counters of every device, in the same order.
    pub(in super::super) fn device_counters(&self) -> Vec<DeviceCounters> {
        let done = |report: &DeviceReport| self.named(report).map(|tier| tier.counters).unwrap_or_default();
        self.description.devices.iter().map(done).collect()
    }

    fn named(&self, report: &DeviceReport) -> Option<&Tier> {
        self.tiers.iter().find(|tier| tier.report.name == report.name)
    }

    /// Fills the caches from the state file, as far as their slots allow. A read that fails is repeated when the expert
    /// is needed, and its error is reported then.
    pub(in super::super) fn warm_up(&mut self) {
        let Some(mut state) = self.state_file.as_mut().and_then(|file| file.read()) else { return };
        // A cache has one entry: a second one in a hostile file would be filled as if the cache were empty.
        let mut seen = BTreeSet::new();
        state.caches.retain(|saved| seen.insert(saved.name.clone()));
        let before = self.host.counters().bytes_read;
        let mut warm = WarmStart::default();
        let hosts = || state.caches.iter().filter(|saved| saved.name == HOST);
        for saved in hosts() {
            self.host.load_statistics(saved);
        }
        // Devices first: their experts pass through the host's slots.
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

    /// Frees slots of all devices for a new session that lacks memory there. Returns whether there were any.
    pub(in super::super) fn make_room_on_devices(&mut self) -> bool {
        let Self { tiers, host, .. } = self;
        let mut freed = 0;
        for tier in tiers {
            tier.rest(host);
            freed += tier.shrink_idle(0);
        }
        freed > 0
    }

    /// Returns the number of experts uploaded. Layers that are wholly on the device are skipped.
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

    /// Saves the resident experts, unless nothing was computed: the state of an earlier run is then as good.
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

fn preload_layer(host: &mut Host, tier: &mut Tier, layer: u16) -> Result<(), StoreError> {
    let experts = (0..host.layout().n_expert(layer)).map(|index| Version::high(ExpertId { layer, index }));
    for versions in experts.collect::<Vec<_>>().chunks(UPLOAD_AT_ONCE) {
        if !upload(host, tier, versions)? {
            return Ok(());
        }
    }
    tier.complete.insert(layer);
    Ok(())
}

/// Uploads versions of one layer and precision to a device. Returns whether all were uploaded.
///
/// # Errors
/// A read that fails.
fn upload(host: &mut Host, tier: &mut Tier, versions: &[Version]) -> Result<bool, StoreError> {
    let Some(step) = host.load(versions) else { return Ok(true) };
    let kinds = host.layout().kinds(step.layer).to_vec();
    let result = tier.fill(host, &step, &kinds);
    let pins = host.finish(step);
    tier.settled(host);
    host.unpin(pins);
    result
}
