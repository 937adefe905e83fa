//! Tracks which uploads have run, and returns host memory that they no longer read.

use super::{StagingState, TIDY_UPLOADS, Tier};
use crate::engine::ggml::Stream;
use crate::engine::host_reads::Host;
use hobbit_core::expert::SliceId;

impl Tier {
    /// Products of slices staged on the host have been submitted: the host gets these staging slots back once the
    /// products have run.
    pub(in crate::engine) fn used_on_host(&mut self, compute: &Stream, slices: impl IntoIterator<Item = SliceId>) {
        self.submitted += 1;
        self.waited = self.submitted;
        let event = self.events.record(compute);
        self.marks.push_back((self.submitted, event));
        self.held.extend(slices.into_iter().map(|slice| (self.submitted, slice)));
    }

    /// The stream `user` is about to use the tier, for a region of `layer` if any.
    pub(in crate::engine) fn enter(&mut self, user: &Stream, layer: Option<u16>) {
        self.busy = layer;
        self.before = (self.counters.uploads, self.counters.uploaded_bytes);
        let user = user.raw() as usize;
        if self.user != user {
            // Another session's products may still read slots that this one is about to overwrite.
            if let Some(fence) = self.fence.take() {
                fence.synchronize();
            }
            self.user = user;
        }
    }

    /// Waits for all work submitted for this tier.
    pub(in crate::engine) fn rest(&mut self, host: &mut Host) {
        if let Some(fence) = self.fence.take() {
            fence.synchronize();
        }
        self.user = 0;
        self.settled(host);
    }

    /// `user` is done with the tier for now.
    pub(in crate::engine) fn leave(&mut self, user: &Stream) {
        self.catch_up(user);
        self.fence = self.events.record(user);
    }

    /// The compute stream has run all its submissions, and so the uploads it waited for; waits for any others. Returns
    /// to the host what uploads were reading: pins and staged slices.
    pub(in crate::engine) fn settled(&mut self, host: &mut Host) {
        // Uploads for a product that was never submitted (a failed batch, a later layer) have not been waited for.
        if self.submitted > self.waited {
            self.copy.synchronize();
            self.waited = self.submitted;
        }
        self.settled_so_far(host);
    }

    /// As [`Tier::settled`], but prefetches for layers that have not run continue.
    pub(in crate::engine) fn settled_so_far(&mut self, host: &mut Host) {
        let (waited, submitted) = (self.waited, self.submitted);
        if submitted > waited && !self.ahead.as_ref().is_some_and(|ahead| ahead.are_all(waited, submitted)) {
            return self.settled(host);
        }
        for pin in self.pins.drain(..) {
            self.cache.unpin(pin);
        }
        for state in &mut self.staging {
            if let StagingState::Free(_, event) = state {
                *event = None;
            }
        }
        if self.submitted >= self.tidied + TIDY_UPLOADS {
            self.tidied = self.submitted;
            // The stream has run, so this costs next to nothing, but Vulkan reuses events and command buffers only
            // afterwards.
            self.copy.synchronize();
            self.events.synchronize();
        }
        let staged = self.run_until(self.waited);
        host.unpin(std::mem::take(&mut self.host_pins));
        staged.into_iter().for_each(|slice| host.release(slice));
    }

    /// Uploads up to `upload` have run.
    pub(super) fn run_until(&mut self, upload: u64) -> Vec<SliceId> {
        self.done = self.done.max(upload);
        let done = self.done;
        self.waited = self.waited.max(done);
        self.marks.retain(|(mark, _)| *mark > done);
        self.arrivals.retain(|_, mark| *mark > done);
        self.host_pins.extend(self.ahead.iter_mut().flat_map(|ahead| ahead.run_until(done)));
        let n = self.held.partition_point(|(upload, _)| *upload <= done);
        self.held.drain(..n).map(|(_, slice)| slice).collect()
    }

    /// Whether an upload that may not have run reads a staging slot of the host.
    pub(in crate::engine) fn is_reading(&self, slice: SliceId) -> bool {
        self.held.iter().any(|(_, held)| *held == slice)
    }

    /// Waits on the host for the oldest upload that reads a host staging slot. Returns the slices to release; empty if
    /// there is no such upload.
    pub(in crate::engine) fn wait_for_host_staging(&mut self) -> Vec<SliceId> {
        let Some(&(upload, _)) = self.held.front() else { return Vec::new() };
        if let Some((_, Some(event))) = self.marks.iter().find(|(mark, _)| *mark >= upload) {
            event.synchronize();
        }
        self.run_until(upload)
    }
}
