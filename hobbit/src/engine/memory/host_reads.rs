//! Memory of the host's slots, and reads into it: turns decisions of [`hobbit_core::residency`] into addresses and
//! loader requests.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::engine::ggml::repack::Interleaving;
use crate::engine::memory::recorder::Recorder;
use crate::engine::memory::virtual_disk::VirtualDisk;
use hobbit_core::cache::{Cache, SlotId};
use hobbit_core::expert::{ExpertId, Extent, SliceId, SliceKind, Version};
use hobbit_core::gguf::{Catalog, LayerCatalog, SliceShape, SliceSource, Stored, VersionSource};
use hobbit_core::load::{LoadClass, LoadStats, Loader};
use hobbit_core::residency::{
    LayerShape, LayerShare, Layout, Place, Read, Reads, Residency, RestBytes, Target, Used, VersionBytes,
};
use hobbit_core::store::{
    Arena, CopyReport, Form, HighPlane, Order, Part, ReadDone, ReadRequest, Rows, SlotPtr, StoreError,
};

/// Residency in host memory.
pub(crate) type Host = Residency<HostReads, Recorder>;

/// All slots of a share for one kind, as a tensor `[ne0, ne1, n_slots]`.
#[derive(Clone, Copy)]
pub(crate) struct ShareView<'a> {
    /// First byte of slot 0's slice.
    pub(crate) base: *mut u8,
    /// Stride of the slots, in bytes.
    pub(crate) stride: usize,
    /// Slots in the share.
    pub(crate) n_slots: u32,
    /// ggml's id of the element type.
    pub(crate) type_id: u32,
    /// Bytes of a block, and of a row.
    pub(crate) row: (usize, usize),
    /// The order of their bytes, if it differs from the files'.
    pub(crate) interleaving: Option<&'a Interleaving>,
}

/// By class and slice of a catalog, the order of bytes in slots. `None`: the files' order.
#[derive(Default)]
pub(crate) struct Interleavings(Vec<Vec<Option<Arc<Interleaving>>>>);

impl Interleavings {
    /// The order that ggml prefers on this CPU.
    pub(crate) fn of(catalog: &Catalog) -> Self {
        let of_slice = |slice: &SliceShape| Interleaving::of(slice.dtype, slice.ne0, slice.ne1);
        Self(catalog.classes.iter().map(|class| class.slices.iter().map(of_slice).collect()).collect())
    }

    /// Whether every slice has the files' order.
    pub(crate) fn is_plain(&self) -> bool {
        self.0.iter().flatten().all(Option::is_none)
    }

    fn get(&self, class: u16, position: usize) -> Option<&Arc<Interleaving>> {
        self.0.get(usize::from(class))?.get(position)?.as_ref()
    }
}

/// Slots in host memory, and the loader that fills them.
pub(crate) struct HostReads {
    // Dropped first: reads must end before the memory below is freed.
    loader: Loader,
    catalog: Catalog,
    interleavings: Interleavings,
    /// One per pool of the cache.
    pools: Vec<Arena>,
    staging: Arena,
    /// Bytes of a staging slot.
    staging_stride: usize,
    /// By block, in the layout's order.
    shares: Vec<Vec<Share>>,
    began: Instant,
    /// Where reads take a device's virtual time.
    disk: Option<VirtualDisk>,
}

/// A layer's slots of one class.
struct Share {
    slots: LayerShare,
    class: u16,
    /// First byte of the share's first slot.
    base: *mut u8,
    /// By slice of the class.
    leads: Vec<u64>,
}

// SAFETY: the pointers in `Share` lead into arenas owned by the same value; devices live as long as the process.
unsafe impl Send for HostReads {}

impl HostReads {
    /// # Panics
    /// If the slots of the layout do not fit in the pools, or if versions of a share begin at different offsets in
    /// their slots.
    pub(crate) fn new(
        layout: &Layout,
        (catalog, interleavings): (Catalog, Interleavings),
        pools: Vec<Arena>,
        (staging, staging_stride): (Arena, usize),
        (loader, disk): (Loader, Option<VirtualDisk>),
    ) -> Self {
        let mut shares: Vec<Vec<Share>> = (0..layout.n_blocks()).map(|_| Vec::new()).collect();
        for layer in layout.layers() {
            let of_layer = layout.shares(layer).iter().map(|share| Share::new(share, &catalog, &pools));
            shares[usize::from(layer)].extend(of_layer);
        }
        for (version, share) in layout.versions_with_shares() {
            let source = catalog.source(version).expect("a version of the catalog");
            let share = &shares[usize::from(version.expert.layer)][usize::from(share)];
            let leads = source.slices.iter().map(|slice| slice.lead);
            assert!(leads.eq(share.leads.iter().copied()), "{version}: another lead");
        }
        Self { loader, catalog, interleavings, pools, staging, staging_stride, shares, began: Instant::now(), disk }
    }

