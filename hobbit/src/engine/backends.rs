//! Every backend that this build has is known to ggml before anything asks for one.

use std::sync::Once;

use ggml_sys::llama;

use super::log;

/// To be called before any other use of ggml's registry or of llama.cpp; does its work once per process.
pub(super) fn ready() {
    // Libraries that are loaded introduce themselves in the log.
    log::install();
    ggml_sys::register_backends();
    static INIT: Once = Once::new();
    // SAFETY: once per process, with the backends there.
    INIT.call_once(|| unsafe { llama::llama_backend_init() });
}
