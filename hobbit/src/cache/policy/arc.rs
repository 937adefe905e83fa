//! ARC (Megiddo and Modha, FAST 2003), which Fate keeps inside each layer (section 4.4).

use super::Candidate;
use super::queues::{Queue, Queues};
use crate::expert::Version;

/// A share's residents in two lists by recency: `T1` was used once, `T2` again. Whom each of them evicted is remembered
/// in `B1` and `B2`; a miss on what is remembered there moves the target size `p` of `T1`. `T1` and `B1` together
/// remember at most as many as there are slots, all four at most twice as many.
///
/// Where the list whose turn it is has no candidate, the other one's oldest goes.
pub type Arc = Queues<Lists>;

/// Each least recently used first.
#[derive(Clone, Debug, Default)]
pub struct Lists {
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
}

impl Queue for Lists {
    fn insert(&mut self, version: Version) {
        let is_back = take(&mut self.b1, version) | take(&mut self.b2, version);
        if is_back { &mut self.t2 } else { &mut self.t1 }.push(version);
    }

    fn use_one(&mut self, version: Version, is_re_use: bool) {
        if take(&mut self.t2, version) {
            self.t2.push(version);
        } else if take(&mut self.t1, version) {
            if is_re_use { &mut self.t2 } else { &mut self.t1 }.push(version);
        }
    }

    fn remove(&mut self, version: Version) {
        take(&mut self.t1, version);
        take(&mut self.t2, version);
    }

    /// The paper's cases II to IV for a full share: adapts, forgets, and evicts a candidate to make room for `incoming`.
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
        let (list, ghosts) = match from_t1 {
            true => (&mut self.t1, &mut self.b1),
            false => (&mut self.t2, &mut self.b2),
        };
        take(list, evicted);
        if remembers {
            ghosts.push(evicted);
        }
        self.bound(n_slots, incoming);
        Some(evicted)
    }
}

#[cfg(test)]
mod tests;
