//! Copies to the device: their destinations, their order, the waits for them, and the host memory that they read.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use ggml_sys::llama::ggml_backend_dev_t;

use super::{Destination, Memory, TIDY_UPLOADS, Tier, Weights, ZEROS, padding_bytes};
use crate::engine::ggml::{Event, Events, Stream};
use crate::engine::memory::host_reads::{Host, host_bytes};
use hobbit_core::cache::SliceState;
use hobbit_core::expert::{SliceId, SliceKind, Version};
use hobbit_core::gguf::SliceShape;
use hobbit_core::residency::{LayerStep, Used};

// The order of copies.

#[derive(Clone)]
pub(super) enum StagingState {
    /// Number of the slot's last use, and the event that shows that it has run.
    Free(u64, Option<Rc<Event>>),
    Taken,
}

/// Copies in flight, by number, and the staging slots that some go to.
pub(crate) struct Copies {
    pub(super) stream: Stream,
    pub(super) events: Events,
    pub(super) staging: Vec<StagingState>,
    pub(super) staged: HashMap<SliceId, (usize, SliceShape)>,
    n_staged_uses: u64,
    /// Copies submitted, waited for by the compute stream, and known to have run.
    pub(super) submitted: u64,
    pub(super) waited: u64,
    pub(super) done: u64,
    tidied: u64,
    marks: VecDeque<(u64, Option<Rc<Event>>)>,
    arrivals: HashMap<SliceId, u64>,
    /// Host staging slots that copies with these numbers read.
    held: VecDeque<(u64, SliceId)>,
}

impl Copies {
    /// `None` if the device refuses a second stream.
    pub(super) fn new(dev: ggml_backend_dev_t, n_staging: usize) -> Option<Self> {
        let (staged, marks, arrivals, held) = Default::default();
        Some(Self {
            stream: Stream::new(dev)?,
            events: Events::new(dev),
            staging: vec![StagingState::Free(0, None); n_staging],
            staged,
            n_staged_uses: 0,
            submitted: 0,
            waited: 0,
            done: 0,
            tidied: 0,
            marks,
            arrivals,
            held,
        })
    }

    /// Versions of a layer that the compute stream would have to wait for.
    pub(crate) fn arriving(&self, layer: u16) -> Vec<Version> {
        let is_arriving = |(slice, upload): (&SliceId, &u64)| {
            (*upload > self.waited && slice.version.expert.layer == layer).then_some(slice.version)
        };
        self.arrivals.iter().filter_map(is_arriving).collect()
    }

    /// The upload just started reads a staging slot of the host.
    pub(crate) fn hold_staged(&mut self, slice: SliceId) {
        self.held.push_back((self.submitted, slice));
    }

    /// Whether the compute stream would have to wait for a slice.
    pub(crate) fn is_arriving(&self, slice: SliceId) -> bool {
        self.arrivals.get(&slice).is_some_and(|upload| *upload > self.waited)
    }

    /// Whether the compute stream would have to wait for any slice of a version that has a slot.
    pub(crate) fn is_version_arriving(&self, version: Version, kinds: &[SliceKind]) -> bool {
        kinds.iter().any(|&kind| self.is_arriving(SliceId { version, kind }))
    }

    /// Later work on `compute` runs after the slice's upload.
    pub(crate) fn wait_for(&mut self, compute: &Stream, slice: SliceId) {
        if let Some(&upload) = self.arrivals.get(&slice) {
            self.wait_for_upload(compute, upload);
        }
    }

    /// Later work on `compute` runs after every upload submitted so far.
    pub(crate) fn wait_for_all(&mut self, compute: &Stream) {
        self.wait_for_upload(compute, self.submitted);
    }

    /// Makes `compute` wait for the upload with this number.
    pub(crate) fn wait_for_upload(&mut self, compute: &Stream, upload: u64) {
        if upload <= self.waited {
            return;
        }
        if let Some((_, Some(event))) = self.marks.iter().find(|(mark, _)| *mark == upload) {
            compute.wait(event);
        }
        self.waited = upload;
    }

    /// Products of staged slices have been submitted to `compute`: their slots may be overwritten once these have run.
    pub(crate) fn used(&mut self, compute: &Stream, slices: impl IntoIterator<Item = SliceId>) {
        let mut event = None;
        for slice in slices {
            let Some((slot, _)) = self.staged.remove(&slice) else { continue };
            let event = event.get_or_insert_with(|| self.events.record(compute)).clone();
            self.n_staged_uses += 1;
            self.staging[slot] = StagingState::Free(self.n_staged_uses, event);
        }
    }

    /// Products of slices staged on the host have been submitted: the host gets these staging slots back once the
    /// products have run.
    pub(crate) fn used_on_host(&mut self, compute: &Stream, slices: impl IntoIterator<Item = SliceId>) {
        self.submitted += 1;
        self.waited = self.submitted;
        let event = self.events.record(compute);
        self.marks.push_back((self.submitted, event));
        self.held.extend(slices.into_iter().map(|slice| (self.submitted, slice)));
    }

