//! Experts in the memory of devices, as a layer sees them.

use crate::expert::{SliceId, Version};

/// Experts in the memory of devices, as far as they concern a layer. By default there are no devices.
pub trait DeviceResidency {
    /// Whether the device that multiplies has a version, so that nothing of it needs to be read.
    fn has(&self, _version: Version) -> bool {
        false
    }

    /// Whether any device has a version, so that it need not be read ahead.
    fn has_on_any(&self, version: Version) -> bool {
        self.has(version)
    }

    /// Whether an upload may still read a staged slice, which must stay until then.
    fn is_uploading(&self, _slice: SliceId) -> bool {
        false
    }

    /// Seconds per byte from the host's slots to the memory where products run, or of the CPU's products where these
    /// are quicker; 0 where products run on the host's slots.
    fn seconds_per_byte(&self) -> f64 {
        0.0
    }

    /// Whether products run in another memory than the host's slots, so that experts there have to be copied.
    fn copies(&self) -> bool {
        self.seconds_per_byte() > 0.0
    }

    /// Whether the device that multiplies has an empty slot for a version, which then stays there.
    fn has_empty_slot(&self, _version: Version) -> bool {
        false
    }
}

impl DeviceResidency for () {}
