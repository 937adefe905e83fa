//! Staging slots.

use std::collections::HashMap;

use crate::expert::SliceId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Loading(SliceId),
    /// The slice is not wanted any more, but its read is in flight.
    Dropped,
    Ready(SliceId),
}

/// Which slice is in which staging slot. A staging slot holds one slice on its way through a product, for working sets
/// larger than a layer's share of the cache: from the moment its read is submitted until its product is done.
#[derive(Debug)]
pub(super) struct Staging {
    slots: Vec<State>,
    /// A slot more is made where all are taken.
    grows: bool,
    by_slice: HashMap<SliceId, usize>,
}

/// How far a staged slice has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Staged {
    /// Its read is in flight.
    Loading,
    /// Its bytes are complete, in this slot.
    Ready(usize),
}

impl Staging {
    /// `None`: with as many slots as it takes.
    pub(super) fn new(n_slots: Option<usize>) -> Self {
        let slots = vec![State::Free; n_slots.unwrap_or(0)];
        Self { slots, grows: n_slots.is_none(), by_slice: HashMap::new() }
    }

    /// Number of slots.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Slots that can be taken now.
    pub(super) fn n_free(&self) -> usize {
        self.slots.iter().filter(|state| **state == State::Free).count()
    }

    /// Every slice that has a slot.
    pub(super) fn slices(&self) -> impl Iterator<Item = SliceId> {
        self.by_slice.keys().copied()
    }

    pub(super) fn get(&self, slice: SliceId) -> Option<Staged> {
        let slot = *self.by_slice.get(&slice)?;
        Some(if self.slots[slot] == State::Loading(slice) { Staged::Loading } else { Staged::Ready(slot) })
    }

    /// Whether a slice has been read.
    pub(super) fn is_ready(&self, slice: SliceId) -> bool {
        matches!(self.get(slice), Some(Staged::Ready(_)))
    }

    /// Gives `slice` a free slot in state loading; `None` when all are taken.
    pub(super) fn take(&mut self, slice: SliceId) -> Option<usize> {
        debug_assert!(!self.by_slice.contains_key(&slice), "{slice} is staged already");
        let free = self.slots.iter().position(|state| *state == State::Free);
        let slot = free.or_else(|| self.grows.then_some(self.slots.len()))?;
        if slot == self.slots.len() {
            self.slots.push(State::Free);
        }
        self.slots[slot] = State::Loading(slice);
        self.by_slice.insert(slice, slot);
        Some(slot)
    }

    /// The read into `slot` ended.
    pub(super) fn landed(&mut self, slot: usize, complete: bool) {
        match self.slots[slot] {
            State::Loading(slice) if complete => self.slots[slot] = State::Ready(slice),
            State::Loading(slice) => {
                self.by_slice.remove(&slice);
                self.slots[slot] = State::Free;
            }
            State::Dropped => self.slots[slot] = State::Free,
            state => panic!("staging slot {slot} is {state:?}: no read was in flight"),
        }
    }

    /// The slice is no longer wanted.
    pub(super) fn release(&mut self, slice: SliceId) {
        if let Some(slot) = self.by_slice.remove(&slice) {
            self.slots[slot] = match self.slots[slot] {
                State::Loading(_) => State::Dropped,
                _ => State::Free,
            };
        }
    }

    /// Releases every slice for which `keep` is false.
    pub(super) fn retain(&mut self, keep: impl Fn(SliceId) -> bool) {
        let gone: Vec<SliceId> = self.slices().filter(|slice| !keep(*slice)).collect();
        gone.into_iter().for_each(|slice| self.release(slice));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::{ExpertId, SliceKind, Version};

    fn slice(index: u16) -> SliceId {
        SliceId { version: Version::high(ExpertId { layer: 0, index }), kind: SliceKind::Up }
    }

    #[test]
    fn a_slot_is_reused_only_after_its_read_landed() {
        let mut staging = Staging::new(Some(1));
        assert_eq!(staging.take(slice(0)), Some(0));
        assert_eq!(staging.get(slice(0)), Some(Staged::Loading));
        staging.release(slice(0));
        assert_eq!(staging.get(slice(0)), None);
        assert_eq!(staging.take(slice(1)), None, "the read of slice 0 still writes there");
        staging.landed(0, true);
        assert_eq!(staging.take(slice(1)), Some(0));
        staging.landed(0, true);
        assert_eq!(staging.get(slice(1)), Some(Staged::Ready(0)));
        assert_eq!(staging.len(), 1);
    }

    #[test]
    fn unbounded_staging_grows_only_as_needed() {
        let mut staging = Staging::new(None);
        assert_eq!((staging.take(slice(0)), staging.take(slice(1))), (Some(0), Some(1)));
        staging.landed(0, false);
        assert_eq!((staging.take(slice(2)), staging.len()), (Some(0), 2));
    }
}
