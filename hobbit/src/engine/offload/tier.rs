//! Device slots of one model on one device: which experts are there, what is on its way, and what must wait for what.
//!
//! Uploads run on a stream of their own. Three orders must hold, and are kept without stopping the host:
//!
//! * a product waits for the upload of its slice ([`Tier::wait_for`]);
//! * an upload into a staging slot waits for the product that used the slot last ([`Tier::used`]);
//! * host memory stays as it is until the upload that reads it has run: [`Tier::hold`] keeps what belongs to the host
//!   until [`Tier::settled`], which is called wherever the host has waited for the compute stream anyway.
//!
//! Copies for layers that have not run ([`super::ahead`]) keep the same orders.

mod copies;

use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::Instant;

use ggml_sys::llama::{self, ggml_backend_buffer_t, ggml_backend_dev_t, ggml_tensor};

use super::ahead::UploadsAhead;
use super::clock::Clock;
use super::memory::Memory;
use super::stream::{Event, Events, Stream};
use super::uploads::Uploads;
use crate::cache::{Cache, Lru, SavedCache, SliceState, SlotId, Use};
use crate::engine::allocation::cache_slots;
use crate::engine::pinned::{Buffer, HostMemory};
use crate::engine::residency::{Residency, Step, Used};
use crate::expert::{SliceId, SliceKind, Version};
use crate::gguf::{Catalog, SliceShape};
use crate::load::balance::Balancer;
use crate::stats::{CacheSlots, DeviceCounters, DeviceReport};
use crate::store::StoreError;

/// Kernels read rows of quantised weights in steps of so many elements.
const ROW_PADDING: u64 = 512;

/// The link is measured in one of so many regions with uploads, beside a CPU helper.
const LINK_SAMPLE: u32 = 32;

/// The same where only copies ahead of need go by it.
const LINK_SAMPLE_ALONE: u32 = 256;

/// After so many uploads a stream that has run is waited for all the same.
const TIDY_UPLOADS: u64 = 256;

/// More than the padding of any row, in bytes.
static ZEROS: [u8; 4096] = [0; 4096];

/// Where an upload goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Destination {
    /// A slot of the layer's share.
    Slot(SlotId),
    /// A staging slot.
    Staging(usize),
}

/// A needed slice as a product's weights.
#[derive(Clone, Copy)]
pub(super) enum Weights {
    /// A row of a share's tensor `[ne0, ne1, n_slots]`.
    Shared { tensor: *mut ggml_tensor, row: u32 },
    /// By itself: first byte, buffer and block, element type, `[ne0, ne1]`.
    Single { data: *mut u8, place: Place, type_: llama::ggml_type, ne: [i64; 2] },
}

/// The buffer that an address is in, and the tensor that all of it belongs to, if there is one.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) buffer: ggml_backend_buffer_t,
    pub(super) whole: Option<*mut ggml_tensor>,
}

/// Host memory that the device computes in.
struct HostRange {
    base: usize,
    len: usize,
    buffer: ggml_backend_buffer_t,
}

/// A layer's slots of one pool.
pub(super) struct Share {
    /// First slot, counted in the pool.
    first: u32,
    /// By slice of the class: `[ne0, ne1, n_slots]`.
    tensors: Vec<(SliceKind, *mut ggml_tensor)>,
}

#[derive(Clone)]
enum StagingState {
    /// Since which of all uses, and when that has run.
    Free(u64, Option<Rc<Event>>),
    Taken,
}

/// Host memory that an upload reads.
struct Held {
    upload: u64,
    slice: SliceId,
}

/// A stream that computes with layers that are here as a whole.
struct Loan {
    user: usize,
    is_running: bool,
    /// How far it had come.
    fence: Option<Rc<Event>>,
}

/// What a tier is made of.
pub(in super::super) struct Parts {
    pub(in super::super) dev: ggml_backend_dev_t,
    pub(in super::super) cache: Cache,
    pub(in super::super) memory: Memory,
    pub(in super::super) report: DeviceReport,
    /// How often the slots were made fewer until the device gave them.
    pub(in super::super) n_shrunk: u32,
}

