//! Where slices are, and waiting for those that are on their way.

use super::staging::Staged;
use super::step::{LayerStep, Used};
use super::{Observer, Reads, Residency};
use crate::cache::SliceState;
use crate::expert::{SliceId, SliceKind};

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

    /// Frees the staging slots for `slice`, which no read in flight brings: other staged slices are dropped, so none may be
    /// in use. False if there are no staging slots.
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
            // What fills free slots and has started.
            self.reads.drain(&mut self.landed);
            if self.landed.is_empty() {
                break;
            }
            self.land();
        }
        self.failure = None;
    }
}
