//! A store for a model's files, by the engine that was chosen.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use super::original::{BUFFERED, OpenFile, Original};
use super::{Store, StoreError, StoreKind, buffered};
#[cfg(target_os = "linux")]
use super::{direct, past_cache};

/// Opens `files` (a model's list of source files, in order) with the engine that `kind` names.
///
/// # Errors
/// [`StoreError::Open`] names the file that could not be opened; [`StoreError::Unavailable`] says why the direct
/// engine cannot run here.
pub fn open(kind: StoreKind, files: &[PathBuf]) -> Result<Arc<dyn Store>, StoreError> {
    let open = |path: &PathBuf| {
        let (opened, engine) = match kind {
            StoreKind::Buffered => (File::open(path), BUFFERED),
            #[cfg(target_os = "linux")]
            StoreKind::Direct => (past_cache::open(path), past_cache::ENGINE),
            #[cfg(not(target_os = "linux"))]
            StoreKind::Direct => return Err(no_direct()),
        };
        let path = path.clone();
        match opened {
            Ok(file) => Ok(OpenFile { path, file }),
            Err(source) => Err(StoreError::Open { path, engine, source }),
        }
    };
    start(kind, files.iter().map(open).collect::<Result<_, _>>()?)
}

/// As [`open`], of files that are open already: they are read whatever has taken their names since.
///
/// # Errors
/// As [`open`]; [`StoreError::Changed`] for a file that has been written to.
pub fn open_originals(kind: StoreKind, files: &[Original]) -> Result<Arc<dyn Store>, StoreError> {
    let open = |original: &Original| {
        let file = match kind {
            StoreKind::Buffered => original.again()?,
            #[cfg(target_os = "linux")]
            StoreKind::Direct => original.again_direct()?,
            #[cfg(not(target_os = "linux"))]
            StoreKind::Direct => return Err(no_direct()),
        };
        Ok(OpenFile { path: original.path.clone(), file })
    };
    start(kind, files.iter().map(open).collect::<Result<_, _>>()?)
}

fn start(kind: StoreKind, files: Vec<OpenFile>) -> Result<Arc<dyn Store>, StoreError> {
    match kind {
        StoreKind::Buffered => Ok(Arc::new(buffered::start(files)?)),
        #[cfg(target_os = "linux")]
        StoreKind::Direct => Ok(Arc::new(direct::DirectStore::start(files, direct::DirectOptions::default())?)),
        #[cfg(not(target_os = "linux"))]
        StoreKind::Direct => Err(no_direct()),
    }
}

#[cfg(not(target_os = "linux"))]
fn no_direct() -> StoreError {
    StoreError::Unavailable { engine: "direct", reason: "it needs Linux (io_uring and O_DIRECT)".into() }
}
