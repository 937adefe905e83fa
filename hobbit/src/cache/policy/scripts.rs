//! What the scripted tests of the policies share: layer 3, high versions unless said otherwise.

use super::{Now, Policy, Use};
use crate::expert::{ExpertId, Precision, Version};

pub(super) fn high(index: u16) -> Version {
    Version::high(ExpertId { layer: 3, index })
}

pub(super) fn low(index: u16) -> Version {
    Version::low(ExpertId { layer: 3, index })
}

pub(super) fn used(precision: Precision) -> Use {
    Use { hit: true, precision: Some(precision), weight: 0.5 }
}

pub(super) fn at(token: u64) -> Now {
    Now { token, layer: 3 }
}

/// Inserts experts in order, as prefetches.
pub(super) fn insert(policy: &mut dyn Policy, indices: &[u16]) {
    indices.iter().for_each(|&index| policy.on_insert(high(index), at(0)));
}

/// One token that uses these experts in high precision, with equal weights.
pub(super) fn token(policy: &mut dyn Policy, token: u64, indices: &[u16]) {
    let usage = Use { weight: 1.0 / indices.len() as f32, ..used(Precision::High) };
    indices.iter().for_each(|&index| policy.on_use(high(index).expert, usage, at(token)));
}

/// The index of whom the policy evicts of these experts for expert 99, at token 9.
pub(super) fn victim_of(policy: &mut dyn Policy, candidates: &[u16]) -> u16 {
    victim_for(policy, 99, candidates)
}

/// The index of whom the policy evicts of these experts for another one, at token 9.
pub(super) fn victim_for(policy: &mut dyn Policy, incoming: u16, candidates: &[u16]) -> u16 {
    let candidates: Vec<_> = candidates.iter().copied().map(high).collect();
    candidates[policy.victim(high(incoming), &candidates, at(9))].expert.index
}

/// A miss as the cache reports it: use, victim of `full` slots, insertion. Returns who left.
pub(super) fn miss(policy: &mut dyn Policy, index: u16, residents: &mut Vec<u16>, full: usize) -> Option<u16> {
    policy.on_use(high(index).expert, Use { hit: false, ..used(Precision::High) }, at(0));
    let left = (residents.len() == full).then(|| victim_for(policy, index, residents));
    residents.retain(|&resident| Some(resident) != left);
    residents.push(index);
    policy.on_insert(high(index), at(0));
    left
}