/// See the [module](self).
pub(in super::super) struct Tier {
    dev: ggml_backend_dev_t,
    pub(super) copy: Stream,
    events: Events,
    pub(super) cache: Cache,
    pub(super) memory: Memory,
    staging: Vec<StagingState>,
    staged: HashMap<SliceId, (usize, SliceShape)>,
    n_staged_uses: u64,
    /// Uploads submitted, waited for by the compute stream, and known to have run.
    submitted: u64,
    waited: u64,
    done: u64,
    tidied: u64,
    marks: VecDeque<(u64, Option<Rc<Event>>)>,
    arrivals: HashMap<SliceId, u64>,
    held: VecDeque<Held>,
    pins: Vec<SlotId>,
    host_pins: Vec<SlotId>,
    /// The layer whose region is being computed.
    pub(super) busy: Option<u16>,
    /// The stream that used the tier last, and how far it had come.
    user: usize,
    fence: Option<Rc<Event>>,
    pub(super) counters: DeviceCounters,
    pub(super) report: DeviceReport,
    /// Decides what the CPU computes; `None`: nothing.
    pub(super) balancer: Option<Balancer>,
    /// Threads of the CPU helper; `None` takes the session's.
    pub(super) helper_threads: Option<u16>,
    /// Regions with uploads since the link was measured last.
    unmeasured: u32,
    /// Uploads and their bytes when the running region began, and when that was.
    before: (u64, u64),
    began: Instant,
    pub(super) clock: Clock,
    began_on_clock: f64,
    /// Layers of which every expert is in the slot of its number.
    pub(super) complete: HashSet<u16>,
    loans: Vec<Loan>,
    /// Bytes that the slots are to have as soon as no layer is lent.
    pub(super) pending: Option<u64>,
    /// Where the device computes on the host's own slots.
    host: Vec<HostRange>,
    /// Keeps what the device was shown.
    shown: Vec<Buffer>,
    /// Copies for layers that have not run; `None`: there are to be none.
    pub(super) ahead: Option<UploadsAhead>,
}

// SAFETY: streams, events and tensors belong to the tier alone, and one thread uses it at a time.
unsafe impl Send for Tier {}

impl Tier {
    /// `None` when the device refuses a second stream.
    pub(in super::super) fn new(parts: Parts) -> Option<Self> {
        let Parts { dev, cache, memory, report, n_shrunk } = parts;
        Some(Self {
            dev,
            copy: Stream::new(dev)?,
            events: Events::new(dev),
            cache,
            staging: vec![StagingState::Free(0, None); memory.n_staging()],
            memory,
            staged: HashMap::new(),
            n_staged_uses: 0,
            submitted: 0,
            waited: 0,
            done: 0,
            tidied: 0,
            marks: VecDeque::new(),
            arrivals: HashMap::new(),
            held: VecDeque::new(),
            pins: Vec::new(),
            host_pins: Vec::new(),
            busy: None,
            user: 0,
            fence: None,
            counters: DeviceCounters { cache_shrunk: n_shrunk, ..DeviceCounters::default() },
            report,
            balancer: None,
            helper_threads: None,
            unmeasured: LINK_SAMPLE_ALONE,
            before: (0, 0),
            began: Instant::now(),
            clock: Clock::of(dev),
            began_on_clock: 0.0,
            complete: HashSet::new(),
            loans: Vec::new(),
            pending: None,
            host: Vec::new(),
            shown: Vec::new(),
            ahead: None,
        })
    }

    /// The tier of a device that computes in host memory: it has no slots of its own.
    pub(in super::super) fn unified(dev: ggml_backend_dev_t, report: DeviceReport) -> Option<Self> {
        let cache = Cache::new(Vec::new(), Box::new(Lru::default()));
        Self::new(Parts { dev, cache, memory: Memory::none(), report, n_shrunk: 0 })
    }

    /// Host memory that slots are in. Of a unified device, this is where it computes.
    pub(in super::super) fn show(&mut self, memory: &mut HostMemory) {
        if let Some(buffer) = memory.buffer.filter(|_| memory.dev == Some(self.dev)) {
            let (base, len) = (memory.arena.as_ptr() as usize, memory.arena.len());
            self.host.push(HostRange { base, len, buffer });
            self.shown.extend(memory.shown.take());
        }
        self.report.pinned |= memory.pinned && memory.dev == Some(self.dev);
    }

