//! Expert bytes that are already in RAM: the host tier, and tests without a file system.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::Store;
use super::error::StoreError;
use super::request::{Completion, ReadRequest};
use super::workers::{Source, Workers};

/// Bytes of one copy.
const CHUNK_BYTES: u64 = 1 << 20;

/// Copies from byte slices, one per source file, on one thread.
pub struct MemoryStore {
    workers: Workers<Bytes>,
}

struct Bytes {
    files: Vec<Arc<[u8]>>,
}

impl MemoryStore {
    /// Serves `files`, in the order of the model's list of files.
    ///
    /// # Errors
    /// [`StoreError::Thread`].
    pub fn new(files: Vec<Arc<[u8]>>) -> Result<Self, StoreError> {
        Ok(Self { workers: Workers::start(Bytes { files }, 1, CHUNK_BYTES)? })
    }
}

impl Store for MemoryStore {
    fn name(&self) -> &'static str {
        self.workers.name()
    }

    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>) {
        self.workers.submit(requests, sink);
    }
}

impl Source for Bytes {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn files(&self) -> usize {
        self.files.len()
    }

    fn path(&self, _file: usize) -> &Path {
        Path::new("(memory)")
    }

    fn len(&self, file: usize) -> u64 {
        self.files[file].len() as u64
    }

    fn read_at(&self, file: usize, offset: u64, dst: &mut [u8]) -> io::Result<usize> {
        let bytes = &self.files[file];
        let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or(&[]);
        let got = rest.len().min(dst.len());
        dst[..got].copy_from_slice(&rest[..got]);
        Ok(got)
    }
}
