//! A layer in progress: the versions that it uses.

use crate::cache::SlotId;
use crate::expert::{ExpertId, Precision, Version};

/// A needed expert and the version of it that is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    pub index: u16,
    pub precision: Precision,
    /// The number of the layer's share that the version belongs to.
    pub share: u16,
    /// Its row in the share; `None` for one that streams through staging, or is on the device.
    pub row: Option<u32>,
    /// The device that multiplies has it: nothing is read.
    pub is_on_device: bool,
}

/// A layer in progress, or one of the splits in which it comes.
#[derive(Debug)]
pub struct LayerStep {
    pub layer: u16,
    /// Needed experts that are multiplied, in the order of need.
    pub used: Vec<Used>,
    /// Needed experts that are left out.
    pub skipped: Vec<u16>,
    /// Used experts that were there.
    pub(super) n_hits: u64,
    pub(super) pinned: Vec<SlotId>,
}

impl LayerStep {
    /// The version of an expert that this step multiplies.
    pub fn version(&self, used: Used) -> Version {
        Version { expert: ExpertId { layer: self.layer, index: used.index }, precision: used.precision }
    }

    pub(super) fn versions(&self) -> impl Iterator<Item = Version> {
        self.used.iter().map(|&used| self.version(used))
    }
}
