//! What HOBBIT's cache manager writes down about each expert.

use super::recency::LastUse;
use super::{Now, Use};
use crate::cache::by_expert::ByExpert;
use crate::expert::{ExpertId, Precision, Version};

/// An expert's uses since the records were cleared. Skipped ones do not count; those of both versions count together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    /// `R`: the token that used it last, counted from 1; 0 for none.
    pub(super) last_token: u64,
    /// `F`: how many tokens used it.
    pub(super) uses: u64,
    /// `H`: how many of them in high precision.
    pub(super) high_uses: u64,
}

/// The records of all experts, and the ages of all versions, which break ties.
#[derive(Clone, Debug, Default)]
pub(super) struct Records {
    records: ByExpert<Record>,
    last_use: LastUse,
}

impl Records {
    pub(super) fn on_insert(&mut self, version: Version) {
        self.last_use.mark(version);
    }

    pub(super) fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        self.last_use.on_use(expert, usage);
        let Some(precision) = usage.precision else { return };
        let record = self.records.entry(expert);
        record.last_token = now.token + 1;
        record.uses += 1;
        record.high_uses += u64::from(precision == Precision::High);
    }

    pub(super) fn of(&self, expert: ExpertId) -> Record {
        self.records.get(expert).copied().unwrap_or_default()
    }

    /// Position of the candidate whose expert has the lowest value; of equal values, the least recently used.
    pub(super) fn lowest(&self, candidates: &[Version], value: impl Fn(ExpertId) -> f64) -> usize {
        self.last_use.lowest(candidates, |version| value(version.expert))
    }

    /// Forgets the uses, not the ages.
    pub(super) fn clear(&mut self) {
        self.records.clear();
    }
}
