//! Cache, staging, loader and slot memory of one model, driven by one expert split at a time.
//!
//! A split of layer `l` goes through [`Residency::begin`] (which experts are needed: pin what is resident, submit a
//! read for everything else), then, product by product, [`Residency::locate`] / [`Residency::wait`], and
//! [`Residency::end`]. Experts beyond the layer's share stream through staging slots, in the order in which the
//! products use them; while they do, the slots of the next layer are filled ahead when the batch is dense.

use std::collections::VecDeque;
use std::time::Instant;

use super::staging::{Staged, Staging};
use crate::cache::{Cache, SliceState, SlotId, Use};
use crate::expert::{ExpertId, SliceId, SliceKind, Version};
use crate::gguf::ExpertTensor;
use crate::load::{LoadClass, Loader};
use crate::plan::MemoryPlan;
use crate::stats::LayerStats;
use crate::store::{Arena, BLOCK_BYTES, ReadDone, ReadRequest, SlotPtr, StoreError, slot_stride};

/// Where the bytes of a needed slice are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the layer's share of the cache: row of the layer's view.
    Cached(u32),
    /// In a staging slot: address of the first byte.
    Staged(*mut u8),
    /// On its way, or waiting for a staging slot.
    Pending,
}

/// All slots of a layer's share for one kind, as a tensor `[ne0, ne1, n_slots]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerView {
    /// First byte of slot 0's slice.
    pub(super) base: *mut u8,
    /// Bytes from slot to slot.
    pub(super) stride: usize,
    /// Slots in the share.
    pub(super) n_slots: u32,
}

/// One expert split in progress.
pub(super) struct Step {
    /// Block number.
    pub(super) layer: u16,
    /// Needed experts that have a cache slot: index and row of the layer's view.
    pub(super) cached: Vec<(u16, u32)>,
    /// Needed experts that stream through staging.
    pub(super) overflow: Vec<u16>,
    pinned: Vec<SlotId>,
}

/// Counted since the model was opened.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) slices_loaded: u64,
    pub(super) bytes_read: u64,
    pub(super) wait_seconds: f64,
}

struct Layer {
    n_expert: u16,
    tensors: Vec<LayerTensor>,
    first_slot: u32,
    hits: u64,
    misses: u64,
    seen: [bool; SliceKind::COUNT],
}

struct LayerTensor {
    source: ExpertTensor,
    view: LayerView,
    lead: usize,
}

#[derive(Clone, Copy)]
enum Target {
    Slot { slot: SlotId, slice: SliceId },
    Staging { slot: usize, slice: SliceId },
}

/// Memory for the slots of one pool, one arena per slice kind.
pub(super) struct PoolMemory {
    /// By [`SliceKind::index`].
    pub(super) arenas: [Option<Arena>; SliceKind::COUNT],
}

/// See the module.
pub(super) struct Residency {
    // Dropped first: it drains before the memory below goes away.
    loader: Loader,
    cache: Cache,
    staging: Staging,
    layers: Vec<Option<Layer>>,
    targets: Vec<Option<Target>>,
    /// Slices the running layer still has to stage, in the order of use.
    queue: VecDeque<SliceId>,
    /// Slices of the next layer to stage when nothing of the running layer is left to submit.
    ahead: VecDeque<SliceId>,
    /// The layer of the split in progress.
    running: Option<u16>,
    failure: Option<StoreError>,
    counters: Counters,
    staging_memory: Arena,
    staging_stride: usize,
    _pools: Vec<PoolMemory>,
    description: Option<(MemoryPlan, String)>,
}

// SAFETY: the pointers in `LayerView` lead into arenas owned by the same value.
unsafe impl Send for Residency {}

