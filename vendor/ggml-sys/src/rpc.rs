//! ggml's RPC backend (`ggml-rpc.h`), compiled from llama.cpp's own sources, without RDMA, in shim/rpc.cpp.

use std::ffi::c_char;

use crate::llama::ggml_backend_reg_t;

unsafe extern "C" {
    /// The backend's registration. It has no devices of its own.
    pub fn ggml_backend_rpc_reg() -> ggml_backend_reg_t;

    /// Connects to a server (`host:port`) and returns a registration with its devices, the same at every call with the
    /// same endpoint. Not registered with ggml. Null if the server has no devices; aborts if there is no server.
    pub fn ggml_backend_rpc_add_server(endpoint: *const c_char) -> ggml_backend_reg_t;
}
