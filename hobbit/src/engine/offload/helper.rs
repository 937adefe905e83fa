//! The CPU helper: computes some of a single token's missing experts from host memory, while the device computes the
//! others (HOBBIT's cooperative mode; SMoE, Algorithm 2).
//!
//! The helper repeats the nodes of a layer's region that work on one row: products, activation, biases. A region with
//! any other node is left to the device ([`Helper::can`]).

use std::collections::HashMap;
use std::ffi::c_int;
use std::ptr;

use ggml_sys::llama::{self, ggml_tensor};

use crate::engine::ggml::{Buffer, Stream};
use crate::engine::graph::{Inner, tensor_at};
use hobbit_core::expert::SliceKind;
use hobbit_core::gguf::SliceShape;

/// A node of a layer's region, and the matrix that it multiplies by, if it is a product. The last node is the last
/// product.
pub(super) type Node = (*mut ggml_tensor, Option<SliceKind>);

/// A CPU backend for single rows.
pub(super) struct Helper {
    inner: Inner,
    /// The buffer given for ordinary memory.
    buffer: Buffer,
    /// Copies of device tensors that regions read and that are never written: biases.
    leaves: HashMap<usize, Vec<u8>>,
    n_threads: c_int,
}

// SAFETY: owned; used by one thread at a time.
unsafe impl Send for Helper {}

impl Helper {
    /// `None` if ggml refuses a CPU backend.
    pub(super) fn new() -> Option<Self> {
        // SAFETY: takes nothing.
        let buffer = Buffer::new(unsafe { llama::ggml_backend_cpu_buffer_type() }, 64)?;
        Some(Self { inner: Inner::new()?, buffer, leaves: HashMap::new(), n_threads: 0 })
    }

    pub(super) fn set_n_threads(&mut self, n_threads: c_int) {
        if n_threads != self.n_threads {
            self.n_threads = n_threads;
            self.inner.set_n_threads(n_threads);
        }
    }

    /// Whether the helper can compute every node of a region row by row.
    ///
    /// # Safety
    /// Nodes of a live graph.
    pub(super) unsafe fn can(region: &[Node]) -> bool {
        let Some(&(first, _)) = region.first() else { return false };
        let mut known: Vec<*const ggml_tensor> = Vec::new();
        // SAFETY: by the caller; sources of a live node are live.
        unsafe {
            let input = (*first).src[1];
            for &(node, kind) in region {
                let node = &*node;
                let is_row = |src: *mut ggml_tensor| src == input || known.contains(&src.cast_const());
                let [a, b, ids] = [node.src[0], node.src[1], node.src[2]];
                let can = match (kind, node.op) {
                    (Some(_), _) => is_row(b),
                    (None, llama::GGML_OP_GLU) => is_row(a) && (b.is_null() || is_row(b)),
                    (None, llama::GGML_OP_ADD_ID) => is_row(a) && is_leaf(b) && !ids.is_null(),
                    (None, llama::GGML_OP_UNARY | llama::GGML_OP_CLAMP | llama::GGML_OP_SCALE | llama::GGML_OP_SQR) => {
                        is_row(a)
                    }
                    (None, llama::GGML_OP_VIEW) => {
                        is_row(node.view_src) && node.view_src != input && node.nb[1] == (*node.view_src).nb[1]
                    }
                    _ => false,
                };
                if !can || node.type_ != llama::GGML_TYPE_F32 || (*input).type_ != llama::GGML_TYPE_F32 {
                    return false;
                }
                known.push(ptr::from_ref(node));
            }
        }
        true
    }

