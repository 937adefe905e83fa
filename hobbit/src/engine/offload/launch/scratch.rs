//! Device memory that a region's nodes read and write besides the graph's own tensors: indices, gathered rows, results.

use ggml_sys::llama::{self, GGML_STATUS_ALLOC_FAILED, ggml_backend_dev_t, ggml_tensor};

use super::Launch;
use crate::engine::ggml::{Buffer, Context};
use crate::engine::graph::tensor_at;
use crate::engine::split::Failed;
use crate::engine::tier::Tier;

/// Alignment of index tensors in bytes.
pub(super) const INDEX_ALIGNMENT: usize = 256;

/// Scratch memory grows in steps of this many bytes.
const SCRATCH_STEP: usize = 1 << 20;

/// Device memory for indices, gathered rows and their results.
pub(super) struct Scratch {
    pub(super) tensor: *mut ggml_tensor,
    bytes: usize,
    _memory: (Buffer, Context),
}

impl Scratch {
    fn new(dev: ggml_backend_dev_t, bytes: usize) -> Option<Self> {
        let context = Context::new(1, 0)?;
        let tensor = context.tensor(llama::GGML_TYPE_I8, [bytes as i64, 1, 1]);
        // SAFETY: a registered device.
        let buffer = context.allocate(unsafe { llama::ggml_backend_dev_buffer_type(dev) })?;
        Some(Self { tensor, bytes, _memory: (buffer, context) })
    }
}

impl Launch {
    /// The place of indices in the scratch tensor, where they are before the graph being built runs. The caller makes
    /// room.
    pub(super) fn place(&mut self, bytes: Vec<u8>) -> usize {
        if let Some(&place) = self.places.get(&bytes) {
            return place;
        }
        let place = self.indices.len();
        self.indices.extend_from_slice(&bytes);
        self.indices.resize(self.indices.len().next_multiple_of(INDEX_ALIGNMENT), 0);
        self.places.insert(bytes, place);
        place
    }

    /// The places of indices, and the place of `row_bytes` bytes of rows.
    pub(super) fn indices<const N: usize>(
        &mut self,
        tier: &mut Tier,
        indices: [Vec<u8>; N],
        row_bytes: usize,
    ) -> Result<([usize; N], usize), Failed> {
        // Room for all of them at once: one must not overwrite another.
        let is_known = indices.iter().all(|bytes| self.places.contains_key(bytes));
        let index_bytes = |bytes: &Vec<u8>| bytes.len().next_multiple_of(INDEX_ALIGNMENT);
        let index_bytes = if is_known { 0 } else { indices.iter().map(index_bytes).sum() };
        let rows_at = self.room(tier, index_bytes, row_bytes)?;
        Ok((indices.map(|bytes| self.place(bytes)), rows_at))
    }

    /// Makes room for `index_bytes` more index bytes and `row_bytes` bytes of rows. Returns the rows' place.
    pub(super) fn room(&mut self, tier: &mut Tier, index_bytes: usize, row_bytes: usize) -> Result<usize, Failed> {
        if self.indices.len() + index_bytes > self.index_room {
            self.submit(tier)?;
            self.forget_indices();
            self.index_room = self.index_room.max(index_bytes.next_power_of_two());
        }
        let bytes = self.index_room + row_bytes;
        if self.scratch.as_ref().is_none_or(|scratch| scratch.bytes < bytes) {
            // Submitted work and the graph being built point into the old memory.
            self.submit(tier)?;
            self.synchronize();
            self.scratch = None;
            let bytes = bytes.next_multiple_of(SCRATCH_STEP);
            self.scratch = Scratch::new(self.dev, bytes);
            if self.scratch.is_none() && tier.shrink(&self.stream, bytes as u64) > 0 {
                self.scratch = Scratch::new(self.dev, bytes);
            }
            if self.scratch.is_none() {
                return Err(GGML_STATUS_ALLOC_FAILED);
            }
            self.sent = 0;
        }
        Ok(self.index_room)
    }

    pub(super) fn indices_at(&mut self, place: usize, type_: llama::ggml_type, ne: [i64; 2]) -> *mut ggml_tensor {
        let tensor = self.scratch_tensor(type_, [ne[0], ne[1], 1, 1], place);
        self.graph.tensor(tensor)
    }

    pub(super) fn floats_at(&self, place: usize, ne: [i64; 3]) -> ggml_tensor {
        self.scratch_tensor(llama::GGML_TYPE_F32, [ne[0], ne[1], ne[2], 1], place)
    }

    fn scratch_tensor(&self, type_: llama::ggml_type, ne: [i64; 4], place: usize) -> ggml_tensor {
        let whole = self.scratch.as_ref().expect("room was made").tensor;
        // SAFETY: the scratch tensor is live.
        let (data, buffer) = unsafe { ((*whole).data.cast::<u8>().wrapping_add(place), (*whole).buffer) };
        tensor_at(type_, ne, data, buffer, Some(whole))
    }
}
