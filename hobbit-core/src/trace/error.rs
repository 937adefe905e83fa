//! Why a trace cannot be read or written.

use std::io;
use std::path::{Path, PathBuf};

/// Why a trace cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The operating system refused.
    #[error("{}cannot {action} this trace: {error}", named(path))]
    Io {
        /// File; empty for a writer's, which knows none.
        path: PathBuf,
        /// What was attempted.
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
    #[error("{}: version {found} of the trace format, expected {expected}; record the trace again with this hobbit", path.display())]
    Version {
        /// File.
        path: PathBuf,
        /// What it says.
        found: u16,
        /// What is understood.
        expected: u16,
    },
    /// The description of model and settings makes no sense.
    #[error("{}: the trace's header is damaged: {reason}; record the trace again", path.display())]
    Header {
        /// File.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A record makes no sense.
    #[error("{}: the record at byte {offset} is damaged: {reason}; what precedes it can be read, record the rest again", path.display())]
    Record {
        /// File.
        path: PathBuf,
        /// First byte of the record.
        offset: u64,
        /// What is wrong: what was found, what was expected.
        reason: String,
    },
    /// What it recorded is no way for this model's tokens.
    #[error("{}: these routes cannot be followed: {reason}", path.display())]
    Routes {
        /// File.
        path: PathBuf,
        /// What was found, what was expected.
        reason: String,
    },
    /// Something that the format has no room for was to be written: a bug of the caller, or a batch beyond all bounds.
    #[error("this cannot be recorded: {reason}")]
    Unwritable {
        /// What is wrong.
        reason: String,
    },
}

fn named(path: &Path) -> String {
    if path.as_os_str().is_empty() { String::new() } else { format!("{}: ", path.display()) }
}