    pub(crate) fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// The slots of a layer's share for one kind.
    pub(crate) fn view(&self, layer: u16, share: u16, kind: SliceKind) -> ShareView<'_> {
        let share = &self.shares[usize::from(layer)][usize::from(share)];
        let class = &self.catalog.classes[usize::from(share.class)];
        let (position, slice) = slice_of(&class.slices, kind);
        ShareView {
            base: share.base.wrapping_add((slice.region + share.leads[position]) as usize),
            stride: class.stride as usize,
            n_slots: share.slots.n_slots,
            type_id: slice.dtype.id(),
            row: (slice.dtype.type_size() as usize, (slice.bytes / slice.ne1.max(1)) as usize),
            interleaving: self.interleavings.get(share.class, position).map(Arc::as_ref),
        }
    }

    /// The first byte of a slice in a staging slot.
    pub(crate) fn staged(&self, slot: usize, slice: SliceId) -> *mut u8 {
        let lead = self.slice(slice).1.lead as usize;
        self.staging.as_ptr().wrapping_add(slot * self.staging_stride + lead)
    }

    /// The shape of a slice.
    pub(crate) fn shape(&self, slice: SliceId) -> &SliceShape {
        self.slice(slice).0
    }

    /// Bytes of a staging slot.
    pub(crate) fn staging_stride(&self) -> usize {
        self.staging_stride
    }

    /// Bytes of a slot of a share.
    pub(crate) fn stride(&self, layer: u16, share: u16) -> u64 {
        let share = &self.shares[usize::from(layer)][usize::from(share)];
        self.catalog.classes[usize::from(share.class)].stride
    }

    /// Seconds with at least one read in flight.
    pub(crate) fn busy_seconds(&self) -> f64 {
        self.loader.stats().busy.as_secs_f64()
    }

    /// The copies of the files, if there are mirrors.
    pub(crate) fn copies(&self) -> Vec<CopyReport> {
        self.loader.copies()
    }

    /// Whether a pool's memory can be given back to the system.
    pub(crate) fn is_discardable(&self, pool: u16) -> bool {
        self.pools[usize::from(pool)].is_discardable()
    }

    /// Gives the memory of slots `slots` of a layer's share back to the system.
    ///
    /// # Safety
    /// The slots are empty and can no longer be taken, and nothing reads or writes them.
    pub(crate) unsafe fn discard(&self, layer: u16, share: u16, slots: Range<u32>) {
        let (arena, bytes) = self.memory(layer, share, slots);
        // SAFETY: by the caller.
        unsafe { arena.discard(bytes) };
    }

    /// Slots `slots` of a layer's share may be taken again.
    pub(crate) fn restore(&self, layer: u16, share: u16, slots: Range<u32>) {
        let (arena, bytes) = self.memory(layer, share, slots);
        arena.restore(bytes);
    }

    fn memory(&self, layer: u16, share: u16, slots: Range<u32>) -> (&Arena, Range<usize>) {
        let stride = self.stride(layer, share) as usize;
        let share = &self.shares[usize::from(layer)][usize::from(share)];
        let at = |slot: u32| (share.slots.first_slot + slot) as usize * stride;
        (&self.pools[usize::from(share.slots.id.pool)], at(slots.start)..at(slots.end))
    }

    /// Replaces the staging slots, which no read may be filling. Returns whether the memory could be had.
    pub(crate) fn make_staging(&mut self, n_slots: usize) -> bool {
        let Ok(arena) = Arena::touched_as_needed(n_slots * self.staging_stride) else { return false };
        self.staging = arena;
        true
    }

    fn source(&self, version: Version) -> &VersionSource {
        self.catalog.source(version).expect("only versions of the catalog are asked for")
    }

    fn slice(&self, slice: SliceId) -> (&SliceShape, SliceSource) {
        let source = self.source(slice.version);
        let (position, shape) = slice_of(&self.catalog.classes[usize::from(source.class)].slices, slice.kind);
        (shape, source.slices[position])
    }

    /// First byte of a version's slot.
    fn slot(&self, slot: SlotId, version: Version) -> *mut u8 {
        let shares = &self.shares[usize::from(version.expert.layer)];
        let share =
            shares.iter().find(|share| share.slots.id.pool == slot.pool).expect("a slot of one of the layer's shares");
        let stride = self.catalog.classes[usize::from(share.class)].stride as usize;
        share.base.wrapping_add((slot.index - share.slots.first_slot) as usize * stride)
    }

    fn request(&self, read: &Read) -> ReadRequest {
        let version = read.target.version();
        let source = self.source(version);
        let class = &self.catalog.classes[usize::from(source.class)];
        // Positions of the slices that are read, and each one's first byte behind `start`.
        let (start, capacity, slices) = match read.target {
            Target::Slot { slot, slice } => {
                let (position, shape) = slice_of(&class.slices, slice.kind);
                let start = self.slot(slot, version).wrapping_add(shape.region as usize);
                (start, shape.capacity as usize, vec![(position, 0)])
            }
            Target::Record { slot, .. } => {
                let regions = class.slices.iter().map(|shape| shape.region as usize).enumerate();
                (self.slot(slot, version), class.stride as usize, regions.collect())
            }
            Target::Staging { slot, slice } => {
                let start = self.staging.as_ptr().wrapping_add(slot * self.staging_stride);
                (start, self.staging_stride, vec![(slice_of(&class.slices, slice.kind).0, 0)])
            }
        };
        let is_rearranged = slices.iter().any(|&(at, _)| self.interleavings.get(source.class, at).is_some());
        // The version in this slot has the rest of the bytes.
        let held = read.held.map(|slot| (self.slot(slot, Version::low(version.expert)), version.expert));
        let first = &source.slices[slices[0].0];
        let (mut extent, mut lead) = (first.extent, first.lead);
        let mut record = source.record;
        let form = if is_rearranged {
            lead = 0;
            Form::Rows(slices.into_iter().map(|(at, to)| self.rows(source, at, to)).collect())
        } else {
            let mut parts = Vec::new();
            for (at, to) in slices {
                let planes = self.in_planes(&source.slices[at], &class.slices[at], to, held);
                extent = planes.0;
                parts.extend(planes.1);
            }
            record = if held.is_some() { source.rest() } else { record };
            if parts.is_empty() { Form::AsIs } else { Form::Planes(parts) }
        };
        if matches!(read.target, Target::Record { .. }) {
            (extent, lead) = (record.expect("only records are asked for as such"), 0);
        }
        // SAFETY: `start` is a slot, a slice's region of one, or a staging slot, of `capacity` bytes in an arena of
        // this value that outlives the loader. The residency keeps its state at loading from now until the read is
        // reported as landed: nothing else reads or writes it, and it cannot be taken again.
        let dst = unsafe { SlotPtr::new(start) };
        ReadRequest { ticket: read.ticket, extent, dst, capacity, lead: lead as usize, form }
    }

    /// A slice of a version whose class has another order in memory.
    fn rows(&self, source: &VersionSource, position: usize, to: usize) -> Rows {
        let slice = &source.slices[position];
        let interleaving = self.interleavings.get(source.class, position);
        Rows {
            offset: slice.extent.offset,
            bytes: slice.extent.len,
            group_bytes: interleaving.map_or(1, |interleaving| interleaving.group_bytes()),
            to: to + slice.lead as usize,
            order: interleaving.map_or(Order::AsIs, |interleaving| Order::Other(Arc::clone(interleaving) as _)),
        }
    }

    /// The bytes to read for a slice, and the parts to build if it is stored in planes: weights from `to` on, with the
    /// high plane taken from the slot of a low version if one is `held`.
    fn in_planes(
        &self,
        source: &SliceSource,
        shape: &SliceShape,
        to: usize,
        held: Option<(*mut u8, ExpertId)>,
    ) -> (Extent, Vec<Part>) {
        let SliceSource { extent, stored, .. } = *source;
        let n_blocks = shape.bytes / shape.dtype.type_size();
        let part = |high, low| vec![Part { n_blocks, high, low, to }];
        match (stored, held) {
            (Stored::Whole, _) => (extent, Vec::new()),
            (Stored::High, _) => (extent, part(HighPlane::File(extent.offset), None)),
            // The low planes come after all high ones.
            (Stored::Both { low }, None) => {
                let both = Extent { len: low.end() - extent.offset, ..extent };
                (both, part(HighPlane::File(extent.offset), Some(low.offset)))
            }
            (Stored::Both { low }, Some((slot, expert))) => {
                let (expanded, own) = self.slice(SliceId { version: Version::low(expert), kind: shape.kind });
                let start = slot.wrapping_add((expanded.region + own.lead) as usize);
                // SAFETY: the slot has a complete version, which the residency neither evicts nor reads anew before the
                // read is reported as landed: until then nothing writes there. It lies in an arena that outlives the
                // loader.
                let plane = HighPlane::Held(unsafe { SlotPtr::new(start) });
                (low, part(plane, Some(low.offset)))
            }
        }
    }
}

