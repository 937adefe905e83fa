//! Expert bytes that are already in RAM: the host tier, and tests without a file system.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::error::StoreError;
use super::workers::{CHUNK_BYTES, Source, Workers};

/// Copies from byte slices, one per source file, on one thread.
pub type MemoryStore = Workers<Vec<Arc<[u8]>>>;

impl MemoryStore {
    /// Serves `files`, in the order of the model's list of files.
    ///
    /// # Errors
    /// [`StoreError::Thread`].
    pub fn new(files: Vec<Arc<[u8]>>) -> Result<Self, StoreError> {
        Workers::start(files, 1, CHUNK_BYTES)
    }
}

impl Source for Vec<Arc<[u8]>> {
    const NAME: &'static str = "memory";

    fn files(&self) -> usize {
        self.len()
    }

    fn path(&self, _file: usize) -> &Path {
        Path::new("(memory)")
    }

    fn len(&self, file: usize) -> u64 {
        self[file].len() as u64
    }

    fn read_at(&self, file: usize, offset: u64, mut dst: &mut [u8]) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self[file].get(offset..)).unwrap_or_default();
        io::Write::write(&mut dst, rest)
    }
}
