//! A store for a model's files, by the engine that was chosen.

use std::path::PathBuf;
use std::sync::Arc;

use super::buffered::BufferedStore;
#[cfg(target_os = "linux")]
use super::direct::DirectStore;
use super::{Original, Store, StoreError, StoreKind};

/// Opens `files` (a model's list of source files, in order) with the engine that `kind` names.
///
/// # Errors
/// [`StoreError::Open`] names the file that could not be opened; [`StoreError::Unavailable`] says why the direct
/// engine cannot run here.
pub fn open(kind: StoreKind, files: &[PathBuf]) -> Result<Arc<dyn Store>, StoreError> {
    match kind {
        StoreKind::Buffered => Ok(Arc::new(BufferedStore::open(files)?)),
        #[cfg(target_os = "linux")]
        StoreKind::Direct => Ok(Arc::new(DirectStore::open(files)?)),
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
        StoreKind::Buffered => Ok(Arc::new(BufferedStore::of_originals(files)?)),
        #[cfg(target_os = "linux")]
        StoreKind::Direct => Ok(Arc::new(DirectStore::of_originals(files)?)),
        #[cfg(not(target_os = "linux"))]
        StoreKind::Direct => Err(no_direct()),
    }
}

#[cfg(not(target_os = "linux"))]
fn no_direct() -> StoreError {
    StoreError::Unavailable { engine: "direct", reason: "it needs Linux (io_uring and O_DIRECT)".into() }
}
