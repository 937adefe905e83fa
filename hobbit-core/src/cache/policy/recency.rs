//! Policies that order a share's residents by recency: LRU and ARC.

use std::collections::BTreeMap;

use super::{Candidate, Now, Policy, Use, lowest};
use crate::cache::ShareId;
use crate::cache::slots::ByExpert;
use crate::expert::{ExpertId, Precision, Version};

/// Evicts the version whose last use or insertion is longest ago. Only the version that is used counts as used: a low
/// version beside a high one ages. Sequences do not matter to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lru;

impl Policy for Lru {
    fn on_use(&mut self, _expert: ExpertId, _usage: Use, _now: Now) {}

    fn victim(&mut self, _incoming: Version, candidates: &[Candidate], _now: Now) -> usize {
        lowest(candidates, |_| 0.0)
    }
}

/// ARC (Megiddo and Modha, FAST 2003), which Fate keeps inside each layer (section 4.4).
///
/// A share's residents are in two lists by recency: `T1` was used once, `T2` again. Versions that they evicted are
/// remembered in `B1` and `B2`; a miss of one that is remembered moves the target size `p` of `T1`. `T1` and `B1`
/// together remember at most as many as there are slots, all four at most twice as many. Where the list whose turn it
/// is has no candidate, the other one's oldest goes.
///
/// Versions of a layer and precision that belong to no share have one of their own.
#[derive(Clone, Debug, Default)]
pub struct Arc {
    lists: BTreeMap<ShareId, Lists>,
    members: ByExpert<[Member; Precision::COUNT]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Member {
    share: Option<ShareId>,
    arrival: Arrival,
}

/// How a version came to be resident. The first use of a prefetched version is no re-use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Arrival {
    #[default]
    Away,
    /// Missed: its use was reported before its insertion.
    Asked,
    /// Inserted before its first use: a prefetch or an upgrade.
    Early,
    Used,
}

impl Arc {
    /// The lists of the version's share, and how the version came.
    fn of(&mut self, version: Version) -> (&mut Lists, &mut Arrival) {
        let precision = version.precision.index();
        let Member { share, arrival } = &mut self.members.entry(version.expert)[precision];
        let own = ShareId { pool: precision as u16, layer: version.expert.layer };
        (self.lists.entry(share.unwrap_or(own)).or_default(), arrival)
    }
}

impl Policy for Arc {
    fn on_share(&mut self, share: ShareId, members: &[Version]) {
        for member in members {
            self.members.entry(member.expert)[member.precision.index()].share = Some(share);
        }
    }

    fn on_insert(&mut self, version: Version, _now: Now) {
        let (lists, arrival) = self.of(version);
        *arrival = if *arrival == Arrival::Asked { Arrival::Used } else { Arrival::Early };
        lists.insert(version);
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, _now: Now) {
        let Some(precision) = usage.precision else { return };
        let version = Version { expert, precision };
        let (lists, arrival) = self.of(version);
        let is_re_use = *arrival == Arrival::Used;
        *arrival = match *arrival {
            Arrival::Away | Arrival::Asked => Arrival::Asked,
            Arrival::Early | Arrival::Used => Arrival::Used,
        };
        lists.use_one(version, is_re_use);
    }

    fn on_remove(&mut self, version: Version, _now: Now) {
        let (lists, arrival) = self.of(version);
        *arrival = Arrival::Away;
        lists.remove(version);
    }

    fn victim(&mut self, incoming: Version, candidates: &[Candidate], _now: Now) -> usize {
        let evicted = self.of(incoming).0.evict(incoming, candidates);
        let position = candidates.iter().position(|candidate| Some(candidate.version) == evicted).unwrap_or(0);
        *self.of(candidates[position].version).1 = Arrival::Away;
        position
    }
}

#[derive(Clone, Debug, Default)]
struct Lists {
    t1: Vec<Version>,
    t2: Vec<Version>,
    b1: Vec<Version>,
    b2: Vec<Version>,
    /// `p`, `0..=` slots.
    target: usize,
}

