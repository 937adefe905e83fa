//! A model's routers, taken from its running graphs: what they would say about layers that have not run yet.
//!
//! A router multiplies its layer's input by a matrix, the *gate*. The inputs of neighbouring layers are alike, so this
//! layer's input through the next layers' gates foretells their choice (HOBBIT's stacked gate, Fate's cross-layer gate).
//! Every gate is kept once more, in float and stacked in layer order: the gates of some layers are one product.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::ops::Range;

use ggml_sys::llama::{self, ggml_tensor};

/// How many nodes lie at most between the router's logits and its choice.
const DEPTH_MAX: usize = 24;

/// Gates of all layers together, in bytes: more than any model has (a layer of 512 experts and width 8192 takes 16 MiB).
const STACK_BYTES_MAX: usize = 4 << 30;

/// What turns logits into probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gating {
    Softmax,
    Sigmoid,
}

/// One layer's router.
struct Gate {
    /// Its rows in the stack.
    rows: Range<usize>,
    /// Added to the logits.
    bias: Option<Vec<f32>>,
    /// Added to the probabilities before the choice.
    choice_bias: Option<Vec<f32>>,
    gating: Gating,
}

/// Routers by layer. Filled as layers run for the first time.
#[derive(Default)]
pub(super) struct Gates {
    gates: BTreeMap<u16, Gate>,
    /// `[rows][width]`.
    stack: Vec<f32>,
    width: usize,
    /// Reused: logits of one product.
    logits: Vec<f32>,
}

/// The nodes of one layer's router in a graph.
struct Router {
    /// `[width, n_expert]` times the input.
    product: *mut ggml_tensor,
    bias: Option<*mut ggml_tensor>,
    choice_bias: Option<*mut ggml_tensor>,
    gating: Gating,
}

impl Gates {
    /// Whether the layer's router is known.
    pub(super) fn knows(&self, layer: u16) -> bool {
        self.gates.contains_key(&layer)
    }

    /// Learns the router that made the choice `ids`. `false` where there is none that this module understands: then
    /// nothing is foretold of this layer.
    ///
    /// # Safety
    /// A live node of a graph; weights are allocated.
    pub(super) unsafe fn learn(&mut self, layer: u16, ids: *mut ggml_tensor, n_expert: usize) -> bool {
        // SAFETY: by the caller; sources of a live node are live.
        unsafe {
            let Some(router) = router_of(ids) else { return false };
            let weights = (*router.product).src[0];
            let (width, rows) = ((*weights).ne[0] as usize, (*weights).ne[1] as usize);
            let is_usual = rows == n_expert && width > 0 && (self.width == 0 || width == self.width);
            if !is_usual || (self.stack.len() + rows * width) * size_of::<f32>() > STACK_BYTES_MAX {
                return false;
            }
            let Some(floats) = floats_of(weights) else { return false };
            let vector = |tensor: Option<*mut ggml_tensor>| match tensor {
                None => Some(None),
                Some(tensor) => floats_of(tensor).filter(|bias| bias.len() == n_expert).map(Some),
            };
            let (Some(bias), Some(choice_bias)) = (vector(router.bias), vector(router.choice_bias)) else {
                return false;
            };
            self.width = width;
            let first = self.stack.len() / width;
            self.stack.extend(floats);
            self.gates.insert(layer, Gate { rows: first..first + rows, bias, choice_bias, gating: router.gating });
            true
        }
    }

    /// What the routers of `layers` (ascending) say about the input `x` of `width` floats: each layer and the
    /// probabilities of its experts, by index. Layers whose router is not known are left out.
    pub(super) fn scores(&mut self, x: &[f32], layers: &[u16]) -> Vec<(u16, Vec<f32>)> {
        if x.len() != self.width {
            return Vec::new();
        }
        let mut all = Vec::with_capacity(layers.len());
        for layer in layers {
            let Some(gate) = self.gates.get(layer) else { continue };
            let rows = &self.stack[gate.rows.start * self.width..gate.rows.end * self.width];
            self.logits.clear();
            self.logits.extend(rows.chunks_exact(self.width).map(|row| dot(row, x)));
            all.push((*layer, gate.probabilities(&self.logits)));
        }
        all
    }
}

impl Gate {
    fn probabilities(&self, logits: &[f32]) -> Vec<f32> {
        let mut scores: Vec<f32> = match &self.bias {
            Some(bias) => logits.iter().zip(bias).map(|(logit, bias)| logit + bias).collect(),
            None => logits.to_vec(),
        };
        match self.gating {
            Gating::Softmax => {
                let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                scores.iter_mut().for_each(|score| *score = (*score - max).exp());
            }
            Gating::Sigmoid => scores.iter_mut().for_each(|score| *score = 1.0 / (1.0 + (-*score).exp())),
        }
        if let Some(bias) = &self.choice_bias {
            scores.iter_mut().zip(bias).for_each(|(score, bias)| *score = (*score + bias).max(0.0));
        }
        let sum: f32 = scores.iter().sum();
        if sum > 0.0 {
            scores.iter_mut().for_each(|score| *score /= sum);
        }
        scores
    }
}

