//! Everything that can be wrong with a model file. Each message names the file, the value found, the value expected,
//! and the remedy.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model file was refused.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("{}: cannot {action}: {error}", path.display())]
    Io { path: PathBuf, action: String, error: io::Error },
    #[error("{}: is a directory, expected a .gguf file; name the file inside it (for a split model: any of its shards)",
        path.display())]
    Directory { path: PathBuf },
    #[error("{}: is not a regular file; experts are read at random offsets, copy the model to a disk first",
        path.display())]
    NotAFile { path: PathBuf },
    #[error("{}: file is empty, expected a GGUF header; the download probably failed, fetch it again", path.display())]
    Empty { path: PathBuf },
    #[error("{}: not a GGUF file: starts with {found}, expected \"GGUF\"; {remedy}", path.display())]
    NotGguf { path: PathBuf, found: String, remedy: &'static str },
    #[error("{}: big-endian GGUF (version field {version:#010x}), only little-endian files can be read; convert it \
        with gguf-py's gguf_convert_endian.py", path.display())]
    BigEndian { path: PathBuf, version: u32 },
    #[error("{}: GGUF version {version}, expected 2 or 3; {remedy}", path.display())]
    Version { path: PathBuf, version: u32, remedy: &'static str },
    #[error("{}: truncated: {what} needs bytes {start}..{end}, but the file has {len}; fetch or copy the file again",
        path.display())]
    Truncated { path: PathBuf, what: String, start: u64, end: u64, len: u64 },
    #[error("{}: the {len} bytes that are there end inside the header: {what} needs bytes up to {end}; fetch more of \
        it, headers with a tokenizer have up to 40 MiB", path.display())]
    HeaderCut { path: PathBuf, what: String, end: u64, len: u64 },
    #[error("{}: {what} is {found}, at most {limit} expected; the header is damaged, fetch the file again",
        path.display())]
    TooLarge { path: PathBuf, what: String, found: u64, limit: u64 },
    #[error("{}: {what}: found {found}, expected {expected}; the header is damaged or written by a faulty tool, fetch \
        or convert the model again", path.display())]
    Malformed { path: PathBuf, what: String, found: String, expected: String },
    #[error("{}: tensor '{tensor}' has ggml type {id} ({found}), expected a type of current llama.cpp; {remedy}",
        path.display())]
    UnsupportedType { path: PathBuf, tensor: String, id: u32, found: &'static str, remedy: &'static str },
    #[error("{}: tensor '{tensor}' occurs twice, first in {}; names must be unique, fetch or convert the model again",
        path.display(), first.display())]
    DuplicateTensor { path: PathBuf, tensor: String, first: PathBuf },
    #[error("{}: tensors '{first}' and '{second}' overlap at byte {offset}; the header is damaged, fetch the file \
        again", path.display())]
    Overlap { path: PathBuf, first: String, second: String, offset: u64 },
    #[error("{}: shard {number} of {count} is missing, looked for {}; fetch it into the same directory, under that \
        name", path.display(), missing.display())]
    MissingShard { path: PathBuf, number: u32, count: u32, missing: PathBuf },
    #[error("{}: {what}: found {found}, expected {expected}; the shards come from different splits or were renamed, \
        fetch them again", path.display())]
    SplitMismatch { path: PathBuf, what: &'static str, found: String, expected: String },
    #[error("{}: tensor '{tensor}': {what}: found {found}, expected {expected}; the model was converted wrongly, \
        fetch or convert it again", path.display())]
    Experts { path: PathBuf, tensor: String, what: &'static str, found: String, expected: String },
}

impl GgufError {
    pub(super) fn too_large(path: &Path, what: impl Into<String>, found: u64, limit: u64) -> Self {
        Self::TooLarge { path: path.to_owned(), what: what.into(), found, limit }
    }
}
