//! Which kernels multiply the experts' rows in batches.

use serde::{Deserialize, Serialize};

use crate::words::named;

/// Which of ggml's kernels may multiply the experts' rows in batches, where one is faster than llama.cpp's own choice. Single tokens
/// are multiplied as llama.cpp does it, whatever is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelChoice {
    /// Those that give the same bits, as tried on this machine.
    #[default]
    Identical,
    /// The fastest: the last bits of some types' results (f16, bf16, iq4_nl) differ then from llama.cpp's, and what is fastest may
    /// differ from run to run. Not where results must repeat or be exact: see [`ModelOptions::kernels`](super::ModelOptions::kernels).
    Fastest,
}

named!(KernelChoice, "choice of kernels": Identical = "identical", Fastest = "fastest");