impl Reads for HostReads {
    type Error = StoreError;

    fn submit(&mut self, class: LoadClass, reads: &[Read]) -> Vec<ReadDone> {
        let requests: Vec<ReadRequest> = reads.iter().map(|read| self.request(read)).collect();
        for arena in self.pools.iter().chain([&self.staging]) {
            requests.iter().for_each(|request| arena.need(request.dst.as_ptr(), request.capacity));
        }
        let Some(disk) = &mut self.disk else { return self.loader.submit(class, requests) };
        let refused = self.loader.submit(LoadClass::OnDemandHigh, requests);
        disk.submit(class, reads, self.loader.drain().into_iter().chain(refused));
        Vec::new()
    }

    fn withdraw(&mut self, class: LoadClass, unwanted: &mut dyn FnMut(u64) -> bool) -> Vec<u64> {
        match &mut self.disk {
            Some(disk) => disk.withdraw(class, unwanted),
            None => self.loader.withdraw(class, unwanted),
        }
    }

    fn promote(&mut self, needed: &mut dyn FnMut(u64) -> bool, to: LoadClass) {
        match &mut self.disk {
            Some(disk) => disk.promote(needed, to),
            None => _ = self.loader.promote(needed, to),
        }
    }

    fn poll(&mut self, landed: &mut Vec<ReadDone>) {
        match &mut self.disk {
            Some(disk) => disk.poll(landed),
            None => landed.extend(self.loader.poll()),
        }
    }

