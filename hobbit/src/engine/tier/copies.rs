//! Copies to the device: their destinations, their order, and the waits for them.

use std::time::Instant;

use super::{Destination, Memory, StagingState, Tier, Weights, ZEROS, padding_bytes};
use crate::engine::ggml::Stream;
use hobbit_core::cache::SliceState;
use hobbit_core::expert::{SliceId, SliceKind, Version};
use hobbit_core::gguf::SliceShape;

impl Tier {
    /// Destination of an upload of this slice now: its version's slot, or a free staging slot.
    pub(in crate::engine) fn destination(&mut self, slice: SliceId) -> Option<Destination> {
        match self.cache.lookup(slice.version) {
            Some(slot) => Some(Destination::Slot(slot)),
            None => {
                let free = self.staging.iter().enumerate().filter_map(|(slot, state)| match state {
                    StagingState::Free(since, _) => Some((*since, slot)),
                    StagingState::Taken => None,
                });
                // The slot that has been free longest: its last product is the most likely to have run.
                free.min().map(|(_, slot)| Destination::Staging(slot))
            }
        }
    }

    /// Starts copying a slice to the device.
    ///
    /// # Safety
    /// `data` is valid for the slice's bytes until the upload has run: see the module.
    pub(in crate::engine) unsafe fn upload(
        &mut self,
        slice: SliceId,
        shape: &SliceShape,
        data: *const u8,
        to: Destination,
    ) {
        if self.counters.uploads == self.before.0 {
            let is_due = self.unmeasured.saturating_add(1) >= self.link_sample();
            if is_due && self.busy == Some(slice.version.expert.layer) {
                // The measurement must not include prefetches.
                self.copy.synchronize();
            }
            self.began = Instant::now();
            self.began_on_clock = self.clock.seconds();
        }
        let bytes = shape.bytes as usize;
        let (tensor, offset) = match to {
            Destination::Slot(slot) => {
                let share = self.memory.share(slice.version.expert.layer, slot.pool);
                self.cache.set_ready(slot, slice.kind);
                (share.tensor(slice.kind), (slot.index - share.first) as usize * bytes)
            }
            Destination::Staging(slot) => {
                if let StagingState::Free(_, Some(event)) = &self.staging[slot] {
                    self.copy.wait(event);
                }
                self.staging[slot] = StagingState::Taken;
                self.staged.insert(slice, (slot, shape.clone()));
                (self.memory.staging, slot * self.memory.staging_stride)
            }
        };
        // SAFETY: the tensor has room for the slot; the bytes are valid by the caller. Zeros are static.
        unsafe {
            self.copy.set(tensor, data.cast(), offset, bytes);
            // Kernels read the last row to the end of a step: the bytes there must not be NaN.
            let padding = padding_bytes(shape);
            if padding > 0 && matches!(to, Destination::Staging(_)) {
                self.copy.set(tensor, ZEROS.as_ptr().cast(), offset + bytes, padding);
            }
        }
        self.submitted += 1;
        let event = self.events.record(&self.copy);
        if event.is_none() {
            self.waited = self.submitted;
        }
        self.marks.push_back((self.submitted, event));
        self.arrivals.insert(slice, self.submitted);
        self.counters.uploads += 1;
        self.counters.uploaded_bytes += shape.bytes;
    }

    /// The upload just started reads a staging slot of the host.
    pub(super) fn hold_staged(&mut self, slice: SliceId) {
        self.held.push_back((self.submitted, slice));
    }

    /// Location of a slice on the device, once its upload has been submitted.
    pub(in crate::engine) fn locate(&self, slice: SliceId) -> Option<Weights> {
        if let Some(slot) = self.cache.lookup(slice.version) {
            if self.cache.state(slot, slice.kind) != SliceState::Ready {
                return None;
            }
            let share = self.memory.share(slice.version.expert.layer, slot.pool);
            return Some(Weights::Shared { tensor: share.tensor(slice.kind), row: slot.index - share.first });
        }
        let (slot, shape) = self.staged.get(&slice)?;
        let Memory { staging, staging_stride, .. } = self.memory;
        // SAFETY: the staging tensor is live.
        let (base, buffer) = unsafe { ((*staging).data.cast::<u8>(), (*staging).buffer) };
        Some(Weights::of(shape, base.wrapping_add(slot * staging_stride), buffer, Some(staging)))
    }

    /// Whether the compute stream would have to wait for a slice.
    pub(in crate::engine) fn is_arriving(&self, slice: SliceId) -> bool {
        self.arrivals.get(&slice).is_some_and(|upload| *upload > self.waited)
    }

    /// Whether the compute stream would have to wait for any slice of a version that has a slot.
    pub(in crate::engine) fn is_version_arriving(&self, version: Version, kinds: &[SliceKind]) -> bool {
        kinds.iter().any(|&kind| self.is_arriving(SliceId { version, kind }))
    }

    /// Later work on `compute` runs after the slice's upload.
    pub(in crate::engine) fn wait_for(&mut self, compute: &Stream, slice: SliceId) {
        if let Some(&upload) = self.arrivals.get(&slice) {
            self.wait_for_upload(compute, upload);
        }
    }

    /// The same for the upload with this number.
    pub(super) fn wait_for_upload(&mut self, compute: &Stream, upload: u64) {
        if upload <= self.waited {
            return;
        }
        if let Some((_, Some(event))) = self.marks.iter().find(|(mark, _)| *mark == upload) {
            compute.wait(event);
        }
        self.waited = upload;
    }

    /// Products of staged slices have been submitted to `compute`: their slots may be overwritten once these have run.
    pub(in crate::engine) fn used(&mut self, compute: &Stream, slices: impl IntoIterator<Item = SliceId>) {
        let mut event = None;
        for slice in slices {
            let Some((slot, _)) = self.staged.remove(&slice) else { continue };
            let event = event.get_or_insert_with(|| self.events.record(compute)).clone();
            self.n_staged_uses += 1;
            self.staging[slot] = StagingState::Free(self.n_staged_uses, event);
        }
    }
}
