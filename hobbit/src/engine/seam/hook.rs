//! The router hook: observes each token's chosen experts and their weights.
//!
//! The engine reads ids and weights inside the expert split and needs no hook. The hook serves studies of routing, and
//! models whose layers span several splits (those with a scale per expert), where the split of the first products does
//! not see the weights, or whose routers see another input than their experts, which ggml may have overwritten by then.
//! It uses ggml's evaluation callback, which breaks the graph after each requested tensor (about 35 µs), so it is
//! installed only when one of these is needed. Tensors are requested by exact name: the weights have a `(reshaped)`
//! twin. Results do not change.

use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ggml_sys::llama::{self, ggml_tensor};

use crate::engine::seam::calling;
use crate::engine::seam::experts::RouterValues;

/// A layer's router choice for a ubatch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterChoice {
    /// Block number.
    pub layer: u16,
    /// Experts per token.
    pub n_expert_used: usize,
    /// Expert ids, `[n_tokens][n_expert_used]`, best first.
    pub experts: Vec<i32>,
    /// Their weights after llama.cpp's own normalisation, of the same shape.
    pub weights: Vec<f32>,
}

/// Receives router choices, layer by layer.
pub type RouterObserver = Box<dyn FnMut(RouterChoice) + Send>;

/// Receives tensors with parts of routers' choices, as they are computed.
pub(crate) trait Watcher: Send {
    /// Whether to receive this tensor. The graph breaks after it.
    fn wants(&self, asked: Asked, name: &str) -> bool;

    /// # Safety
    /// `tensor` is computed.
    unsafe fn take(&mut self, asked: Asked, name: &str, tensor: &ggml_tensor);
}

/// ggml's evaluation callback with its state, installed while this lives. The callback holds the state's address.
pub(crate) struct EvalHook<W>(Arc<Mutex<W>>);

impl<W: Watcher> EvalHook<W> {
    pub(crate) fn new(watcher: W) -> Self {
        Self(Arc::new(Mutex::new(watcher)))
    }

    /// Makes `params` call back into the state, which must outlive the context.
    pub(crate) fn install(&self, params: &mut llama::llama_context_params) {
        params.cb_eval = Some(on_eval::<W>);
        params.cb_eval_user_data = Arc::as_ptr(&self.0).cast_mut().cast();
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, W> {
        lock(&self.0)
    }
}

fn lock<W>(watcher: &Mutex<W>) -> MutexGuard<'_, W> {
    watcher.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Parts of a router's choice that the expert backend needs from the hook.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shown {
    pub(crate) weights: bool,
    pub(crate) input: bool,
}

/// Passes choices to an observer, and weights and inputs to the expert backend.
pub(crate) struct Observed {
    observer: Option<RouterObserver>,
    shown: Shown,
    current: Option<RouterChoice>,
    /// The input of the router that was seen last.
    input: Vec<f32>,
}

/// Names of tensors with weights, in the graph's order: the last one of a layer counts.
const WEIGHTS: [&str; 4] =
    ["ffn_moe_weights-", "ffn_moe_weights_softmax-", "ffn_moe_weights_norm-", "ffn_moe_weights_scaled-"];
const TOP_K: &str = "ffn_moe_topk-";
const LOGITS: &str = "ffn_moe_logits-";

/// A tensor with part of a router's choice, by its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Experts(u16),
    Weights(u16),
    Logits(u16),
}

/// The meaning of a tensor's name.
pub(crate) fn asked(name: &str) -> Option<Asked> {
    if let Some(layer) = name.strip_prefix(TOP_K) {
        return layer.parse().ok().map(Asked::Experts);
    }
    if let Some(layer) = name.strip_prefix(LOGITS) {
        return layer.parse().ok().map(Asked::Logits);
    }
    WEIGHTS.iter().find_map(|prefix| name.strip_prefix(prefix)?.parse().ok()).map(Asked::Weights)
}

impl Observed {
    /// A hook for an observer or the expert backend; `None` if neither needs it.
    pub(crate) fn hook(observer: Option<RouterObserver>, shown: Shown) -> Option<EvalHook<Self>> {
        let wanted = observer.is_some() || shown.weights || shown.input;
        wanted.then(|| EvalHook::new(Self { observer, shown, current: None, input: Vec::new() }))
    }

    /// Passes the last layer of a batch to the observer.
    pub(crate) fn flush(&mut self) {
        if let (Some(choice), Some(observer)) = (self.current.take(), &mut self.observer) {
            observer(choice);
        }
    }
}

impl Watcher for Observed {
    fn wants(&self, asked: Asked, _: &str) -> bool {
        match asked {
            Asked::Experts(_) | Asked::Weights(_) => self.observer.is_some() || self.shown.weights,
            Asked::Logits(_) => self.shown.input,
        }
    }

