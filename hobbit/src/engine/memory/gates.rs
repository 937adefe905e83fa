//! Takes a model's routers from its running graphs, so that [`GateStack`] can predict the choices of layers that have
//! not run yet. A float matrix in host memory is read in place; others are copied, and [`copied_bytes`] gives the plan
//! the size of the copies.

use std::ffi::CStr;
use std::sync::Arc;

use ggml_sys::llama::{self, ggml_tensor};

use crate::engine::ggml::graph::{is_view, overlap};
use crate::engine::ggml::quantise::Ggml;
use hobbit_core::gguf::{GgmlType, Gguf, Recode};
use hobbit_core::predict::{Gate, GateRows, GateStack, Gating, Groups};

/// Maximum number of nodes between the router's logits and its choice.
const DEPTH_MAX: usize = 24;

/// The nodes of one layer's router in a graph.
struct Router {
    /// `[width, n_expert]` times the input.
    product: *mut ggml_tensor,
    bias: Option<*mut ggml_tensor>,
    choice_bias: Option<*mut ggml_tensor>,
    gating: Gating,
    groups: Option<Groups>,
}

/// Learns the router that made the choice `ids`. Returns `false` if this module does not understand it: the layer then
/// gets no predictions.
///
/// # Safety
/// A live node of a graph; weights are allocated.
pub(crate) unsafe fn learn(gates: &mut GateStack, layer: u16, ids: *mut ggml_tensor, n_expert: usize) -> bool {
    // SAFETY: by the caller; sources of a live node are live.
    unsafe {
        let Some(router) = router_of(ids) else { return false };
        let weights = (*router.product).src[0];
        let (width, rows) = ((*weights).ne[0] as usize, (*weights).ne[1] as usize);
        if rows != n_expert || !gates.takes(width, n_expert) {
            return false;
        }
        let lent = Lent::of(weights).map(|lent| Arc::new(lent) as Arc<dyn GateRows>);
        let Some(rows) = lent.or_else(|| Some(Arc::new(floats_of(weights)?))) else { return false };
        let vector = |tensor: Option<*mut ggml_tensor>| match tensor {
            None => Some(None),
            Some(tensor) => floats_of(tensor).filter(|bias| bias.len() == n_expert).map(Some),
        };
        let (Some(bias), Some(choice_bias)) = (vector(router.bias), vector(router.choice_bias)) else {
            return false;
        };
        let Router { gating, groups, .. } = router;
        gates.add(layer, width, Gate { rows, bias, choice_bias, gating, groups })
    }
}

/// Finds the router behind a choice: goes up from the choice to the first product named as a router's.
///
/// # Safety
/// A live node.
unsafe fn router_of(ids: *mut ggml_tensor) -> Option<Router> {
    let mut router =
        Router { product: std::ptr::null_mut(), bias: None, choice_bias: None, gating: Gating::Softmax, groups: None };
    let mut level = vec![ids];
    for _ in 0..DEPTH_MAX {
        let mut above: Vec<*mut ggml_tensor> = Vec::new();
        for &node in &level {
            // SAFETY: by the caller; sources of a live node are live.
            unsafe {
                let op = (*node).op;
                let name = CStr::from_ptr((*node).name.as_ptr()).to_bytes();
                let is_logits = name.starts_with(b"ffn_moe_logits");
                if name.starts_with(b"ffn_moe_group_topk") && !(*node).view_src.is_null() {
                    let n = (*(*node).view_src).ne[0] as usize;
                    router.groups = Some(Groups { n, n_used: (*node).ne[0] as usize });
                }
                if op == llama::GGML_OP_MUL_MAT {
                    if is_logits {
                        router.product = node;
                        return Some(router);
                    }
                    continue;
                }
                if op == llama::GGML_OP_UNARY {
                    match llama::ggml_get_unary_op(node) {
                        llama::GGML_UNARY_OP_SIGMOID => router.gating = Gating::Sigmoid,
                        llama::GGML_UNARY_OP_SOFTPLUS => router.gating = Gating::SqrtSoftplus,
                        _ => {}
                    }
                }
                if op == llama::GGML_OP_ADD && is_vector((*node).src[1]) {
                    // Above the activation it is the router's own bias; below, it affects the choice only. Without an
                    // activation, llama.cpp names the biased logits as it names probabilities.
                    let is_own = is_logits || (*(*node).src[0]).op == llama::GGML_OP_MUL_MAT;
                    let bias = if is_own { &mut router.bias } else { &mut router.choice_bias };
                    *bias = Some((*node).src[1]);
                }
                let sources = (*node).src.iter().copied().chain([(*node).view_src]);
                for source in sources.filter(|source| !source.is_null()) {
                    if !above.contains(&source) {
                        above.push(source);
                    }
                }
            }
        }
        if above.is_empty() {
            return None;
        }
        level = above;
    }
    None
}

