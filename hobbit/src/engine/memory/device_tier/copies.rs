//! Copies to the device: their destinations, their order, the waits for them, and the host memory that they read.

use std::ffi::{CStr, c_void};
use std::time::Instant;

use ggml_sys::llama::{self, ggml_backend_dev_t};

use super::{Destination, Memory, StagingState, TIDY_UPLOADS, Tier, Weights, ZEROS, padding_bytes};
use crate::engine::ggml::Stream;
use crate::engine::memory::host_reads::{Host, host_bytes};
use hobbit_core::cache::SliceState;
use hobbit_core::expert::{SliceId, SliceKind, Version};
use hobbit_core::gguf::SliceShape;
use hobbit_core::residency::{LayerStep, Used};

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
            let is_staged = !tier.is_resident(slice.version);
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
                tier.hold_staged(slice);
            }
            false
        });
        self.waiting.len() < before
    }
}

impl Tier {
    /// Destination of an upload of this slice now: its version's slot, or a free staging slot.
    pub(crate) fn destination(&mut self, slice: SliceId) -> Option<Destination> {
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
    pub(crate) unsafe fn upload(&mut self, slice: SliceId, shape: &SliceShape, data: *const u8, to: Destination) {
        if self.counters.uploads == self.before.0 {
            let is_due = self.unmeasured.saturating_add(1) >= self.link_sample();
            if is_due && self.busy == Some(slice.version.expert.layer) {
                // The measurement must not include prefetches.
                self.copy.synchronize();
            }
            self.began = self.clock.seconds();
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
    pub(crate) fn locate(&self, slice: SliceId) -> Option<Weights> {
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
    pub(crate) fn used(&mut self, compute: &Stream, slices: impl IntoIterator<Item = SliceId>) {
        let mut event = None;
        for slice in slices {
            let Some((slot, _)) = self.staged.remove(&slice) else { continue };
            let event = event.get_or_insert_with(|| self.events.record(compute)).clone();
            self.n_staged_uses += 1;
            self.staging[slot] = StagingState::Free(self.n_staged_uses, event);
        }
    }
}

// Copies that have run, and host memory that they no longer read.

impl Tier {
    /// Products of slices staged on the host have been submitted: the host gets these staging slots back once the
    /// products have run.
    pub(crate) fn used_on_host(&mut self, compute: &Stream, slices: impl IntoIterator<Item = SliceId>) {
        self.submitted += 1;
        self.waited = self.submitted;
        let event = self.events.record(compute);
        self.marks.push_back((self.submitted, event));
        self.held.extend(slices.into_iter().map(|slice| (self.submitted, slice)));
    }

    /// The stream `user` is about to use the tier, for a region of `layer` if any.
    pub(crate) fn enter(&mut self, user: &Stream, layer: Option<u16>) {
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
    pub(crate) fn rest(&mut self, host: &mut Host) {
        if let Some(fence) = self.fence.take() {
            fence.synchronize();
        }
        self.user = 0;
        self.settled(host);
    }

    /// `user` is done with the tier for now.
    pub(crate) fn leave(&mut self, user: &Stream) {
        self.catch_up(user);
        self.fence = self.events.record(user);
    }

    /// The compute stream has run all its submissions, and so the uploads it waited for; waits for any others. Returns
    /// to the host what uploads were reading: pins and staged slices.
    pub(crate) fn settled(&mut self, host: &mut Host) {
        // Uploads for a product that was never submitted (a failed batch, a later layer) have not been waited for.
        if self.submitted > self.waited {
            self.copy.synchronize();
            self.waited = self.submitted;
        }
        self.settled_so_far(host);
    }

    /// As [`Tier::settled`], but prefetches for layers that have not run continue.
    pub(crate) fn settled_so_far(&mut self, host: &mut Host) {
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
            // The stream has run, so this costs next to nothing, but Vulkan reuses command buffers only afterwards.
            self.copy.synchronize();
        }
        self.events.tidy(waited == submitted);
        let staged = self.run_until(self.waited);
        host.memory.unpin(std::mem::take(&mut self.host_pins));
        staged.into_iter().for_each(|slice| host.memory.release(slice));
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
    pub(crate) fn is_reading(&self, slice: SliceId) -> bool {
        self.held.iter().any(|(_, held)| *held == slice)
    }

    /// Waits on the host for the oldest upload that reads a host staging slot. Returns the slices to release; empty if
    /// there is no such upload.
    pub(crate) fn wait_for_host_staging(&mut self) -> Vec<SliceId> {
        let Some(&(upload, _)) = self.held.front() else { return Vec::new() };
        if let Some((_, Some(event))) = self.marks.iter().find(|(mark, _)| *mark >= upload) {
            event.synchronize();
        }
        self.run_until(upload)
    }
}

// Speed of copies and of the CPU, by the device's own clock if it has one: input of the balancer and of prefetches.

/// The link is measured in one of this many regions with uploads, beside a CPU helper.
const LINK_SAMPLE: u32 = 32;

/// The sampling interval where only prefetches use the result.
pub(super) const LINK_SAMPLE_ALONE: u32 = 256;

/// How many times as long as its product a slice's copy takes at least where slices are submitted together: the
/// products that then wait for the last copy add at most this part to the time of the copies.
const LINK_SLOW: f64 = 8.0;

/// Seconds since some moment.
type Seconds = unsafe extern "C" fn(ggml_backend_dev_t) -> f64;
/// Tells the device that the host's CPU has multiplied by this many bytes of weights.
type HostWork = unsafe extern "C" fn(ggml_backend_dev_t, u64);

/// The device's clock if it has one (the tests' device does), otherwise the host's.
pub(crate) struct Clock {
    dev: ggml_backend_dev_t,
    own: Option<(Seconds, HostWork)>,
    began: Instant,
}

impl Clock {
    pub(crate) fn of(dev: ggml_backend_dev_t) -> Self {
        // SAFETY: a registered device; what its registry has under these names are such functions.
        let own = unsafe {
            let reg = llama::ggml_backend_dev_backend_reg(dev);
            let address = |name: &CStr| llama::ggml_backend_reg_get_proc_address(reg, name.as_ptr());
            let [seconds, work] = [c"hobbit_device_seconds", c"hobbit_device_host_work"].map(address);
            (!seconds.is_null() && !work.is_null()).then(|| {
                (
                    std::mem::transmute::<*mut c_void, Seconds>(seconds),
                    std::mem::transmute::<*mut c_void, HostWork>(work),
                )
            })
        };
        Self { dev, own, began: Instant::now() }
    }

    /// The CPU has computed beside the device, with `bytes` bytes of weights: a device with a virtual clock advances
    /// it.
    pub(crate) fn host_worked(&self, bytes: u64) {
        if let Some((_, work)) = self.own {
            // SAFETY: the device is live as long as the process.
            unsafe { work(self.dev, bytes) }
        }
    }

    /// Whether this is the host's clock.
    pub(crate) fn is_hosts(&self) -> bool {
        self.own.is_none()
    }

    /// Seconds since some moment. A device's own clock may be set back.
    pub(crate) fn seconds(&self) -> f64 {
        match self.own {
            // SAFETY: as above.
            Some((seconds, _)) => unsafe { seconds(self.dev) },
            None => self.began.elapsed().as_secs_f64(),
        }
    }
}

impl Tier {
    /// Whether the CPU may compute misses.
    pub(crate) fn has_helper(&self) -> bool {
        self.balancer.is_some() && self.is_divided()
    }

    /// The next uploads of a region are timed.
    pub(crate) fn measure_next(&mut self) {
        self.unmeasured = u32::MAX;
    }

    /// The uploads of a region have been submitted. Some regions' uploads are waited for and timed; then returns when
    /// they had ended.
    pub(crate) fn measure_link(&mut self) -> Option<f64> {
        let (n, bytes) = (self.counters.uploads - self.before.0, self.counters.uploaded_bytes - self.before.1);
        if n == 0 {
            return None;
        }
        self.unmeasured = self.unmeasured.saturating_add(1);
        if self.unmeasured < self.link_sample() {
            return None;
        }
        self.unmeasured = 0;
        self.copy.synchronize();
        let ended = self.clock.seconds();
        let seconds = ended - self.began;
        self.balancer.iter_mut().for_each(|balancer| balancer.observe_copy(bytes / n, seconds / n as f64));
        self.ahead.iter_mut().for_each(|ahead| ahead.idle.observe_link(bytes, seconds));
        self.link.add(seconds / bytes as f64);
        Some(ended)
    }

    /// Records that the device multiplied by `bytes` bytes of weights in `seconds`, for a batch that decodes.
    pub(crate) fn observe_products(&mut self, bytes: u64, seconds: f64) {
        if bytes > 0 {
            self.product.add(seconds / bytes as f64);
        }
    }

    /// Whether copies take so much longer than products that nothing is gained by multiplying each slice as it lands:
    /// those of a stage wait for each other, and are submitted together.
    pub(crate) fn is_link_slow(&self) -> bool {
        self.link.get().zip(self.product.get()).is_some_and(|(link, product)| link >= LINK_SLOW * product)
    }

    pub(super) fn link_sample(&self) -> u32 {
        match (&self.balancer, &self.ahead) {
            (Some(_), _) => LINK_SAMPLE,
            (None, Some(_)) => LINK_SAMPLE_ALONE,
            (None, None) => u32::MAX,
        }
    }

    /// The CPU has computed experts of so much [`hobbit_core::load::balance::Miss::work`].
    pub(crate) fn helped(&mut self, experts: u64, work: u64, seconds: f64) {
        self.counters.helper_experts += experts;
        self.counters.helper_seconds += seconds;
        if let Some(balancer) = self.balancer.as_mut() {
            balancer.observe_cpu(work, seconds);
        }
    }
}
