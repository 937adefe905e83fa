//! Device slots of one model on one device: which experts are there, what is on its way, and what must wait for what.
//!
//! Uploads run on a stream of their own. Three orders must hold, and are kept without stopping the host:
//!
//! * a product waits for the upload of its slice ([`Tier::wait_for`]);
//! * an upload into a staging slot waits for the product that used the slot last ([`Tier::used`]);
//! * host memory stays as it is until the upload that reads it has run: [`Tier::hold`] keeps what belongs to the host
//!   until [`Tier::settled`], which is called wherever the host has waited for the compute stream anyway.
//!
//! Copies for layers that have not run ([`ahead`]) keep the same orders.

mod ahead;
mod clock;
mod copies;
mod idle;
mod link;
mod loans;
mod memory;
mod orders;
mod shrink;
pub(in crate::engine) mod stream;
mod uploads;

pub(super) use memory::{Memory, Refused, is_remote, staging_stride};
pub(super) use uploads::Uploads;

use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::Instant;

use ggml_sys::llama::{self, ggml_backend_buffer_t, ggml_backend_dev_t, ggml_tensor};

use self::ahead::UploadsAhead;
use self::clock::Clock;
use self::link::LINK_SAMPLE_ALONE;
use self::loans::Loan;
use self::stream::{Event, Events, Stream};
use crate::cache::{Cache, Lru, SavedCache, SliceState, SlotId, Use};
use crate::engine::host_reads::Host;
use crate::engine::pinned::{Buffer, HostMemory};
use crate::expert::{SliceId, SliceKind, Version};
use crate::gguf::{Catalog, SliceShape};
use crate::load::balance::Balancer;
use crate::residency::{LayerStep, Used};
use crate::stats::{CacheSlots, DeviceCounters, DeviceReport};
use crate::store::StoreError;

/// Kernels read rows of quantised weights in steps of so many elements.
const ROW_PADDING: u64 = 512;

/// After so many uploads a stream that has run is waited for all the same.
const TIDY_UPLOADS: u64 = 256;

/// More than the padding of any row, in bytes.
static ZEROS: [u8; 4096] = [0; 4096];

/// Where an upload goes.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum Destination {
    /// A slot of the layer's share.
    Slot(SlotId),
    /// A staging slot.
    Staging(usize),
}

/// A needed slice as a product's weights.
#[derive(Clone, Copy)]
pub(in crate::engine) enum Weights {
    /// A row of a share's tensor `[ne0, ne1, n_slots]`.
    Shared { tensor: *mut ggml_tensor, row: u32 },
    /// By itself: first byte, buffer and block, element type, `[ne0, ne1]`.
    Single { data: *mut u8, place: InBuffer, type_: llama::ggml_type, ne: [i64; 2] },
}

/// The buffer that an address is in, and the tensor that all of it belongs to, if there is one.
#[derive(Clone, Copy)]
pub(in crate::engine) struct InBuffer {
    pub(in crate::engine) buffer: ggml_backend_buffer_t,
    pub(in crate::engine) whole: Option<*mut ggml_tensor>,
}

/// Host memory that the device computes in.
struct HostRange {
    base: usize,
    len: usize,
    buffer: ggml_backend_buffer_t,
}

