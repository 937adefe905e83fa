//! Helpers of the policies' scripted tests: layer 3, high versions unless stated otherwise.

use crate::cache::policy::{Candidate, Now, Policy, Use};
use crate::expert::{ExpertId, Precision, Version};
use std::ops::{Deref, DerefMut};

/// A policy, and the versions that were used or inserted, oldest event first: the cache tells it who is older.
pub(in crate::cache::policy) struct Aged<P> {
    policy: P,
    events: Vec<Version>,
}

pub(in crate::cache::policy) fn aged<P: Policy>(policy: P) -> Aged<P> {
    Aged { policy, events: Vec::new() }
}

impl<P: Policy> Aged<P> {
    pub(in crate::cache::policy) fn on_insert(&mut self, version: Version, now: Now) {
        self.events.push(version);
        self.policy.on_insert(version, now);
    }

    pub(in crate::cache::policy) fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        self.events.extend(usage.precision.map(|precision| Version { expert, precision }));
        self.policy.on_use(expert, usage, now);
    }

    pub(in crate::cache::policy) fn victim(&mut self, incoming: Version, candidates: &[Version], now: Now) -> usize {
        let last_use = |version| self.events.iter().rposition(|event| *event == version).map_or(0, |i| i as u64 + 1);
        let candidate = |&version| Candidate { version, last_use: last_use(version) };
        let candidates: Vec<_> = candidates.iter().map(candidate).collect();
        self.policy.victim(incoming, &candidates, now)
    }
}

impl<P> Deref for Aged<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.policy
    }
}

impl<P> DerefMut for Aged<P> {
    fn deref_mut(&mut self) -> &mut P {
        &mut self.policy
    }
}

pub(in crate::cache::policy) fn high(index: u16) -> Version {
    Version::high(ExpertId { layer: 3, index })
}

pub(in crate::cache::policy) fn low(index: u16) -> Version {
    Version::low(ExpertId { layer: 3, index })
}

pub(in crate::cache::policy) fn used(precision: Precision) -> Use {
    Use::by_one(true, Some(precision), 0.5)
}

pub(in crate::cache::policy) fn at(token: u64) -> Now {
    Now { token, layer: 3 }
}

pub(in crate::cache::policy) fn insert(policy: &mut Aged<impl Policy>, indices: &[u16]) {
    indices.iter().for_each(|&index| policy.on_insert(high(index), at(0)));
}

/// One token that uses these experts in high precision, with equal weights.
pub(in crate::cache::policy) fn token(policy: &mut Aged<impl Policy>, token: u64, indices: &[u16]) {
    let usage = Use { weight: 1.0 / indices.len() as f32, ..used(Precision::High) };
    indices.iter().for_each(|&index| policy.on_use(high(index).expert, usage, at(token)));
}

/// The expert that the policy evicts for expert 99, at token 9.
pub(in crate::cache::policy) fn victim_of(policy: &mut Aged<impl Policy>, candidates: &[u16]) -> u16 {
    victim_for(policy, 99, candidates)
}

/// The expert that the policy evicts for another one, at token 9.
pub(in crate::cache::policy) fn victim_for(policy: &mut Aged<impl Policy>, incoming: u16, candidates: &[u16]) -> u16 {
    let candidates: Vec<_> = candidates.iter().copied().map(high).collect();
    candidates[policy.victim(high(incoming), &candidates, at(9))].expert.index
}

/// A miss as the cache reports it: use, victim of `full` slots, insertion. Returns the evicted expert.
pub(in crate::cache::policy) fn miss(
    policy: &mut Aged<impl Policy>,
    index: u16,
    residents: &mut Vec<u16>,
    full: usize,
) -> Option<u16> {
    policy.on_use(high(index).expert, Use { hit: false, ..used(Precision::High) }, at(0));
    let left = (residents.len() == full).then(|| victim_for(policy, index, residents));
    residents.retain(|&resident| Some(resident) != left);
    residents.push(index);
    policy.on_insert(high(index), at(0));
    left
}
