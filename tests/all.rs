//! Tests of the programs and of the library with llama.cpp, in one binary that is linked once.
//!
//! Binaries of their own are `devices`, whose test devices are in ggml's list for the whole process, and `gguf_memory`,
//! whose allocator counts every allocation of the process. Tests of a process's resident set or of its RPC devices run
//! themselves in a process of their own (`fixture::in_own_process`).

mod budget;
mod exactness;
mod fine_model;
mod fixture;
mod not_run;
#[cfg(feature = "rpc")]
mod remote;
mod robustness;
mod run_mode;
mod trace;
mod virtual_experts;
mod warm;
