//! Device memory of a tier: per layer and pool a tensor `[ne0, ne1, n_slots]` for each matrix, as llama.cpp itself would
//! allocate a layer's experts, and one block for the staging slots.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::ptr::NonNull;

use ggml_sys::llama::{self, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_tensor};

use super::{Share, padding_bytes};
use crate::cache::{Cache, ShareId};
use crate::expert::SliceKind;
use crate::gguf::{Catalog, ExpertClass};

/// Staging slots start at multiples of so many bytes, more than any backend's alignment.
const STAGING_ALIGNMENT: u64 = 512;

/// Device memory that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Refused {
    /// How much was asked for at once, in bytes.
    pub(in crate::engine) bytes: u64,
    /// It was to be the staging slots.
    pub(in crate::engine) is_staging: bool,
}

/// One allocation and the tensors in it.
struct Block {
    context: NonNull<llama::ggml_context>,
    buffer: Option<NonNull<llama::ggml_backend_buffer>>,
}

impl Block {
    /// A block for `n` tensors, without memory yet.
    fn new(n: usize) -> Option<Self> {
        // SAFETY: a plain constructor; the result is checked.
        let context = unsafe {
            llama::ggml_init(llama::ggml_init_params {
                mem_size: n.max(1) * llama::ggml_tensor_overhead(),
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            })
        };
        Some(Self { context: NonNull::new(context)?, buffer: None })
    }

    fn tensor(&self, type_: llama::ggml_type, ne: [i64; 3]) -> *mut ggml_tensor {
        // SAFETY: the context has room for as many tensors as it was made for.
        unsafe { llama::ggml_new_tensor_3d(self.context.as_ptr(), type_, ne[0], ne[1], ne[2]) }
    }

    fn allocate(&mut self, buft: ggml_backend_buffer_type_t, usage: llama::ggml_backend_buffer_usage) -> bool {
        // SAFETY: context and buffer type are live; the result is checked.
        unsafe {
            let buffer = llama::ggml_backend_alloc_ctx_tensors_from_buft(self.context.as_ptr(), buft);
            self.buffer = NonNull::new(buffer);
            if let Some(buffer) = self.buffer {
                llama::ggml_backend_buffer_set_usage(buffer.as_ptr(), usage);
                // Kernels read on behind the last row of a slot, and what is there must not be NaN.
                llama::ggml_backend_buffer_clear(buffer.as_ptr(), 0);
            }
        }
        self.buffer.is_some()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: both were made here and are freed once, the buffer before the tensors in it.
        unsafe {
            if let Some(buffer) = self.buffer {
                llama::ggml_backend_buffer_free(buffer.as_ptr());
            }
            llama::ggml_free(self.context.as_ptr());
        }
    }
}

/// See the [module](self).
pub(in crate::engine) struct Memory {
    dev: ggml_backend_dev_t,
    /// By pool.
    classes: Vec<ExpertClass>,
    shares: BTreeMap<(u16, u16), Share>,
    staging: *mut ggml_tensor,
    staging_stride: usize,
    n_staging: usize,
    /// Slots, by layer.
    blocks: BTreeMap<u16, Block>,
    _staging_block: Option<Block>,
}

// SAFETY: owned tensors and buffers; used by one thread at a time.
unsafe impl Send for Memory {}

impl Memory {
    /// Allocates slots for every share of `cache`, whose pools have the classes `classes`, and `n_staging` staging slots.
    ///
    /// # Errors
    /// The device refuses a block.
    pub(in crate::engine) fn allocate(
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
        let mut block = Block::new(1).ok_or(Refused { bytes: 0, is_staging: true })?;
        // One at least: every version may lose its slot, when memory runs short.
        let n_staging = n_staging.max(1);
        let bytes = staging_stride * n_staging as u64;
        memory.staging = block.tensor(llama::GGML_TYPE_I8, [bytes as i64, 1, 1]);
        memory.allocate_block(&mut block, bytes).map_err(|refused| Refused { is_staging: true, ..refused })?;
        (memory.staging_stride, memory.n_staging) = (staging_stride as usize, n_staging);
        memory._staging_block = Some(block);
        Ok(memory)
    }

