//! Kinds of devices.

use serde::Serialize;

/// A device's kind (`ggml_backend_dev_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The processor and its memory.
    Cpu,
    /// A GPU with memory of its own; also every device of an RPC server.
    Gpu,
    /// A GPU that shares the host's memory.
    Integrated,
    /// A helper of the CPU, such as BLAS; models are not offloaded to it.
    Accelerator,
}

impl DeviceKind {
    /// For messages.
    pub(super) const fn in_words(self) -> &'static str {
        match self {
            Self::Cpu => "the CPU",
            Self::Gpu => "a GPU",
            Self::Integrated => "an integrated GPU",
            Self::Accelerator => "a helper of the CPU",
        }
    }
}
