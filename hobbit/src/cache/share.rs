//! One layer's part of a pool.

use crate::expert::Precision;

/// Names a share: the slots of one pool that belong to one layer. Versions compete for slots within their share only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShareId {
    /// Index into the pools the cache was made from.
    pub pool: u16,
    /// Block number as in `blk.<layer>.`.
    pub layer: u16,
}

/// Slots `first..first + capacity` of its pool, the lowest empty one filled first. Up to `first + most` are its own.
#[derive(Clone, Debug)]
pub(super) struct Share {
    pub(super) first: u32,
    pub(super) capacity: u32,
    pub(super) most: u32,
    pub(super) n_filled: u32,
    /// Whether any member has this precision, by [`Precision::index`].
    pub(super) holds: [bool; Precision::COUNT],
}

impl Share {
    /// All of its slots, as indices into its pool's arenas.
    pub(super) fn slots(&self) -> std::ops::Range<u32> {
        self.first..self.first + self.capacity
    }

    pub(super) fn has_empty(&self) -> bool {
        self.n_filled < self.capacity
    }
}
