//! Kernels for the experts' rows in batches.

use serde::{Deserialize, Serialize};

use crate::named::named;

/// ggml kernels allowed to multiply the experts' rows in batches, if one is faster than llama.cpp's choice. Single
/// tokens always use llama.cpp's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelChoice {
    /// Kernels that give the same bits, as tried on this machine.
    #[default]
    Identical,
    /// The fastest: the last bits of some types' results (f16, bf16, iq4_nl) then differ from llama.cpp's, and the
    /// fastest kernel may differ from run to run. Not used if results must repeat or be exact: see
    /// [`ModelOptions::kernels`](super::ModelOptions::kernels).
    Fastest,
}

named!(KernelChoice, "choice of kernels": Identical = "identical", Fastest = "fastest");
