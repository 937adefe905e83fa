//! Device memory of a tier: for each layer and pool one tensor `[ne0, ne1, n_slots]` per matrix, as llama.cpp itself
//! would allocate a layer's experts, and one block for the staging slots.
//!
//! A layer's slots are one allocation. If the device is out of memory while a model runs, the allocation is made again
//! with fewer slots; its contents are lost and are copied from the host again when needed.

use std::collections::BTreeMap;
use std::ptr;

use ggml_sys::llama::{self, ggml_backend_dev_t, ggml_tensor};

use super::slots::Share;
use super::{Tier, padding_bytes};
use crate::engine::ggml::log;
use crate::engine::ggml::{self, Buffer, Context, Stream};
use hobbit_core::cache::{Cache, ShareId};
use hobbit_core::expert::{Precision, SliceKind};
use hobbit_core::gguf::{Catalog, ExpertClass, SliceShape};

/// Alignment of staging slots in bytes, more than any backend's alignment.
const STAGING_ALIGNMENT: u64 = 512;

/// A refused allocation of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    /// Bytes of the refused allocation.
    pub(crate) bytes: u64,
    /// Whether it was for the staging slots.
    pub(crate) is_staging: bool,
}

/// One allocation, and the tensors in it.
type Block = (Buffer, Context);

/// See the [module](self).
pub(crate) struct Memory {
    dev: ggml_backend_dev_t,
    /// By pool.
    classes: Vec<ExpertClass>,
    shares: BTreeMap<(u16, u16), Share>,
    pub(super) staging: *mut ggml_tensor,
    pub(super) staging_stride: usize,
    pub(super) n_staging: usize,
    /// Slot memory, by layer.
    blocks: BTreeMap<u16, Block>,
    _staging_block: Option<Block>,
}

// SAFETY: owned tensors and buffers; used by one thread at a time.
unsafe impl Send for Memory {}

impl Memory {
    /// Allocates slots for every share of `cache`, whose pools have the classes `classes`, and `n_staging` staging
    /// slots.
    ///
    /// # Errors
    /// The device refuses a block.
    pub(crate) fn allocate(
        dev: ggml_backend_dev_t,
        catalog: &Catalog,
        cache: &Cache,
        classes: &[u16],
        n_staging: usize,
    ) -> Result<Self, Refused> {
        let mut memory = Self { dev, ..Self::none() };
        memory.classes = classes.iter().map(|class| catalog.classes[usize::from(*class)].clone()).collect();
        for layer in &catalog.layers {
            memory.allocate_layer(layer.layer, cache)?;
        }
        let staging_stride = staging_stride(&catalog.classes);
        let refused = |bytes| Refused { bytes, is_staging: true };
        let context = Context::new(1, 0).ok_or(refused(0))?;
        // At least one: every version may lose its slot when memory runs short.
        let n_staging = n_staging.max(1);
        let bytes = staging_stride * n_staging as u64;
        memory.staging = context.tensor(llama::GGML_TYPE_I8, [bytes as i64, 1, 1]);
        memory._staging_block = Some(memory.block(context).ok_or(refused(bytes))?);
        (memory.staging_stride, memory.n_staging) = (staging_stride as usize, n_staging);
        Ok(memory)
    }

    /// Replaces the memory of a layer's slots according to `cache`; their contents are lost.
    ///
    /// # Errors
    /// The device refuses; the layer then has no memory.
    pub(super) fn allocate_layer(&mut self, layer: u16, cache: &Cache) -> Result<(), Refused> {
        self.blocks.remove(&layer);
        self.shares.retain(|(other, _), _| *other != layer);
        let of_layer = |pool: u16| (pool, cache.pools().slots_of_share(ShareId { pool, layer }));
        let ours: Vec<_> =
            (0..self.classes.len() as u16).map(of_layer).filter(|(_, slots)| !slots.is_empty()).collect();
        if ours.is_empty() {
            return Ok(());
        }
        let refused = |bytes| Refused { bytes, is_staging: false };
        let context = Context::new(ours.len() * SliceKind::COUNT, 0).ok_or(refused(0))?;
        let mut bytes = 0;
        let mut shares = Vec::new();
        for (pool, slots) in ours {
            let class = &self.classes[usize::from(pool)];
            bytes += class.bytes() * slots.len() as u64;
            let tensor = |slice: &SliceShape| {
                let ne = [slice.ne0 as i64, slice.ne1 as i64, slots.len() as i64];
                (slice.kind, context.tensor(slice.dtype.id() as llama::ggml_type, ne))
            };
            shares.push((
                (layer, pool),
                Share { first: slots.start, tensors: class.slices.iter().map(tensor).collect() },
            ));
        }
        self.blocks.insert(layer, self.block(context).ok_or(refused(bytes))?);
        self.shares.extend(shares);
        Ok(())
    }