impl Residency {
    /// Puts cache, memory and loader together. `pools[p]` are the arenas of the cache's pool `p`, `pool_of_layer`
    /// gives a layer's pool; staging slots have `staging_stride` bytes.
    pub(super) fn new(
        map: &crate::gguf::ExpertMap,
        cache: Cache,
        pools: Vec<PoolMemory>,
        pool_of_layer: impl Fn(u16) -> usize,
        staging_memory: Arena,
        staging_stride: usize,
        loader: Loader,
    ) -> Self {
        let n_layer = map.layers.last().map_or(0, |layer| usize::from(layer.layer) + 1);
        let mut layers: Vec<Option<Layer>> = (0..n_layer).map(|_| None).collect();
        for layer in &map.layers {
            let slots = cache.slots_of_layer(layer.layer);
            let memory = &pools[pool_of_layer(layer.layer)];
            let tensors = layer
                .tensors
                .iter()
                .map(|source| {
                    let stride = slot_stride(source.slice_bytes) as usize;
                    let lead = lead(source);
                    let arena = memory.arenas[source.kind.index()].as_ref();
                    let base = arena.map_or(std::ptr::null_mut(), |arena| {
                        assert!(slots.end as usize * stride <= arena.len(), "{} has no room", source.name);
                        arena.as_ptr().wrapping_add(slots.start as usize * stride + lead)
                    });
                    LayerTensor {
                        source: source.clone(),
                        view: LayerView { base, stride, n_slots: slots.len() as u32 },
                        lead,
                    }
                })
                .collect();
            layers[usize::from(layer.layer)] = Some(Layer {
                n_expert: u16::try_from(layer.n_expert).expect("the reader caps the number of experts"),
                tensors,
                first_slot: slots.start,
                hits: 0,
                misses: 0,
                seen: [false; SliceKind::COUNT],
            });
        }
        let n_staging = staging_memory.len() / staging_stride;
        Self {
            loader,
            cache,
            staging: Staging::new(n_staging),
            layers,
            targets: Vec::new(),
            queue: VecDeque::new(),
            ahead: VecDeque::new(),
            running: None,
            failure: None,
            counters: Counters::default(),
            staging_memory,
            staging_stride,
            _pools: pools,
            description: None,
        }
    }

    /// Keeps what the first session was told, for the next ones.
    pub(super) fn describe(&mut self, plan: MemoryPlan, io_choice: String) {
        self.description = Some((plan, io_choice));
    }

    /// What the first session was told: how memory is divided, and how experts are read.
    pub(super) fn description(&self) -> Option<&(MemoryPlan, String)> {
        self.description.as_ref()
    }

    /// Starts a split of `layer` that needs the experts `needed`, each once, most urgent first, and multiplies their
    /// slices in the order `kinds`. `dense`: the next layer will need nearly all of its experts too.
    pub(super) fn begin(&mut self, layer: u16, needed: &[u16], kinds: &[SliceKind], dense: bool) -> Step {
        self.poll();
        self.failure = None;
        self.running = Some(layer);
        let mut step =
            Step { layer, cached: Vec::with_capacity(needed.len()), overflow: Vec::new(), pinned: Vec::new() };
        let order = self.load_order(layer, kinds);
        let mut reads: Vec<(SlotId, u16)> = Vec::new();
        let mut missing = Vec::new();
        for &index in needed {
            let expert = ExpertId { layer, index };
            let slot = self.cache.lookup(expert);
            let hit = slot.is_some_and(|slot| self.cache.is_ready(slot));
            self.cache.touch(expert, Use { hit });
            self.count(layer, hit);
            match slot {
                Some(slot) => {
                    self.load_free_slices(slot, expert, &order);
                    self.hold(&mut step, slot, index);
                }
                None => missing.push(index),
            }
        }
        for index in missing {
            let expert = ExpertId { layer, index };
            let staged =
                order.iter().any(|&kind| self.staging.get(SliceId { version: Version::high(expert), kind }).is_some());
            match if staged { None } else { self.cache.acquire(expert) } {
                Some(acquired) => {
                    order.iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
                    self.hold(&mut step, acquired.slot, index);
                    reads.push((acquired.slot, index));
                }
                None => step.overflow.push(index),
            }
        }
        let wanted =
            |slice: SliceId| slice.version.expert.layer == layer && step.overflow.contains(&slice.version.expert.index);
        self.staging.retain(wanted);
        // Only what this split multiplies: of a layer that comes in several splits, nothing is read twice.
        self.queue = kinds
            .iter()
            .flat_map(|&kind| {
                step.overflow
                    .iter()
                    .map(move |&index| SliceId { version: Version::high(ExpertId { layer, index }), kind })
            })
            .filter(|slice| self.staging.get(*slice).is_none())
            .collect();
        self.ahead.clear();
        let mut requests = Vec::with_capacity(reads.len() * order.len());
        for &kind in &order {
            for &(slot, index) in &reads {
                requests
                    .push(self.slot_request(slot, SliceId { version: Version::high(ExpertId { layer, index }), kind }));
            }
        }
        self.loader.submit(LoadClass::OnDemand, requests);
        if dense {
            self.look_ahead(layer);
        }
        self.pump();
        step
    }

