//! Slots, pools of slots of one shape, and how these are divided among layers.
//!
//! A slot is room for the slices of one version of an expert. As a rule every layer owns a fixed share of each of its
//! pools. Each token scans one recency list of all layers in a circle, and a list shorter than the circle (layers x
//! experts per token) never hits. A policy that predicts uses does not have this problem: for it a pool can be one
//! common share, in which a layer that has just run gives room to the next ones. Batches are scans in any case: while
//! one is evaluated, a layer with an equal part takes no more from others.

use std::collections::BTreeMap;

use super::allocate::even;
use crate::expert::{ExpertId, Precision, SliceKind, Version};

/// Names a slot: the same index in each arena (gate, up, down) of its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId {
    pub pool: u16,
    /// Index into the pool's arenas, `0..n_slots`.
    pub index: u32,
}

/// How far one slice of a slot's version has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SliceState {
    /// Nothing there and nothing on its way.
    Free,
    /// A read into the slot is in flight.
    Loading,
    /// The slice's bytes are complete.
    Ready,
}

/// A set of [`SliceKind`]s: which matrices the experts of a layer consist of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SliceKinds(u8);

impl SliceKinds {
    pub const fn contains(self, kind: SliceKind) -> bool {
        self.0 & (1 << kind.index()) != 0
    }

    pub fn iter(self) -> impl Iterator<Item = SliceKind> {
        SliceKind::ALL.into_iter().filter(move |kind| self.contains(*kind))
    }
}

impl FromIterator<SliceKind> for SliceKinds {
    fn from_iter<I: IntoIterator<Item = SliceKind>>(kinds: I) -> Self {
        Self(kinds.into_iter().fold(0, |set, kind| set | 1 << kind.index()))
    }
}

/// A slot's life: empty, then some version's until that is evicted or released; per slice
/// `Free -> Loading -> Ready`, pins on top.
///
/// Every step asserts the state it starts from, in release builds too: a slot reused under a running read or
/// product would corrupt answers silently.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) version: Option<Version>,
    kinds: SliceKinds,
    states: [SliceState; SliceKind::COUNT],
    pub(super) pins: u32,
}

impl Slot {
    pub(super) fn new(kinds: SliceKinds) -> Self {
        Self { version: None, kinds, states: [SliceState::Free; SliceKind::COUNT], pins: 0 }
    }

    pub(super) fn is_evictable(&self) -> bool {
        self.version.is_some() && self.pins == 0 && !self.states.contains(&SliceState::Loading)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.version.is_some() && self.kinds.iter().all(|kind| self.states[kind.index()] == SliceState::Ready)
    }

    pub(super) fn state(&self, kind: SliceKind) -> SliceState {
        assert!(self.kinds.contains(kind), "this layer's experts have no {kind:?} slice");
        self.states[kind.index()]
    }

    pub(super) fn assign(&mut self, version: Version) {
        assert!(self.version.is_none(), "slot of {:?} is not empty", self.version);
        self.version = Some(version);
    }

    pub(super) fn vacate(&mut self) {
        assert!(self.is_evictable(), "slot of {:?} is empty, pinned or loading", self.version);
        *self = Self::new(self.kinds);
    }

    pub(super) fn step(&mut self, kind: SliceKind, from: SliceState, to: SliceState) {
        assert!(self.version.is_some(), "the slot is empty");
        let found = self.state(kind);
        assert!(found == from, "{kind:?} slice of {:?} is {found:?}, expected {from:?} before {to:?}", self.version);
        self.states[kind.index()] = to;
    }

    pub(super) fn pin(&mut self) {
        assert!(self.version.is_some(), "the slot is empty");
        assert!(
            self.kinds.iter().all(|kind| self.states[kind.index()] != SliceState::Free),
            "a slice of {:?} is not even loading: nothing to pin",
            self.version
        );
        self.pins += 1;
    }

    pub(super) fn unpin(&mut self) {
        assert!(self.pins > 0, "slot of {:?} is not pinned", self.version);
        self.pins -= 1;
    }
}

/// One layer's part of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerLayout {
    pub layer: u16,
    /// The versions of this layer that have the pool's shape, in any order.
    pub members: Vec<Version>,
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

/// One `T` per expert; those never written are `T::default()`.
#[derive(Clone, Debug)]
pub(super) struct ByExpert<T> {
    layers: Vec<Vec<T>>,
}

impl<T> Default for ByExpert<T> {
    fn default() -> Self {
        Self { layers: Vec::new() }
    }
}

impl<T: Clone + Default> ByExpert<T> {
    /// The expert's entry; `None` if it lies beyond all that were written.
    pub(super) fn get(&self, expert: ExpertId) -> Option<&T> {
        self.layer(expert.layer).get(usize::from(expert.index))
    }

    pub(super) fn get_mut(&mut self, expert: ExpertId) -> Option<&mut T> {
        self.layers.get_mut(usize::from(expert.layer))?.get_mut(usize::from(expert.index))
    }

    /// The expert's entry, to write, made if need be.
    pub(super) fn entry(&mut self, expert: ExpertId) -> &mut T {
        let (layer, index) = (usize::from(expert.layer), usize::from(expert.index));
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, Vec::new());
        }
        let experts = &mut self.layers[layer];
        if experts.len() <= index {
            experts.resize(index + 1, T::default());
        }
        &mut experts[index]
    }

    /// The entries of a layer by expert index, as far as they were written.
    pub(super) fn layer(&self, layer: u16) -> &[T] {
        self.layers.get(usize::from(layer)).map_or(&[], Vec::as_slice)
    }

    pub(super) fn layers(&self) -> &[Vec<T>] {
        &self.layers
    }

    pub(super) fn of_layers(layers: Vec<Vec<T>>) -> Self {
        Self { layers }
    }

    pub(super) fn clear(&mut self) {
        self.layers.clear();
    }
}
