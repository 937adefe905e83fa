//! Device slots of one model on one device: resident experts, uploads in flight, and the order of both.
//!
//! Uploads run on a separate stream. Three orders must hold, and are kept without blocking the host:
//!
//! * a product waits for the upload of its slice ([`Tier::wait_for`]);
//! * an upload into a staging slot waits for the product that used the slot last ([`Tier::used`]);
//! * host memory stays unchanged until the upload that reads it has run: [`Tier::hold`] keeps the host's slots until
//!   [`Tier::settled`], which is called wherever the host has waited for the compute stream anyway.
//!
//! Prefetches for layers that have not run ([`ahead`]) keep the same orders.

mod ahead;
mod copies;
mod memory;

pub(crate) use copies::Uploads;
pub(crate) use memory::{Memory, Refused, staging_stride};

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use ggml_sys::llama::{self, ggml_backend_buffer_t, ggml_backend_dev_t, ggml_tensor};

use self::ahead::UploadsAhead;
use self::copies::{Clock, LINK_SAMPLE_ALONE};
use self::memory::Loan;
use crate::engine::ggml::{Buffer, Event, Events, Stream};
use crate::engine::memory::host_reads::{Host, host_bytes};
use crate::engine::memory::pinned::HostMemory;
use hobbit_core::cache::{Cache, Lru, SavedCache, SliceState, SlotId};
use hobbit_core::expert::{ExpertId, Precision, SliceId, SliceKind, Version};
use hobbit_core::gguf::SliceShape;
use hobbit_core::load::balance::{Balancer, RunningMean};
use hobbit_core::residency::{Drafts, LayerStep, Selection, Used};
use hobbit_core::route::{Phase, Rates};
use hobbit_core::stats::{CacheSlots, DeviceCounters, DeviceReport};
use hobbit_core::store::StoreError;

/// Kernels read rows of quantised weights in steps of this many elements.
const ROW_PADDING: u64 = 512;

/// Uploads after which a stream that has run is synchronised anyway.
const TIDY_UPLOADS: u64 = 256;

/// Longer than the padding of any row, in bytes.
static ZEROS: [u8; 4096] = [0; 4096];

/// Where an upload goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Destination {
    /// A slot of the layer's share.
    Slot(SlotId),
    /// A staging slot.
    Staging(usize),
}

/// A needed slice as a product's weights.
#[derive(Clone, Copy)]
pub(crate) enum Weights {
    /// A row of a share's tensor `[ne0, ne1, n_slots]`.
    Shared { tensor: *mut ggml_tensor, row: u32 },
    /// A slice outside a share: first byte, its buffer, the tensor that it is part of, if any, element type, and shape
    /// `[ne0, ne1]`.
    Single {
        data: *mut u8,
        buffer: ggml_backend_buffer_t,
        whole: Option<*mut ggml_tensor>,
        type_: llama::ggml_type,
        ne: [i64; 2],
    },
}

impl Weights {
    /// The weights of a single slice.
    fn of(shape: &SliceShape, data: *mut u8, buffer: ggml_backend_buffer_t, whole: Option<*mut ggml_tensor>) -> Self {
        let ne = [shape.ne0 as i64, shape.ne1 as i64];
        Self::Single { data, buffer, whole, type_: shape.dtype.id() as llama::ggml_type, ne }
    }
}

/// Host memory that the device computes in.
struct HostRange {
    addresses: Range<usize>,
    buffer: ggml_backend_buffer_t,
    /// Keeps the device's view of this memory alive.
    _shown: Option<Buffer>,
}

/// The slots of a layer's experts in high precision that products need not wait for.
pub(crate) struct SlotsOfLayer {
    pub(crate) pool: u16,
    /// By expert.
    pub(crate) rows: Vec<Option<u32>>,
}

/// A layer's slots of one pool.
struct Share {
    /// First slot, counted in the pool.
    first: u32,
    /// By slice of the class: `[ne0, ne1, n_slots]`.
    tensors: Vec<(SliceKind, *mut ggml_tensor)>,
}

#[derive(Clone)]
enum StagingState {
    /// Number of the slot's last use, and the event that shows that it has run.
    Free(u64, Option<Rc<Event>>),
    Taken,
}

