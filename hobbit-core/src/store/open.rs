//! A store for a model's files, by its engine, and the engine that reads through the page cache.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::direct::{DirectOptions, DirectStore, ENGINE};
use super::original::{BUFFERED, OpenFile, Original};
use super::probe::open_direct;
use super::workers::{CHUNK_BYTES, Source, Workers};
use super::{Store, StoreError, StoreKind};

/// Threads of buffered reads: enough to keep a solid-state disk busy when the page cache misses.
const THREADS: usize = 4;

/// Opens `files` (a model's source files, in order) with this engine.
///
/// # Errors
/// [`StoreError::Open`] names the file that could not be opened; [`StoreError::Unavailable`] the reason why the direct
/// engine cannot run here.
pub fn open(kind: StoreKind, files: &[PathBuf]) -> Result<Arc<dyn Store>, StoreError> {
    let open = |path: &PathBuf| {
        let (opened, engine) = match kind {
            StoreKind::Buffered => (File::open(path), BUFFERED),
            StoreKind::Direct => (open_direct(path), ENGINE),
        };
        let path = path.clone();
        match opened {
            Ok(file) => Ok(OpenFile { path, file }),
            Err(source) => Err(StoreError::Open { path, engine, source }),
        }
    };
    start(kind, files.iter().map(open).collect::<Result<_, _>>()?)
}

/// Reads files that are open already, whatever has taken their names since.
///
/// # Errors
/// As [`open`]; [`StoreError::Changed`] for a file that has been written to.
pub fn open_originals(kind: StoreKind, files: &[Original]) -> Result<Arc<dyn Store>, StoreError> {
    let open = |original: &Original| {
        let file = match kind {
            StoreKind::Buffered => original.again()?,
            StoreKind::Direct => original.again_direct()?,
        };
        Ok(OpenFile { path: original.path.clone(), file })
    };
    start(kind, files.iter().map(open).collect::<Result<_, _>>()?)
}

fn start(kind: StoreKind, files: Vec<OpenFile>) -> Result<Arc<dyn Store>, StoreError> {
    Ok(match kind {
        StoreKind::Buffered => {
            // Slices are read whole and in no order: read-ahead would only fetch other experts.
            files.iter().for_each(|open| advise_random(&open.file));
            Arc::new(Workers::start(files, THREADS, CHUNK_BYTES)?)
        }
        StoreKind::Direct => Arc::new(DirectStore::start(files, DirectOptions::default())?),
    })
}

/// Advises the system against read-ahead. A failure costs time only.
#[cfg(target_os = "linux")]
pub fn advise_random(file: &File) {
    // SAFETY: the descriptor is open; the call takes no memory.
    unsafe { libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(file), 0, 0, libc::POSIX_FADV_RANDOM) };
}

/// Nothing: only Linux takes this advice.
#[cfg(not(target_os = "linux"))]
pub fn advise_random(_: &File) {}

/// Has the system start reading a range into the page cache. A failure costs time only.
#[cfg(target_os = "linux")]
pub fn advise_needed(file: &File, offset: u64, len: u64) {
    let (fd, offset, len) = (std::os::fd::AsRawFd::as_raw_fd(file), offset as i64, len as i64);
    // SAFETY: the descriptor is open; the call takes no memory, and refuses what is no range.
    unsafe { libc::posix_fadvise(fd, offset, len, libc::POSIX_FADV_WILLNEED) };
}

/// Nothing: only Linux takes this advice.
#[cfg(not(target_os = "linux"))]
pub fn advise_needed(_: &File, _offset: u64, _len: u64) {}

/// `pread` through the page cache, straight to the place in the slot.
impl Source for Vec<OpenFile> {
    const NAME: &'static str = BUFFERED;

    fn files(&self) -> usize {
        self.len()
    }

    fn path(&self, file: usize) -> &Path {
        &self[file].path
    }

    fn len(&self, file: usize) -> u64 {
        self[file].file.metadata().map_or(0, |metadata| metadata.len())
    }

    fn read_at(&self, file: usize, offset: u64, dst: &mut [u8]) -> io::Result<usize> {
        self[file].file.read_at(dst, offset)
    }
}