    /// Whether the device computes in host memory.
    pub(in super::super) fn is_unified(&self) -> bool {
        self.report.unified
    }

    /// Where a slice is that the device reads from the host's slots, once it is complete.
    pub(super) fn locate_on_host(&self, residency: &Residency, slice: SliceId, used: Used) -> Option<Weights> {
        let (data, _) = residency.host_bytes(slice, used)?;
        let holds = |range: &&HostRange| (range.base..range.base + range.len).contains(&(data as usize));
        let range = self.host.iter().find(holds)?;
        let shape = residency.shape(slice);
        let ne = [shape.ne0 as i64, shape.ne1 as i64];
        let place = Place { buffer: range.buffer, whole: None };
        Some(Weights::Single { data: data.cast_mut(), place, type_: shape.dtype.id() as llama::ggml_type, ne })
    }

    /// Products of slices that were staged on the host have been submitted: the host may have these back when they have
    /// run.
    pub(super) fn used_on_host(&mut self, compute: &Stream, slices: impl IntoIterator<Item = SliceId>) {
        self.submitted += 1;
        self.waited = self.submitted;
        let event = self.events.record(compute);
        self.marks.push_back((self.submitted, event));
        self.held.extend(slices.into_iter().map(|slice| Held { upload: self.submitted, slice }));
    }

    pub(in super::super) fn dev(&self) -> ggml_backend_dev_t {
        self.dev
    }

    pub(in super::super) fn report(&self) -> &DeviceReport {
        &self.report
    }

    pub(in super::super) fn counters(&self) -> &DeviceCounters {
        &self.counters
    }

    /// Whether a version has a slot.
    pub(in super::super) fn is_resident(&self, version: Version) -> bool {
        self.cache.lookup(version).is_some()
    }

    /// Whether these slices of a version are in its slot, or on their way into it.
    pub(super) fn has(&self, version: Version, kinds: &[SliceKind]) -> bool {
        let is_ready = |slot| kinds.iter().all(|&kind| self.cache.state(slot, kind) == SliceState::Ready);
        self.cache.lookup(version).is_some_and(is_ready)
    }