/// Maximum number of nodes between a router's logits and the layer's first expert product.
const NODES_MAX: usize = 64;

/// Position of the node of a router's logits, with the router's bias, `[n_expert, n_tokens]`. `before`: nodes before
/// the first expert product of `layer`.
///
/// # Safety
/// Live nodes of a graph.
pub(crate) unsafe fn logits_of(before: &[*mut ggml_tensor], layer: u16) -> Option<usize> {
    let is_logits = |&node: &*mut ggml_tensor| {
        // SAFETY: by the caller; ggml keeps names NUL-terminated.
        let (op, name) = unsafe { ((*node).op, CStr::from_ptr((*node).name.as_ptr()).to_str()) };
        let Some((stem, number)) = name.ok().and_then(|name| name.rsplit_once('-')) else { return false };
        let is_known = match stem {
            "ffn_moe_logits" | "ffn_moe_logits_biased" => true,
            // Without an activation, llama.cpp names the logits as it names probabilities.
            "ffn_moe_probs" => matches!(op, llama::GGML_OP_MUL_MAT | llama::GGML_OP_ADD),
            _ => false,
        };
        is_known && number.parse() == Ok(layer)
    };
    let first = before.len().saturating_sub(NODES_MAX);
    before[first..].iter().rposition(is_logits).map(|position| first + position)
}

/// The router's logits of `n_expert` experts, dense floats. `None` if they are not known, or a later node has
/// overwritten them: ggml reuses the memory of tensors that no later node reads.
///
/// # Safety
/// `before` are live, allocated nodes of a graph that have been submitted, in this order, and no others since.
pub(crate) unsafe fn intact_logits(
    before: &[*mut ggml_tensor],
    layer: u16,
    n_expert: usize,
) -> Option<*mut ggml_tensor> {
    // SAFETY: by the caller.
    unsafe {
        let position = logits_of(before, layer)?;
        let logits = before[position];
        let is_plain = (*logits).type_ == llama::GGML_TYPE_F32 && llama::ggml_is_contiguous(logits);
        let mut later = before[position + 1..].iter().filter(|&&node| !is_view((*node).op));
        let is_overwritten = later.any(|&node| overlap(node, logits));
        (is_plain && (*logits).ne[0] as usize == n_expert && !is_overwritten).then_some(logits)
    }
}

/// Whether the weights of a choice are scaled so that their sum does not depend on the chosen experts (to 1, then by a
/// constant), in a graph that looks up the weights of exactly these `ids`. `None` if the weights are made in another
/// way: experts that stand for groups of others, or weights that are not a router's.
///
/// # Safety
/// Live nodes of a graph.
pub(crate) unsafe fn normalises(weights: *mut ggml_tensor, ids: *mut ggml_tensor) -> Option<bool> {
    let (mut node, mut normalises) = (weights, false);
    for _ in 0..DEPTH_MAX {
        // SAFETY: by the caller; sources of a live node are live.
        unsafe {
            match (*node).op {
                llama::GGML_OP_GET_ROWS => return same((*node).src[1], ids).then_some(normalises),
                llama::GGML_OP_DIV | llama::GGML_OP_SOFT_MAX => normalises = true,
                llama::GGML_OP_SCALE | llama::GGML_OP_RESHAPE | llama::GGML_OP_VIEW | llama::GGML_OP_CONT => {}
                // A device's copy of another device's result has a name and no sources.
                _ => return None,
            }
            node = (*node).src[0];
            if node.is_null() {
                return None;
            }
        }
    }
    None
}

/// Maximum number of nodes that make the experts' input of the router's.
const PATH_MAX: usize = 4;

/// The input `[width, n_tokens]` of the router that made the choice `ids`, if it is unchanged when the layer's first
/// `product` begins. Experts may get the same input, or one that is made of it: a projection where experts are latent.
///
/// The tensor keeps its memory until its last reader has run. If that makes the experts' input, llama.cpp runs nothing
/// afterwards but the nodes between that reader and `product`, so only those may have taken the memory.
///
/// # Safety
/// Live, allocated nodes of a graph, all of those before `product` computed and none behind.
pub(crate) unsafe fn input_of(product: *mut ggml_tensor, ids: *mut ggml_tensor) -> Option<*mut ggml_tensor> {
    // SAFETY: by the caller; sources of a live node are live.
    unsafe {
        let root = |tensor: *mut ggml_tensor| if (*tensor).view_src.is_null() { tensor } else { (*tensor).view_src };
        let input = (*router_of(ids)?.product).src[1];
        let is_plain = (*input).type_ == llama::GGML_TYPE_F32
            && (*input).nb[0] == size_of::<f32>()
            && [(*input).ne[1], (*input).ne[2], (*input).ne[3]] == [(*ids).ne[1], 1, 1];
        if !is_plain {
            return None;
        }
        let mut level = vec![(*product).src[1]];
        for _ in 0..=PATH_MAX {
            if level.iter().any(|&node| root(node) == root(input)) {
                return Some(input);
            }
            let computed = |&&node: &&*mut ggml_tensor| (*node).op != llama::GGML_OP_NONE;
            if level.iter().filter(computed).any(|&node| overlap(node, input)) {
                return None;
            }
            let sources = level.iter().filter(computed).flat_map(|&node| (*node).src);
            level = sources.filter(|source| !source.is_null()).collect();
        }
        None
    }
}

