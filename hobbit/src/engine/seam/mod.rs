//! The seam to llama.cpp: expert tensors without memory, the layer's router, and backends of our own.

pub(crate) mod buffer;
pub(crate) mod calling;
pub(crate) mod experts;
pub(crate) mod hook;
pub(crate) mod layer_router;
pub(crate) mod registration;
