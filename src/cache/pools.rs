//! Pools and how their slots are divided among layers.
//!
//! Every layer owns a fixed share of each of its pools. One list for all layers would be scanned in a circle, token after
//! token, and a recency list smaller than the circle (layers x experts per token) never hits.

use super::slots::SliceKinds;
use crate::expert::Version;

/// What one layer keeps in a pool: a share in the making.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerLayout {
    /// Block number as in `blk.<layer>.`.
    pub layer: u16,
    /// The versions of this layer that have the pool's shape, in any order.
    pub members: Vec<Version>,
    /// Which slices each of them has.
    pub kinds: SliceKinds,
}

/// Slots of one shape, and the versions that have that shape (equal kinds, types and sizes).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolLayout {
    /// The layers served, each once. A layer may be in many pools, a version in one.
    pub layers: Vec<LayerLayout>,
    /// Slots in each arena of the pool. More than there are versions are never used.
    pub n_slots: u32,
}

impl PoolLayout {
    /// Slots of each layer, in the order of `layers`: as equal as possible, none more than its members.
    pub(super) fn shares(&self) -> Vec<u32> {
        let mut shares = vec![0; self.layers.len()];
        let mut left = self.n_slots;
        loop {
            let before = left;
            for (share, layer) in shares.iter_mut().zip(&self.layers) {
                if left > 0 && (*share as usize) < layer.members.len() {
                    *share += 1;
                    left -= 1;
                }
            }
            if left == before {
                return shares;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::ExpertId;

    fn shares(n_slots: u32, n_member: &[u16]) -> Vec<u32> {
        let layers = n_member.iter().zip(0..).map(|(&n_member, layer)| LayerLayout {
            layer,
            members: (0..n_member).map(|index| Version::high(ExpertId { layer, index })).collect(),
            kinds: SliceKinds::default(),
        });
        PoolLayout { layers: layers.collect(), n_slots }.shares()
    }

    #[test]
    fn shares_differ_by_at_most_one_and_stop_at_the_members() {
        assert_eq!(shares(10, &[8, 8, 8]), [4, 3, 3]);
        assert_eq!(shares(2, &[8, 8, 8]), [1, 1, 0]);
        assert_eq!(shares(0, &[8, 8]), [0, 0]);
        assert_eq!(shares(24, &[8, 8, 8]), [8, 8, 8]);
        assert_eq!(shares(99, &[8, 8, 8]), [8, 8, 8]);
        assert_eq!(shares(10, &[2, 8, 8]), [2, 4, 4]);
        assert_eq!(shares(3, &[0, 8]), [0, 3]);
        assert!(shares(5, &[]).is_empty());
    }
}
