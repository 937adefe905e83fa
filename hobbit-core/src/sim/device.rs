//! A device that multiplies: its experts are neither read nor used on the host.

use super::budget::WHOLE;
use super::config::Device;
use crate::cache::{Cache, SavedCache, SlotId};
use crate::expert::Version;
use crate::residency::{Drafts, LayerStep, Selection};

/// The slots of a device, as in the engine's tier: an expert that is missing there takes one, from the host's memory or
/// from the file.
pub(super) struct DeviceSlots {
    pub(super) cache: Cache,
    pub(super) expert_seconds: f64,
}

impl DeviceSlots {
    pub(super) fn new(mut cache: Cache, device: &Device) -> Self {
        let start = SavedCache { residents: device.residents.clone(), ..SavedCache::default() };
        cache.restore(&start).into_iter().for_each(|(slot, _)| arrive(&mut cache, slot));
        Self { cache, expert_seconds: device.expert_seconds }
    }

    /// The device's part of a step: residents are pinned first, so that missing experts take the slots of others.
    pub(super) fn use_experts(&mut self, selection: &Selection, step: &LayerStep) {
        let cache = &mut self.cache;
        let versions = step.used.iter().map(|&used| step.version(used));
        let versions: Vec<Version> = versions.filter(|version| cache.pools().share_of(*version).is_some()).collect();
        let mut pinned = Vec::new();
        let mut missing = Vec::new();
        for version in versions {
            let slot = cache.lookup(version);
            let precision = Some(version.precision);
            Drafts::default().touch(cache, selection, version.expert, slot.is_some(), precision);
            match slot {
                Some(slot) => {
                    cache.pin(slot);
                    pinned.push(slot);
                }
                None => missing.push(version),
            }
        }
        for version in missing {
            if let Some(acquired) = cache.acquire(version) {
                arrive(cache, acquired.slot);
                cache.pin(acquired.slot);
                pinned.push(acquired.slot);
            }
        }
        pinned.into_iter().for_each(|slot| cache.unpin(slot));
    }
}

/// A copy takes no time of its own.
fn arrive(cache: &mut Cache, slot: SlotId) {
    cache.set_loading(slot, WHOLE);
    cache.set_ready(slot, WHOLE);
}
