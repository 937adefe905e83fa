//! Tensors that the expert backend reads and makes.

use super::*;

/// A layer's router input for each token, `[n_embd, 1, n_tokens]`, if it is also the input of the layer's first
/// product.
///
/// # Safety
/// A live product.
pub(in super::super) unsafe fn router_input_tensor<'a>(product: *mut ggml_tensor) -> Option<&'a ggml_tensor> {
    // SAFETY: by the caller: sources of a live node are live.
    let input = unsafe { &*(*product).src[1] };
    // Experts with separate inputs do not share the router's.
    (input.ne[1] == 1 && input.type_ == llama::GGML_TYPE_F32 && input.nb[0] == size_of::<f32>()).then_some(input)
}

/// Whether the tokens of a router's input follow one another without gaps.
pub(in super::super) fn is_dense_rows(input: &ggml_tensor) -> bool {
    input.ne[2] == 1 || input.nb[2] == input.ne[0] as usize * size_of::<f32>()
}

/// The same, token by token, `[n_embd]` each; empty if it is not known.
///
/// # Safety
/// A live product whose input has been computed in host memory; the input outlives its use.
pub(super) unsafe fn router_inputs<'a>(product: *mut ggml_tensor) -> Vec<&'a [f32]> {
    // SAFETY: by the caller; floats of a row are contiguous.
    unsafe {
        let Some(input) = router_input_tensor(product) else { return Vec::new() };
        let row = |token: usize| input.data.cast::<u8>().add(token * input.nb[2]).cast::<f32>();
        (0..input.ne[2] as usize).map(|token| slice::from_raw_parts(row(token), input.ne[0] as usize)).collect()
    }
}

/// The router's weights if `node` multiplies an expert's input or output by them.
///
/// # Safety
/// `node` is live.
pub(in super::super) unsafe fn weights_tensor(node: *mut ggml_tensor) -> Option<*mut ggml_tensor> {
    // SAFETY: by the caller; sources of a live node are live.
    unsafe {
        let weighted = |node: *mut ggml_tensor| {
            let name = CStr::from_ptr((*node).name.as_ptr()).to_bytes();
            let shape = (*node).op == llama::GGML_OP_MUL && name.starts_with(b"ffn_moe_weighted-");
            (shape && (*(*node).src[1]).type_ == llama::GGML_TYPE_F32).then(|| (*node).src[1])
        };
        let input = (*node).src[1];
        weighted(node).or_else(|| match (*node).op {
            llama::GGML_OP_MUL_MAT_ID if !input.is_null() => weighted(input),
            _ => None,
        })
    }
}

/// Whether a node computes nothing.
pub(in super::super) fn is_view(op: llama::ggml_op) -> bool {
    matches!(
        op,
        llama::GGML_OP_NONE
            | llama::GGML_OP_VIEW
            | llama::GGML_OP_RESHAPE
            | llama::GGML_OP_PERMUTE
            | llama::GGML_OP_TRANSPOSE
    )
}

/// The row of a pair in a product's input, `[n_in, n_used or 1, n_tokens]`, or result, `[n_out, n_used, n_tokens]`.
///
/// # Safety
/// `tensor` is allocated and has the pair's token and rank.
pub(super) unsafe fn row_of(tensor: &ggml_tensor, pair: Pair) -> *mut f32 {
    let rank = (pair.rank % tensor.ne[1] as u32) as usize;
    let offset = pair.token as usize * tensor.nb[2] + rank * tensor.nb[1];
    // SAFETY: by the caller.
    unsafe { tensor.data.cast::<u8>().add(offset).cast() }
}

/// A contiguous tensor over `data` that lies in host memory like `neighbour`.
pub(super) fn plain_tensor(
    type_: llama::ggml_type,
    ne: [i64; 4],
    data: *mut c_void,
    neighbour: &ggml_tensor,
) -> ggml_tensor {
    tensor_at(type_, ne, data.cast(), neighbour.buffer, None)
}

/// The slots of `view` as the weights of a product, in place of the expert tensor `weights`.
pub(super) fn view_tensor(weights: &ggml_tensor, view: ShareView<'_>, neighbour: &ggml_tensor) -> ggml_tensor {
    let ne = [weights.ne[0], weights.ne[1], i64::from(view.n_slots), 1];
    let mut tensor = plain_tensor(view.type_id as llama::ggml_type, ne, view.base.cast(), neighbour);
    let (block, row) = view.row;
    tensor.nb = [block, row, view.stride, view.stride * view.n_slots as usize];
    if let Some(interleaving) = view.interleaving {
        interleaving.mark(&mut tensor);
    }
    tensor
}
