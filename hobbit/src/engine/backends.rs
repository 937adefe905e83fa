//! Registers every backend of this build with ggml before its first use.

use std::sync::Once;

use ggml_sys::llama;

use super::log;

/// Must be called before any other use of ggml's registry or of llama.cpp; works once per process.
pub(super) fn ready() {
    // Loaded libraries write to the log.
    log::install();
    ggml_sys::register_backends();
    static INIT: Once = Once::new();
    // SAFETY: called once per process, with the backends registered.
    INIT.call_once(|| unsafe { llama::llama_backend_init() });
}
