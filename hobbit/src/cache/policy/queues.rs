//! What the policies that keep queues share: one queue per share, and which uses are re-uses.

use super::{Candidate, Now, Policy, Use};
use crate::cache::ShareId;
use crate::cache::by_expert::ByExpert;
use crate::expert::{ExpertId, Precision, Version};
use std::collections::BTreeMap;

/// The residents of one share in some order.
pub trait Queue: Default + Send {
    /// `version` became resident.
    fn insert(&mut self, version: Version);

    /// `version` is used; `is_re_use`: it is resident and was used before.
    fn use_one(&mut self, version: Version, is_re_use: bool);

    /// `version` left otherwise than by [`Queue::evict`].
    fn remove(&mut self, version: Version);

    /// Chooses a candidate to make room for `incoming`, and lets it go; `None` if it knows none of them.
    fn evict(&mut self, incoming: Version, candidates: &[Candidate]) -> Option<Version>;
}

/// A policy of one [`Queue`] per share. Versions of a layer and precision that were never said to belong to a share are
/// taken to have one of their own.
#[derive(Clone, Debug, Default)]
pub struct Queues<Q> {
    queues: BTreeMap<ShareId, Q>,
    members: ByExpert<[Member; Precision::COUNT]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Member {
    share: Option<ShareId>,
    arrival: Arrival,
}

/// How a version came to be resident. Queues that promote on re-use would take the first use of a prefetched version for
/// one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Arrival {
    #[default]
    Away,
    /// Missed: the insertion that comes belongs to a use that was told already.
    Asked,
    /// Inserted before its first use: a prefetch or an upgrade.
    Early,
    Used,
}

impl<Q: Queue> Queues<Q> {
    /// The queue of the version's share, and how the version came.
    pub(super) fn of(&mut self, version: Version) -> (&mut Q, &mut Arrival) {
        let precision = version.precision.index();
        let Member { share, arrival } = &mut self.members.entry(version.expert)[precision];
        let own = ShareId { pool: precision as u16, layer: version.expert.layer };
        (self.queues.entry(share.unwrap_or(own)).or_default(), arrival)
    }
}

impl<Q: Queue> Policy for Queues<Q> {
    fn on_share(&mut self, share: ShareId, members: &[Version]) {
        for member in members {
            self.members.entry(member.expert)[member.precision.index()].share = Some(share);
        }
    }

    fn on_insert(&mut self, version: Version, _now: Now) {
        let (queue, arrival) = self.of(version);
        *arrival = if *arrival == Arrival::Asked { Arrival::Used } else { Arrival::Early };
        queue.insert(version);
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, _now: Now) {
        let Some(precision) = usage.precision else { return };
        let version = Version { expert, precision };
        let (queue, arrival) = self.of(version);
        let is_re_use = *arrival == Arrival::Used;
        *arrival = match *arrival {
            Arrival::Away | Arrival::Asked => Arrival::Asked,
            Arrival::Early | Arrival::Used => Arrival::Used,
        };
        queue.use_one(version, is_re_use);
    }

    fn on_remove(&mut self, version: Version, _now: Now) {
        let (queue, arrival) = self.of(version);
        *arrival = Arrival::Away;
        queue.remove(version);
    }

    fn victim(&mut self, incoming: Version, candidates: &[Candidate], _now: Now) -> usize {
        let evicted = self.of(incoming).0.evict(incoming, candidates);
        let position = candidates.iter().position(|candidate| Some(candidate.version) == evicted).unwrap_or(0);
        *self.of(candidates[position].version).1 = Arrival::Away;
        position
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{at, high, low, used};

    /// Counts the uses that it takes for re-uses.
    #[derive(Default)]
    struct ReUses(u32);

    impl Queue for ReUses {
        fn insert(&mut self, _version: Version) {}

        fn use_one(&mut self, _version: Version, is_re_use: bool) {
            self.0 += u32::from(is_re_use);
        }

        fn remove(&mut self, _version: Version) {}

        fn evict(&mut self, _incoming: Version, _candidates: &[Candidate]) -> Option<Version> {
            None
        }
    }

    fn is_re_use(queues: &mut Queues<ReUses>, version: Version) -> bool {
        let before = queues.of(version).0.0;
        queues.on_use(version.expert, used(version.precision), at(0));
        queues.of(version).0.0 > before
    }

    #[test]
    fn only_a_second_use_is_a_re_use() {
        let queues = &mut Queues::<ReUses>::default();
        assert!(!is_re_use(queues, high(0)), "a miss");
        queues.on_insert(high(0), at(0));
        assert!(is_re_use(queues, high(0)));
        queues.on_insert(low(0), at(0));
        assert!(!is_re_use(queues, low(0)), "it was prefetched for this");
        assert!(is_re_use(queues, low(0)));
        queues.on_remove(high(0), at(0));
        assert!(!is_re_use(queues, high(0)));
    }

    #[test]
    fn shares_are_as_told_or_by_layer_and_precision() {
        let queues = &mut Queues::<ReUses>::default();
        queues.on_share(ShareId { pool: 7, layer: 3 }, &[high(0), low(1)]);
        queues.of(low(1)).0.0 = 5;
        queues.of(high(2)).0.0 = 1;
        assert_eq!([high(0), low(1), low(0), high(1), high(2)].map(|version| queues.of(version).0.0), [5, 5, 0, 1, 1]);
    }
}
