//! Device memory that a region's nodes read and write beside the graph's own tensors: indices, gathered rows, results.

use std::ptr::NonNull;

use ggml_sys::llama::{self, GGML_STATUS_ALLOC_FAILED, ggml_backend_dev_t, ggml_tensor};

use super::Launch;
use crate::engine::offload::failure::Failed;
use crate::engine::offload::graph::tensor_at;
use crate::engine::tier::Tier;
use crate::engine::tier::stream::Stream;

/// Index tensors start at multiples of so many bytes.
pub(super) const INDEX_ALIGNMENT: usize = 256;

/// Scratch memory grows in steps of so many bytes.
const SCRATCH_STEP: usize = 1 << 20;

/// Device memory for indices, gathered rows and their results.
pub(super) struct Scratch {
    buffer: NonNull<llama::ggml_backend_buffer>,
    context: NonNull<llama::ggml_context>,
    pub(super) tensor: *mut ggml_tensor,
    pub(super) bytes: usize,
}

impl Scratch {
    pub(super) fn new(dev: ggml_backend_dev_t, bytes: usize) -> Option<Self> {
        // SAFETY: plain constructors on a live device; the results are checked.
        unsafe {
            let context = NonNull::new(llama::ggml_init(llama::ggml_init_params {
                mem_size: llama::ggml_tensor_overhead(),
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            }))?;
            let tensor = llama::ggml_new_tensor_1d(context.as_ptr(), llama::GGML_TYPE_I8, bytes as i64);
            let buft = llama::ggml_backend_dev_buffer_type(dev);
            match NonNull::new(llama::ggml_backend_alloc_ctx_tensors_from_buft(context.as_ptr(), buft)) {
                Some(buffer) => Some(Self { buffer, context, tensor, bytes }),
                None => {
                    llama::ggml_free(context.as_ptr());
                    None
                }
            }
        }
    }

    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: the tensor is live.
        unsafe { (*self.tensor).data.cast::<u8>().wrapping_add(offset) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once, the buffer before the tensor in it.
        unsafe {
            llama::ggml_backend_buffer_free(self.buffer.as_ptr());
            llama::ggml_free(self.context.as_ptr());
        }
    }
}

impl Launch {
    /// The place of indices in the scratch tensor, where they are before the graph being built runs.
    pub(super) fn index(&mut self, stream: &Stream, tier: &mut Tier, bytes: Vec<u8>) -> Result<usize, Failed> {
        if let Some(&place) = self.places.get(&bytes) {
            return Ok(place);
        }
        self.room(stream, tier, bytes.len().next_multiple_of(INDEX_ALIGNMENT), 0)?;
        let place = self.indices.len();
        self.indices.extend_from_slice(&bytes);
        self.indices.resize(self.indices.len().next_multiple_of(INDEX_ALIGNMENT), 0);
        self.places.insert(bytes, place);
        Ok(place)
    }

    /// As [`Launch::index`], and where so many bytes of rows have room.
    pub(super) fn indices<const N: usize>(
        &mut self,
        stream: &Stream,
        tier: &mut Tier,
        indices: [Vec<u8>; N],
        row_bytes: usize,
    ) -> Result<([usize; N], usize), Failed> {
        // Room for all of them: one must not take the place of another.
        let is_known = indices.iter().all(|bytes| self.places.contains_key(bytes));
        let index_bytes = |bytes: &Vec<u8>| bytes.len().next_multiple_of(INDEX_ALIGNMENT);
        let index_bytes = if is_known { 0 } else { indices.iter().map(index_bytes).sum() };
        let rows_at = self.room(stream, tier, index_bytes, row_bytes)?;
        let mut places = [0; N];
        for (place, bytes) in places.iter_mut().zip(indices) {
            *place = self.index(stream, tier, bytes)?;
        }
        Ok((places, rows_at))
    }

    /// Makes sure that so many more index bytes, and so many bytes of rows, have room. The rows' place.
    pub(super) fn room(
        &mut self,
        stream: &Stream,
        tier: &mut Tier,
        index_bytes: usize,
        row_bytes: usize,
    ) -> Result<usize, Failed> {
        if self.indices.len() + index_bytes > self.index_room {
            self.submit(stream, tier)?;
            self.forget_indices();
            self.index_room = self.index_room.max(index_bytes.next_power_of_two());
        }
        let bytes = self.index_room + row_bytes;
        if self.scratch.as_ref().is_none_or(|scratch| scratch.bytes < bytes) {
            // What has been built and submitted points into the old one.
            self.submit(stream, tier)?;
            stream.synchronize();
            self.settled();
            self.scratch = None;
            let bytes = bytes.next_multiple_of(SCRATCH_STEP);
            self.scratch = Scratch::new(self.dev, bytes);
            if self.scratch.is_none() && tier.shrink(stream, bytes as u64) > 0 {
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

    pub(super) fn scratch_tensor(&self, type_: llama::ggml_type, ne: [i64; 4], place: usize) -> ggml_tensor {
        let scratch = self.scratch.as_ref().expect("room was made");
        // SAFETY: the scratch tensor is live.
        let buffer = unsafe { (*scratch.tensor).buffer };
        tensor_at(type_, ne, scratch.at(place), buffer, Some(scratch.tensor))
    }
}