    unsafe fn take(&mut self, asked: Asked, _: &str, tensor: &ggml_tensor) {
        // SAFETY: by the caller; a copy has the tensor's strides, and is read while it is there.
        unsafe {
            if let Asked::Logits(layer) = asked {
                return self.show_input(layer, tensor);
            }
            let copy = copy_of_device_memory(tensor);
            let mut readable = *tensor;
            if let Some(copy) = &copy {
                readable.data = copy.as_ptr().cast_mut().cast();
            }
            match asked {
                Asked::Experts(layer) => {
                    self.flush();
                    let ids = RouterValues::of(&readable, 0);
                    let (n_expert_used, experts) = (ids.n_used, ids.read().collect());
                    self.current = Some(RouterChoice { layer, n_expert_used, experts, weights: Vec::new() });
                }
                Asked::Weights(layer) => {
                    let Some(choice) = self.current.as_mut().filter(|choice| choice.layer == layer) else { return };
                    // [1, n_used, n_tokens] or [n_used, n_tokens].
                    let d = usize::from(tensor.ne[0] != choice.n_expert_used as i64 || tensor.ne[2] > 1);
                    choice.weights = RouterValues::of(&readable, d).read().collect();
                    // A device reads its weights back itself.
                    if self.shown.weights && copy.is_none() {
                        calling::set_router_weights(layer, RouterValues::of(tensor, d));
                    }
                }
                Asked::Logits(_) => {}
            }
        }
    }
}

impl Observed {
    /// Copies a router's input and shows it to the expert backend, until the next router is seen.
    ///
    /// # Safety
    /// `logits` have just been computed, and nothing after them.
    unsafe fn show_input(&mut self, layer: u16, logits: &ggml_tensor) {
        let input = logits.src[1];
        // SAFETY: by the caller: the source of a product is live, and unchanged until the next node; the copy has room
        // for its bytes and is written again only for the next router.
        unsafe {
            if logits.op != llama::GGML_OP_MUL_MAT
                || (*input).type_ != llama::GGML_TYPE_F32
                || !llama::ggml_is_contiguous(input)
            {
                return;
            }
            self.input.resize(llama::ggml_nelements(input) as usize, 0.0);
            let copy = self.input.as_mut_ptr();
            llama::ggml_backend_tensor_get(input, copy.cast(), 0, llama::ggml_nbytes(input));
            calling::set_router_input(layer, RouterValues::of_copy(&*input, copy.cast(), 0));
        }
    }
}

/// Copies the bytes of a tensor that the host cannot read in place.
///
/// # Safety
/// The tensor is computed.
unsafe fn copy_of_device_memory(tensor: &ggml_tensor) -> Option<Vec<u8>> {
    // SAFETY: by the caller: the tensor is allocated, and so is what it is a view of; the copy has room for its bytes.
    unsafe {
        let buffer = if tensor.view_src.is_null() { tensor.buffer } else { (*tensor.view_src).buffer };
        if buffer.is_null() || llama::ggml_backend_buffer_is_host(buffer) {
            return None;
        }
        let mut bytes = vec![0u8; llama::ggml_nbytes(tensor)];
        llama::ggml_backend_tensor_get(tensor, bytes.as_mut_ptr().cast(), 0, bytes.len());
        Some(bytes)
    }
}

unsafe extern "C" fn on_eval<W: Watcher>(tensor: *mut ggml_tensor, ask: bool, watcher: *mut c_void) -> bool {
    // SAFETY: ggml passes a live tensor with a NUL-terminated name; `install` passed the state, which outlives the
    // context.
    let (tensor, watcher) = unsafe { (&*tensor, &*watcher.cast::<Mutex<W>>()) };
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(tensor.name.as_ptr()) }.to_str().unwrap_or_default();
    let mut watcher = lock(watcher);
    let asked = asked(name).filter(|&asked| watcher.wants(asked, name));
    if ask {
        return asked.is_some();
    }
    if let Some(asked) = asked {
        // SAFETY: the tensor was just computed.
        let _ = catch_unwind(AssertUnwindSafe(|| unsafe { watcher.take(asked, name, tensor) }));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_asked_for_by_exact_name() {
        assert_eq!(asked("ffn_moe_topk-3"), Some(Asked::Experts(3)));
        assert_eq!(asked("ffn_moe_weights-12"), Some(Asked::Weights(12)));
        assert_eq!(asked("ffn_moe_weights_norm-0"), Some(Asked::Weights(0)));
        assert_eq!(asked("ffn_moe_logits-7"), Some(Asked::Logits(7)));
        assert_eq!(asked("ffn_moe_logits_biased-7"), None);
        assert_eq!(asked("ffn_moe_weights_norm-0 (reshaped)"), None);
        assert_eq!(asked("ffn_moe_weights_sum-0"), None);
        assert_eq!(asked("ffn_moe_gate-1"), None);
    }
}
