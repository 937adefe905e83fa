//! What HOBBIT's cache manager writes down about each expert.

use super::{Now, Use};
use crate::cache::by_expert::ByExpert;
use crate::expert::{ExpertId, Precision};

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

/// The records of all experts.
#[derive(Clone, Debug, Default)]
pub(super) struct Records(ByExpert<Record>);

impl Records {
    pub(super) fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        let Some(precision) = usage.precision else { return };
        let record = self.0.entry(expert);
        record.last_token = now.token + 1;
        record.uses += 1;
        record.high_uses += u64::from(precision == Precision::High);
    }

    pub(super) fn of(&self, expert: ExpertId) -> Record {
        self.0.get(expert).copied().unwrap_or_default()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
