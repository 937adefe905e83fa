//! A graph from its submission to its execution, and the CPU backend that runs it.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use ggml_sys::llama::{self, ggml_backend_t, ggml_cgraph, ggml_tensor};

use crate::Options;
use crate::memory::{DeviceMemory, Mapping, UNWRITTEN, buffer_of, memory_of, row_padding};
use crate::shared::Shared;

/// Copies of a graph's nodes and of their sources, pointing at real memory.
pub(crate) struct Captured {
    /// Sources point into this, which is not changed any more.
    tensors: Vec<ggml_tensor>,
    /// Which of them to run, in order, and the memory their weights lie in, whose padding kernels would read.
    nodes: Vec<(usize, Option<Padded>)>,
    /// Keeps the memory of `tensors`.
    _memories: Vec<Arc<DeviceMemory>>,
}

// SAFETY: owns its tensors; the memory behind them is shared between streams as on a GPU.
unsafe impl Send for Captured {}

/// Memory with padding behind weights.
enum Padded {
    Device(Arc<DeviceMemory>),
    /// Host memory with experts.
    Host(Arc<Mapping>),
}

/// The result of running a graph.
#[derive(Default)]
pub(crate) struct Ran {
    /// Virtual seconds.
    pub(crate) seconds: f64,
    pub(crate) faults: Vec<String>,
}

struct Capture<'a> {
    shared: &'a Shared,
    tensors: Vec<ggml_tensor>,
    index: HashMap<*mut ggml_tensor, usize>,
    memories: Vec<Arc<DeviceMemory>>,
}

impl Captured {
    /// Copies all that is needed to run `graph` later.
    ///
    /// # Errors
    /// Names a node that reads or writes memory that the device cannot reach.
    ///
    /// # Safety
    /// `graph` is live, and so are its nodes, their sources and their buffers.
    pub(crate) unsafe fn new(graph: *mut ggml_cgraph, shared: &Shared) -> Result<Captured, String> {
        let mut capture = Capture { shared, tensors: Vec::new(), index: HashMap::new(), memories: Vec::new() };
        let mut nodes = Vec::new();
        // SAFETY: by the caller.
        unsafe {
            for i in 0..llama::ggml_graph_n_nodes(graph) {
                let node = &mut *llama::ggml_graph_node(graph, i);
                if !runs(node) {
                    continue;
                }
                let at = capture.tensor(node)?;
                let weights = is_product(node).then(|| node.src[0].as_ref()).flatten().filter(|w| is_padded(w));
                nodes.push((at, weights.and_then(|weights| padded(node, weights, shared))));
                for src in node.src.into_iter().filter(|src| !src.is_null()) {
                    capture.tensor(&mut *src)?;
                }
            }
        }
        let mut tensors = capture.tensors;
        let (base, len) = (tensors.as_mut_ptr(), tensors.len());
        let moved = |old: *mut ggml_tensor| capture.index.get(&old).map_or(ptr::null_mut(), |i| base.wrapping_add(*i));
        for at in 0..len {
            // SAFETY: one of the tensors, by the address that sources keep.
            unsafe {
                let tensor = &mut *base.add(at);
                tensor.src = tensor.src.map(moved);
                tensor.view_src = moved(tensor.view_src);
            }
        }
        Ok(Captured { tensors, nodes, _memories: capture.memories })
    }
}