/// See the [module](self).
pub(crate) struct Tier {
    pub(crate) dev: ggml_backend_dev_t,
    copy: Stream,
    events: Events,
    pub(crate) cache: Cache,
    /// Uses that its policy will see if the text takes the drafts.
    pub(crate) drafts: Drafts,
    memory: Memory,
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
    /// Host staging slots that uploads with these numbers read.
    held: VecDeque<(u64, SliceId)>,
    pins: Vec<SlotId>,
    host_pins: Vec<SlotId>,
    /// The layer whose region is being computed.
    pub(crate) busy: Option<u16>,
    /// The stream that used the tier last, and its fence.
    user: usize,
    fence: Option<Rc<Event>>,
    pub(crate) counters: DeviceCounters,
    pub(crate) report: DeviceReport,
    /// Whether it has layers of its own, and large batches of layers that the CPU computes otherwise.
    pub(crate) has_layers: bool,
    pub(crate) offloads: bool,
    /// Decides which experts the CPU computes; `None`: none.
    pub(crate) balancer: Option<Balancer>,
    /// Threads of the CPU helper; `None` takes the session's.
    pub(crate) helper_threads: Option<u16>,
    /// Regions with uploads since the link was measured last.
    unmeasured: u32,
    /// Uploads and their bytes before the running region, and the time of its start.
    before: (u64, u64),
    began: f64,
    pub(crate) clock: Clock,
    /// Seconds per byte of copies, and of the device's products of batches that decode.
    link: RunningMean,
    product: RunningMean,
    /// Layers with every expert in the slot of its number: [`Tier::fill`] was called for all, in order.
    pub(crate) complete: HashSet<u16>,
    loans: Vec<Loan>,
    /// Bytes that the slots will have once no layer is lent, if they differ from the current bytes.
    pub(crate) pending: Option<u64>,
    /// Host memory with slots that the device computes in.
    host: Vec<HostRange>,
    /// Prefetches for layers that have not run; `None`: disabled.
    pub(crate) ahead: Option<UploadsAhead>,
}

// SAFETY: streams, events and tensors belong to the tier alone, and one thread uses it at a time.
unsafe impl Send for Tier {}

impl Tier {
    /// `None` if the device refuses a second stream.
    pub(crate) fn new(dev: ggml_backend_dev_t, cache: Cache, memory: Memory, report: DeviceReport) -> Option<Self> {
        Some(Self {
            dev,
            copy: Stream::new(dev)?,
            events: Events::new(dev),
            cache,
            drafts: Drafts::default(),
            staging: vec![StagingState::Free(0, None); memory.n_staging],
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
            counters: DeviceCounters::default(),
            report,
            has_layers: true,
            offloads: false,
            balancer: None,
            helper_threads: None,
            unmeasured: LINK_SAMPLE_ALONE,
            before: (0, 0),
            began: 0.0,
            clock: Clock::of(dev),
            link: RunningMean::default(),
            product: RunningMean::default(),
            complete: HashSet::new(),
            loans: Vec::new(),
            pending: None,
            host: Vec::new(),
            ahead: None,
        })
    }

    /// The tier of a device that computes in host memory: it has no slots of its own.
    pub(crate) fn unified(dev: ggml_backend_dev_t, report: DeviceReport) -> Option<Self> {
        Self::new(dev, Cache::new(Vec::new(), Box::new(Lru)), Memory::none(), report)
    }

    /// Registers host memory with slots. A unified device computes there.
    pub(crate) fn show(&mut self, memory: &mut HostMemory) {
        if let Some(buffer) = memory.buffer.filter(|_| memory.dev == Some(self.dev)) {
            let base = memory.arena.as_ptr() as usize;
            let addresses = base..base + memory.arena.len();
            self.host.push(HostRange { addresses, buffer, _shown: memory.shown.take() });
        }
        self.report.pinned |= memory.pinned && memory.dev == Some(self.dev);
    }

    /// Whether the device computes in host memory.
    pub(crate) fn is_unified(&self) -> bool {
        self.report.unified
    }

    /// The location of a slice that the device reads from the host's slots, once it is complete.
    pub(crate) fn locate_on_host(&self, host: &Host, slice: SliceId, used: Used) -> Option<Weights> {
        let (data, _) = host_bytes(host, slice, used)?;
        let range = self.host.iter().find(|range| range.addresses.contains(&(data as usize)))?;
        let (shape, data) = (host.reads().shape(slice), data.cast_mut());
        // Kernels read the last row to the end of a step, where a read may have left bytes that are NaN.
        // SAFETY: `Catalog::make_room` left room for a block behind the slice, in its own region of a slot that has
        // been read and stays pinned: no read writes there. The device may read zeros that are already there.
        unsafe { data.add(shape.bytes as usize).write_bytes(0, padding_bytes(shape)) };
        Some(Weights::of(shape, data, range.buffer, None))
    }

    /// Whether a version has a slot.
    pub(crate) fn is_resident(&self, version: Version) -> bool {
        self.cache.lookup(version).is_some()
    }

