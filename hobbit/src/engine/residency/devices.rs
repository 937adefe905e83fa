//! Tiers of devices: lent out while in use, filled, reported.

use super::*;

impl Residency {
    /// The tier of a device, to be put back after use, and its place.
    pub(in super::super) fn take_tier(&mut self, dev: ggml_backend_dev_t) -> Option<(usize, Tier)> {
        let is_of = |tier: &Option<Tier>| tier.as_ref().is_some_and(|tier| tier.dev() == dev);
        let place = self.tiers.iter().position(is_of)?;
        self.tiers[place].take().map(|tier| (place, tier))
    }

    /// The tier of a device.
    pub(in super::super) fn tier(&mut self, dev: ggml_backend_dev_t) -> Option<&mut Tier> {
        self.tiers.iter_mut().flatten().find(|tier| tier.dev() == dev)
    }

    /// Fills the tiers that have a slot for every expert of their layers, as llama.cpp loads a model: from then on these
    /// layers are computed like any other.
    ///
    /// # Errors
    /// A read that fails.
    pub(in super::super) fn preload(&mut self) -> Result<(), StoreError> {
        for place in 0..self.tiers.len() {
            let Some(mut tier) = self.tiers[place].take() else { continue };
            let mut result = Ok(());
            for layer in tier.whole_layers().into_iter().filter(|layer| tier.is_empty(*layer)).collect::<Vec<_>>() {
                if result.is_ok() {
                    result = self.preload_layer(&mut tier, layer);
                }
            }
            self.tiers[place] = Some(tier);
            result?;
        }
        Ok(())
    }

    pub(super) fn preload_layer(&mut self, tier: &mut Tier, layer: u16) -> Result<(), StoreError> {
        let experts = (0..self.layer(layer).n_expert).map(|index| Version::high(ExpertId { layer, index }));
        for versions in experts.collect::<Vec<_>>().chunks(PRELOAD_AT_ONCE) {
            if !self.upload(tier, versions)? {
                return Ok(());
            }
        }
        tier.set_complete(layer);
        Ok(())
    }

    /// See [`Residency::take_tier`].
    pub(in super::super) fn put_tier(&mut self, place: usize, tier: Tier) {
        self.tiers[place] = Some(tier);
    }

    /// What every device holds now, in the order in which the first session was told.
    pub(in super::super) fn device_reports(&self) -> Vec<DeviceReport> {
        let now =
            |report: &DeviceReport| self.named(report).map_or_else(|| report.clone(), |tier| tier.report().clone());
        self.description.devices.iter().map(now).collect()
    }

    /// What every device did, in the same order.
    pub(in super::super) fn device_counters(&self) -> Vec<DeviceCounters> {
        let done = |report: &DeviceReport| self.named(report).map(|tier| *tier.counters()).unwrap_or_default();
        self.description.devices.iter().map(done).collect()
    }

    pub(super) fn named(&self, report: &DeviceReport) -> Option<&Tier> {
        self.tiers.iter().flatten().find(|tier| tier.report().name == report.name)
    }
}