impl Capture<'_> {
    /// The index of the copy of `tensor`.
    ///
    /// # Safety
    /// `tensor` is live, and so are its view source and buffers.
    unsafe fn tensor(&mut self, tensor: &mut ggml_tensor) -> Result<usize, String> {
        let key: *mut ggml_tensor = tensor;
        if let Some(&at) = self.index.get(&key) {
            return Ok(at);
        }
        let mut copy = *tensor;
        copy.extra = ptr::null_mut();
        // SAFETY: by the caller.
        unsafe {
            if let Some(memory) = memory_of(tensor, self.shared.buffer_type()) {
                copy.data = memory
                    .real(tensor.data, llama::ggml_nbytes(tensor))
                    .ok_or_else(|| format!("tensor {} leaves its buffer", name(tensor)))?
                    .cast();
                copy.buffer = memory.cpu_buffer();
                if !self.memories.iter().any(|known| Arc::ptr_eq(known, memory)) {
                    self.memories.push(Arc::clone(memory));
                }
            } else if !(self.shared.options().unified && self.shared.is_host_memory(tensor.data.cast())) {
                let buffer = buffer_of(tensor);
                let place = if buffer.is_null() {
                    "no buffer".into()
                } else {
                    CStr::from_ptr(llama::ggml_backend_buffer_name(buffer)).to_string_lossy()
                };
                return Err(format!("tensor {} is not in device memory but in {place}", name(tensor)));
            }
        }
        let at = self.tensors.len();
        self.index.insert(key, at);
        self.tensors.push(copy);
        if !tensor.view_src.is_null() {
            // SAFETY: by the caller. Kernels may look at a view's root, never at the root's sources.
            unsafe { self.tensor(&mut *tensor.view_src)? };
        }
        Ok(at)
    }
}

/// Whether there is something to compute.
fn runs(node: &ggml_tensor) -> bool {
    let nothing = [
        llama::GGML_OP_NONE,
        llama::GGML_OP_VIEW,
        llama::GGML_OP_RESHAPE,
        llama::GGML_OP_PERMUTE,
        llama::GGML_OP_TRANSPOSE,
    ];
    // SAFETY: reads the tensor's shape.
    let empty = unsafe { llama::ggml_is_empty(node) };
    !empty && !nothing.contains(&node.op) && node.flags & llama::GGML_TENSOR_FLAG_COMPUTE as i32 != 0
}

fn is_product(node: &ggml_tensor) -> bool {
    matches!(node.op, llama::GGML_OP_MUL_MAT | llama::GGML_OP_MUL_MAT_ID)
}

/// Rounds a product's results to 15 bits.
///
/// # Safety
/// The node's result is live.
unsafe fn round(node: &ggml_tensor) {
    let [n0, n1, n2, n3] = node.ne.map(|n| n as usize);
    for row in 0..n1 * n2 * n3 {
        let at = row % n1 * node.nb[1] + row / n1 % n2 * node.nb[2] + row / n1 / n2 * node.nb[3];
        for column in 0..n0 {
            // SAFETY: by the caller; a product's type is F32.
            unsafe {
                let value = node.data.cast::<u8>().add(at + column * node.nb[0]).cast::<f32>();
                *value = f32::from_bits(((*value).to_bits() + 0x100) & !0x1ff);
            }
        }
    }
}

/// Whether padding behind these weights must be clean. In compute buffers, where ggml's scheduler copies weights, CUDA
/// cleans it itself.
///
/// # Safety
/// The tensor's view source and buffer are live.
unsafe fn is_padded(weights: &ggml_tensor) -> bool {
    // SAFETY: by the caller.
    unsafe {
        let buffer = buffer_of(weights);
        row_padding(weights) > 0
            && !buffer.is_null()
            && llama::ggml_backend_buffer_get_usage(buffer) != llama::GGML_BACKEND_BUFFER_USAGE_COMPUTE
    }
}

/// The memory of a product's weights.
///
/// # Safety
/// The weights' view source and buffer are live.
unsafe fn padded(node: &ggml_tensor, weights: &ggml_tensor, shared: &Shared) -> Option<Padded> {
    // SAFETY: by the caller.
    if let Some(memory) = unsafe { memory_of(weights, shared.buffer_type()) } {
        return Some(Padded::Device(Arc::clone(memory)));
    }
    let experts = (node.op == llama::GGML_OP_MUL_MAT_ID).then_some(weights)?;
    shared.host_mapping(experts.data.cast(), 1).map(Padded::Host)
}

