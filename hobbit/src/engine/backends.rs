//! Every backend that this build has is known to ggml before anything asks for one.

use super::log;

/// To be called before any other use of ggml's registry; does its work once per process.
pub(super) fn ready() {
    // Libraries that are loaded introduce themselves in the log.
    log::install();
    ggml_sys::register_backends();
}
