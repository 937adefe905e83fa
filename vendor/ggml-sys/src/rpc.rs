//! ggml's RPC backend (`ggml-rpc.h`): devices of other machines, and this machine's for them.
//!
//! It is compiled from llama.cpp's own sources, without RDMA, in shim/rpc.cpp.

use std::ffi::{c_char, c_int, c_void};

use crate::llama::{ggml_backend_dev_t, ggml_backend_reg_t};

/// The server listens: clients may connect.
pub const HOBBIT_RPC_LISTENING: c_int = 0;
/// A client has connected.
pub const HOBBIT_RPC_CONNECTED: c_int = 1;

/// Called on the serving thread with one of the constants above; `context` is what the caller passed in.
pub type EventCallback = unsafe extern "C" fn(context: *mut c_void, event: c_int);

unsafe extern "C" {
    /// The backend's registration. Has no devices of its own; its addresses of procedures are the two below.
    pub fn ggml_backend_rpc_reg() -> ggml_backend_reg_t;

    /// Connects to a server (`host:port`) and returns a registration with its devices, the same at every call with the
    /// same endpoint. Not registered with ggml. Null where the server has no devices; aborts where there is no server.
    pub fn ggml_backend_rpc_add_server(endpoint: *const c_char) -> ggml_backend_reg_t;

    /// Serves clients, one after the other. `host` is an IPv4 address, `cache_dir` null or a directory that exists.
    /// Returns only on failure: an error code of the system, or 0 where there is none, and a message in `error`.
    pub fn hobbit_rpc_serve(
        host: *const c_char,
        port: c_int,
        cache_dir: *const c_char,
        n_threads: c_int,
        n_devices: usize,
        devices: *mut ggml_backend_dev_t,
        on_event: EventCallback,
        context: *mut c_void,
        error: *mut c_char,
        error_capacity: usize,
    ) -> c_int;
}