/// Sums of sixteen lanes: the compiler makes vector code of it.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// The router behind a choice: upwards from the choice to the first product that is named as a router's.
///
/// # Safety
/// A live node.
unsafe fn router_of(ids: *mut ggml_tensor) -> Option<Router> {
    let mut router = Router { product: std::ptr::null_mut(), bias: None, choice_bias: None, gating: Gating::Softmax };
    let mut level = vec![ids];
    for _ in 0..DEPTH_MAX {
        let mut above: Vec<*mut ggml_tensor> = Vec::new();
        for &node in &level {
            // SAFETY: by the caller; sources of a live node are live.
            unsafe {
                let op = (*node).op;
                if op == llama::GGML_OP_MUL_MAT {
                    let name = CStr::from_ptr((*node).name.as_ptr()).to_bytes();
                    if name.starts_with(b"ffn_moe_logits") {
                        router.product = node;
                        return Some(router);
                    }
                    continue;
                }
                if op == llama::GGML_OP_UNARY && llama::ggml_get_unary_op(node) == llama::GGML_UNARY_OP_SIGMOID {
                    router.gating = Gating::Sigmoid;
                }
                if op == llama::GGML_OP_ADD && is_vector((*node).src[1]) {
                    // Above the activation it is the router's own bias, below it concerns the choice only.
                    let name = CStr::from_ptr((*node).name.as_ptr()).to_bytes();
                    match name.starts_with(b"ffn_moe_logits") {
                        true => router.bias = Some((*node).src[1]),
                        false => router.choice_bias = Some((*node).src[1]),
                    }
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

/// Whether a tensor is a weight of one row.
///
/// # Safety
/// Null or a live tensor.
unsafe fn is_vector(tensor: *mut ggml_tensor) -> bool {
    // SAFETY: by the caller.
    unsafe { tensor.as_ref() }.is_some_and(|tensor| tensor.op == llama::GGML_OP_NONE && tensor.ne[1..] == [1, 1, 1])
}

/// A weight's values, wherever it lies.
///
/// # Safety
/// An allocated tensor that nobody writes.
unsafe fn floats_of(tensor: *mut ggml_tensor) -> Option<Vec<f32>> {
    // SAFETY: by the caller; the buffers have the tensor's bytes and elements.
    unsafe {
        if (*tensor).buffer.is_null() || !llama::ggml_is_contiguous(tensor) {
            return None;
        }
        let n = llama::ggml_nelements(tensor) as usize;
        let mut bytes = vec![0u8; llama::ggml_nbytes(tensor)];
        llama::ggml_backend_tensor_get(tensor, bytes.as_mut_ptr().cast(), 0, bytes.len());
        if (*tensor).type_ == llama::GGML_TYPE_F32 {
            return Some(
                bytes.chunks_exact(4).map(|four| f32::from_ne_bytes([four[0], four[1], four[2], four[3]])).collect(),
            );
        }
        let to_float = (*llama::ggml_get_type_traits((*tensor).type_)).to_float?;
        let mut floats = vec![0f32; n];
        to_float(bytes.as_ptr().cast(), floats.as_mut_ptr(), n as i64);
        Some(floats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gates(gating: Gating) -> Gates {
        let gate = |rows, bias: Option<Vec<f32>>| Gate { rows, bias, choice_bias: None, gating };
        let stack = vec![1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 2.0];
        let gates = BTreeMap::from([(3, gate(0..2, None)), (5, gate(2..4, Some(vec![0.0, 4.0])))]);
        Gates { gates, stack, width: 2, logits: Vec::new() }
    }

    #[test]
    fn each_layer_has_its_own_rows_and_bias() {
        let mut gates = gates(Gating::Softmax);
        assert!(gates.knows(3) && !gates.knows(4));
        let scores = gates.scores(&[1.0, 0.0], &[3, 4, 5]);
        let odds: Vec<(u16, f32)> = scores.iter().map(|(layer, p)| (*layer, (p[0] / p[1]).ln())).collect();
        assert_eq!(odds.iter().map(|odds| odds.0).collect::<Vec<_>>(), [3, 5]);
        assert!((odds[0].1 - 1.0).abs() < 1e-5 && (odds[1].1 + 2.0).abs() < 1e-5, "{odds:?}");
        assert!(scores.iter().all(|(_, p)| (p.iter().sum::<f32>() - 1.0).abs() < 1e-6));
        assert!(gates.scores(&[1.0], &[3]).is_empty(), "an input of another width");
    }

    #[test]
    fn sigmoid_scores_are_shares_too() {
        let scores = gates(Gating::Sigmoid).scores(&[0.0, 0.0], &[3]);
        assert_eq!(scores, [(3, vec![0.5, 0.5])]);
    }

    #[test]
    fn dot_takes_every_element() {
        let a: Vec<f32> = (0..37).map(|i| i as f32).collect();
        assert_eq!(dot(&a, &a), (0..37).map(|i| (i * i) as f32).sum::<f32>());
    }
}
