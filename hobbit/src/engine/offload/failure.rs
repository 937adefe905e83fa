//! Why a device's part of a batch failed, kept for the session: ggml passes on a status only.

use std::cell::RefCell;

use ggml_sys::llama::{GGML_STATUS_ALLOC_FAILED, ggml_status};

thread_local! {
    /// ggml computes a graph on the thread that evaluates the batch.
    static REASON: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Notes that a device failed. The first reason is kept.
pub(super) fn note(device: &str, status: ggml_status) {
    let reason = match status {
        GGML_STATUS_ALLOC_FAILED => format!(
            "device {device} is out of memory, and nothing is left in its expert cache that could go; put fewer layers \
             there, give a smaller context or ubatch, or compute experts on the CPU"
        ),
        _ => format!(
            "device {device} failed (ggml status {status}): it may have been reset, removed or overheated; look at its \
             driver's log, then start again, or leave it out"
        ),
    };
    REASON.with_borrow_mut(|known| {
        known.get_or_insert(reason);
    });
}

/// Takes the reason noted on this thread.
pub(in super::super) fn take() -> Option<String> {
    REASON.with_borrow_mut(Option::take)
}
