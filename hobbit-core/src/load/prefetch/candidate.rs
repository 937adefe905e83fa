//! A predicted expert against what is in memory.

use super::odds::{Guess, Standing};
use crate::expert::{Precision, Version};
use crate::predict::Predicted;
use crate::route::{Demand, resolve};

/// A predicted expert, what its predicted weight is worth, and what of it is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) predicted: Predicted,
    pub(super) worth: Demand,
    pub(super) standing: Standing,
    /// By [`Precision::index`].
    pub(super) is_resident: [bool; Precision::COUNT],
    /// Bytes of each version, by [`Precision::index`], where there is such.
    pub(super) bytes: [Option<u64>; Precision::COUNT],
    /// Whether a resident has to leave for it, by [`Precision::index`].
    pub(super) displaces: [bool; Precision::COUNT],
}

impl Candidate {
    pub(super) fn guess(&self) -> Guess {
        let Predicted { distance, score, .. } = self.predicted;
        Guess { distance, score, worth: self.worth, standing: self.standing }
    }

    /// The version that would have to be read if so much is asked for.
    fn to_read(self, asked: Demand, is_resident: [bool; Precision::COUNT]) -> Option<Precision> {
        let [has_high, has_low] = self.bytes.map(|bytes| bytes.is_some());
        let wanted = resolve(asked, is_resident, has_low)?;
        let precision = if has_high { wanted } else { Precision::Low };
        (!is_resident[precision.index()]).then_some(precision)
    }

    /// Bytes that need not be read any more if so much is asked for, once this version is there.
    pub(super) fn spared(&self, asked: Demand, precision: Precision) -> u64 {
        let mut with = self.is_resident;
        with[precision.index()] = true;
        let [before, after] = [self.is_resident, with].map(|is_resident| {
            let precision = self.to_read(asked, is_resident);
            precision.and_then(|precision| self.bytes[precision.index()]).unwrap_or(0)
        });
        before.saturating_sub(after)
    }

    /// The version that has to be read for what the predicted weight is worth, and its bytes.
    pub(super) fn missing(&self) -> Option<(Version, u64)> {
        self.version(self.to_read(self.worth, self.is_resident)?)
    }

    /// A version that is not there, and its bytes.
    pub(super) fn version(&self, precision: Precision) -> Option<(Version, u64)> {
        let bytes = self.bytes[precision.index()].filter(|_| !self.is_resident[precision.index()])?;
        Some((Version { expert: self.predicted.expert, precision }, bytes))
    }
}
