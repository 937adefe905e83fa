//! What ggml has of buffer types for the CPU, and matrices and products in them.

use std::ffi::{CStr, c_int};
use std::mem;
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ggml_sys::llama::{self, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_tensor};
use hobbit_core::gguf::GgmlType;

/// A type of weights, and one matrix of them: row length and rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub dtype: GgmlType,
    pub n_per_row: usize,
    pub n_rows: usize,
}

impl Shape {
    /// `None` where rows are no whole blocks.
    pub fn bytes(self) -> Option<usize> {
        Some(self.dtype.row_bytes(self.n_per_row as u64)? as usize * self.n_rows)
    }

    fn type_(self) -> llama::ggml_type {
        self.dtype.id() as llama::ggml_type
    }
}

/// ggml's CPU.
pub struct Cpu {
    dev: ggml_backend_dev_t,
    backend: llama::ggml_backend_t,
    /// What llama.cpp tries for weights before ordinary memory, in its order.
    extra: Vec<ggml_backend_buffer_type_t>,
}

impl Cpu {
    pub fn new(n_threads: c_int) -> Result<Self> {
        ggml_sys::register_backends();
        // SAFETY: each result is checked before it is used. ggml fixes the types of the procedures that have these names
        // (ggml-backend.h), and null is `None`. The list of buffer types ends with null.
        unsafe {
            let dev = llama::ggml_backend_dev_by_type(llama::GGML_BACKEND_DEVICE_TYPE_CPU);
            ensure!(!dev.is_null(), "ggml has no CPU");
            let reg = llama::ggml_backend_dev_backend_reg(dev);
            let address = |name: &CStr| llama::ggml_backend_reg_get_proc_address(reg, name.as_ptr());
            let set_n_threads: llama::ggml_backend_set_n_threads_t =
                mem::transmute(address(c"ggml_backend_set_n_threads"));
            let extra: llama::ggml_backend_dev_get_extra_bufts_t =
                mem::transmute(address(c"ggml_backend_dev_get_extra_bufts"));
            let backend = llama::ggml_backend_dev_init(dev, ptr::null());
            ensure!(!backend.is_null(), "ggml's CPU refuses to start");
            set_n_threads.context("ggml's CPU takes no number of threads")?(backend, n_threads);
            let mut found = Vec::new();
            let mut next = extra.map_or(ptr::null_mut(), |extra| extra(dev));
            while !next.is_null() && !(*next).is_null() {
                found.push(*next);
                next = next.add(1);
            }
            Ok(Self { dev, backend, extra: found })
        }
    }

    /// Ordinary memory.
    pub fn plain(&self) -> ggml_backend_buffer_type_t {
        // SAFETY: a registered device.
        unsafe { llama::ggml_backend_dev_buffer_type(self.dev) }
    }

    /// The buffer type that llama.cpp puts weights of experts into, or else other weights, if it is not ordinary memory;
    /// and whether both operations are possible there: `MUL_MAT` and `MUL_MAT_ID`.
    pub fn repacking(&self, shape: Shape) -> Result<Option<(ggml_backend_buffer_type_t, [bool; 2])>> {
        let mut found = None;
        for &buft in &self.extra {
            let can = [self.supports(shape, buft, Operation::Plain)?, self.supports(shape, buft, Operation::ById)?];
            if can[1] {
                return Ok(Some((buft, can)));
            }
            if can[0] && found.is_none() {
                found = Some((buft, can));
            }
        }
        Ok(found)
    }

    /// As llama.cpp asks: with weights in an empty buffer.
    fn supports(&self, shape: Shape, buft: ggml_backend_buffer_type_t, operation: Operation) -> Result<bool> {
        let context = Context::new(4)?;
        // SAFETY: tensors of a live context; the buffer outlives the question.
        unsafe {
            let buffer = Buffer::new(llama::ggml_backend_buft_alloc_buffer(buft, 0))?;
            let n_experts = if operation == Operation::ById { 2 } else { 1 };
            let (ne0, ne1) = (shape.n_per_row as i64, shape.n_rows as i64);
            let weights = llama::ggml_new_tensor_3d(context.0.as_ptr(), shape.type_(), ne0, ne1, n_experts);
            (*weights).buffer = buffer.0.as_ptr();
            let product = context.product(operation, weights, 4);
            Ok(llama::ggml_backend_dev_supports_op(self.dev, product))
        }
    }

    /// Multiplies `input`, rows of the right length, by each of the matrices: everything into `result`, one over the other.
    pub fn multiply(
        &self,
        operation: Operation,
        matrices: &[*mut ggml_tensor],
        input: &mut [f32],
        result: &mut [f32],
    ) -> Result<Duration> {
        let context = Context::new(matrices.len() * 4)?;
        // SAFETY: matrices are live; input and result have the sizes that the first assertions see, and stay until the
        // graph has run.
        unsafe {
            let [ne0, ne1, ..] = (*matrices[0]).ne;
            let n = input.len() / ne0 as usize;
            ensure!(input.len() == n * ne0 as usize && result.len() == n * ne1 as usize, "rows of another length");
            let mut ids = vec![0i32; n];
            let graph = llama::ggml_new_graph_custom(context.0.as_ptr(), matrices.len(), false);
            for &matrix in matrices {
                let product = context.product(operation, matrix, n as i64);
                (*(*product).src[1]).data = input.as_mut_ptr().cast();
                if operation == Operation::ById {
                    (*(*product).src[2]).data = ids.as_mut_ptr().cast();
                }
                (*product).data = result.as_mut_ptr().cast();
                (*product).flags |= llama::GGML_TENSOR_FLAG_COMPUTE as i32;
                llama::ggml_graph_add_node(graph, product);
            }
            let started = Instant::now();
            let status = llama::ggml_backend_graph_compute(self.backend, graph);
            let time = started.elapsed();
            ensure!(status == llama::GGML_STATUS_SUCCESS, "ggml fails to multiply: status {status}");
            Ok(time)
        }
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { llama::ggml_backend_free(self.backend) };
    }
}

