//! One slot: room for the slices of one expert, and what has arrived in it.

use crate::expert::{ExpertId, SliceKind};

/// Names a slot: the same index in each arena (gate, up, down) of its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId {
    /// Index into the pools the cache was made from.
    pub pool: u16,
    /// Index into the pool's arenas, `0..n_slots`.
    pub index: u32,
}

/// How far one slice of a slot's expert has come.
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
    /// Whether `kind` is in the set.
    pub const fn contains(self, kind: SliceKind) -> bool {
        self.0 & (1 << kind.index()) != 0
    }

    /// The members in load order.
    pub fn iter(self) -> impl Iterator<Item = SliceKind> {
        SliceKind::ALL.into_iter().filter(move |kind| self.contains(*kind))
    }
}

impl FromIterator<SliceKind> for SliceKinds {
    fn from_iter<I: IntoIterator<Item = SliceKind>>(kinds: I) -> Self {
        Self(kinds.into_iter().fold(0, |set, kind| set | 1 << kind.index()))
    }
}

/// A slot's life: empty, then always some expert's; per slice `Free -> Loading -> Ready`, pins on top.
///
/// Every step asserts the state it starts from, in release builds too: a slot reused under a running read or
/// product would corrupt answers silently.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) expert: Option<ExpertId>,
    kinds: SliceKinds,
    states: [SliceState; SliceKind::COUNT],
    pins: u32,
}

impl Slot {
    pub(super) fn new(kinds: SliceKinds) -> Self {
        Self { expert: None, kinds, states: [SliceState::Free; SliceKind::COUNT], pins: 0 }
    }

    pub(super) fn is_evictable(&self) -> bool {
        self.expert.is_some() && self.pins == 0 && !self.states.contains(&SliceState::Loading)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.expert.is_some() && self.kinds.iter().all(|kind| self.states[kind.index()] == SliceState::Ready)
    }

    pub(super) fn state(&self, kind: SliceKind) -> SliceState {
        assert!(self.kinds.contains(kind), "this layer's experts have no {kind:?} slice");
        self.states[kind.index()]
    }

    /// Hands the slot to `expert`, all slices free.
    pub(super) fn assign(&mut self, expert: ExpertId) {
        assert!(self.expert.is_none() || self.is_evictable(), "slot of {:?} is pinned or loading", self.expert);
        *self = Self { expert: Some(expert), ..Self::new(self.kinds) };
    }

    pub(super) fn step(&mut self, kind: SliceKind, from: SliceState, to: SliceState) {
        assert!(self.expert.is_some(), "the slot holds no expert");
        let found = self.state(kind);
        assert!(found == from, "{kind:?} slice of {:?} is {found:?}, expected {from:?} before {to:?}", self.expert);
        self.states[kind.index()] = to;
    }

    pub(super) fn pin(&mut self) {
        assert!(self.expert.is_some(), "the slot holds no expert");
        assert!(
            self.kinds.iter().all(|kind| self.states[kind.index()] != SliceState::Free),
            "a slice of {:?} is not even loading: nothing to pin",
            self.expert
        );
        self.pins += 1;
    }

    pub(super) fn unpin(&mut self) {
        assert!(self.pins > 0, "slot of {:?} is not pinned", self.expert);
        self.pins -= 1;
    }
}
