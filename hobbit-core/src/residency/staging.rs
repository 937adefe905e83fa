//! Places of slices: slots, staging slots, and waiting for slices that are on their way.
//!
//! A staging slot holds one slice on its way through a product, for working sets larger than a layer's share of the cache:
//! from the moment its read is submitted until its product is done.

use std::collections::HashMap;

use super::step::{LayerStep, Used};
use super::{Observer, Reads, Residency};
use crate::cache::SliceState;
use crate::expert::{SliceId, SliceKind};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Loading(SliceId),
    /// The slice is not wanted any more, but its read is in flight.
    Dropped,
    Ready(SliceId),
}

/// Which slice is in which staging slot.
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
        let gone: Vec<SliceId> = self.by_slice.keys().copied().filter(|slice| !keep(*slice)).collect();
        gone.into_iter().for_each(|slice| self.release(slice));
    }
}

/// Where the bytes of a needed slice are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a share of the cache, in the row that [`Used::row`] names.
    Cached,
    /// In this staging slot.
    Staged(usize),
    /// On its way, or waiting for a staging slot.
    Pending,
}

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Where a slice that a step uses is now.
    pub fn locate(&self, slice: SliceId, used: Used) -> Place {
        match used.row {
            Some(_) => {
                let slot = self.cache.lookup(slice.version).expect("a pinned version is resident");
                match self.cache.state(slot, slice.kind) {
                    SliceState::Ready => Place::Cached,
                    _ => Place::Pending,
                }
            }
            None => match self.staging.get(slice) {
                Some(Staged::Ready(slot)) => Place::Staged(slot),
                _ => Place::Pending,
            },
        }
    }

    /// The product of a staged slice is done: its staging slot takes the next one.
    pub fn release(&mut self, slice: SliceId) {
        self.staging.release(slice);
        self.pump();
    }

    /// Takes what has landed, without waiting.
    ///
    /// Failures are kept for [`Residency::take_failure`].
    pub fn poll(&mut self) {
        self.reads.poll(&mut self.landed);
        self.land();
    }

    /// Waits until something lands. False when nothing is on its way.
    pub fn wait(&mut self) -> bool {
        let started = self.reads.seconds();
        if !self.reads.wait(&mut self.landed) {
            return false;
        }
        self.counters.wait_seconds += self.reads.seconds() - started;
        self.land();
        true
    }

    /// Without overlap: waits until whatever of a step has a slot is there. What streams through staging cannot be
    /// there all at once.
    pub fn wait_for_all(&mut self, step: &LayerStep, kinds: &[SliceKind]) {
        let is_pending = |own: &Self| {
            let of_slots = step.used.iter().filter(|used| used.row.is_some());
            let mut slices = of_slots
                .flat_map(|&used| kinds.iter().map(move |&kind| (SliceId { version: step.version(used), kind }, used)));
            slices.any(|(slice, used)| own.locate(slice, used) == Place::Pending)
        };
        while !self.overlaps && is_pending(self) && self.wait() {}
    }

    /// Frees the staging slots for `slice`, which no read in flight brings: other staged slices are dropped, so none
    /// may be in use. False if there are no staging slots.
    pub fn force_staging(&mut self, slice: SliceId, used: Used) -> bool {
        // A slice that has a slot is read into it or not at all.
        if used.row.is_some() {
            return false;
        }
        if self.staging.get(slice).is_none() {
            self.staging.retain(|_| false);
            self.ahead.clear();
            self.queue.retain(|queued| *queued != slice);
            self.queue.push_front(slice);
            self.pump();
        }
        self.staging.get(slice).is_some()
    }

    /// Whether [`Residency::force_staging`] keeps what is staged.
    pub fn is_staged_or_cached(&self, slice: SliceId, used: Used) -> bool {
        used.row.is_some() || self.staging.get(slice).is_some()
    }

    /// The first wanted read that failed since the last call.
    pub fn take_failure(&mut self) -> Option<R::Error> {
        self.failure.take()
    }

    /// After a failed batch: waits for what is in flight and forgets how it ended, so that it does not fail the next.
    pub fn settle(&mut self) {
        self.stop_filling(None);
        self.queue.clear();
        self.ahead.clear();
        loop {
            while self.wait() {}
            // Reads into free slots that have started.
            self.reads.drain(&mut self.landed);
            if self.landed.is_empty() {
                break;
            }
            self.land();
        }
        self.failure = None;
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