/// Takes `version` out of `list` and says whether it was there.
fn take(list: &mut Vec<Version>, version: Version) -> bool {
    let position = list.iter().position(|entry| *entry == version);
    position.map(|position| list.remove(position)).is_some()
}

fn forget_oldest(list: &mut Vec<Version>) {
    if !list.is_empty() {
        list.remove(0);
    }
}

impl Lists {
    /// The paper's bounds, also where pins made it evict from the other list or slots were taken away.
    fn bound(&mut self, n_slots: usize, incoming: Version) {
        // The incoming version is about to leave its ghost list, or to join T1.
        let [in_b1, in_b2] = [&self.b1, &self.b2].map(|ghosts| ghosts.contains(&incoming));
        let (joins_t1, returns) = (usize::from(!in_b1 && !in_b2), usize::from(in_b1 || in_b2));
        while !self.b1.is_empty() && self.t1.len() + joins_t1 + self.b1.len() > n_slots + usize::from(in_b1) {
            forget_oldest(&mut self.b1);
        }
        while !self.b2.is_empty() && self.b1.len() + self.b2.len() > n_slots + returns {
            forget_oldest(&mut self.b2);
        }
    }

    fn insert(&mut self, version: Version) {
        let is_back = take(&mut self.b1, version) | take(&mut self.b2, version);
        if is_back { &mut self.t2 } else { &mut self.t1 }.push(version);
    }

    /// `version` is used. `is_re_use`: it is resident and was used before.
    fn use_one(&mut self, version: Version, is_re_use: bool) {
        if take(&mut self.t2, version) {
            self.t2.push(version);
        } else if take(&mut self.t1, version) {
            if is_re_use { &mut self.t2 } else { &mut self.t1 }.push(version);
        }
    }

    /// `version` left without [`Lists::evict`].
    fn remove(&mut self, version: Version) {
        take(&mut self.t1, version);
        take(&mut self.t2, version);
    }

