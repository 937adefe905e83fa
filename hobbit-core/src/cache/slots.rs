//! One slot: room for the slices of one version of an expert, and what has arrived in it.

use crate::expert::{SliceKind, Version};

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