    /// Computes one expert's row of a region's last product. `input`: the row of the first product's input. `weights`:
    /// each matrix's bytes and shape.
    ///
    /// # Safety
    /// The helper can compute the region; the weights are valid; `stream` has run the nodes that made the leaves.
    pub(super) unsafe fn row(
        &mut self,
        stream: &Stream,
        region: &[Node],
        input: &mut [f32],
        expert: u16,
        weights: &dyn Fn(SliceKind) -> (*const u8, SliceShape),
    ) -> Option<Vec<f32>> {
        let mut rows: HashMap<usize, ggml_tensor> = HashMap::new();
        let mut memory: Vec<Vec<f32>> = Vec::new();
        // One address each: borrowing an array again would invalidate the addresses in nodes.
        let (mut zero, mut index) = ([0i32; 4], [i32::from(expert); 4]);
        let (zero, index) = (zero.as_mut_ptr().cast(), index.as_mut_ptr().cast());
        // SAFETY: by the caller; memory, ids and weights outlive the run below.
        unsafe {
            let (first, _) = region[0];
            let row = self.floats((*first).src[1], input.as_mut_ptr());
            rows.insert((*first).src[1] as usize, row);
            for &(node, kind) in region {
                let original = &*node;
                if original.op == llama::GGML_OP_VIEW {
                    let whole = rows[&(original.view_src as usize)];
                    let mut part = whole;
                    part.ne[0] = original.ne[0];
                    part.data = whole.data.cast::<u8>().add(original.view_offs % original.nb[1]).cast();
                    rows.insert(node as usize, part);
                    continue;
                }
                memory.push(vec![0.0; original.ne[0] as usize]);
                let data = memory.last_mut().expect("just pushed").as_mut_ptr();
                let mut made = self.floats(node, data);
                made.op = original.op;
                made.op_params = original.op_params;
                made.flags = original.flags;
                match kind {
                    Some(kind) => {
                        let (data, shape) = weights(kind);
                        let ne = [shape.ne0 as i64, shape.ne1 as i64, 1, 1];
                        let type_ = shape.dtype.id() as llama::ggml_type;
                        let slice = self.host(type_, ne, data.cast_mut());
                        made.src[0] = self.inner.tensor(slice);
                        made.src[1] = self.inner.tensor(rows[&(original.src[1] as usize)]);
                        let ids = self.host(llama::GGML_TYPE_I32, [1; 4], zero);
                        made.src[2] = self.inner.tensor(ids);
                    }
                    None => {
                        made.src[0] = self.inner.tensor(rows[&(original.src[0] as usize)]);
                        if original.op == llama::GGML_OP_ADD_ID {
                            let bias = self.leaf(stream, original.src[1]);
                            made.src[1] = self.inner.tensor(bias);
                            let ids = self.host(llama::GGML_TYPE_I32, [1; 4], index);
                            made.src[2] = self.inner.tensor(ids);
                        } else if !original.src[1].is_null() {
                            made.src[1] = self.inner.tensor(rows[&(original.src[1] as usize)]);
                        }
                    }
                }
                rows.insert(node as usize, made);
                let made = self.inner.tensor(made);
                self.inner.add(made);
            }
        }
        if self.inner.run() != llama::GGML_STATUS_SUCCESS {
            self.inner.discard();
            return None;
        }
        memory.pop()
    }

    /// # Safety
    /// `like` is live.
    unsafe fn floats(&self, like: *const ggml_tensor, data: *mut f32) -> ggml_tensor {
        // SAFETY: by the caller.
        let n = unsafe { (*like).ne[0] };
        self.host(llama::GGML_TYPE_F32, [n, 1, 1, 1], data.cast())
    }

    fn host(&self, type_: llama::ggml_type, ne: [i64; 4], data: *mut u8) -> ggml_tensor {
        tensor_at(type_, ne, data, self.buffer.raw(), None)
    }

    /// # Safety
    /// `tensor` is a live leaf on the device of `stream`.
    unsafe fn leaf(&mut self, stream: &Stream, tensor: *mut ggml_tensor) -> ggml_tensor {
        // SAFETY: by the caller.
        let tensor = unsafe { &*tensor };
        let bytes = self.leaves.entry(ptr::from_ref(tensor) as usize).or_insert_with(|| {
            // SAFETY: as above; the stream is waited for before the bytes are used.
            unsafe {
                let mut bytes: Vec<u8> = vec![0; llama::ggml_nbytes(tensor)];
                stream.get(tensor, &mut bytes);
                stream.synchronize();
                bytes
            }
        });
        let data = bytes.as_mut_ptr();
        self.host(tensor.type_, tensor.ne, data)
    }
}

/// Whether a tensor is a weight, not a node.
///
/// # Safety
/// `tensor` is null or live.
unsafe fn is_leaf(tensor: *const ggml_tensor) -> bool {
    // SAFETY: by the caller.
    unsafe { tensor.as_ref() }.is_some_and(|tensor| tensor.op == llama::GGML_OP_NONE)
}