    /// Whether these slices of a version are in its slot, or on their way into it.
    pub(crate) fn has(&self, version: Version, kinds: &[SliceKind]) -> bool {
        let is_ready = |slot| kinds.iter().all(|&kind| self.cache.state(slot, kind) == SliceState::Ready);
        self.cache.lookup(version).is_some_and(is_ready)
    }

    /// Whether experts have to be copied to it from the host during a run.
    pub(crate) fn has_misses(&self) -> bool {
        !self.is_unified() && self.is_divided()
    }

    /// Seconds per byte of a copy from the host, or of the CPU's products where these are quicker, as far as they were
    /// measured.
    pub(crate) fn seconds_per_byte(&self) -> f64 {
        let costs = self.balancer.as_ref().map(|balancer| balancer.costs);
        let ahead = self.ahead.as_ref().and_then(UploadsAhead::seconds_per_byte);
        let link = costs.and_then(|costs| costs.link.get()).or(ahead).unwrap_or(Rates::LINK);
        costs.and_then(|costs| costs.cpu.get()).map_or(link, |cpu| link.min(cpu))
    }

    /// Whether products are computed in parts, as experts arrive.
    pub(crate) fn is_divided(&self) -> bool {
        self.has_layers && self.report.slots < self.report.experts
    }

    /// Host slots that stay pinned until the uploads that read them have run.
    pub(crate) fn hold(&mut self, pins: Vec<SlotId>) {
        self.host_pins.extend(pins);
    }

    /// Loads the policy's statistics from an earlier run. Returns the versions that have room in the slots, least
    /// recently used first.
    pub(crate) fn begin_warm_up(&mut self, saved: &SavedCache) -> Vec<Version> {
        self.cache.load_statistics(saved);
        self.cache.pools().that_fit(saved)
    }

    /// Layers that have one share with a slot for each of their `n_expert` experts.
    pub(crate) fn whole_layers(&self, n_expert: impl Fn(u16) -> u16) -> Vec<u16> {
        let n_slots = |layer: u16| self.cache.pools().capacity_of_layer(layer, Precision::High);
        let mut layers = self.memory.layers_of_one_share();
        layers.retain(|&layer| n_slots(layer) == u32::from(n_expert(layer)));
        layers
    }

    /// How the slots are divided among its layers; `None` if it has no slots of its own.
    pub(crate) fn slots_by_layer(&self) -> Option<CacheSlots> {
        CacheSlots::of(&self.report.name, &self.cache, self.cache.pools().shares().map(|share| share.layer))
    }

    /// Whether no version of a layer has a slot.
    pub(crate) fn is_empty(&self, layer: u16) -> bool {
        self.cache.residents().all(|(version, _)| version.expert.layer != layer)
    }

    /// Uploads the slices that a step reads into the host's slots, in the order of the step. Returns whether all were
    /// uploaded.
    ///
    /// # Errors
    /// A read that fails.
    pub(crate) fn fill(&mut self, host: &mut Host, step: &LayerStep, kinds: &[SliceKind]) -> Result<bool, StoreError> {
        for &used in &step.used {
            self.acquire(step.version(used), kinds);
        }
        let mut uploads = Uploads::new(step, kinds, &step.used);
        while !uploads.is_empty() {
            // SAFETY: the step's host slots are pinned until `settled`, which waits for the uploads.
            let progress = unsafe { uploads.pump(host, self) };
            if let Some(error) = host.memory.take_failure() {
                return Err(error);
            }
            if progress || host.memory.wait() {
                continue;
            }
            let released = self.wait_for_host_staging();
            if released.is_empty() && !uploads.force_staging(host) {
                return Ok(false);
            }
            released.into_iter().for_each(|slice| host.memory.release(slice));
        }
        Ok(true)
    }

    /// Counts a use for the statistics and the policy, which sees the router's own choice.
    pub(crate) fn touch(&mut self, Version { expert, precision }: Version, hit: bool, selection: &Selection) {
        if self.cache.pools().share_of(Version { expert, precision }).is_some() {
            self.drafts.touch(&mut self.cache, selection, expert, hit, Some(precision));
        }
        if hit { self.counters.hits += 1 } else { self.counters.misses += 1 }
    }

    /// Tells the policy of experts that tokens were routed away from, which the device copies when the link is idle.
    pub(crate) fn pass_over(&mut self, selection: &Selection) {
        for expert in selection.passed_over() {
            self.drafts.touch(&mut self.cache, selection, expert, false, Some(Precision::High));
            self.want(Version::high(expert));
        }
    }

    /// Pool and row of a version's slot.
    pub(crate) fn place(&self, version: Version) -> Option<(u16, u32)> {
        let slot = self.cache.lookup(version)?;
        Some((slot.pool, slot.index - self.memory.share(version.expert.layer, slot.pool).first))
    }

