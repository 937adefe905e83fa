//! Everything that can be wrong with a model file. Each message names the file, the value found, the value expected,
//! and the remedy.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model file was refused.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("{}: cannot {action}: {error}", path.display())]
    Io { path: PathBuf, action: String, error: io::Error },
    #[error("{}: {reason}", path.display())]
    Refused { path: PathBuf, reason: String },
    #[error("{}: truncated: {what} needs bytes {start}..{end}, but the file has {len}; fetch or copy the file again",
        path.display())]
    Truncated { path: PathBuf, what: String, start: u64, end: u64, len: u64 },
    #[error("{}: {what} is {found}, at most {limit} expected; the header is damaged, fetch the file again",
        path.display())]
    TooLarge { path: PathBuf, what: String, found: u64, limit: u64 },
    #[error("{}: {what}: found {found}, expected {expected}; {remedy}", path.display())]
    Malformed { path: PathBuf, what: String, found: String, expected: String, remedy: &'static str },
}

impl GgufError {
    pub(super) fn refused(path: &Path, reason: impl Into<String>) -> Self {
        Self::Refused { path: path.to_owned(), reason: reason.into() }
    }

    pub(super) fn too_large(path: &Path, what: impl Into<String>, found: u64, limit: u64) -> Self {
        Self::TooLarge { path: path.to_owned(), what: what.into(), found, limit }
    }
}