    /// The stream `user` is about to use the tier, for a region of `layer` if any.
    pub(super) fn enter(&mut self, user: &Stream, layer: Option<u16>) {
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

    /// Waits for all that was submitted for this tier. What the host may have back, as [`Tier::settled`].
    pub(in super::super) fn rest(&mut self) -> (Vec<SlotId>, Vec<SliceId>) {
        if let Some(fence) = self.fence.take() {
            fence.synchronize();
        }
        self.user = 0;
        self.settled()
    }

    /// `user` is done with the tier for now.
    pub(super) fn leave(&mut self, user: &Stream) {
        self.catch_up(user);
        self.fence = self.events.record(user);
    }

    /// The compute stream has run all that was submitted to it: what it waited for is done, and nothing else is left to be
    /// done. Returns what the host may have back: pins, and slices that were staged.
    pub(in super::super) fn settled(&mut self) -> (Vec<SlotId>, Vec<SliceId>) {
        // Uploads for a product that never came (a failed batch, a later layer) have not been waited for.
        if self.submitted > self.waited {
            self.copy.synchronize();
            self.waited = self.submitted;
        }
        self.settled_so_far()
    }

    /// As [`Tier::settled`], but what is copied for layers that have not run goes on.
    pub(super) fn settled_so_far(&mut self) -> (Vec<SlotId>, Vec<SliceId>) {
        let (waited, submitted) = (self.waited, self.submitted);
        if submitted > waited && !self.ahead.as_ref().is_some_and(|ahead| ahead.are_all(waited, submitted)) {
            return self.settled();
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
            // Has run: costs next to nothing, but Vulkan reuses events and command buffers only after this.
            self.copy.synchronize();
            self.events.synchronize();
        }
        let staged = self.run_until(self.waited);
        (std::mem::take(&mut self.host_pins), staged)
    }

    /// Uploads up to `upload` have run.
    fn run_until(&mut self, upload: u64) -> Vec<SliceId> {
        self.done = self.done.max(upload);
        let done = self.done;
        self.waited = self.waited.max(done);
        self.marks.retain(|(mark, _)| *mark > done);
        self.arrivals.retain(|_, mark| *mark > done);
        self.host_pins.extend(self.ahead.iter_mut().flat_map(|ahead| ahead.run_until(done)));
        let mut released = Vec::new();
        while self.held.front().is_some_and(|held| held.upload <= done) {
            released.extend(self.held.pop_front().map(|held| held.slice));
        }
        released
    }

    /// Whether an upload that may not have run reads a staging slot of the host.
    pub(in super::super) fn is_reading(&self, slice: SliceId) -> bool {
        self.held.iter().any(|held| held.slice == slice)
    }

    /// Waits on the host for the oldest upload that reads a staging slot of the host. The slices that it may have back;
    /// empty where none is on its way.
    pub(in super::super) fn wait_for_host_staging(&mut self) -> Vec<SliceId> {
        let Some(upload) = self.held.front().map(|held| held.upload) else { return Vec::new() };
        if let Some((_, Some(event))) = self.marks.iter().find(|(mark, _)| *mark >= upload) {
            event.synchronize();
        }
        self.run_until(upload)
    }

    /// Lets the CPU compute misses.
    pub(in super::super) fn set_helper(&mut self, balancer: Balancer, threads: Option<u16>) {
        self.balancer = Some(balancer);
        self.helper_threads = threads;
    }

    /// Whether the CPU may compute misses.
    pub(in super::super) fn has_helper(&self) -> bool {
        self.balancer.is_some() && self.is_divided()
    }

    /// Whether products are computed in parts, as experts come.
    pub(in super::super) fn is_divided(&self) -> bool {
        self.report.slots < self.report.experts
    }

    /// The uploads of a region have been submitted. Now and then they are waited for and timed.
    pub(super) fn measure_link(&mut self) {
        let (n, bytes) = (self.counters.uploads - self.before.0, self.counters.uploaded_bytes - self.before.1);
        if n == 0 {
            return;
        }
        self.unmeasured = self.unmeasured.saturating_add(1);
        if self.unmeasured >= self.link_sample() {
            self.unmeasured = 0;
            self.copy.synchronize();
            let seconds = self.began.elapsed().as_secs_f64();
            self.balancer.iter_mut().for_each(|balancer| balancer.observe_copy(bytes / n, seconds / n as f64));
            let seconds = self.clock.seconds() - self.began_on_clock;
            self.ahead.iter_mut().for_each(|ahead| ahead.idle.observe_link(bytes, seconds));
        }
    }

    fn link_sample(&self) -> u32 {
        match (&self.balancer, &self.ahead) {
            (Some(_), _) => LINK_SAMPLE,
            (None, Some(_)) => LINK_SAMPLE_ALONE,
            (None, None) => u32::MAX,
        }
    }

    /// Whether the link was measured with the running region's uploads.
    pub(super) fn was_measured(&self) -> bool {
        self.unmeasured == 0
    }

    /// Bytes of the running region's uploads so far.
    pub(super) fn uploaded_in_region(&self) -> u64 {
        self.counters.uploaded_bytes - self.before.1
    }

    /// The CPU has computed experts.
    pub(super) fn helped(&mut self, experts: u64, bytes: u64, seconds: f64) {
        self.counters.helper_experts += experts;
        self.counters.helper_seconds += seconds;
        if let Some(balancer) = self.balancer.as_mut() {
            balancer.observe_cpu(bytes, seconds);
        }
    }

    /// Host slots that stay pinned until the uploads that read them have run.
    pub(super) fn hold(&mut self, pins: Vec<SlotId>) {
        self.host_pins.extend(pins);
    }

    /// What is here, for another run.
    pub(in super::super) fn save(&mut self) -> SavedCache {
        self.cache.save(&self.report.name)
    }

    /// Shows the policy what it has learned in an earlier run. Which versions there are slots for now; least recently used
    /// first.
    pub(in super::super) fn begin_warm_up(&mut self, saved: &SavedCache) -> Vec<Version> {
        self.cache.load_statistics(saved);
        self.cache.that_fit(saved)
    }

    /// Layers that have one share with a slot for each of their experts.
    pub(in super::super) fn whole_layers(&self) -> Vec<u16> {
        self.memory.layers_of_one_share(self.report.slots == self.report.experts)
    }

    /// How the slots are divided among its layers; `None` where it has none of its own.
    pub(in super::super) fn slots_by_layer(&self) -> Option<CacheSlots> {
        cache_slots(&self.report.name, &self.cache, self.cache.shares().map(|share| share.layer))
    }

    /// Whether nothing of a layer has a slot.
    pub(in super::super) fn is_empty(&self, layer: u16) -> bool {
        self.cache.residents().all(|(version, _)| version.expert.layer != layer)
    }

    /// Uploads what a step reads into the host's slots, in the order of the step. Whether all of it came.
    ///
    /// # Errors
    /// A read that fails.
    pub(in super::super) fn fill(
        &mut self,
        residency: &mut Residency,
        step: &Step,
        kinds: &[SliceKind],
    ) -> Result<bool, StoreError> {
        for &used in &step.used {
            self.acquire(step.version(used), kinds);
        }
        let mut uploads = Uploads::new(step, kinds, &step.used);
        while !uploads.is_empty() {
            // SAFETY: the step's host slots are pinned until `settled`, which waits for the uploads.
            let progress = unsafe { uploads.pump(residency, self) };
            if let Some(error) = residency.take_failure() {
                return Err(error);
            }
            if progress || residency.wait() {
                continue;
            }
            let released = self.wait_for_host_staging();
            if released.is_empty() && !uploads.insist(residency) {
                return Ok(false);
            }
            released.into_iter().for_each(|slice| residency.release(slice));
        }
        Ok(true)
    }

    /// Every expert of the layer is in the slot of its number: [`Tier::fill`] was called for all, in order.
    pub(in super::super) fn set_complete(&mut self, layer: u16) {
        self.complete.insert(layer);
    }

    /// The tensor of all experts of a layer, if it is on the device as a whole.
    pub(super) fn complete(&self, layer: u16, kind: SliceKind) -> Option<*mut ggml_tensor> {
        if self.complete.contains(&layer) { self.memory.only_tensor(layer, kind) } else { None }
    }

    /// `user` computes with [`Tier::complete`] tensors until [`Tier::returned`].
    pub(super) fn lend(&mut self, user: &Stream) {
        let user = user.raw() as usize;
        self.loans.retain(|loan| loan.user != user);
        self.loans.push(Loan { user, is_running: true, fence: None });
    }

    /// `user` has submitted all that reads them.
    pub(super) fn returned(&mut self, user: &Stream) {
        let fence = self.events.record(user);
        let user = user.raw() as usize;
        if let Some(loan) = self.loans.iter_mut().find(|loan| loan.user == user) {
            *loan = Loan { user, is_running: false, fence };
        }
    }

    /// Bytes that the slots are to have as soon as no layer is lent, if these are others than they have.
    pub(in super::super) fn pending(&self) -> Option<u64> {
        self.pending
    }

    /// Whether a graph is being submitted that reads [`Tier::complete`] tensors.
    pub(in super::super) fn is_lent(&self) -> bool {
        self.loans.iter().any(|loan| loan.is_running)
    }

    /// A layer is no longer here as a whole. `false`, and no change, while it is lent.
    pub(super) fn dissolve(&mut self, layer: u16) -> bool {
        if !self.complete.contains(&layer) {
            return true;
        }
        if self.is_lent() {
            return false;
        }
        self.loans.drain(..).filter_map(|loan| loan.fence).for_each(|fence| fence.synchronize());
        self.complete.remove(&layer)
    }

    /// The router's probabilities of all experts of a layer for one token, `[n_expert]`, for the policy.
    pub(super) fn scores(&mut self, layer: u16, scores: &[f32]) {
        self.cache.scores(layer, scores);
    }

    /// Counts a use, for the policy.
    pub(super) fn touch(&mut self, Version { expert, precision }: Version, hit: bool, weight: f32) {
        self.cache.touch(expert, Use { hit, precision: Some(precision), weight });
        match hit {
            true => self.counters.hits += 1,
            false => self.counters.misses += 1,
        }
    }

    /// Pool and row of a version's slot.
    pub(super) fn place(&self, version: Version) -> Option<(u16, u32)> {
        let slot = self.cache.lookup(version)?;
        Some((slot.pool, slot.index - self.memory.share(version.expert.layer, slot.pool).first))
    }

    /// Pins a version if it is resident.
    pub(super) fn pin(&mut self, version: Version) -> bool {
        let Some(slot) = self.cache.lookup(version) else { return false };
        self.cache.pin(slot);
        self.pins.push(slot);
        true
    }

    /// Gives a version a slot, if it has none and the share has one to give, and pins it there.
    pub(super) fn acquire(&mut self, version: Version, kinds: &[SliceKind]) -> bool {
        if self.cache.share_of(version).is_none() || self.cache.lookup(version).is_some() {
            return false;
        }
        let Some(acquired) = self.cache.acquire(version) else { return false };
        kinds.iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
        self.cache.pin(acquired.slot);
        self.pins.push(acquired.slot);
        true
    }

    /// A pinned version's slices that will not come after all: the slot is given back.
    pub(super) fn abandon(&mut self) {
        let resident: Vec<(Version, SlotId)> = self.cache.residents().collect();
        for pin in self.pins.drain(..) {
            self.cache.unpin(pin);
        }
        for (version, slot) in resident {
            let kinds = self.memory.kinds(version.expert.layer, slot.pool);
            let is_complete = kinds.iter().all(|&kind| self.cache.state(slot, kind) == SliceState::Ready);
            if !is_complete {
                for kind in kinds {
                    if self.cache.state(slot, kind) == SliceState::Loading {
                        self.cache.set_failed(slot, kind);
                    }
                }
                self.cache.release(version);
            }
        }
        self.staged.clear();
        self.staging.iter_mut().for_each(|state| *state = StagingState::Free(0, None));
    }

    /// The next token begins, for the policy.
    pub(in super::super) fn next_token(&mut self) {
        self.end_ahead();
        self.cache.next_token();
    }

    /// A new sequence begins, for the policy.
    pub(in super::super) fn begin_sequence(&mut self) {
        self.cache.begin_sequence();
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        // What is copied ahead, nobody else waits for; the host's slots go next.
        if self.submitted > self.waited {
            self.copy.synchronize();
        }
    }
}

impl Share {
    pub(super) fn new(first: u32, tensors: Vec<(SliceKind, *mut ggml_tensor)>) -> Self {
        Self { first, tensors }
    }

