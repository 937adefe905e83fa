//! Tiers of devices: filled, reported.

use super::Hierarchy;
use crate::engine::host_reads::Host;
use crate::engine::tier::Tier;
use crate::expert::{ExpertId, Version};
use crate::stats::{DeviceCounters, DeviceReport};
use crate::store::StoreError;
use ggml_sys::llama::ggml_backend_dev_t;

/// Experts of a layer that are brought to a device at once.
pub(super) const UPLOAD_AT_ONCE: usize = 8;

impl Hierarchy {
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

    /// What every device holds now, in the order in which the first session was told.
    pub(in super::super) fn device_reports(&self) -> Vec<DeviceReport> {
        let now = |report: &DeviceReport| self.named(report).map_or_else(|| report.clone(), |tier| tier.report.clone());
        self.description.devices.iter().map(now).collect()
    }

    /// What every device did, in the same order.
    pub(in super::super) fn device_counters(&self) -> Vec<DeviceCounters> {
        let done = |report: &DeviceReport| self.named(report).map(|tier| tier.counters).unwrap_or_default();
        self.description.devices.iter().map(done).collect()
    }

    fn named(&self, report: &DeviceReport) -> Option<&Tier> {
        self.tiers.iter().find(|tier| tier.report.name == report.name)
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

/// Brings versions of one layer and precision onto a device. Whether all came.
///
/// # Errors
/// A read that fails.
pub(super) fn upload(host: &mut Host, tier: &mut Tier, versions: &[Version]) -> Result<bool, StoreError> {
    let Some(step) = host.bring(versions) else { return Ok(true) };
    let kinds = host.layout().kinds(step.layer).to_vec();
    let result = tier.fill(host, &step, &kinds);
    let pins = host.finish(step);
    tier.settled(host);
    host.unpin(pins);
    result
}
