//! Errors of reading and writing traces.

use std::io;
use std::path::{Path, PathBuf};

/// Why a trace cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The path is empty for a writer, which has none.
    #[error("{}cannot {action} this trace: {error}", named(path))]
    Io { path: PathBuf, action: &'static str, error: io::Error },
    #[error("{}: not a trace: it begins with {found:02x?}, expected \"HOBBITTR\"", path.display())]
    Magic { path: PathBuf, found: Vec<u8> },
    #[error("{}: version {found} of the trace format, expected {expected}; record the trace again with this hobbit",
        path.display())]
    Version { path: PathBuf, found: u16, expected: u16 },
    #[error("{}: the trace's header is damaged: {reason}; record the trace again", path.display())]
    Header { path: PathBuf, reason: String },
    #[error("{}: the record at byte {offset} is damaged: {reason}; what precedes it can be read, record the rest again",
        path.display())]
    Record { path: PathBuf, offset: u64, reason: String },
    /// The recorded routes do not fit this model.
    #[error("{}: these routes cannot be followed: {reason}", path.display())]
    Routes { path: PathBuf, reason: String },
    /// The format cannot store a value: a bug of the caller, or a batch beyond all limits.
    #[error("this cannot be recorded: {reason}")]
    Unwritable { reason: String },
}

fn named(path: &Path) -> String {
    if path.as_os_str().is_empty() { String::new() } else { format!("{}: ", path.display()) }
}
