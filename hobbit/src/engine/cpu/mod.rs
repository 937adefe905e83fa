//! Products of experts on the CPU, and the device by which ggml's scheduler sends them here.

pub(crate) mod backend;
pub(crate) mod expert_device;