    /// The slots of a layer's experts; `None` if none of them has one.
    pub(crate) fn slots_of_layer(&self, layer: u16, n_expert: u16) -> Option<SlotsOfLayer> {
        let is_arriving = |(slice, upload): (&SliceId, &u64)| {
            (*upload > self.waited && slice.version.expert.layer == layer).then_some(slice.version)
        };
        let arriving: Vec<Version> = self.arrivals.iter().filter_map(is_arriving).collect();
        let mut share = None;
        let row = |index| {
            let version = Version::high(ExpertId { layer, index });
            let slot = self.cache.lookup(version).filter(|slot| self.cache.is_ready(*slot))?;
            let (pool, first) = *share.get_or_insert_with(|| (slot.pool, self.memory.share(layer, slot.pool).first));
            (slot.pool == pool && !arriving.contains(&version)).then_some(slot.index - first)
        };
        let rows: Vec<Option<u32>> = (0..n_expert).map(row).collect();
        rows.iter().any(Option::is_some).then(|| SlotsOfLayer { pool: share.map_or(0, |(pool, _)| pool), rows })
    }

    /// The slots of a layer in a pool, as the weights of a product.
    pub(crate) fn tensor(&self, layer: u16, pool: u16, kind: SliceKind) -> *mut ggml_tensor {
        self.memory.share(layer, pool).tensor(kind)
    }

    /// Pins a version if it is resident.
    pub(crate) fn pin(&mut self, version: Version) -> bool {
        let Some(slot) = self.cache.lookup(version) else { return false };
        self.cache.pin(slot);
        self.pins.push(slot);
        true
    }

    /// Gives a version a slot, if it has none and the share has one to give, and pins it there.
    pub(crate) fn acquire(&mut self, version: Version, kinds: &[SliceKind]) {
        if self.cache.pools().share_of(version).is_none() || self.cache.lookup(version).is_some() {
            return;
        }
        let Some(acquired) = self.cache.acquire(version) else { return };
        kinds.iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
        self.cache.pin(acquired.slot);
        self.pins.push(acquired.slot);
    }

    /// Gives the slots of pinned versions back whose slices will not arrive.
    pub(crate) fn abandon(&mut self) {
        let resident: Vec<(Version, SlotId)> = self.cache.residents().collect();
        for pin in self.pins.drain(..) {
            self.cache.unpin(pin);
        }
        for (version, slot) in resident {
            let tensors = &self.memory.share(version.expert.layer, slot.pool).tensors;
            if tensors.iter().all(|(kind, _)| self.cache.state(slot, *kind) == SliceState::Ready) {
                continue;
            }
            for &(kind, _) in tensors {
                if self.cache.state(slot, kind) == SliceState::Loading {
                    self.cache.set_failed(slot, kind);
                }
            }
            self.cache.release(version);
        }
        self.staged.clear();
        self.staging.iter_mut().for_each(|state| *state = StagingState::Free(0, None));
    }

    /// A batch begins.
    pub(crate) fn begin_batch(&mut self, phase: Phase) {
        self.drafts.forget();
        self.cache.begin_batch(!phase.is_decode());
    }

    /// A batch of `n_tokens` tokens was evaluated.
    pub(crate) fn end_batch(&mut self, n_tokens: u32) {
        self.end_ahead();
        self.cache.end_batch(self.drafts.n_certain(n_tokens));
    }
}

impl SlotsOfLayer {
    /// The row of every expert; of those that have none, that of another one.
    pub(crate) fn table(&self) -> Vec<i32> {
        let any = self.rows.iter().flatten().next().copied().unwrap_or(0);
        self.rows.iter().map(|row| row.unwrap_or(any) as i32).collect()
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        // Nothing else waits for prefetches, and the host's slots are dropped next.
        if self.submitted > self.waited {
            self.copy.synchronize();
        }
    }
}

impl Share {
    fn tensor(&self, kind: SliceKind) -> *mut ggml_tensor {
        let known = self.tensors.iter().find(|(known, _)| *known == kind);
        known.expect("a share has a tensor for each kind of its class").1
    }
}

/// Bytes after a slice that kernels may read.
pub(crate) fn padding_bytes(shape: &SliceShape) -> usize {
    let block = shape.dtype.block_size();
    if block <= 1 || shape.ne0.is_multiple_of(ROW_PADDING) {
        return 0;
    }
    let elements = ROW_PADDING - shape.ne0 % ROW_PADDING;
    (elements.div_ceil(block) * shape.dtype.type_size()) as usize
}
