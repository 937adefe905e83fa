//! For policies that keep queues: one state per share, and which uses are re-uses.

use crate::cache::ShareId;
use crate::cache::by_expert::ByExpert;
use crate::expert::{Precision, Version};
use std::collections::BTreeMap;

/// One `T` per share, found by version. Versions of a layer and precision that were never said to belong to a share
/// are taken to have one of their own.
#[derive(Clone, Debug)]
pub(super) struct ByShare<T> {
    share_of: ByExpert<[Option<ShareId>; Precision::COUNT]>,
    states: BTreeMap<ShareId, T>,
}

impl<T> Default for ByShare<T> {
    fn default() -> Self {
        Self { share_of: ByExpert::default(), states: BTreeMap::new() }
    }
}

impl<T: Default> ByShare<T> {
    /// As [`super::Policy::on_share`] tells it.
    pub(super) fn join(&mut self, share: ShareId, members: &[Version]) {
        for member in members {
            self.share_of.entry(member.expert)[member.precision.index()] = Some(share);
        }
    }

    /// The state of the version's share.
    pub(super) fn of(&mut self, version: Version) -> &mut T {
        let precision = version.precision.index();
        let known = self.share_of.get(version.expert).and_then(|shares| shares[precision]);
        let own = ShareId { pool: precision as u16, layer: version.expert.layer };
        self.states.entry(known.unwrap_or(own)).or_default()
    }
}

/// How a version came to be resident.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Arrival {
    #[default]
    Away,
    /// Missed: the insertion that comes belongs to a use that was told already.
    Asked,
    /// Inserted before its first use: a prefetch or an upgrade.
    Early,
    Used,
}

/// Tells uses of what is resident from the one that a version was loaded for. Queues that promote on re-use would take
/// the first use of a prefetched version for one.
#[derive(Clone, Debug, Default)]
pub(super) struct Arrivals(ByExpert<[Arrival; Precision::COUNT]>);

impl Arrivals {
    fn entry(&mut self, version: Version) -> &mut Arrival {
        &mut self.0.entry(version.expert)[version.precision.index()]
    }

    /// Whether this use of `version` finds it resident and used before.
    pub(super) fn on_use(&mut self, version: Version) -> bool {
        let arrival = self.entry(version);
        let before = *arrival;
        *arrival = match before {
            Arrival::Away | Arrival::Asked => Arrival::Asked,
            Arrival::Early | Arrival::Used => Arrival::Used,
        };
        before == Arrival::Used
    }

    pub(super) fn on_insert(&mut self, version: Version) {
        let arrival = self.entry(version);
        *arrival = if *arrival == Arrival::Asked { Arrival::Used } else { Arrival::Early };
    }

    pub(super) fn on_leave(&mut self, version: Version) {
        *self.entry(version) = Arrival::Away;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{high, low};

    #[test]
    fn only_a_second_use_is_a_re_use() {
        let mut arrivals = Arrivals::default();
        assert!(!arrivals.on_use(high(0)), "a miss");
        arrivals.on_insert(high(0));
        assert!(arrivals.on_use(high(0)));
        arrivals.on_insert(low(0));
        assert!(!arrivals.on_use(low(0)), "it was prefetched for this");
        assert!(arrivals.on_use(low(0)));
        arrivals.on_leave(high(0));
        assert!(!arrivals.on_use(high(0)));
    }

    #[test]
    fn shares_are_as_told_or_by_layer_and_precision() {
        let mut counts = ByShare::<u32>::default();
        counts.join(ShareId { pool: 7, layer: 3 }, &[high(0), low(1)]);
        *counts.of(low(1)) = 5;
        *counts.of(high(2)) = 1;
        assert_eq!([high(0), low(1), low(0), high(1), high(2)].map(|version| *counts.of(version)), [5, 5, 0, 1, 1]);
    }
}
