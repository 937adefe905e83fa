//! What a thread evaluates for.

use std::cell::Cell;

use crate::options::KernelChoice;

/// What a context is made for, and its graphs planned. ggml asks the device, not the context's backend, so it is said by thread.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Purpose {
    /// Which kernels may be taken.
    pub(super) kernels: KernelChoice,
    /// llama.cpp runs the model by itself: products of batches are taken from it.
    pub(super) takes_batches: bool,
    /// What is evaluated are tokens that are generated, or judged one by one, and no prompt.
    pub(super) decodes: bool,
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

/// As [`Purpose::decodes`], of what this thread evaluates.
pub(super) fn decodes() -> bool {
    PURPOSE.get().is_some_and(|purpose| purpose.decodes)
}
