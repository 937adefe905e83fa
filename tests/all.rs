//! Tests of the programs and of the library with llama.cpp, in one binary that is linked once.
//!
//! Binaries of their own are `devices`, whose test devices are in ggml's list for the whole process, and `gguf_memory`,
//! whose allocator counts every allocation of the process. Tests of a process's resident set or of its RPC devices run
//! themselves in a process of their own (`fixture::in_own_process`).

mod bench;
mod budget;
mod checkpoints;
mod cli;
mod dynamic;
mod engine;
mod exactness;
#[cfg(unix)]
mod features;
#[cfg(unix)]
mod files;
mod fine_model;
mod fixture;
mod low;
mod media;
mod mirror;
mod perplexity;
mod quantise;
mod robustness;
#[cfg(feature = "rpc")]
mod rpc;
mod run_mode;
mod sampling;
mod speculation;
mod trace;
mod virtual_experts;
mod warm;
