//! Errors of reading and writing traces.

use std::io;
use std::path::{Path, PathBuf};

/// Why a trace cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("{}cannot {action} this trace: {error}", named(path))]
    Io {
        /// File; empty for a writer, which has no path.
        path: PathBuf,
        action: &'static str,
        /// The operating system's reason.
        error: io::Error,
    },
    #[error("{}: not a trace: it begins with {found:02x?}, expected \"HOBBITTR\"", path.display())]
    Magic {
        /// File.
        path: PathBuf,
        /// Its first bytes, at most eight.
        found: Vec<u8>,
    },
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
    #[error("{}: the trace's header is damaged: {reason}; record the trace again", path.display())]
    Header {
        /// File.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
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
    #[error("{}: these routes cannot be followed: {reason}", path.display())]
    Routes {
        /// File.
        path: PathBuf,
        /// The value found and the expected value.
        reason: String,
    },
    #[error("this cannot be recorded: {reason}")]
    Unwritable {
        /// The fault.
        reason: String,
    },
}

fn named(path: &Path) -> String {
    if path.as_os_str().is_empty() { String::new() } else { format!("{}: ", path.display()) }
}
