//! Where slices are, and waiting for those that are on their way.

use std::time::Instant;

use super::{Place, Residency, Step, Used};
use crate::cache::SliceState;
use crate::engine::staging::Staged;
use crate::expert::{SliceId, SliceKind};
use crate::store::StoreError;

impl Residency {
    /// Where a slice that a step uses is now.
    pub(in super::super) fn locate(&self, slice: SliceId, used: Used) -> Place {
        match used.row {
            Some(_) => {
                let slot = self.cache.lookup(slice.version).expect("a pinned version is resident");
                match self.cache.state(slot, slice.kind) {
                    SliceState::Ready => Place::Cached,
                    _ => Place::Pending,
                }
            }
            None => match self.staging.get(slice) {
                Some(Staged::Ready(slot)) => {
                    let lead = self.slice(slice).1.lead as usize;
                    Place::Staged(self.staging_memory.as_ptr().wrapping_add(slot * self.staging_stride + lead))
                }
                _ => Place::Pending,
            },
        }
    }

    /// The product of a staged slice is done: its staging slot takes the next one.
    pub(in super::super) fn release(&mut self, slice: SliceId) {
        self.staging.release(slice);
        self.pump();
    }

    /// Takes what has landed, without waiting.
    ///
    /// Failures are kept for [`Residency::take_failure`].
    pub(in super::super) fn poll(&mut self) {
        let done = self.loader.poll();
        self.land(done);
    }

    /// Waits until something lands. False when nothing is on its way.
    pub(in super::super) fn wait(&mut self) -> bool {
        let started = Instant::now();
        let Ok(done) = self.loader.wait() else { return false };
        self.counters.wait_seconds += started.elapsed().as_secs_f64();
        self.land(done);
        true
    }

    /// Without overlap: waits until whatever of a step has a slot is there. What streams through staging cannot be there all
    /// at once.
    pub(in super::super) fn wait_for_all(&mut self, step: &Step, kinds: &[SliceKind]) {
        let is_pending = |own: &Self| {
            let of_slots = step.used.iter().filter(|used| used.row.is_some());
            let mut slices = of_slots
                .flat_map(|&used| kinds.iter().map(move |&kind| (SliceId { version: step.version(used), kind }, used)));
            slices.any(|(slice, used)| own.locate(slice, used) == Place::Pending)
        };
        while !self.overlaps && is_pending(self) && self.wait() {}
    }

    /// Makes the staging slots free for `slice`, which nothing in flight will bring: what else is staged is dropped.
    /// False when that is impossible (there are no staging slots).
    pub(in super::super) fn insist(&mut self, slice: SliceId, used: Used) -> bool {
        // A slice that has a slot is read into it or not at all.
        if used.row.is_some() {
            return false;
        }
        if self.staging.get(slice).is_none() {
            // Another device's uploads may be all that is staged.
            for tier in self.tiers.iter_mut().flatten() {
                while !tier.wait_for_host_staging().is_empty() {}
            }
            self.staging.retain(|_| false);
            self.ahead.clear();
            self.queue.retain(|queued| *queued != slice);
            self.queue.push_front(slice);
            self.pump();
        }
        self.staging.get(slice).is_some()
    }

    /// The first read that failed since the last call.
    pub(in super::super) fn take_failure(&mut self) -> Option<StoreError> {
        self.failure.take()
    }

    /// After a failed batch: waits for what is in flight and forgets how it ended, so that it does not fail the next.
    pub(in super::super) fn settle(&mut self) {
        self.stop_filling(None);
        self.queue.clear();
        self.ahead.clear();
        loop {
            while self.wait() {}
            // What fills free slots and has started.
            match self.loader.drain() {
                done if done.is_empty() => break,
                done => self.land(done),
            }
        }
        self.failure = None;
    }
}