fn name(tensor: &ggml_tensor) -> String {
    // SAFETY: ggml keeps names NUL-terminated.
    unsafe { CStr::from_ptr(tensor.name.as_ptr()) }.to_string_lossy().into_owned()
}

/// A CPU backend and a graph of one node.
pub(crate) struct Engine {
    cpu: ggml_backend_t,
    context: *mut llama::ggml_context,
    graph: *mut ggml_cgraph,
}

// SAFETY: used by one thread at a time.
unsafe impl Send for Engine {}

impl Engine {
    /// `None` where ggml has no CPU backend.
    pub(crate) fn new() -> Option<Engine> {
        // SAFETY: plain calls of ggml's API; every pointer is checked before it is used.
        unsafe {
            let device = llama::ggml_backend_dev_by_type(llama::GGML_BACKEND_DEVICE_TYPE_CPU);
            let reg = llama::ggml_backend_dev_backend_reg((!device.is_null()).then_some(device)?);
            let cpu = llama::ggml_backend_dev_init(device, ptr::null());
            if cpu.is_null() {
                return None;
            }
            let set = llama::ggml_backend_reg_get_proc_address(reg, c"ggml_backend_set_n_threads".as_ptr());
            if !set.is_null() {
                let set: unsafe extern "C" fn(ggml_backend_t, i32) = std::mem::transmute(set);
                set(cpu, 1);
            }
            let context = llama::ggml_init(llama::ggml_init_params {
                mem_size: llama::ggml_graph_overhead_custom(1, false) + 256,
                mem_buffer: ptr::null_mut(),
                no_alloc: true,
            });
            let graph = llama::ggml_new_graph_custom(context, 1, false);
            Some(Engine { cpu, context, graph })
        }
    }

    /// Runs a captured graph. A product whose slices or padding are not in order is not computed: its result
    /// becomes NaN.
    pub(crate) fn run(&self, graph: &mut Captured, options: &Options) -> Ran {
        let mut ran = Ran::default();
        for (at, weights) in &graph.nodes {
            // SAFETY: the index is from `Captured::new`, whose tensors do not move; sources are in the same slice.
            let node = unsafe { &mut *graph.tensors.as_mut_ptr().add(*at) };
            match touched(node, options).and_then(|touched| {
                check_padding(node, &touched.ends, weights.as_ref())?;
                Ok(touched.bytes)
            }) {
                Ok(bytes) => {
                    ran.seconds += options.node_latency + bytes as f64 / options.compute_bandwidth;
                    // SAFETY: the node and its sources lie in host memory that lives as long as `graph`.
                    let status = unsafe {
                        llama::ggml_graph_clear(self.graph);
                        llama::ggml_graph_add_node(self.graph, node);
                        llama::ggml_backend_graph_compute(self.cpu, self.graph)
                    };
                    if options.rounds_products && is_product(node) {
                        // SAFETY: just computed, and contiguous unless it is a view of something contiguous.
                        unsafe { round(node) };
                    }
                    if status != llama::GGML_STATUS_SUCCESS {
                        ran.faults.push(format!("the CPU backend fails on node {} with {status}", name(node)));
                    }
                }
                Err(fault) => {
                    ran.faults.push(fault);
                    // SAFETY: `Captured::new` checked that the node's bytes are in its buffer.
                    unsafe { ptr::write_bytes(node.data.cast::<u8>(), UNWRITTEN, llama::ggml_nbytes(node)) };
                }
            }
        }
        ran
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe {
            llama::ggml_free(self.context);
            llama::ggml_backend_free(self.cpu);
        }
    }
}

/// Bytes that a node reads and that count, and the ends of the matrices it multiplies by.
struct Touched {
    bytes: usize,
    ends: Vec<*const u8>,
}

