//! `pread` through the page cache, on a few threads.

use std::fs::File;
use std::io;
use std::path::Path;

use super::error::StoreError;
use super::original::{BUFFERED, OpenFile};
use super::workers::{CHUNK_BYTES, Source, Workers};

/// Reading threads: enough to keep a solid-state disk busy when the page cache misses.
const THREADS: usize = 4;

/// Reads straight to their place in the slot; the kernel copies from its page cache.
pub(super) fn start(files: Vec<OpenFile>) -> Result<Workers<Vec<OpenFile>>, StoreError> {
    // Slices are read whole and in no order: read-ahead would only fetch other experts.
    files.iter().for_each(|open| advise_random(&open.file));
    Workers::start(files, THREADS, CHUNK_BYTES)
}

/// Tells the system that what follows what is read will not be read next. Where it cannot be told, that costs time only.
pub fn advise_random(file: &File) {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        // SAFETY: the descriptor is open; the call takes no memory, and its failure is harmless.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

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

    #[cfg(unix)]
    fn read_at(&self, file: usize, offset: u64, dst: &mut [u8]) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(&self[file].file, dst, offset)
    }

    #[cfg(windows)]
    fn read_at(&self, file: usize, offset: u64, dst: &mut [u8]) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(&self[file].file, dst, offset)
    }
}