    pub(super) fn kinds(&self) -> impl Iterator<Item = SliceKind> {
        self.tensors.iter().map(|(kind, _)| *kind)
    }

    pub(super) fn tensor(&self, kind: SliceKind) -> *mut ggml_tensor {
        let known = self.tensors.iter().find(|(known, _)| *known == kind);
        known.expect("a share has a tensor for each kind of its class").1
    }
}

/// Bytes behind a slice that kernels may read.
pub(super) fn padding_bytes(shape: &SliceShape) -> usize {
    let block = shape.dtype.block_size();
    if block <= 1 || shape.ne0.is_multiple_of(ROW_PADDING) {
        return 0;
    }
    let elements = ROW_PADDING - shape.ne0 % ROW_PADDING;
    (elements.div_ceil(block) * shape.dtype.type_size()) as usize
}

/// The experts of a catalog that are in layers for which `on` is true.
pub(in super::super) fn part_of(catalog: &Catalog, on: impl Fn(u16) -> bool) -> Catalog {
    let mut part = catalog.clone();
    part.retain_layers(on);
    part
}

/// Bytes of the device that are free now, and in all.
pub(in super::super) fn device_memory(dev: ggml_backend_dev_t) -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the device is live; the places are valid.
    unsafe { llama::ggml_backend_dev_memory(dev, &mut free, &mut total) };
    (free as u64, total as u64)
}
