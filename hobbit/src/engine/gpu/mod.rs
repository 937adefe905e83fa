//! Devices: which there are, and products of experts on them.

pub(crate) mod devices;
pub(crate) mod link;
pub(crate) mod offload;
#[cfg(feature = "rpc")]
pub(crate) mod rpc;
