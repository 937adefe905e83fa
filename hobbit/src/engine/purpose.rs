//! What a thread evaluates for.

use std::cell::Cell;

use hobbit_core::options::KernelChoice;
use hobbit_core::route::Phase;

/// What a context is made for, and its graphs planned. ggml asks the device, not the context's backend, so it is said by thread.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Purpose {
    /// Which kernels may be taken.
    pub(super) kernels: KernelChoice,
    /// llama.cpp runs the model by itself: products of batches are taken from it.
    pub(super) takes_batches: bool,
    /// Of the batch that is evaluated. A graph has no place for it.
    pub(super) phase: Phase,
}

thread_local! {
    static PURPOSE: Cell<Option<Purpose>> = const { Cell::new(None) };
}

impl Purpose {
    /// That of what this thread makes or evaluates.
    pub(super) fn current() -> Option<Self> {
        PURPOSE.get()
    }

    /// Has `run` make a context or evaluate on it.
    pub(super) fn during<R>(self, run: impl FnOnce() -> R) -> R {
        let before = PURPOSE.replace(Some(self));
        let result = run();
        PURPOSE.set(before);
        result
    }
}

/// As [`Purpose::phase`], of what this thread evaluates.
pub(super) fn phase() -> Phase {
    PURPOSE.get().map_or(Phase::default(), |purpose| purpose.phase)
}
