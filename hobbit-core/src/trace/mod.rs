//! Traces: routing with its weights, residency, and times.
//!
//! A trace is recorded by the engine (`--trace FILE`), replayed by [`crate::sim`] and printed by `hobbit-sim show`.
//! The file is a [`Header`] followed by records, appended as things happen; docs/TRACE.md describes it byte by byte. A
//! file truncated by a crash is no error: [`TraceReader`] ends after the last whole record and reports the offset.
//!
//! ```
//! use hobbit_core::trace::{Header, Layer, LayerRecord, ModelDescription, Phase, Record, TraceReader, TraceWriter};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (bytes_high, bytes_low, bytes_rest) = (4096, 1024, 0);
//! let slots = 4;
//! let layer =
//!     Layer { layer: 0, n_expert: 8, n_used: 2, bytes_high, bytes_low, bytes_rest, slots_high: slots, slots_low: 0 };
//! let model = ModelDescription { name: "demo".into(), architecture: "toy".into(), layers: vec![layer] };
//! let mut writer = TraceWriter::new(Vec::new(), &Header { model, ..Header::default() })?;
//! let mut record = LayerRecord::new(0, 2);
//! record.push_token(&[5, 1], &[0.75, 0.25], None, 0);
//! writer.layer(&record)?;
//! writer.batch(Phase::Decode, 1, 0.004)?;
//!
//! let bytes = writer.finish()?;
//! let mut reader = TraceReader::new(&bytes[..], "demo.trace")?;
//! assert!(matches!(reader.next(), Some(Ok(Record::Layer(record))) if record.chosen == [5, 1]));
//! # Ok(())
//! # }
//! ```

mod bytes;
mod header;
mod reader;
mod record;
mod routes;
#[cfg(test)]
mod tests;
mod writer;

use std::io;
use std::path::{Path, PathBuf};

pub use header::{Header, Layer, MAGIC, ModelDescription, Settings, VERSION};
pub use reader::TraceReader;
pub use record::{LayerRecord, Needed, Prediction, ReadClass, Record, ResidentsRecord};
pub(crate) use routes::foretell;
pub use routes::{Routes, Walk};
pub use writer::TraceWriter;

pub use crate::route::Phase;

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
