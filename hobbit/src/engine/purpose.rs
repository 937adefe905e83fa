//! The purpose of a thread's evaluation.

use std::cell::Cell;

use hobbit_core::options::KernelChoice;
use hobbit_core::route::Phase;

/// Purpose of making a context, planning its graphs, or evaluating on it. It is kept per thread, because ggml asks the
/// device, not the context's backend.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Purpose {
    /// Kernels that may be used.
    pub(super) kernels: KernelChoice,
    /// Whether llama.cpp runs the model by itself and we take over the products of batches.
    pub(super) takes_batches: bool,
    /// Phase of the batch being evaluated, which a graph cannot carry.
    pub(super) phase: Phase,
}

thread_local! {
    static PURPOSE: Cell<Option<Purpose>> = const { Cell::new(None) };
}

impl Purpose {
    /// The current thread's purpose.
    pub(super) fn current() -> Option<Self> {
        PURPOSE.get()
    }

    /// Calls `run`, which makes a context or evaluates on it, with this purpose.
    pub(super) fn during<R>(self, run: impl FnOnce() -> R) -> R {
        let before = PURPOSE.replace(Some(self));
        let result = run();
        PURPOSE.set(before);
        result
    }
}

/// [`Purpose::phase`] of the current thread.
pub(super) fn phase() -> Phase {
    PURPOSE.get().map_or(Phase::default(), |purpose| purpose.phase)
}
