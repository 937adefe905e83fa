//! Device slots of one model on one device: resident experts, uploads in flight, and the order of both.
//!
//! Uploads run on a separate stream. Three orders must hold, and are kept without blocking the host:
//!
//! * a product waits for the upload of its slice ([`Copies::wait_for`]);
//! * an upload into a staging slot waits for the product that used the slot last ([`Copies::used`]);
//! * host memory stays unchanged until the upload that reads it has run: [`OnHost::pins`] keeps the host's slots until
//!   [`Tier::settled`], which is called wherever the host has waited for the compute stream anyway.
//!
//! Prefetches for layers that have not run ([`ahead`]) keep the same orders.

mod ahead;
mod copies;
mod memory;
mod slots;
mod speed;

pub(crate) use copies::{Copies, Uploads};
pub(crate) use memory::{Memory, Refused, staging_stride};
pub(crate) use slots::{DeviceSlots, SlotsOfLayer};
pub(crate) use speed::{Clock, Speed};

use std::ops::Range;
use std::rc::Rc;

use ggml_sys::llama::{self, ggml_backend_buffer_t, ggml_backend_dev_t, ggml_tensor};

use self::ahead::UploadsAhead;
use self::copies::StagingState;
use crate::engine::ggml::{Buffer, Event};
use crate::engine::memory::host_reads::{Host, host_bytes};
use crate::engine::memory::pinned::HostMemory;
use hobbit_core::cache::{Cache, Lru, SlotId};
use hobbit_core::expert::{Precision, SliceId, SliceKind, Version};
use hobbit_core::gguf::SliceShape;
use hobbit_core::load::balance::Balancer;
use hobbit_core::residency::{LayerStep, Selection, Used};
use hobbit_core::route::{Phase, Rates};
use hobbit_core::stats::{DeviceCounters, DeviceReport};
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

/// See the [module](self).
pub(crate) struct Tier {
    pub(crate) dev: ggml_backend_dev_t,
    // Dropped before the memory that copies go to.
    pub(crate) copies: Copies,
    pub(crate) slots: DeviceSlots,
    pub(crate) speed: Speed,
    pub(crate) on_host: OnHost,
    users: Users,
    /// The layer whose region is being computed.
    pub(crate) busy: Option<u16>,
    pub(crate) counters: DeviceCounters,
    pub(crate) report: DeviceReport,
    pub(crate) serves: Serves,
    pub(crate) helper: CpuHelper,
    /// Prefetches for layers that have not run; `None`: disabled.
    pub(crate) ahead: Option<UploadsAhead>,
}

/// The layers and batches that a device computes.
#[derive(Clone, Copy)]
pub(crate) struct Serves {
    /// Layers that the placement gives it.
    pub(crate) layers: bool,
    /// Large batches of layers that the CPU computes otherwise.
    pub(crate) batches: bool,
}

/// The CPU's part in the products of a device.
#[derive(Default)]
pub(crate) struct CpuHelper {
    /// Decides which experts the CPU computes for generated tokens; `None`: none.
    pub(crate) balancer: Option<Balancer>,
    /// The same for short prompts. The CPU's speed is another one where it multiplies many rows.
    pub(crate) of_prompts: Option<Balancer>,
    /// Threads; `None` takes the session's.
    pub(crate) n_threads: Option<u16>,
}

impl CpuHelper {
    pub(crate) fn of(&mut self, phase: Phase) -> Option<&mut Balancer> {
        if phase.is_decode() { self.balancer.as_mut() } else { self.of_prompts.as_mut() }
    }
}

/// The stream that used the tier last, and its fence.
#[derive(Default)]
struct Users {
    last: usize,
    fence: Option<Rc<Event>>,
}

/// Host memory that the device reads.
#[derive(Default)]
pub(crate) struct OnHost {
    /// With slots that the device computes in.
    ranges: Vec<HostRange>,
    /// Slots that stay pinned until the uploads that read them have run.
    pub(crate) pins: Vec<SlotId>,
}