    /// Allocates as many slots as `cache` has for a layer, in place of those that it had: what was in them is lost.
    ///
    /// # Errors
    /// The device refuses; the layer then has no memory.
    pub(in crate::engine) fn allocate_layer(&mut self, layer: u16, cache: &Cache) -> Result<(), Refused> {
        self.blocks.remove(&layer);
        let of_layer = |pool: u16| (pool, cache.slots_of_share(ShareId { pool, layer }));
        let all = (0..self.classes.len() as u16).map(of_layer);
        (0..self.classes.len() as u16).for_each(|pool| drop(self.shares.remove(&(layer, pool))));
        let ours: Vec<_> = all.filter(|(_, slots)| !slots.is_empty()).collect();
        if ours.is_empty() {
            return Ok(());
        }
        let mut block = Block::new(ours.len() * SliceKind::COUNT).ok_or(Refused { bytes: 0, is_staging: false })?;
        let mut bytes = 0;
        let mut shares = Vec::new();
        for (pool, slots) in ours {
            let class = &self.classes[usize::from(pool)];
            let n_slots = slots.len() as u32;
            bytes += class.bytes() * u64::from(n_slots);
            let tensor = |slice: &crate::gguf::SliceShape| {
                let ne = [slice.ne0 as i64, slice.ne1 as i64, i64::from(n_slots)];
                (slice.kind, block.tensor(slice.dtype.id() as llama::ggml_type, ne))
            };
            shares.push(((layer, pool), Share::new(slots.start, class.slices.iter().map(tensor).collect())));
        }
        self.allocate_block(&mut block, bytes)?;
        self.blocks.insert(layer, block);
        self.shares.extend(shares);
        Ok(())
    }

    fn allocate_block(&self, block: &mut Block, bytes: u64) -> Result<(), Refused> {
        // SAFETY: a registered device.
        let buft = unsafe { llama::ggml_backend_dev_buffer_type(self.dev) };
        if block.allocate(buft, usage_of(self.dev)) { Ok(()) } else { Err(Refused { bytes, is_staging: false }) }
    }

    /// No slots at all.
    pub(in crate::engine) fn none() -> Self {
        Self {
            dev: std::ptr::null_mut(),
            classes: Vec::new(),
            shares: BTreeMap::new(),
            staging: std::ptr::null_mut(),
            staging_stride: 0,
            n_staging: 0,
            blocks: BTreeMap::new(),
            _staging_block: None,
        }
    }

    /// Bytes of a slot of a pool.
    pub(in crate::engine) fn slot_bytes(&self, pool: u16) -> u64 {
        self.classes[usize::from(pool)].bytes()
    }

    pub(in crate::engine) fn share(&self, layer: u16, pool: u16) -> &Share {
        self.shares.get(&(layer, pool)).expect("slots are handed out for shares that have memory")
    }

    /// Layers with one share, if `all` experts have slots.
    pub(in crate::engine) fn layers_of_one_share(&self, all: bool) -> Vec<u16> {
        let mut layers: Vec<u16> = self.shares.keys().map(|(layer, _)| *layer).collect();
        layers.dedup();
        layers.retain(|&layer| all && self.only_share(layer).is_some());
        layers
    }

    fn only_share(&self, layer: u16) -> Option<&Share> {
        let mut shares = self.shares.range((layer, 0)..=(layer, u16::MAX)).map(|(_, share)| share);
        shares.next().filter(|_| shares.next().is_none())
    }

    /// The tensor of a layer that has one share.
    pub(in crate::engine) fn only_tensor(&self, layer: u16, kind: SliceKind) -> Option<*mut ggml_tensor> {
        self.only_share(layer).map(|share| share.tensor(kind))
    }

    pub(in crate::engine) fn kinds(&self, layer: u16, pool: u16) -> Vec<SliceKind> {
        self.share(layer, pool).kinds().collect()
    }

    pub(in crate::engine) fn staging_tensor(&self) -> *mut ggml_tensor {
        self.staging
    }

    pub(in crate::engine) fn staging_stride(&self) -> usize {
        self.staging_stride
    }

    pub(in crate::engine) fn n_staging(&self) -> usize {
        self.n_staging
    }

    /// First byte of a staging slot, on the device.
    pub(in crate::engine) fn staging_address(&self, slot: usize) -> *mut u8 {
        // SAFETY: the tensor is live as long as this value.
        unsafe { (*self.staging).data.cast::<u8>().wrapping_add(slot * self.staging_stride) }
    }
}

/// Bytes of a staging slot: room for any slice and what kernels read behind it.
pub(in crate::engine) fn staging_stride(classes: &[ExpertClass]) -> u64 {
    let slices = classes.iter().flat_map(|class| &class.slices);
    let largest = slices.map(|slice| slice.bytes + padding_bytes(slice) as u64).max().unwrap_or(0);
    largest.max(1).next_multiple_of(STAGING_ALIGNMENT)
}

/// Slots are weights, except on an RPC server: it would keep a copy on disk of every weight that is sent.
fn usage_of(dev: ggml_backend_dev_t) -> llama::ggml_backend_buffer_usage {
    match is_remote(dev) {
        true => llama::GGML_BACKEND_BUFFER_USAGE_ANY,
        false => llama::GGML_BACKEND_BUFFER_USAGE_WEIGHTS,
    }
}

/// Whether the device is an RPC server's.
pub(in crate::engine) fn is_remote(dev: ggml_backend_dev_t) -> bool {
    // SAFETY: a registered device; names are NUL-terminated and static.
    unsafe {
        let reg = llama::ggml_backend_dev_backend_reg(dev);
        !reg.is_null() && CStr::from_ptr(llama::ggml_backend_reg_name(reg)).to_bytes() == b"RPC"
    }
}