    /// Whether an upload that may not have run reads a staging slot of the host.
    pub(crate) fn is_reading(&self, slice: SliceId) -> bool {
        self.held.iter().any(|(_, held)| *held == slice)
    }
}

// Starting copies.

/// Slices that are not uploaded yet.
#[derive(Default)]
pub(crate) struct Uploads {
    /// Kind by kind, in the order of products; within a kind, experts in the order of need.
    waiting: Vec<(SliceId, Used)>,
}

impl Uploads {
    pub(crate) fn new(step: &LayerStep, kinds: &[SliceKind], missing: &[Used]) -> Self {
        let of_kind = |&kind: &SliceKind| {
            missing.iter().map(move |&used| (SliceId { version: step.version(used), kind }, used)).collect::<Vec<_>>()
        };
        Self { waiting: kinds.iter().flat_map(of_kind).collect() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Makes the host read the first slice although no read is in flight. Returns `false` if that is impossible.
    pub(crate) fn force_staging(&self, host: &mut Host) -> bool {
        self.waiting.first().is_some_and(|&(slice, used)| host.memory.force_staging(slice, used))
    }

    /// Starts every upload whose bytes are in host memory and that has a destination. Returns whether any was started.
    ///
    /// # Safety
    /// The step's pinned host slots stay unchanged until the uploads have run.
    pub(crate) unsafe fn pump(&mut self, host: &Host, tier: &mut Tier) -> bool {
        // Staging slots go to the earliest products: taken by a later one, they might never become free again.
        let mut staging_for = None;
        let before = self.waiting.len();
        self.waiting.retain(|&(slice, used)| {
            let is_staged = !tier.slots.is_resident(slice.version);
            if is_staged && staging_for.is_some_and(|kind| kind != slice.kind) {
                return true;
            }
            let Some((data, on_loan)) = host_bytes(host, slice, used) else {
                if is_staged {
                    staging_for = Some(slice.kind);
                }
                return true;
            };
            let Some(to) = tier.destination(slice) else {
                staging_for = Some(slice.kind);
                return true;
            };
            debug_assert!(is_staged == matches!(to, Destination::Staging(_)));
            // SAFETY: by the caller for what is cached; a staged slice is kept until its upload has run.
            unsafe { tier.upload(slice, host.reads().shape(slice), data, to) };
            if on_loan {
                tier.copies.hold_staged(slice);
            }
            false
        });
        self.waiting.len() < before
    }
}

impl Tier {
    /// Destination of an upload of this slice now: its version's slot, or a free staging slot.
    pub(crate) fn destination(&mut self, slice: SliceId) -> Option<Destination> {
        match self.slots.cache.lookup(slice.version) {
            Some(slot) => Some(Destination::Slot(slot)),
            None => {
                let free = self.copies.staging.iter().enumerate().filter_map(|(slot, state)| match state {
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
    pub(crate) unsafe fn upload(&mut self, slice: SliceId, shape: &SliceShape, data: *const u8, to: Destination) {
        if self.counters.uploads == self.speed.before.0 {
            let is_due = self.speed.unmeasured.saturating_add(1) >= self.link_sample();
            if is_due && self.busy == Some(slice.version.expert.layer) {
                // The measurement must not include prefetches.
                self.copies.stream.synchronize();
            }
            self.speed.began = self.speed.clock.seconds();
        }
        let bytes = shape.bytes as usize;
        let (tensor, offset) = match to {
            Destination::Slot(slot) => {
                let share = self.slots.memory.share(slice.version.expert.layer, slot.pool);
                self.slots.cache.set_ready(slot, slice.kind);
                (share.tensor(slice.kind), (slot.index - share.first) as usize * bytes)
            }
            Destination::Staging(slot) => {
                if let StagingState::Free(_, Some(event)) = &self.copies.staging[slot] {
                    self.copies.stream.wait(event);
                }
                self.copies.staging[slot] = StagingState::Taken;
                self.copies.staged.insert(slice, (slot, shape.clone()));
                (self.slots.memory.staging, slot * self.slots.memory.staging_stride)
            }
        };
        // SAFETY: the tensor has room for the slot; the bytes are valid by the caller. Zeros are static.
        unsafe {
            self.copies.stream.set(tensor, data.cast(), offset, bytes);
            // Kernels read the last row to the end of a step: the bytes there must not be NaN.
            let padding = padding_bytes(shape);
            if padding > 0 && matches!(to, Destination::Staging(_)) {
                self.copies.stream.set(tensor, ZEROS.as_ptr().cast(), offset + bytes, padding);
            }
        }
        self.copies.submitted += 1;
        let event = self.copies.events.record(&self.copies.stream);
        if event.is_none() {
            self.copies.waited = self.copies.submitted;
        }
        self.copies.marks.push_back((self.copies.submitted, event));
        self.copies.arrivals.insert(slice, self.copies.submitted);
        self.counters.uploads += 1;
        self.counters.uploaded_bytes += shape.bytes;
    }

    /// Location of a slice on the device, once its upload has been submitted.
    pub(crate) fn locate(&self, slice: SliceId) -> Option<Weights> {
        if let Some(slot) = self.slots.cache.lookup(slice.version) {
            if self.slots.cache.state(slot, slice.kind) != SliceState::Ready {
                return None;
            }
            let share = self.slots.memory.share(slice.version.expert.layer, slot.pool);
            return Some(Weights::Shared { tensor: share.tensor(slice.kind), row: slot.index - share.first });
        }
        let (slot, shape) = self.copies.staged.get(&slice)?;
        let Memory { staging, staging_stride, .. } = self.slots.memory;
        // SAFETY: the staging tensor is live.
        let (base, buffer) = unsafe { ((*staging).data.cast::<u8>(), (*staging).buffer) };
        Some(Weights::of(shape, base.wrapping_add(slot * staging_stride), buffer, Some(staging)))
    }
}

// Copies that have run, and host memory that they no longer read.

impl Tier {
    /// The stream `user` is about to use the tier, for a region of `layer` if any.
    pub(crate) fn enter(&mut self, user: &Stream, layer: Option<u16>) {
        self.busy = layer;
        self.speed.before = (self.counters.uploads, self.counters.uploaded_bytes);
        let user = user.raw() as usize;
        if self.users.last != user {
            // Another session's products may still read slots that this one is about to overwrite.
            if let Some(fence) = self.users.fence.take() {
                fence.synchronize();
            }
            self.users.last = user;
        }
    }

    /// Waits for all work submitted for this tier.
    pub(crate) fn rest(&mut self, host: &mut Host) {
        if let Some(fence) = self.users.fence.take() {
            fence.synchronize();
        }
        self.users.last = 0;
        self.settled(host);
    }

    /// `user` is done with the tier for now.
    pub(crate) fn leave(&mut self, user: &Stream) {
        self.catch_up(user);
        self.users.fence = self.copies.events.record(user);
    }

    /// The compute stream has run all its submissions, and so the uploads it waited for; waits for any others. Returns
    /// to the host what uploads were reading: pins and staged slices.
    pub(crate) fn settled(&mut self, host: &mut Host) {
        // Uploads for a product that was never submitted (a failed batch, a later layer) have not been waited for.
        if self.copies.submitted > self.copies.waited {
            self.copies.stream.synchronize();
            self.copies.waited = self.copies.submitted;
        }
        self.settled_so_far(host);
    }

    /// As [`Tier::settled`], but prefetches for layers that have not run continue.
    pub(crate) fn settled_so_far(&mut self, host: &mut Host) {
        let (waited, submitted) = (self.copies.waited, self.copies.submitted);
        if submitted > waited && !self.ahead.as_ref().is_some_and(|ahead| ahead.are_all(waited, submitted)) {
            return self.settled(host);
        }
        self.slots.unpin();
        for state in &mut self.copies.staging {
            if let StagingState::Free(_, event) = state {
                *event = None;
            }
        }
        if self.copies.submitted >= self.copies.tidied + TIDY_UPLOADS {
            self.copies.tidied = self.copies.submitted;
            // The stream has run, so this costs next to nothing, but Vulkan reuses command buffers only afterwards.
            self.copies.stream.synchronize();
        }
        self.copies.events.tidy(waited == submitted);
        let staged = self.run_until(self.copies.waited);
        host.memory.unpin(std::mem::take(&mut self.on_host.pins));
        staged.into_iter().for_each(|slice| host.memory.release(slice));
    }

    /// Uploads up to `upload` have run.
    pub(super) fn run_until(&mut self, upload: u64) -> Vec<SliceId> {
        self.copies.done = self.copies.done.max(upload);
        let done = self.copies.done;
        self.copies.waited = self.copies.waited.max(done);
        self.copies.marks.retain(|(mark, _)| *mark > done);
        self.copies.arrivals.retain(|_, mark| *mark > done);
        self.on_host.pins.extend(self.ahead.iter_mut().flat_map(|ahead| ahead.run_until(done)));
        let n = self.copies.held.partition_point(|(upload, _)| *upload <= done);
        self.copies.held.drain(..n).map(|(_, slice)| slice).collect()
    }

    /// Waits on the host for the oldest upload that reads a host staging slot. Returns the slices to release; empty if
    /// there is no such upload.
    pub(crate) fn wait_for_host_staging(&mut self) -> Vec<SliceId> {
        let Some(&(upload, _)) = self.copies.held.front() else { return Vec::new() };
        if let Some((_, Some(event))) = self.copies.marks.iter().find(|(mark, _)| *mark >= upload) {
            event.synchronize();
        }
        self.run_until(upload)
    }
}
