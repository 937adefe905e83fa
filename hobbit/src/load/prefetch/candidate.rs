//! A predicted expert against what is in memory.

use crate::expert::{Precision, Version};
use crate::predict::Predicted;
use crate::route::{Choice, Demand, Resident, resolve};

/// A predicted expert, what its predicted weight is worth, and what of it is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) predicted: Predicted,
    pub(super) worth: Demand,
    pub(super) resident: Resident,
    /// Bytes of the low and the high version, where there are such.
    pub(super) bytes: [Option<u64>; 2],
}

impl Candidate {
    /// The version that is used if so much is asked for, and whether it would have to be read.
    fn choice(&self, asked: Demand, resident: Resident) -> Option<(Precision, bool)> {
        let precision = match resolve(asked, resident, self.bytes[0].is_some()) {
            Choice::High if self.bytes[1].is_none() => Precision::Low,
            Choice::High => Precision::High,
            Choice::Low => Precision::Low,
            Choice::Skip => return None,
        };
        let is_there = match precision {
            Precision::High => resident.high,
            Precision::Low => resident.low,
        };
        Some((precision, !is_there))
    }

    /// Bytes that are read if so much is asked for.
    fn read(&self, asked: Demand, resident: Resident) -> u64 {
        match self.choice(asked, resident) {
            Some((Precision::High, true)) => self.bytes[1].unwrap_or(0),
            Some((Precision::Low, true)) => self.bytes[0].unwrap_or(0),
            _ => 0,
        }
    }

    /// Bytes that need not be read any more if so much is asked for, once this version is there.
    pub(super) fn spared(&self, asked: Demand, precision: Precision) -> u64 {
        let with = match precision {
            Precision::High => Resident { high: true, ..self.resident },
            Precision::Low => Resident { low: true, ..self.resident },
        };
        self.read(asked, self.resident).saturating_sub(self.read(asked, with))
    }

    /// The version that has to be read for what the predicted weight is worth, and its bytes.
    pub(super) fn missing(&self) -> Option<(Version, u64)> {
        let (precision, _) = self.choice(self.worth, self.resident).filter(|(_, is_missing)| *is_missing)?;
        self.version(precision)
    }

    /// A version that is not there, and its bytes.
    pub(super) fn version(&self, precision: Precision) -> Option<(Version, u64)> {
        let (bytes, is_there) = match precision {
            Precision::High => (self.bytes[1], self.resident.high),
            Precision::Low => (self.bytes[0], self.resident.low),
        };
        let version = Version { expert: self.predicted.expert, precision };
        bytes.filter(|_| !is_there).map(|bytes| (version, bytes))
    }
}