/// A layer's slots of one pool.
pub(in crate::engine) struct Share {
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
struct UploadSource {
    upload: u64,
    slice: SliceId,
}

/// What a tier is made of.
pub(in crate::engine) struct Parts {
    pub(in crate::engine) dev: ggml_backend_dev_t,
    pub(in crate::engine) cache: Cache,
    pub(in crate::engine) memory: Memory,
    pub(in crate::engine) report: DeviceReport,
    /// How often the slots were made fewer until the device gave them.
    pub(in crate::engine) n_shrunk: u32,
}

/// See the [module](self).
pub(in crate::engine) struct Tier {
    dev: ggml_backend_dev_t,
    pub(in crate::engine) copy: Stream,
    events: Events,
    pub(in crate::engine) cache: Cache,
    pub(in crate::engine) memory: Memory,
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
    held: VecDeque<UploadSource>,
    pins: Vec<SlotId>,
    host_pins: Vec<SlotId>,
    /// The layer whose region is being computed.
    pub(in crate::engine) busy: Option<u16>,
    /// The stream that used the tier last, and how far it had come.
    user: usize,
    fence: Option<Rc<Event>>,
    pub(in crate::engine) counters: DeviceCounters,
    pub(in crate::engine) report: DeviceReport,
    /// Decides what the CPU computes; `None`: nothing.
    pub(in crate::engine) balancer: Option<Balancer>,
    /// Threads of the CPU helper; `None` takes the session's.
    pub(in crate::engine) helper_threads: Option<u16>,
    /// Regions with uploads since the link was measured last.
    unmeasured: u32,
    /// Uploads and their bytes when the running region began, and when that was.
    before: (u64, u64),
    began: Instant,
    pub(in crate::engine) clock: Clock,
    began_on_clock: f64,
    /// Layers of which every expert is in the slot of its number.
    pub(in crate::engine) complete: HashSet<u16>,
    loans: Vec<Loan>,
    /// Bytes that the slots are to have as soon as no layer is lent.
    pub(in crate::engine) pending: Option<u64>,
    /// Where the device computes on the host's own slots.
    host: Vec<HostRange>,
    /// Keeps what the device was shown.
    shown: Vec<Buffer>,
    /// Copies for layers that have not run; `None`: there are to be none.
    pub(in crate::engine) ahead: Option<UploadsAhead>,
}

// SAFETY: streams, events and tensors belong to the tier alone, and one thread uses it at a time.
unsafe impl Send for Tier {}

impl Tier {
    /// `None` when the device refuses a second stream.
    pub(in crate::engine) fn new(parts: Parts) -> Option<Self> {
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
    pub(in crate::engine) fn unified(dev: ggml_backend_dev_t, report: DeviceReport) -> Option<Self> {
        let cache = Cache::new(Vec::new(), Box::new(Lru));
        Self::new(Parts { dev, cache, memory: Memory::none(), report, n_shrunk: 0 })
    }

    /// Host memory that slots are in. Of a unified device, this is where it computes.
    pub(in crate::engine) fn show(&mut self, memory: &mut HostMemory) {
        if let Some(buffer) = memory.buffer.filter(|_| memory.dev == Some(self.dev)) {
            let (base, len) = (memory.arena.as_ptr() as usize, memory.arena.len());
            self.host.push(HostRange { base, len, buffer });
            self.shown.extend(memory.shown.take());
        }
        self.report.pinned |= memory.pinned && memory.dev == Some(self.dev);
    }

    /// Whether the device computes in host memory.
    pub(in crate::engine) fn is_unified(&self) -> bool {
        self.report.unified
    }

    /// Where a slice is that the device reads from the host's slots, once it is complete.
    pub(in crate::engine) fn locate_on_host(&self, host: &Host, slice: SliceId, used: Used) -> Option<Weights> {
        let (data, _) = host.host_bytes(slice, used)?;
        let holds = |range: &&HostRange| (range.base..range.base + range.len).contains(&(data as usize));
        let range = self.host.iter().find(holds)?;
        let shape = host.shape(slice);
        let ne = [shape.ne0 as i64, shape.ne1 as i64];
        let place = InBuffer { buffer: range.buffer, whole: None };
        Some(Weights::Single { data: data.cast_mut(), place, type_: shape.dtype.id() as llama::ggml_type, ne })
    }

    pub(in crate::engine) fn dev(&self) -> ggml_backend_dev_t {
        self.dev
    }

    pub(in crate::engine) fn report(&self) -> &DeviceReport {
        &self.report
    }

    pub(in crate::engine) fn counters(&self) -> &DeviceCounters {
        &self.counters
    }

    /// Whether a version has a slot.
    pub(in crate::engine) fn is_resident(&self, version: Version) -> bool {
        self.cache.lookup(version).is_some()
    }

    /// Whether these slices of a version are in its slot, or on their way into it.
    pub(in crate::engine) fn has(&self, version: Version, kinds: &[SliceKind]) -> bool {
        let is_ready = |slot| kinds.iter().all(|&kind| self.cache.state(slot, kind) == SliceState::Ready);
        self.cache.lookup(version).is_some_and(is_ready)
    }

    /// Whether products are computed in parts, as experts come.
    pub(in crate::engine) fn is_divided(&self) -> bool {
        self.report.slots < self.report.experts
    }

    /// Host slots that stay pinned until the uploads that read them have run.
    pub(in crate::engine) fn hold(&mut self, pins: Vec<SlotId>) {
        self.host_pins.extend(pins);
    }

    /// What is here, for another run.
    pub(in crate::engine) fn save(&mut self) -> SavedCache {
        self.cache.save(&self.report.name)
    }

    /// Shows the policy what it has learned in an earlier run. Which versions there are slots for now; least recently used
    /// first.
    pub(in crate::engine) fn begin_warm_up(&mut self, saved: &SavedCache) -> Vec<Version> {
        self.cache.load_statistics(saved);
        self.cache.that_fit(saved)
    }

    /// Layers that have one share with a slot for each of their experts.
    pub(in crate::engine) fn whole_layers(&self) -> Vec<u16> {
        self.memory.layers_of_one_share(self.report.slots == self.report.experts)
    }

    /// How the slots are divided among its layers; `None` where it has none of its own.
    pub(in crate::engine) fn slots_by_layer(&self) -> Option<CacheSlots> {
        CacheSlots::of(&self.report.name, &self.cache, self.cache.shares().map(|share| share.layer))
    }

    /// Whether nothing of a layer has a slot.
    pub(in crate::engine) fn is_empty(&self, layer: u16) -> bool {
        self.cache.residents().all(|(version, _)| version.expert.layer != layer)
    }

    /// Uploads what a step reads into the host's slots, in the order of the step. Whether all of it came.
    ///
    /// # Errors
    /// A read that fails.
    pub(in crate::engine) fn fill(
        &mut self,
        host: &mut Host,
        step: &LayerStep,
        kinds: &[SliceKind],
    ) -> Result<bool, StoreError> {
        for &used in &step.used {
            self.acquire(step.version(used), kinds);
        }
        let mut uploads = Uploads::new(step, kinds, &step.used);
        while !uploads.is_empty() {
            // SAFETY: the step's host slots are pinned until `settled`, which waits for the uploads.
            let progress = unsafe { uploads.pump(host, self) };
            if let Some(error) = host.take_failure() {
                return Err(error);
            }
            if progress || host.wait() {
                continue;
            }
            let released = self.wait_for_host_staging();
            if released.is_empty() && !uploads.insist(host) {
                return Ok(false);
            }
            released.into_iter().for_each(|slice| host.release(slice));
        }
        Ok(true)
    }

    /// The router's probabilities of all experts of a layer for one token, `[n_expert]`, for the policy.
    pub(in crate::engine) fn scores(&mut self, layer: u16, scores: &[f32]) {
        self.cache.scores(layer, scores);
    }

    /// Counts a use, for the policy.
    pub(in crate::engine) fn touch(&mut self, Version { expert, precision }: Version, hit: bool, weight: f32) {
        self.cache.touch(expert, Use { hit, precision: Some(precision), weight });
        match hit {
            true => self.counters.hits += 1,
            false => self.counters.misses += 1,
        }
    }

    /// Pool and row of a version's slot.
    pub(in crate::engine) fn place(&self, version: Version) -> Option<(u16, u32)> {
        let slot = self.cache.lookup(version)?;
        Some((slot.pool, slot.index - self.memory.share(version.expert.layer, slot.pool).first))
    }

    /// Pins a version if it is resident.
    pub(in crate::engine) fn pin(&mut self, version: Version) -> bool {
        let Some(slot) = self.cache.lookup(version) else { return false };
        self.cache.pin(slot);
        self.pins.push(slot);
        true
    }

    /// Gives a version a slot, if it has none and the share has one to give, and pins it there.
    pub(in crate::engine) fn acquire(&mut self, version: Version, kinds: &[SliceKind]) -> bool {
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
    pub(in crate::engine) fn abandon(&mut self) {
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
    pub(in crate::engine) fn next_token(&mut self) {
        self.end_ahead();
        self.cache.next_token();
    }

    /// A new sequence begins, for the policy.
    pub(in crate::engine) fn begin_sequence(&mut self) {
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
    pub(in crate::engine) fn new(first: u32, tensors: Vec<(SliceKind, *mut ggml_tensor)>) -> Self {
        Self { first, tensors }
    }

    pub(in crate::engine) fn kinds(&self) -> impl Iterator<Item = SliceKind> {
        self.tensors.iter().map(|(kind, _)| *kind)
    }

    pub(in crate::engine) fn tensor(&self, kind: SliceKind) -> *mut ggml_tensor {
        let known = self.tensors.iter().find(|(known, _)| *known == kind);
        known.expect("a share has a tensor for each kind of its class").1
    }
}

/// Bytes behind a slice that kernels may read.
pub(in crate::engine) fn padding_bytes(shape: &SliceShape) -> usize {
    let block = shape.dtype.block_size();
    if block <= 1 || shape.ne0.is_multiple_of(ROW_PADDING) {
        return 0;
    }
    let elements = ROW_PADDING - shape.ne0 % ROW_PADDING;
    (elements.div_ceil(block) * shape.dtype.type_size()) as usize
}

/// The experts of a catalog that are in layers for which `on` is true.
pub(in crate::engine) fn part_of(catalog: &Catalog, on: impl Fn(u16) -> bool) -> Catalog {
    let mut part = catalog.clone();
    part.retain_layers(on);
    part
}

/// Bytes of the device that are free now, and in all.
pub(in crate::engine) fn device_memory(dev: ggml_backend_dev_t) -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the device is live; the places are valid.
    unsafe { llama::ggml_backend_dev_memory(dev, &mut free, &mut total) };
    (free as u64, total as u64)
}
