//! Context of this thread's call into llama.cpp.
//!
//! ggml calls devices, buffer types and backends without a context of ours: it asks the device whether it takes a
//! node and the buffer type for a buffer, and passes on a failed graph's status only. It makes these calls on the
//! thread that called llama.cpp, so their context is kept by thread, here and nowhere else.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use crate::engine::ggml;
use crate::engine::seam::experts::{Experts, RouterValues};
use hobbit_core::options::KernelChoice;
use hobbit_core::route::Phase;

/// Purpose of making a context, planning its graphs, or evaluating on it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Purpose {
    /// Kernels that may be used.
    pub(crate) kernels: KernelChoice,
    /// Whether llama.cpp runs the model by itself and we take over the products of batches.
    pub(crate) takes_batches: bool,
    /// Whether the memory of a batch is given back after it, for which we must see one of its products.
    pub(crate) gives_back: bool,
    /// The device whose host memory our results are in: llama.cpp keeps the CPU's in that of the first device.
    pub(crate) pinned_by: Option<ggml::Device>,
    /// Phase of the batch being evaluated, which a graph cannot carry.
    pub(crate) phase: Phase,
}

#[derive(Default)]
struct Calling {
    purpose: Option<Purpose>,
    /// Experts of the model that is being loaded, for the next buffer.
    loading: Option<Arc<Experts>>,
    /// Layer and weights that a router hook saw last in this evaluation.
    router_weights: Option<(u16, RouterValues)>,
    /// Layer and input of a router, `[width, n_tokens]`: a copy that the hook keeps.
    router_input: Option<(u16, RouterValues)>,
    /// Why the call fails: the first reason.
    failure: Option<String>,
    /// llama.cpp's compute buffer in host memory, as an expert product saw it last.
    compute_buffer: Option<Range<usize>>,
    /// Backends of the expert device made so far: a context with such a backend adds one.
    n_backends: usize,
}

thread_local! {
    static CALLING: RefCell<Calling> = RefCell::default();
}

impl Purpose {
    /// The current call's purpose.
    pub(crate) fn current() -> Option<Self> {
        CALLING.with_borrow(|calling| calling.purpose)
    }

    /// Calls `run`, which makes a context or evaluates on it, with this purpose.
    pub(crate) fn during<R>(self, run: impl FnOnce() -> R) -> R {
        let before = CALLING.with_borrow_mut(|calling| calling.purpose.replace(self));
        let result = run();
        CALLING.with_borrow_mut(|calling| calling.purpose = before);
        result
    }
}

/// [`Purpose::phase`] of the current call.
pub(crate) fn phase() -> Phase {
    Purpose::current().map_or(Phase::default(), |purpose| purpose.phase)
}

/// Runs `load`: expert buffers that it allocates belong to `experts`.
pub(crate) fn while_loading<T>(experts: &Arc<Experts>, load: impl FnOnce() -> T) -> T {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            CALLING.with_borrow_mut(|calling| calling.loading = None);
        }
    }
    CALLING.with_borrow_mut(|calling| calling.loading = Some(Arc::clone(experts)));
    let _reset = Reset;
    load()
}

/// Experts of the model that this call loads.
pub(crate) fn loading() -> Option<Arc<Experts>> {
    CALLING.with_borrow(|calling| calling.loading.clone())
}

/// Records why the current call fails. Keeps the first reason.
pub(crate) fn fail(reason: impl Into<String>) {
    CALLING.with_borrow_mut(|calling| {
        calling.failure.get_or_insert_with(|| reason.into());
    });
}

/// Takes the recorded reason.
pub(crate) fn take_failure() -> Option<String> {
    CALLING.with_borrow_mut(|calling| calling.failure.take())
}

/// Notes the weights of the layer that is computed.
pub(crate) fn set_router_weights(layer: u16, weights: RouterValues) {
    CALLING.with_borrow_mut(|calling| calling.router_weights = Some((layer, weights)));
}

/// Notes the input of the router of the layer that is computed.
pub(crate) fn set_router_input(layer: u16, input: RouterValues) {
    CALLING.with_borrow_mut(|calling| calling.router_input = Some((layer, input)));
}

/// Forgets weights and input when the batch ends, which they do not outlive.
pub(crate) fn forget_router() {
    CALLING.with_borrow_mut(|calling| (calling.router_weights, calling.router_input) = (None, None));
}

/// The weights of `layer`, if a router hook saw them last.
pub(crate) fn router_weights(layer: u16) -> Option<RouterValues> {
    CALLING.with_borrow(|calling| calling.router_weights.filter(|(seen, _)| *seen == layer).map(|(_, weights)| weights))
}

/// The input of the router of `layer`, if a router hook saw it last.
pub(crate) fn router_input(layer: u16) -> Option<RouterValues> {
    CALLING.with_borrow(|calling| calling.router_input.filter(|(seen, _)| *seen == layer).map(|(_, input)| input))
}

/// Notes the addresses of the buffer that holds the graph's results.
pub(crate) fn set_compute_buffer(addresses: Range<usize>) {
    CALLING.with_borrow_mut(|calling| calling.compute_buffer = Some(addresses));
}

/// Takes the addresses noted since the last call of this function. llama.cpp may free the buffer when it evaluates
/// again.
pub(crate) fn take_compute_buffer() -> Option<Range<usize>> {
    CALLING.with_borrow_mut(|calling| calling.compute_buffer.take())
}

/// Counts a backend of the expert device.
pub(crate) fn count_backend() {
    CALLING.with_borrow_mut(|calling| calling.n_backends += 1);
}

/// Number of the expert device's backends made by calls of this thread.
pub(crate) fn n_backends_made() -> usize {
    CALLING.with_borrow(|calling| calling.n_backends)
}
