//! Errors of reads, with the file, the place and the remedy.

use std::io;
use std::path::PathBuf;

/// Why a store could not be opened or a read failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// More reads wait than the loader's bound.
    #[error("too many reads wait to start (the next is of {len} bytes at offset {offset})")]
    TooManyReads { offset: u64, len: u64 },
    /// The file could not be opened.
    #[error("cannot open {path} for {engine} reads: {source}")]
    Open { path: PathBuf, engine: &'static str, source: io::Error },
    /// The system reported an error for a read, such as `EIO`.
    #[error("reading {len} bytes at offset {offset} of {path} failed: {source}; check the disk and its connection")]
    Read { path: PathBuf, offset: u64, len: u64, source: io::Error },
    /// The file ended before the bytes that its header declares.
    #[error(
        "file shrank while running: {path} now has {file_len} bytes, but {len} bytes at offset {offset} are needed; \
         restore the file"
    )]
    Shrank { path: PathBuf, offset: u64, len: u64, file_len: u64 },
    /// The file was replaced or written to after its first check.
    #[error(
        "{}: this file was replaced or written to after it was opened ({what}), so that old and new weights would be \
         mixed; start again, and change no model while it is in use", path.display()
    )]
    Changed { path: PathBuf, what: &'static str },
    /// The file has become shorter since its first check.
    #[error(
        "{}: a part of this file cannot be read any more: it was cut while in use; put it back and start again",
        path.display()
    )]
    Cut { path: PathBuf },
    /// The bytes read are no bit plane of 8-bit weights.
    #[error(
        "{}: the {len} bytes at offset {offset} are not the planes of weights that they should be (a scale is no sound \
         number); the pack is damaged, `gguf-tools verify` says where", path.display()
    )]
    Planes { path: PathBuf, offset: u64, len: u64 },
    /// A request names a file that the store was not opened with.
    #[error("a read names source file {file}, but the model has {files} (expected 0..{files})")]
    NoSuchFile { file: u32, files: usize },
    /// A request does not fit its slot, or its range overflows.
    #[error("a slot of {capacity} bytes cannot take {len} bytes from offset {offset} at lead {lead}")]
    SlotTooSmall { offset: u64, len: u64, lead: usize, capacity: usize },
    /// The engine cannot run on this machine or file system.
    #[error("the {engine} engine is not available: {reason}; use buffered reads instead")]
    Unavailable { engine: &'static str, reason: String },
    /// Memory for a read was refused.
    #[error("cannot allocate {bytes} bytes for reads: {source}")]
    Memory { bytes: u64, source: io::Error },
    /// A worker thread could not be started.
    #[error("cannot start an I/O thread for {engine} reads: {source}")]
    Thread { engine: &'static str, source: io::Error },
    /// The request was given to a store that has ended.
    #[error("the {engine} store has stopped and takes no more reads")]
    Stopped { engine: &'static str },
}