    /// Ends a split: its experts may be evicted again.
    pub(super) fn end(&mut self, step: Step) {
        step.pinned.into_iter().for_each(|slot| self.cache.unpin(slot));
        self.queue.clear();
        self.running = None;
    }

    /// The slots of a layer for one kind.
    pub(super) fn view(&self, layer: u16, kind: SliceKind) -> LayerView {
        self.tensor(layer, kind).view
    }

    /// Where the slice of a needed expert is now. `cached` is the expert's row from [`Step::cached`].
    pub(super) fn locate(&self, slice: SliceId, cached: Option<u32>) -> Place {
        match cached {
            Some(row) => {
                let layer = self.layer(slice.version.expert.layer);
                let slot = self.cache.lookup(slice.version.expert).expect("a pinned expert is resident");
                debug_assert_eq!(slot.index, layer.first_slot + row);
                match self.cache.state(slot, slice.kind) {
                    SliceState::Ready => Place::Cached(row),
                    _ => Place::Pending,
                }
            }
            None => match self.staging.get(slice) {
                Some(Staged::Ready(slot)) => {
                    let lead = self.tensor(slice.version.expert.layer, slice.kind).lead;
                    Place::Staged(self.staging_memory.as_ptr().wrapping_add(slot * self.staging_stride + lead))
                }
                _ => Place::Pending,
            },
        }
    }

    /// The product of a staged slice is done: its staging slot takes the next one.
    pub(super) fn release(&mut self, slice: SliceId) {
        self.staging.release(slice);
        self.pump();
    }

    /// Takes what has landed, without waiting.
    ///
    /// Failures are kept for [`Residency::take_failure`].
    pub(super) fn poll(&mut self) {
        let done = self.loader.poll();
        self.land(done);
    }

    /// Waits until something lands. False when nothing is on its way.
    pub(super) fn wait(&mut self) -> bool {
        let started = Instant::now();
        let Ok(done) = self.loader.wait() else { return false };
        self.counters.wait_seconds += started.elapsed().as_secs_f64();
        self.land(done);
        true
    }

    /// Makes the staging slots free for `slice`, which nothing in flight will bring: what else is staged is dropped.
    /// False when that is impossible (there are no staging slots).
    pub(super) fn insist(&mut self, slice: SliceId) -> bool {
        if self.staging.get(slice).is_none() {
            self.staging.retain(|_| false);
            self.ahead.clear();
            self.queue.retain(|queued| *queued != slice);
            self.queue.push_front(slice);
            self.pump();
        }
        self.staging.get(slice).is_some()
    }

    /// The first read that failed since the last call.
    pub(super) fn take_failure(&mut self) -> Option<StoreError> {
        self.failure.take()
    }

    /// After a failed batch: waits for what is in flight and forgets how it ended, so that it does not fail the next.
    pub(super) fn settle(&mut self) {
        self.queue.clear();
        self.ahead.clear();
        while self.wait() {}
        self.failure = None;
    }

    /// Counters since the model was opened.
    pub(super) fn counters(&self) -> Counters {
        self.counters
    }

    /// Seconds with at least one read in flight since the model was opened.
    pub(super) fn busy_seconds(&self) -> f64 {
        self.loader.stats().busy.as_secs_f64()
    }

