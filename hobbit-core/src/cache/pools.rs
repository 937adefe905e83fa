//! Pools and how their slots are divided among layers.
//!
//! As a rule every layer owns a fixed share of each of its pools. Each token scans one recency list of all layers in a
//! circle, and a list shorter than the circle (layers x experts per token) never hits. A policy that predicts uses
//! does not have this problem: for it a pool can be one common share, in which a layer that has just run gives room to
//! the next ones. Batches are scans in any case: while one is evaluated, a layer with an equal part takes no more from
//! others.

use super::allocate::even;
use super::slots::SliceKinds;
use crate::expert::{Precision, Version};
use std::collections::BTreeMap;

/// One layer's part of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerLayout {
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
    pub n_slots: u32,
    /// Slots of each layer, in the order of `layers`, at most `n_slots` together; [`super::allocate()`] computes them.
    /// `None` divides equally, to within one.
    pub capacities: Option<Vec<u32>>,
    /// All layers compete for all slots: one share with the first layer's number. `capacities` is ignored.
    pub is_common: bool,
}

impl PoolLayout {
    /// Layers that share slots, and how many.
    pub(super) fn groups(&self) -> Vec<(&[LayerLayout], u32)> {
        if !self.is_common || self.layers.is_empty() {
            return self.layers.chunks(1).zip(self.shares()).collect();
        }
        let n_members = self.layers.iter().map(|layer| layer.members.len() as u32).sum(); // versions: two u16 a layer
        vec![(&self.layers, self.n_slots.min(n_members))]
    }

    /// Slots of each layer, in the order of `layers`, none more than its members.
    ///
    /// # Panics
    /// If explicit capacities are not one for each layer, or more than `n_slots` together.
    pub(super) fn shares(&self) -> Vec<u32> {
        let members = self.layers.iter().map(|layer| layer.members.len() as u32); // versions of a layer: two u16
        let Some(capacities) = &self.capacities else { return even(self.n_slots, &members.collect::<Vec<_>>()) };
        assert!(capacities.len() == self.layers.len(), "{} capacities, {} layers", capacities.len(), self.layers.len());
        let all: u64 = capacities.iter().copied().map(u64::from).sum();
        assert!(all <= u64::from(self.n_slots), "layers have {all} slots, their pool {}", self.n_slots);
        capacities.iter().zip(members).map(|(capacity, members)| *capacity.min(&members)).collect()
    }
}

/// Names a share: the slots of one pool that belong to one layer, or to all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShareId {
    /// Index into the pools the cache was made from.
    pub pool: u16,
    /// Block number as in `blk.<layer>.`: of a common share, the first layer's.
    pub layer: u16,
}

/// Slots `first..first + capacity` of its pool; it can grow to `first + most`.
#[derive(Clone, Debug)]
pub(super) struct Share {
    pub(super) first: u32,
    pub(super) capacity: u32,
    pub(super) most: u32,
    pub(super) n_filled: u32,
    /// Filled slots of each of its layers, and precisions that any member in the layer has, by [`Precision::index`].
    pub(super) layers: BTreeMap<u16, (u32, [bool; Precision::COUNT])>,
}

impl Share {
    /// All of its slots, as indices into its pool's arenas.
    pub(super) fn slots(&self) -> std::ops::Range<u32> {
        self.first..self.first + self.capacity
    }

    pub(super) fn has_empty(&self) -> bool {
        self.n_filled < self.capacity
    }

    pub(super) fn count(&mut self, layer: u16, has_come: bool) {
        let filled = self.layers.get_mut(&layer).map(|(filled, _)| filled);
        for n in [Some(&mut self.n_filled), filled].into_iter().flatten() {
            *n = if has_come { *n + 1 } else { *n - 1 };
        }
    }

    /// Whether a layer has its equal part of the slots, among others.
    pub(super) fn has_its_part(&self, layer: u16) -> bool {
        let n_layers = self.layers.len() as u32; // layers: u16
        let filled = self.layers.get(&layer).map_or(0, |(filled, _)| *filled);
        n_layers > 1 && filled >= (self.capacity / n_layers).max(1)
    }
}