/// Whether no router made the choice `ids`: a table has each token's experts.
///
/// # Safety
/// A live node.
pub(crate) unsafe fn is_by_token(ids: *mut ggml_tensor) -> bool {
    // SAFETY: by the caller; sources of a live node are live.
    unsafe { (*ids).op == llama::GGML_OP_GET_ROWS && (*(*ids).src[0]).op == llama::GGML_OP_NONE }
}

/// Whether two tensors are one, or views of the same.
///
/// # Safety
/// Live tensors.
unsafe fn same(a: *mut ggml_tensor, b: *mut ggml_tensor) -> bool {
    // SAFETY: by the caller.
    unsafe { a == b || !(*a).view_src.is_null() && (*a).view_src == (*b).view_src }
}

/// Whether a tensor is a weight of one row.
///
/// # Safety
/// Null or a live tensor.
unsafe fn is_vector(tensor: *mut ggml_tensor) -> bool {
    // SAFETY: by the caller.
    unsafe { tensor.as_ref() }.is_some_and(|tensor| tensor.op == llama::GGML_OP_NONE && tensor.ne[1..] == [1, 1, 1])
}

/// A matrix that llama.cpp owns.
struct Lent {
    data: *const f32,
    len: usize,
}

// SAFETY: weights are not written after a model is loaded.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Lent {
    /// `None` if a weight is not floats in host memory.
    ///
    /// # Safety
    /// A weight of a model that outlives the value: routers are learned by a model's residency, which is used by
    /// contexts of that model only.
    unsafe fn of(weights: *mut ggml_tensor) -> Option<Self> {
        // SAFETY: by the caller.
        let tensor = unsafe { &*weights };
        let buffer = tensor.buffer;
        // SAFETY: a weight's buffer is live.
        let is_host = !buffer.is_null() && unsafe { llama::ggml_backend_buffer_is_host(buffer) };
        // SAFETY: by the caller.
        let is_plain = tensor.type_ == llama::GGML_TYPE_F32 && unsafe { llama::ggml_is_contiguous(weights) };
        // SAFETY: by the caller.
        let len = unsafe { llama::ggml_nelements(weights) } as usize;
        let data = tensor.data.cast_const().cast::<f32>();
        (is_host && is_plain && !data.is_null() && data.is_aligned()).then_some(Self { data, len })
    }
}

impl GateRows for Lent {
    fn rows(&self) -> &[f32] {
        // SAFETY: `len` floats of a weight that outlives this value and is not written.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }
}

/// Bytes of a model's routers that [`learn`] copies: those that are not floats, or not in host memory.
pub(crate) fn copied_bytes(gguf: &Gguf, layers: impl Iterator<Item = u16>, is_on_device: impl Fn(u16) -> bool) -> u64 {
    let bytes = |layer: u16| {
        let name = format!("blk.{layer}.ffn_gate_inp.weight");
        let tensor = gguf.tensors.iter().find(|tensor| tensor.name == name)?;
        let is_lent = tensor.dtype == GgmlType::F32 && !is_on_device(layer);
        (!is_lent).then(|| tensor.dims.iter().product::<u64>().saturating_mul(size_of::<f32>() as u64))
    };
    layers.filter_map(bytes).fold(0, u64::saturating_add)
}

/// A weight's values, from any memory.
///
/// # Safety
/// An allocated tensor that is not written.
unsafe fn floats_of(tensor: *mut ggml_tensor) -> Option<Vec<f32>> {
    // SAFETY: by the caller; the buffer has the tensor's bytes.
    let (bytes, dtype, n_per_row) = unsafe {
        if (*tensor).buffer.is_null() || !llama::ggml_is_contiguous(tensor) {
            return None;
        }
        let mut bytes = vec![0u8; llama::ggml_nbytes(tensor)];
        llama::ggml_backend_tensor_get(tensor, bytes.as_mut_ptr().cast(), 0, bytes.len());
        (bytes, GgmlType::from_id((*tensor).type_)?, (*tensor).ne[0] as u64)
    };
    let mut floats = Vec::new();
    Ggml.dequantise(dtype, n_per_row, &bytes, &mut floats).ok()?;
    Some(floats)
}