    /// Counters of each MoE layer, ascending.
    pub(super) fn layer_stats(&self) -> Vec<LayerStats> {
        let layers = self.layers.iter().zip(0u16..);
        layers
            .filter_map(|(layer, number)| {
                let layer = layer.as_ref()?;
                let slots = self.cache.capacity_of_layer(number);
                Some(LayerStats { layer: number, slots, hits: layer.hits, misses: layer.misses })
            })
            .collect()
    }

    /// An expert product of this tensor reached the expert backend.
    pub(super) fn mark_seen(&mut self, layer: u16, kind: SliceKind) {
        if let Some(layer) = self.layers[usize::from(layer)].as_mut() {
            layer.seen[kind.index()] = true;
        }
    }

    /// Names of expert tensors whose products never reached the expert backend.
    pub(super) fn unseen(&self) -> Vec<String> {
        let layers = self.layers.iter().flatten();
        layers
            .flat_map(|layer| layer.tensors.iter().filter(|t| !layer.seen[t.source.kind.index()]))
            .map(|tensor| tensor.source.name.clone())
            .collect()
    }

    /// The next token begins, for the policy.
    pub(super) fn next_token(&mut self) {
        self.cache.next_token();
    }

    /// A new sequence begins, for the policy.
    pub(super) fn begin_sequence(&mut self) {
        self.cache.begin_sequence();
    }

    fn layer(&self, layer: u16) -> &Layer {
        self.layers[usize::from(layer)].as_ref().expect("only MoE layers have expert products")
    }

    fn tensor(&self, layer: u16, kind: SliceKind) -> &LayerTensor {
        let tensors = &self.layer(layer).tensors;
        tensors.iter().find(|t| t.source.kind == kind).expect("tags are made from the same map")
    }

    /// All kinds of the layer: those of the split in its order, then the rest.
    fn load_order(&self, layer: u16, kinds: &[SliceKind]) -> Vec<SliceKind> {
        let mut order = kinds.to_vec();
        order.extend(self.layer(layer).tensors.iter().map(|t| t.source.kind).filter(|kind| !kinds.contains(kind)));
        order
    }

    fn count(&mut self, layer: u16, hit: bool) {
        let layer = self.layers[usize::from(layer)].as_mut().expect("only MoE layers have expert products");
        let (counter, total) = match hit {
            true => (&mut layer.hits, &mut self.counters.hits),
            false => (&mut layer.misses, &mut self.counters.misses),
        };
        *counter += 1;
        *total += 1;
    }

    fn hold(&mut self, step: &mut Step, slot: SlotId, index: u16) {
        self.cache.pin(slot);
        step.pinned.push(slot);
        step.cached.push((index, slot.index - self.layer(step.layer).first_slot));
    }

    /// Requests slices of a resident expert that an earlier failure left free.
    fn load_free_slices(&mut self, slot: SlotId, expert: ExpertId, order: &[SliceKind]) {
        for &kind in order {
            if self.cache.state(slot, kind) == SliceState::Free {
                self.cache.set_loading(slot, kind);
                let request = self.slot_request(slot, SliceId { version: Version::high(expert), kind });
                self.loader.submit(LoadClass::OnDemand, vec![request]);
            }
        }
    }

    /// Fills what is free of the next layer's share, and lines the rest up for staging.
    fn look_ahead(&mut self, layer: u16) {
        let Some(next) = (layer + 1..self.layers.len() as u16).find(|&l| self.layers[usize::from(l)].is_some()) else {
            return;
        };
        let order = self.load_order(next, &[]);
        let missing: Vec<ExpertId> = (0..self.layer(next).n_expert)
            .map(|index| ExpertId { layer: next, index })
            .filter(|&expert| self.cache.lookup(expert).is_none())
            .collect();
        let mut filled = Vec::new();
        let mut rest = Vec::new();
        for expert in missing {
            let slot = if self.cache.has_empty_slot(next) { self.cache.acquire(expert) } else { None };
            match slot {
                Some(acquired) => {
                    order.iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
                    filled.push((acquired.slot, expert));
                }
                None => rest.push(expert),
            }
        }
        let mut requests = Vec::with_capacity(filled.len() * order.len());
        for &kind in &order {
            requests
                .extend(filled.iter().map(|&(slot, expert)| (slot, SliceId { version: Version::high(expert), kind })));
            self.ahead.extend(rest.iter().map(|&expert| SliceId { version: Version::high(expert), kind }));
        }
        let requests: Vec<ReadRequest> =
            requests.into_iter().map(|(slot, slice)| self.slot_request(slot, slice)).collect();
        self.loader.submit(LoadClass::Prefetch, requests);
    }