    /// Memory for the tensors of a context. `None` if the device refuses it.
    fn block(&self, context: Context) -> Option<Block> {
        // SAFETY: a registered device.
        let buffer = context.allocate(unsafe { llama::ggml_backend_dev_buffer_type(self.dev) })?;
        // Slots are weights, except on an RPC server: it would keep a copy on disk of every weight that is sent.
        if !ggml::is_remote(self.dev) {
            // SAFETY: the buffer is live.
            unsafe {
                llama::ggml_backend_buffer_set_usage(buffer.raw(), llama::GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            }
        }
        // Kernels read beyond the last row of a slot, and these bytes must not be NaN.
        buffer.fill(0);
        Some((buffer, context))
    }

    /// No slots at all.
    pub(crate) fn none() -> Self {
        Self {
            dev: ptr::null_mut(),
            classes: Vec::new(),
            shares: BTreeMap::new(),
            staging: ptr::null_mut(),
            staging_stride: 0,
            n_staging: 0,
            blocks: BTreeMap::new(),
            _staging_block: None,
        }
    }

    /// Bytes of a slot of a pool.
    pub(crate) fn slot_bytes(&self, pool: u16) -> u64 {
        self.classes[usize::from(pool)].bytes()
    }

    pub(super) fn share(&self, layer: u16, pool: u16) -> &Share {
        self.shares.get(&(layer, pool)).expect("slots are handed out for shares that have memory")
    }

    /// Layers with one share.
    pub(super) fn layers_of_one_share(&self) -> Vec<u16> {
        let mut layers: Vec<u16> = self.shares.keys().map(|(layer, _)| *layer).collect();
        layers.dedup();
        layers.retain(|&layer| self.only_share(layer).is_some());
        layers
    }

    fn only_share(&self, layer: u16) -> Option<&Share> {
        let mut shares = self.shares.range((layer, 0)..=(layer, u16::MAX)).map(|(_, share)| share);
        shares.next().filter(|_| shares.next().is_none())
    }

    /// The tensor of a layer that has one share.
    pub(super) fn only_tensor(&self, layer: u16, kind: SliceKind) -> Option<*mut ggml_tensor> {
        self.only_share(layer).map(|share| share.tensor(kind))
    }
}

/// Bytes of a staging slot: room for any slice and its padding.
pub(crate) fn staging_stride(classes: &[ExpertClass]) -> u64 {
    let slices = classes.iter().flat_map(|class| &class.slices);
    let largest = slices.map(|slice| slice.bytes + padding_bytes(slice) as u64).max().unwrap_or(0);
    largest.max(1).next_multiple_of(STAGING_ALIGNMENT)
}

// Fewer slots: the device is out of memory, or the user asks for some of it.

/// Divisor for the part of the slots freed when the missing size is unknown.
const SHRINK_PART: u64 = 4;

impl Tier {
    /// The device refused memory: frees at least `bytes` bytes of slots and a quarter of all, as far as possible. Waits
    /// for `stream`, so that nothing reads the freed slots; keeps the slots of the layer being computed. Returns the
    /// bytes freed: 0 if nothing is left to free.
    pub(crate) fn shrink(&mut self, stream: &Stream, bytes: u64) -> u64 {
        stream.synchronize();
        self.copies.stream.synchronize();
        let before = self.report.cache_bytes;
        let target = bytes.max(before / SHRINK_PART).max(1);
        let mut stuck: Vec<u16> = self.busy.into_iter().collect();
        let mut freed = 0;
        while freed < target {
            let Some(layer) = self.slots.largest_layer(&stuck) else { break };
            match self.resize_layer(layer, |n, _| n * 3 / 4) {
                0 => stuck.push(layer),
                n => freed += n,
            }
        }
        if freed > 0 {
            self.counters.cache_shrunk += 1;
            log::notice(format_args!(
                "{}: out of device memory; its expert cache has {} MiB instead of {}; give a smaller device cache or a \
                 larger head-room",
                self.report.name,
                self.report.cache_bytes >> 20,
                before >> 20
            ));
        }
        freed
    }

    /// Resizes each of a layer's shares to `size` of its current and its initial slot count, or to as many as the
    /// device still has. The contents are lost. Returns the bytes freed: 0 if slots are in use.
    ///
    /// Nothing on the device may be reading or writing the layer's slots.
    fn resize_layer(&mut self, layer: u16, size: impl Fn(u32, u32) -> u32) -> u64 {
        let shares = self.slots.shares_of_layer(layer);
        if !shares.iter().all(|share| self.slots.cache.pools().is_share_idle(*share)) {
            return 0;
        }
        let before = self.slots.bytes_of_layer(layer);
        let n_slots = |cache: &Cache, share| cache.pools().slots_of_share(share).len() as u32;
        let mut wanted: Vec<(ShareId, u32)> = shares
            .iter()
            .map(|&share| {
                (share, size(n_slots(&self.slots.cache, share), self.slots.cache.pools().most_of_share(share)))
            })
            .collect();
        if wanted.iter().all(|&(share, n)| n_slots(&self.slots.cache, share) == n) {
            return 0;
        }
        if !self.slots.dissolve(layer) {
            return 0;
        }
        loop {
            for &(share, n) in &wanted {
                for n in [0, n] {
                    self.slots.cache.resize_share(share, n).expect("nothing in it is in use");
                }
            }
            if self.slots.memory.allocate_layer(layer, &self.slots.cache).is_ok() {
                break;
            }
            wanted.iter_mut().for_each(|(_, n)| *n /= 2);
        }
        let after = self.slots.bytes_of_layer(layer);
        let layers = self.slots.layers();
        self.report.cache_bytes = layers.iter().map(|layer| self.slots.bytes_of_layer(*layer)).sum();
        let high = |layer: &u16| u64::from(self.slots.cache.pools().capacity_of_layer(*layer, Precision::High));
        self.report.slots = layers.iter().map(high).sum();
        before.saturating_sub(after)
    }

    /// Resizes the slots to `bytes` bytes in all, at most their initial size and the device's free memory; layers that
    /// change lose their contents. Call [`Tier::rest`] just before. Returns the bytes of the slots.
    pub(crate) fn resize(&mut self, bytes: u64) -> u64 {
        self.copies.stream.synchronize();
        let planned = self.slots.planned_bytes().max(1);
        let share_of = |most: u32| (u128::from(most) * u128::from(bytes.min(planned)) / u128::from(planned)) as u32;
        for layer in self.slots.layers() {
            self.resize_layer(layer, |_, most| share_of(most));
        }
        self.slots.pending = (self.slots.is_lent() && self.report.cache_bytes != bytes.min(planned)).then_some(bytes);
        self.report.cache_bytes
    }
}