    fn wait(&mut self, landed: &mut Vec<ReadDone>) -> bool {
        if let Some(disk) = &mut self.disk {
            return disk.wait(landed);
        }
        let Some(done) = self.loader.wait() else { return false };
        landed.extend(done);
        true
    }

    fn drain(&mut self, landed: &mut Vec<ReadDone>) {
        match &mut self.disk {
            Some(disk) => disk.drain(landed),
            None => landed.extend(self.loader.drain()),
        }
    }

    fn outstanding(&self) -> usize {
        self.disk.as_ref().map_or_else(|| self.loader.outstanding(), VirtualDisk::outstanding)
    }

    fn stats(&self) -> LoadStats {
        self.loader.stats()
    }

    fn seconds(&self) -> f64 {
        self.disk.as_ref().map_or_else(|| self.began.elapsed().as_secs_f64(), VirtualDisk::seconds)
    }

    fn forget_fills(&mut self) {
        self.pools.iter().for_each(Arena::need_nothing);
    }
}

impl Share {
    fn new(share: &LayerShare, catalog: &Catalog, pools: &[Arena]) -> Self {
        let source = catalog.source(share.member).expect("a version of the catalog");
        let stride = catalog.classes[usize::from(source.class)].stride as usize;
        let arena = &pools[usize::from(share.id.pool)];
        let end = (share.first_slot + share.n_slots) as usize;
        assert!(end * stride <= arena.len(), "the share's slots have no room");
        Self {
            slots: *share,
            class: source.class,
            base: arena.as_ptr().wrapping_add(share.first_slot as usize * stride),
            leads: source.slices.iter().map(|slice| slice.lead).collect(),
        }
    }
}

/// The bytes of a slice that a step uses, once they are complete, and whether they are in a staging slot that must be
/// released after use.
pub(crate) fn host_bytes(host: &Host, slice: SliceId, used: Used) -> Option<(*const u8, bool)> {
    match host.memory.locate(slice, used) {
        Place::Cached => {
            let view = host.reads().view(slice.version.expert.layer, used.share, slice.kind);
            let row = used.row.expect("a cached version has a row") as usize;
            Some((view.base.wrapping_add(row * view.stride), false))
        }
        Place::Staged(slot) => Some((host.reads().staged(slot, slice), true)),
        Place::Pending => None,
    }
}

/// The layout of a catalog whose versions have slots in `cache`, for [`hobbit_core::residency`].
pub(crate) fn layout_of(catalog: &Catalog, cache: &Cache) -> Layout {
    let shape = |layer: &LayerCatalog| {
        let class = &catalog.classes[usize::from(layer.high[0].class)];
        let kinds = class.slices.iter().map(|slice| slice.kind).collect();
        LayerShape { layer: layer.layer, n_expert: layer.n_expert, kinds }
    };
    let bytes = |version: Version| {
        let source = catalog.source(version)?;
        let mut bytes = VersionBytes { record: source.record.map(|record| record.len), ..VersionBytes::default() };
        let mut rest = RestBytes { record: source.rest().map(|rest| rest.len), ..RestBytes::default() };
        for (shape, slice) in catalog.classes[usize::from(source.class)].slices.iter().zip(&source.slices) {
            bytes.slices[shape.kind.index()] = slice.bytes();
            if let Stored::Both { low } = slice.stored {
                rest.slices[shape.kind.index()] = low.len;
            }
        }
        bytes.rest = catalog.in_bit_planes(version).then_some(rest);
        Some(bytes)
    };
    Layout::new(catalog.layers.iter().map(shape), cache, bytes)
}

fn slice_of(slices: &[SliceShape], kind: SliceKind) -> (usize, &SliceShape) {
    let position = slices.iter().position(|slice| slice.kind == kind).expect("tags are made from the same map");
    (position, &slices[position])
}
