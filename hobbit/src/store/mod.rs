//! Where expert bytes come from.
//!
//! A [`Store`] takes [`ReadRequest`]s and answers each of them exactly once with a [`ReadDone`]. It decides
//! nothing: which request goes first is [`crate::load`]'s business, which engine is used is [`mode::choose`]'s.
//!
//! * [`direct`]: `io_uring` and `O_DIRECT`, past the page cache, Linux only;
//! * [`buffered`]: `pread` through the page cache;
//! * [`memory`]: from bytes in RAM;
//! * [`faulty`]: any of them, with faults.

pub mod arena;
pub mod buffered;
#[cfg(target_os = "linux")]
pub mod direct;
pub mod error;
pub mod faulty;
pub mod measure;
pub mod memory;
pub mod mode;
pub mod original;
pub mod probe;
mod request;
mod window;
mod workers;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

pub use arena::Arena;
pub(crate) use buffered::advise_random;
pub use error::StoreError;
pub use measure::{Bandwidth, measure_random_read};
pub use mode::{Choice, IoMode, Regime, StoreKind, choose};
pub use original::Original;
pub use request::{Completion, ReadDone, ReadRequest, SlotPtr};
pub use window::{BLOCK_BYTES, lead_of, slot_stride};

/// A source of expert bytes.
///
/// The contract of an implementation:
/// * every submitted request is answered exactly once, in any order, from any thread, also when it fails;
/// * `submit` never waits for I/O, and may be called from inside [`Completion::complete`];
/// * after the answer nothing of the store touches the request's memory any more;
/// * dropping a store answers what it has accepted first.
pub trait Store: Send + Sync {
    /// The engine's name as the user reads it: `direct`, `buffered`, `memory`.
    fn name(&self) -> &'static str;

    /// Starts reading. Reads begin in the order given; a read that is split keeps that order too, so that the
    /// first slice lands first.
    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>);
}

/// Opens `files` (a model's list of source files, in order) with the engine that `kind` names.
///
/// # Errors
/// [`StoreError::Open`] names the file that could not be opened; [`StoreError::Unavailable`] says why the direct
/// engine cannot run here.
pub fn open(kind: StoreKind, files: &[PathBuf]) -> Result<Arc<dyn Store>, StoreError> {
    match kind {
        StoreKind::Buffered => Ok(Arc::new(buffered::BufferedStore::open(files)?)),
        #[cfg(target_os = "linux")]
        StoreKind::Direct => Ok(Arc::new(direct::DirectStore::open(files)?)),
        #[cfg(not(target_os = "linux"))]
        StoreKind::Direct => Err(no_direct()),
    }
}

/// As [`open`], of files that are open already: they are read whatever has taken their names since.
///
/// # Errors
/// As [`open`]; [`StoreError::Changed`] for a file that has been written to.
pub fn open_originals(kind: StoreKind, files: &[Original]) -> Result<Arc<dyn Store>, StoreError> {
    match kind {
        StoreKind::Buffered => Ok(Arc::new(buffered::BufferedStore::of_originals(files)?)),
        #[cfg(target_os = "linux")]
        StoreKind::Direct => Ok(Arc::new(direct::DirectStore::of_originals(files)?)),
        #[cfg(not(target_os = "linux"))]
        StoreKind::Direct => Err(no_direct()),
    }
}

#[cfg(not(target_os = "linux"))]
fn no_direct() -> StoreError {
    StoreError::Unavailable { engine: "direct", reason: "it needs Linux (io_uring and O_DIRECT)".into() }
}