    /// Submits reads as long as there are staging slots and slices to stage.
    fn pump(&mut self) {
        loop {
            let (class, slice) = match (self.queue.front(), self.ahead.front()) {
                (Some(&slice), _) => (LoadClass::OnDemand, slice),
                (None, Some(&slice)) => (LoadClass::Prefetch, slice),
                (None, None) => return,
            };
            let already = self.staging.get(slice).is_some();
            if !already {
                let Some(slot) = self.staging.take(slice) else { return };
                let dst = self.staging_memory.as_ptr().wrapping_add(slot * self.staging_stride);
                let request = self.request(slice, dst, self.staging_stride, Target::Staging { slot, slice });
                self.loader.submit(class, vec![request]);
            }
            match class {
                LoadClass::OnDemand => self.queue.pop_front(),
                LoadClass::Prefetch => self.ahead.pop_front(),
            };
        }
    }

    fn slot_request(&mut self, slot: SlotId, slice: SliceId) -> ReadRequest {
        let first_slot = self.layer(slice.version.expert.layer).first_slot;
        let tensor = self.tensor(slice.version.expert.layer, slice.kind);
        let stride = tensor.view.stride;
        let dst = tensor.view.base.wrapping_add((slot.index - first_slot) as usize * stride).wrapping_sub(tensor.lead);
        self.request(slice, dst, stride, Target::Slot { slot, slice })
    }

    fn request(&mut self, slice: SliceId, dst: *mut u8, capacity: usize, target: Target) -> ReadRequest {
        let tensor = self.tensor(slice.version.expert.layer, slice.kind);
        let (extent, lead) = (tensor.source.extent(slice.version.expert.index), tensor.lead);
        let ticket = match self.targets.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                self.targets.push(None);
                self.targets.len() - 1
            }
        };
        self.targets[ticket] = Some(target);
        // SAFETY: `dst` is a slot of `capacity` bytes in an arena of this value that outlives the loader. Its state
        // is loading from now until `land`: nothing else reads or writes it, and it cannot be taken again.
        let dst = unsafe { SlotPtr::new(dst) };
        ReadRequest { ticket: ticket as u64, extent, dst, capacity, lead }
    }

    fn land(&mut self, done: Vec<ReadDone>) {
        for ReadDone { ticket, result, .. } in done {
            let target = self.targets[ticket as usize].take().expect("every ticket is answered once");
            let (Target::Slot { slice, .. } | Target::Staging { slice, .. }) = target;
            match (target, result.is_ok()) {
                (Target::Slot { slot, .. }, true) => self.cache.set_ready(slot, slice.kind),
                (Target::Slot { slot, .. }, false) => self.cache.set_failed(slot, slice.kind),
                (Target::Staging { slot, .. }, complete) => self.staging.landed(slot, complete),
            }
            match result {
                Ok(bytes) => {
                    self.counters.slices_loaded += 1;
                    self.counters.bytes_read += bytes;
                }
                // A read ahead that failed is tried again when its layer runs, if it is needed at all.
                Err(error) if self.running == Some(slice.version.expert.layer) => {
                    self.failure.get_or_insert(error);
                }
                Err(_) => {}
            }
        }
        self.pump();
    }
}

/// Where in its slot a slice of this tensor begins. Experts that are whole blocks long all begin alike, and a direct
/// read then lands in place; others are moved to the slot's start by the store.
fn lead(tensor: &ExpertTensor) -> usize {
    match tensor.slice_bytes % BLOCK_BYTES {
        0 => (tensor.offset % BLOCK_BYTES) as usize,
        _ => 0,
    }
}