/// Ids are read now: they may be the work of the node before, and be overwritten by one after.
fn touched(node: &ggml_tensor, options: &Options) -> Result<Touched, String> {
    // SAFETY: a node of a product has weights and activations, and ids if it is a `MUL_MAT_ID`; all captured.
    unsafe {
        let weights = node.src[0].as_ref();
        match (node.op, weights) {
            (llama::GGML_OP_MUL_MAT, Some(weights)) => {
                let bytes = llama::ggml_nbytes(weights);
                Ok(Touched { bytes, ends: vec![weights.data.cast::<u8>().add(bytes)] })
            }
            (llama::GGML_OP_MUL_MAT_ID, Some(weights)) => {
                let slice = weights.nb[1] * weights.ne[1] as usize;
                let used = ids(node, options.forbids_repeats)?;
                let end = |id: &i64| weights.data.cast::<u8>().add(*id as usize * weights.nb[2] + slice).cast_const();
                Ok(Touched { bytes: used.len() * slice, ends: used.iter().map(end).collect() })
            }
            // The node is all of its target; it writes its source.
            (llama::GGML_OP_SET_ROWS, Some(rows)) => Ok(Touched { bytes: llama::ggml_nbytes(rows), ends: Vec::new() }),
            _ => Ok(Touched { bytes: llama::ggml_nbytes(node), ends: Vec::new() }),
        }
    }
}

/// The distinct slices a `MUL_MAT_ID` uses.
///
/// # Safety
/// `node` is a captured `MUL_MAT_ID`.
unsafe fn ids(node: &ggml_tensor, forbids_repeats: bool) -> Result<HashSet<i64>, String> {
    // SAFETY: by the caller: weights and ids are there, and ids are I32 `[n_used, n_tokens]` with strides.
    unsafe {
        let (weights, ids) = (&*node.src[0], &*node.src[2]);
        let takes_repeats = !forbids_repeats || ids.ne[1] == 1 && llama::ggml_is_quantized(weights.type_);
        let mut used = HashSet::new();
        for token in 0..ids.ne[1] as usize {
            let mut of_token = HashSet::new();
            for rank in 0..ids.ne[0] as usize {
                let id = ids.data.cast::<u8>().add(token * ids.nb[1] + rank * ids.nb[0]).cast::<i32>();
                let id = i64::from(id.read_unaligned());
                if !(0..weights.ne[2]).contains(&id) {
                    return Err(format!("node {} asks for slice {id} of {}", name(node), weights.ne[2]));
                }
                if !of_token.insert(id) && !takes_repeats {
                    return Err(format!("node {}: token {token} uses slice {id} twice", name(node)));
                }
            }
            used.extend(of_token);
        }
        Ok(used)
    }
}

/// CUDA kernels read whole multiples of 512 values, so behind a matrix there must be memory, and no NaN in it.
fn check_padding(node: &ggml_tensor, ends: &[*const u8], memory: Option<&Padded>) -> Result<(), String> {
    let Some(memory) = memory else { return Ok(()) };
    // SAFETY: a product has weights, and they were captured.
    let padding = row_padding(unsafe { &*node.src[0] });
    for &end in ends {
        let is_there = match memory {
            Padded::Device(memory) => memory.holds_real(end, padding),
            Padded::Host(memory) => memory.contains(end, padding),
        };
        if !is_there {
            return Err(format!("node {}: no room for {padding} bytes of padding behind its weights", name(node)));
        }
        // SAFETY: just checked to be in the buffer.
        let bytes = unsafe { std::slice::from_raw_parts(end, padding) };
        let fault = match memory {
            Padded::Device(_) => bytes.iter().all(|&byte| byte == UNWRITTEN).then_some("was never written"),
            Padded::Host(_) => bytes.iter().any(|&byte| byte != 0).then_some("is not zero"),
        };
        if let Some(fault) = fault {
            return Err(format!("node {}: the padding behind its weights {fault}", name(node)));
        }
    }
    Ok(())
}