    /// The paper's cases II to IV for a full share: adapts, forgets, and evicts a candidate to make room for
    /// `incoming`; `None` if it knows none of the candidates.
    fn evict(&mut self, incoming: Version, candidates: &[Candidate]) -> Option<Version> {
        let n_slots = self.t1.len() + self.t2.len();
        let (n1, n2) = (self.b1.len(), self.b2.len());
        let was_in_b2 = self.b2.contains(&incoming);
        let mut remembers = true;
        if self.b1.contains(&incoming) {
            self.target = (self.target + (n2 / n1).max(1)).min(n_slots);
        } else if was_in_b2 {
            self.target = self.target.saturating_sub((n1 / n2).max(1)).min(n_slots);
        } else if self.t1.len() + n1 >= n_slots {
            // With no ghost to forget, the evicted one itself is forgotten: T1 is the whole share.
            remembers = n1 > 0;
            forget_oldest(&mut self.b1);
        } else if n_slots + n1 + n2 >= 2 * n_slots {
            forget_oldest(&mut self.b2);
        }
        let is_candidate = |version: &Version| candidates.iter().any(|candidate| candidate.version == *version);
        let oldest = |list: &[Version]| list.iter().copied().find(is_candidate);
        let (of_t1, of_t2) = (oldest(&self.t1), oldest(&self.t2));
        let is_t1_due = self.t1.len() > self.target || (was_in_b2 && self.t1.len() == self.target) || !remembers;
        let from_t1 = of_t1.is_some() && (is_t1_due || of_t2.is_none());
        let evicted = if from_t1 { of_t1 } else { of_t2 }?;
        let (list, ghosts) = if from_t1 { (&mut self.t1, &mut self.b1) } else { (&mut self.t2, &mut self.b2) };
        take(list, evicted);
        if remembers {
            ghosts.push(evicted);
        }
        self.bound(n_slots, incoming);
        Some(evicted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::tests::scripts::{aged, at, high, insert, low, miss, token, victim_for, victim_of};

    /// T1, T2, B1, B2 by expert, and p.
    fn lists(arc: &mut Arc) -> ([Vec<u16>; 4], usize) {
        let Lists { t1, t2, b1, b2, target } = arc.of(high(0)).0.clone();
        ([t1, t2, b1, b2].map(|list| list.iter().map(|version| version.expert.index).collect()), target)
    }

    #[test]
    fn recency_and_frequency_adapt_to_what_is_missed() {
        let (mut arc, mut residents) = (aged(Arc::default()), Vec::new());
        (0..4).for_each(|index| assert_eq!(miss(&mut arc, index, &mut residents, 4), None));
        token(&mut arc, 1, &[0, 1]);
        assert_eq!(lists(&mut arc), ([vec![2, 3], vec![0, 1], vec![], vec![]], 0));
        assert_eq!(miss(&mut arc, 4, &mut residents, 4), Some(2), "T1 is above its target of 0");
        assert_eq!(miss(&mut arc, 5, &mut residents, 4), Some(3));
        assert_eq!(lists(&mut arc), ([vec![4, 5], vec![0, 1], vec![2, 3], vec![]], 0));

        assert_eq!(miss(&mut arc, 2, &mut residents, 4), Some(4), "missed too early: T1 may have 1, it has 2");
        assert_eq!(lists(&mut arc), ([vec![5], vec![0, 1, 2], vec![3, 4], vec![]], 1));
        assert_eq!(miss(&mut arc, 3, &mut residents, 4), Some(0), "T1 may have 2");
        assert_eq!(lists(&mut arc), ([vec![5], vec![1, 2, 3], vec![4], vec![0]], 2));
        assert_eq!(
            miss(&mut arc, 0, &mut residents, 4),
            Some(5),
            "frequent and missed: T1 may have 1, and B2 takes it"
        );
        assert_eq!(lists(&mut arc), ([vec![], vec![1, 2, 3, 0], vec![4, 5], vec![]], 1));
        assert_eq!(miss(&mut arc, 6, &mut residents, 4), Some(1), "T1 is below its target");
        assert_eq!(lists(&mut arc), ([vec![6], vec![2, 3, 0], vec![4, 5], vec![1]], 1));
    }

    #[test]
    fn a_scan_is_forgotten() {
        let (mut arc, mut residents) = (aged(Arc::default()), Vec::new());
        for index in 0..60 {
            miss(&mut arc, index, &mut residents, 3);
        }
        assert_eq!(lists(&mut arc), ([vec![57, 58, 59], vec![], vec![], vec![]], 0), "T1 is the share: no ghosts");
    }

    #[test]
    fn a_prefetch_is_not_a_use() {
        let mut arc = aged(Arc::default());
        insert(&mut arc, &[0, 1]);
        token(&mut arc, 0, &[0]);
        assert_eq!(lists(&mut arc).0[..2], [vec![1, 0], vec![]]);
        token(&mut arc, 1, &[0]);
        assert_eq!(lists(&mut arc).0[..2], [vec![1], vec![0]]);
        arc.on_remove(high(0), at(1));
        assert_eq!(lists(&mut arc).0, [vec![1], vec![], vec![], vec![]], "who was sent away is no ghost");
    }

    #[test]
    fn who_may_leave_goes_even_if_the_list_is_not_due() {
        let mut arc = aged(Arc::default());
        insert(&mut arc, &[0, 1, 2]);
        (0..2).for_each(|time| token(&mut arc, time, &[0]));
        assert_eq!(victim_of(&mut arc, &[0]), 0, "1 and 2 are pinned");
        insert(&mut arc, &[99]);
        assert_eq!(victim_for(&mut arc, 98, &[2, 99]), 2);
        assert_eq!(victim_for(&mut arc, 97, &[55]), 55, "unknown residents are taken in slot order");
    }

    #[test]
    fn shares_are_as_told_or_by_layer_and_precision() {
        let arc = &mut Arc::default();
        arc.on_share(ShareId { pool: 7, layer: 3 }, &[high(0), low(1)]);
        arc.of(low(1)).0.target = 5;
        arc.of(high(2)).0.target = 1;
        let found = [high(0), low(1), low(0), high(1), high(2)].map(|version| arc.of(version).0.target);
        assert_eq!(found, [5, 5, 0, 1, 1]);
    }
}
