//! `pread` through the page cache, on a few threads.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::StoreError;
use super::request::{Completion, ReadRequest};
use super::workers::{Source, Workers};
use super::{Original, Store};

/// Reading threads: enough to keep a solid-state disk busy when the page cache misses.
pub const THREADS: usize = 4;
/// Bytes of one `pread`.
pub const CHUNK_BYTES: u64 = 1 << 20;

/// Reads straight to their place in the slot; the kernel copies from its page cache.
pub struct BufferedStore {
    workers: Workers<Files>,
}

struct Files {
    open: Vec<(PathBuf, File)>,
}

impl BufferedStore {
    /// Opens the files and starts [`THREADS`] threads.
    ///
    /// # Errors
    /// [`StoreError::Open`] with the file's name, [`StoreError::Thread`].
    pub fn open(files: &[PathBuf]) -> Result<Self, StoreError> {
        let open = files
            .iter()
            .map(|path| match File::open(path) {
                Ok(file) => Ok((path.clone(), file)),
                Err(source) => Err(StoreError::Open { path: path.clone(), engine: "buffered", source }),
            })
            .collect::<Result<Vec<_>, _>>()?;
        Self::of_files(open)
    }

    /// As [`BufferedStore::open`], of files that are open already.
    ///
    /// # Errors
    /// As [`BufferedStore::open`]; [`StoreError::Changed`].
    pub fn of_originals(files: &[Original]) -> Result<Self, StoreError> {
        let again = |file: &Original| Ok((file.path().to_owned(), file.again()?));
        Self::of_files(files.iter().map(again).collect::<Result<_, StoreError>>()?)
    }

    fn of_files(open: Vec<(PathBuf, File)>) -> Result<Self, StoreError> {
        // Slices are read whole and in no order: read-ahead would only fetch other experts.
        open.iter().for_each(|(_, file)| advise_random(file));
        Ok(Self { workers: Workers::start(Files { open }, THREADS, CHUNK_BYTES)? })
    }
}

/// Tells the system that what follows what is read will not be read next. Where it cannot be told, that costs time only.
pub(crate) fn advise_random(file: &File) {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        // SAFETY: the descriptor is open; the call takes no memory, and its failure is harmless.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

impl Store for BufferedStore {
    fn name(&self) -> &'static str {
        self.workers.name()
    }

    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>) {
        self.workers.submit(requests, sink);
    }
}

impl Source for Files {
    fn name(&self) -> &'static str {
        "buffered"
    }

    fn files(&self) -> usize {
        self.open.len()
    }

    fn path(&self, file: usize) -> &Path {
        &self.open[file].0
    }

    fn len(&self, file: usize) -> u64 {
        self.open[file].1.metadata().map_or(0, |metadata| metadata.len())
    }

    #[cfg(unix)]
    fn read_at(&self, file: usize, offset: u64, dst: &mut [u8]) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(&self.open[file].1, dst, offset)
    }

    #[cfg(windows)]
    fn read_at(&self, file: usize, offset: u64, dst: &mut [u8]) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(&self.open[file].1, dst, offset)
    }
}
