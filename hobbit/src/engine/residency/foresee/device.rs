//! What devices ask of whoever looks ahead, and of the host's slots, to copy experts ahead of need.

use super::super::{Residency, Used};
use super::Foresight;
use crate::cache::SlotId;
use crate::expert::Version;
use crate::predict::{PredictShape, Predictor};

impl Residency {
    /// Asks the predictor, which has been shown the running layer's choice, about the next layers: `ask` gets it with the
    /// model's shape and how far to look at most. `None` while nothing is read ahead.
    pub(in super::super::super) fn ask_ahead<T>(
        &mut self,
        ask: impl FnOnce(&Self, &mut dyn Predictor, &PredictShape, u8) -> T,
    ) -> Option<T> {
        let mut foresight = self.foresight.take()?;
        let Foresight { predictor, governor, shape, distance_max, .. } = &mut foresight;
        let answer = governor.is_on().then(|| ask(self, &mut **predictor, shape, *distance_max));
        self.foresight = Some(foresight);
        answer
    }

    /// Whether every slice of a version is in a slot of the host.
    pub(in super::super::super) fn is_complete_on_host(&self, version: Version) -> bool {
        self.cache.lookup(version).is_some_and(|slot| self.cache.is_ready(slot))
    }

    /// Pins a version that is complete in a slot of the host, for [`Residency::host_bytes`] until the slot is given to
    /// [`Residency::unpin`]. `None` where it is not.
    pub(in super::super::super) fn pin_on_host(&mut self, version: Version) -> Option<(Used, SlotId)> {
        let slot = self.cache.lookup(version).filter(|slot| self.cache.is_ready(*slot))?;
        self.cache.pin(slot);
        let share = self.share_of(version);
        let row = slot.index - self.layer(version.expert.layer).shares[usize::from(share)].first_slot;
        let (index, precision) = (version.expert.index, version.precision);
        Some((Used { index, precision, share, row: Some(row), elsewhere: false }, slot))
    }

    /// Bytes of a version.
    pub(in super::super::super) fn bytes_to_copy(&self, version: Version) -> Option<u64> {
        self.version_bytes(version)
    }

    /// Whether a device that computes nothing just now has a version.
    pub(super) fn is_on_idle_device(&self, version: Version) -> bool {
        self.tiers.iter().flatten().any(|tier| tier.is_resident(version))
    }

    /// Whether experts are copied to a device ahead of need.
    pub(super) fn copies_ahead(&self) -> bool {
        self.tiers.iter().flatten().any(|tier| tier.copies_ahead())
    }
}