/// ggml's name of a buffer type.
pub fn name(buft: ggml_backend_buffer_type_t) -> String {
    // SAFETY: a registered buffer type, whose name is static text.
    unsafe { CStr::from_ptr(llama::ggml_backend_buft_name(buft)) }.to_string_lossy().into_owned()
}

/// How a matrix is multiplied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operation {
    /// `MUL_MAT`.
    Plain,
    /// `MUL_MAT_ID`, of one expert.
    ById,
}

/// Matrices of one shape, each a tensor of its own in one buffer.
pub struct Matrices {
    pub tensors: Vec<*mut ggml_tensor>,
    bytes: usize,
    // Freed in this order.
    _buffer: Buffer,
    _context: Context,
}

impl Matrices {
    pub fn new(shape: Shape, n: usize, buft: ggml_backend_buffer_type_t) -> Result<Self> {
        let context = Context::new(n)?;
        let (ne0, ne1) = (shape.n_per_row as i64, shape.n_rows as i64);
        // SAFETY: the context is live and has room for so many tensors, none of which has memory yet.
        unsafe {
            let tensor = |_| llama::ggml_new_tensor_2d(context.0.as_ptr(), shape.type_(), ne0, ne1);
            let tensors: Vec<_> = (0..n).map(tensor).collect();
            let buffer = Buffer::new(llama::ggml_backend_alloc_ctx_tensors_from_buft(context.0.as_ptr(), buft))?;
            Ok(Self { tensors, bytes: shape.bytes().context("no whole blocks")?, _buffer: buffer, _context: context })
        }
    }

    /// Writes a matrix as files have it. In a buffer type that rearranges weights, this does.
    pub fn set(&self, index: usize, bytes: &[u8]) -> Result<()> {
        ensure!(bytes.len() == self.bytes, "found {} bytes, expected {}", bytes.len(), self.bytes);
        // SAFETY: a live tensor of so many bytes.
        unsafe { llama::ggml_backend_tensor_set(self.tensors[index], bytes.as_ptr().cast(), 0, bytes.len()) };
        Ok(())
    }

    /// The bytes of a matrix, as they are in memory; of ordinary memory, as files have them.
    pub fn bytes(&self, index: usize) -> &[u8] {
        // SAFETY: the CPU's buffer types are memory of this process; a matrix in it has at least so many bytes, all set.
        unsafe { std::slice::from_raw_parts((*self.tensors[index]).data.cast(), self.bytes) }
    }
}

/// Random values, quantised.
pub fn quantised(shape: Shape, values: &[f32]) -> Result<Vec<u8>> {
    let bytes = shape.bytes().context("no whole blocks")?;
    ensure!(values.len() == shape.n_per_row * shape.n_rows, "values for another matrix");
    let mut out = vec![0; bytes];
    let ones = vec![1.0f32; shape.n_per_row];
    // SAFETY: values, importance and room for the shape's rows.
    let written = unsafe {
        let (rows, columns) = (shape.n_rows as i64, shape.n_per_row as i64);
        let (values, out) = (values.as_ptr(), out.as_mut_ptr().cast());
        llama::ggml_quantize_chunk(shape.type_(), values, out, 0, rows, columns, ones.as_ptr())
    };
    ensure!(written == bytes, "{}: {written} of {bytes} bytes were written", shape.dtype);
    Ok(out)
}

/// Tensors without memory.
struct Context(NonNull<llama::ggml_context>);

impl Context {
    fn new(n_tensors: usize) -> Result<Self> {
        // SAFETY: plain constructors; the result is checked.
        let raw = unsafe {
            llama::ggml_init(llama::ggml_init_params {
                mem_size: n_tensors * llama::ggml_tensor_overhead()
                    + llama::ggml_graph_overhead_custom(n_tensors.max(1), false),
                mem_buffer: ptr::null_mut(),
                no_alloc: true,
            })
        };
        NonNull::new(raw).map(Self).context("ggml refuses memory for tensors")
    }

    /// A product of `n` rows of floats; they, the ids and the result have no memory yet.
    ///
    /// # Safety
    /// `weights` is a live tensor.
    unsafe fn product(&self, operation: Operation, weights: *mut ggml_tensor, n: i64) -> *mut ggml_tensor {
        let context = self.0.as_ptr();
        // SAFETY: the context is live; shapes agree.
        unsafe {
            let columns = (*weights).ne[0];
            match operation {
                Operation::Plain => {
                    let input = llama::ggml_new_tensor_2d(context, llama::GGML_TYPE_F32, columns, n);
                    llama::ggml_mul_mat(context, weights, input)
                }
                Operation::ById => {
                    let input = llama::ggml_new_tensor_3d(context, llama::GGML_TYPE_F32, columns, 1, n);
                    let ids = llama::ggml_new_tensor_2d(context, llama::GGML_TYPE_I32, 1, n);
                    llama::ggml_mul_mat_id(context, weights, input, ids)
                }
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { llama::ggml_free(self.0.as_ptr()) };
    }
}

struct Buffer(NonNull<llama::ggml_backend_buffer>);

impl Buffer {
    fn new(raw: llama::ggml_backend_buffer_t) -> Result<Self> {
        NonNull::new(raw).map(Self).context("ggml refuses memory for weights")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { llama::ggml_backend_buffer_free(self.0.as_ptr()) };
    }
}
