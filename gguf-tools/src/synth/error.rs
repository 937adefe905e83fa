//! Why a model cannot be generated.

use std::{io, path::PathBuf};

use hobbit::gguf::WriteError;

use super::format::Format;
use super::spec::{PRESETS, architectures};

/// Errors of [`super::write`] and of the names it takes.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// No such architecture.
    #[error("--arch '{found}': expected one of {}", architectures().collect::<Vec<_>>().join(", "))]
    UnknownArch {
        /// What was asked for.
        found: String,
    },
    /// No such preset.
    #[error("--preset '{found}': expected one of {}", PRESETS.join(", "))]
    UnknownPreset {
        /// What was asked for.
        found: String,
    },
    /// No such format, or none that can be generated.
    #[error("type '{found}': expected one of {}", Format::all().map(Format::name).collect::<Vec<_>>().join(", "))]
    UnknownFormat {
        /// What was asked for.
        found: String,
    },
    /// A number that the architecture or llama.cpp does not take.
    #[error("{flag} {found}: expected {expected}")]
    Flag {
        /// Command line flag, which is also the name of the field.
        flag: &'static str,
        /// What was asked for.
        found: String,
        /// What is possible.
        expected: String,
    },
    /// An expert's row does not divide into blocks.
    #[error(
        "tensor '{tensor}': rows of {found} weights, expected a multiple of {} for {format}; \
         change --ff or --embd, or take q8_0", format.block_weights()
    )]
    RowLength {
        /// Tensor.
        tensor: String,
        /// Its format.
        format: Format,
        /// Weights per row.
        found: u64,
    },
    /// More bytes than 64 bits count.
    #[error("tensor '{tensor}' is too large")]
    TooLarge {
        /// Tensor.
        tensor: String,
    },
    /// The disk would be full.
    #[error("{}: {available} bytes free, expected at least {needed}", dir.display())]
    DiskSpace {
        /// Directory to be written to.
        dir: PathBuf,
        /// Bytes that the model takes.
        needed: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// A name that cannot be given to shards.
    #[error("{}: expected a path that ends in a file name", path.display())]
    Name {
        /// The path.
        path: PathBuf,
    },
    /// The header cannot be built, or the disk refused.
    #[error("{}: {source}", path.display())]
    Write {
        /// File.
        path: PathBuf,
        /// Why.
        source: WriteError,
    },
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}