impl OnHost {
    /// The location of a slice that the device reads from the host's slots, once it is complete.
    pub(crate) fn locate(&self, host: &Host, slice: SliceId, used: Used) -> Option<Weights> {
        let (data, _) = host_bytes(host, slice, used)?;
        let range = self.ranges.iter().find(|range| range.addresses.contains(&(data as usize)))?;
        let (shape, data) = (host.reads().shape(slice), data.cast_mut());
        // Kernels read the last row to the end of a step, where a read may have left bytes that are NaN.
        // SAFETY: `Catalog::make_room` left room for a block behind the slice, in its own region of a slot that has
        // been read and stays pinned: no read writes there. The device may read zeros that are already there.
        unsafe { data.add(shape.bytes as usize).write_bytes(0, padding_bytes(shape)) };
        Some(Weights::of(shape, data, range.buffer, None))
    }
}

// SAFETY: streams, events and tensors belong to the tier alone, and one thread uses it at a time.
unsafe impl Send for Tier {}

impl Tier {
    /// `None` if the device refuses a second stream.
    pub(crate) fn new(dev: ggml_backend_dev_t, cache: Cache, memory: Memory, report: DeviceReport) -> Option<Self> {
        Some(Self {
            dev,
            copies: Copies::new(dev, memory.n_staging)?,
            slots: DeviceSlots::new(cache, memory),
            speed: Speed::of(dev),
            on_host: OnHost::default(),
            users: Users::default(),
            busy: None,
            counters: DeviceCounters::default(),
            report,
            serves: Serves { layers: true, batches: false },
            helper: CpuHelper::default(),
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
            self.on_host.ranges.push(HostRange { addresses, buffer, _shown: memory.shown.take() });
        }
        self.report.pinned |= memory.pinned && memory.dev == Some(self.dev);
    }

    /// Whether the device computes in host memory.
    pub(crate) fn is_unified(&self) -> bool {
        self.report.unified
    }

    /// Whether experts have to be copied to it from the host during a run.
    pub(crate) fn has_misses(&self) -> bool {
        !self.is_unified() && self.is_divided()
    }

    /// Seconds per byte of a copy from the host, or of the CPU's products where these are quicker, as far as they were
    /// measured.
    pub(crate) fn seconds_per_byte(&self) -> f64 {
        let costs = self.helper.balancer.as_ref().map(|balancer| balancer.costs);
        let ahead = self.ahead.as_ref().and_then(UploadsAhead::seconds_per_byte);
        let link = costs.and_then(|costs| costs.link.get()).or(ahead).unwrap_or(Rates::LINK);
        costs.and_then(|costs| costs.cpu.get()).map_or(link, |cpu| link.min(cpu))
    }

    /// Whether products are computed in parts, as experts arrive.
    pub(crate) fn is_divided(&self) -> bool {
        self.serves.layers && self.report.slots < self.report.experts
    }

    /// Uploads the slices that a step reads into the host's slots, in the order of the step. Returns whether all were
    /// uploaded.
    ///
    /// # Errors
    /// A read that fails.
    pub(crate) fn fill(&mut self, host: &mut Host, step: &LayerStep, kinds: &[SliceKind]) -> Result<bool, StoreError> {
        for &used in &step.used {
            self.slots.acquire(step.version(used), kinds);
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
        if self.slots.cache.pools().share_of(Version { expert, precision }).is_some() {
            self.slots.drafts.touch(&mut self.slots.cache, selection, expert, hit, Some(precision));
        }
        if hit { self.counters.hits += 1 } else { self.counters.misses += 1 }
    }

    /// Tells the policy of experts that tokens were routed away from, which the device copies when the link is idle.
    pub(crate) fn pass_over(&mut self, selection: &Selection) {
        for expert in selection.passed_over() {
            self.slots.drafts.touch(&mut self.slots.cache, selection, expert, false, Some(Precision::High));
            self.want(Version::high(expert));
        }
    }

    /// Gives the slots of pinned versions back whose slices will not arrive.
    pub(crate) fn abandon(&mut self) {
        self.slots.abandon();
        self.copies.staged.clear();
        self.copies.staging.iter_mut().for_each(|state| *state = StagingState::Free(0, None));
    }

    /// A batch of `n_tokens` tokens was evaluated.
    pub(crate) fn end_batch(&mut self, n_tokens: u32) {
        self.end_ahead();
        self.slots.cache.end_batch(self.slots.drafts.n_certain(n_tokens));
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        // Nothing else waits for prefetches, and the host's slots are dropped next.
        if self.copies.submitted > self.copies.waited {
            self.copies.stream.synchronize();
        }
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
