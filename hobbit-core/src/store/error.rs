//! Errors of reads, with the file, the place and the remedy.

use std::io;
use std::path::PathBuf;

/// Why a store could not be opened or a read failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("too many reads wait to start (the next is of {len} bytes at offset {offset})")]
    TooManyReads { offset: u64, len: u64 },
    #[error("cannot open {path} for {engine} reads: {source}")]
    Open { path: PathBuf, engine: &'static str, source: io::Error },
    #[error("reading {len} bytes at offset {offset} of {path} failed: {source}; check the disk and its connection")]
    Read { path: PathBuf, offset: u64, len: u64, source: io::Error },
    #[error(
        "file shrank while running: {path} now has {file_len} bytes, but {len} bytes at offset {offset} are needed; \
         restore the file"
    )]
    Shrank { path: PathBuf, offset: u64, len: u64, file_len: u64 },
    #[error(
        "{}: this file was replaced or written to after it was opened ({what}), so that old and new weights would be \
         mixed; start again, and change no model while it is in use", path.display()
    )]
    Changed { path: PathBuf, what: &'static str },
    #[error(
        "{}: a part of this file cannot be read any more: it was cut while in use; put it back and start again",
        path.display()
    )]
    Cut { path: PathBuf },
    #[error(
        "{}: the {len} bytes at offset {offset} are not the planes of weights that they should be (a scale is no sound \
         number); the pack is damaged, `gguf-tools verify` says where", path.display()
    )]
    Planes { path: PathBuf, offset: u64, len: u64 },
    #[error("a read names source file {file}, but the model has {files} (expected 0..{files})")]
    NoSuchFile { file: u32, files: usize },
    #[error("a slot of {capacity} bytes cannot take {len} bytes from offset {offset} at lead {lead}")]
    SlotTooSmall { offset: u64, len: u64, lead: usize, capacity: usize },
    #[error("the {engine} engine is not available: {reason}; use buffered reads instead")]
    Unavailable { engine: &'static str, reason: String },
    #[error("cannot allocate {bytes} bytes for reads: {source}")]
    Memory { bytes: u64, source: io::Error },
    #[error("cannot start an I/O thread for {engine} reads: {source}")]
    Thread { engine: &'static str, source: io::Error },
    #[error("the {engine} store has stopped and takes no more reads")]
    Stopped { engine: &'static str },
}
