//! The files of a model, and the virtual GGUF that llama.cpp reads.

pub(crate) mod adapters;
#[cfg(unix)]
pub(crate) mod cookie_stream;
#[cfg(windows)]
#[path = "windows_stream.rs"]
pub(crate) mod cookie_stream;
pub(crate) mod low;
pub(crate) mod model_source;
pub(crate) mod tables;
pub(crate) mod validate;
mod virtual_bytes;
