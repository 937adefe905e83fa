//! Errors of reading and writing traces.

use std::io;
use std::path::{Path, PathBuf};

/// Why a trace cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The operating system refused.
    #[error("{}cannot {action} this trace: {error}", named(path))]
    Io {
        /// File; empty for a writer, which has no path.
        path: PathBuf,
        /// Attempted action.
        action: &'static str,
        /// The operating system's reason.
        error: io::Error,
    },
    /// Another kind of file.
    #[error("{}: not a trace: it begins with {found:02x?}, expected \"HOBBITTR\"", path.display())]
    Magic {
        /// File.
        path: PathBuf,
        /// Its first bytes, at most eight.
        found: Vec<u8>,
    },
    /// Written by another version.
    #[error("{}: version {found} of the trace format, expected {expected}; record the trace again with this hobbit",
        path.display())]
    Version {
        /// File.
        path: PathBuf,
        /// Version of the file.
        found: u16,
        /// Supported version.
        expected: u16,
    },
    /// The description of model and settings is invalid.
    #[error("{}: the trace's header is damaged: {reason}; record the trace again", path.display())]
    Header {
        /// File.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// A record is invalid.
    #[error("{}: the record at byte {offset} is damaged: {reason}; what precedes it can be read, record the rest again",
        path.display())]
    Record {
        /// File.
        path: PathBuf,
        /// First byte of the record.
        offset: u64,
        /// The value found and the expected value.
        reason: String,
    },
    /// The recorded routes do not fit this model.
    #[error("{}: these routes cannot be followed: {reason}", path.display())]
    Routes {
        /// File.
        path: PathBuf,
        /// The value found and the expected value.
        reason: String,
    },
    /// The format cannot store a value: a bug of the caller, or a batch beyond all limits.
    #[error("this cannot be recorded: {reason}")]
    Unwritable {
        /// The fault.
        reason: String,
    },
}

fn named(path: &Path) -> String {
    if path.as_os_str().is_empty() { String::new() } else { format!("{}: ", path.display()) }
}
