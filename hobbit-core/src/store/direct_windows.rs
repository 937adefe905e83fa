//! Reads past the system's cache on Windows (`FILE_FLAG_NO_BUFFERING`): threads that each wait for one operation.
//!
//! Offset, length and memory of an operation are multiples of [`BLOCK_BYTES`]. A slice whose slot has room for the
//! blocks around it is read into its place; everything else goes through a thread's buffer.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::original::OpenFile;
use super::workers::{Source, Workers};
use super::{Arena, BLOCK_BYTES, Completion, ReadRequest, Store, StoreError};
use crate::files::FileExt;

/// Name of the engine that reads past the page cache.
pub(super) const ENGINE: &str = "direct";

/// Settings of the direct engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectOptions {
    /// Operations that the system holds at a time: threads.
    pub depth: u32,
    /// Bytes of one operation, a multiple of [`BLOCK_BYTES`].
    pub chunk_bytes: u32,
    /// For tests: operations ask for at most this much, as if the system had cut them short.
    #[cfg(test)]
    pub(super) cut_bytes: Option<u32>,
}

impl Default for DirectOptions {
    fn default() -> Self {
        Self {
            depth: 16,
            // A thread's buffer is as large.
            chunk_bytes: 1 << 20,
            #[cfg(test)]
            cut_bytes: None,
        }
    }
}

/// Reads the blocks around each slice.
pub(crate) struct DirectStore(Workers<Unbuffered>);

/// Every Windows can make them; a file system may refuse.
pub(super) fn probe_ring() -> io::Result<()> {
    Ok(())
}

impl DirectStore {
    /// Starts threads on files that were opened past the page cache.
    ///
    /// # Errors
    /// [`StoreError::Thread`].
    ///
    /// # Panics
    /// When `depth` is 0 or `chunk_bytes` is not a positive multiple of [`BLOCK_BYTES`].
    pub fn start(open: Vec<OpenFile>, options: DirectOptions) -> Result<Self, StoreError> {
        assert_eq!(u64::from(options.chunk_bytes) % BLOCK_BYTES, 0);
        let files = Unbuffered {
            open,
            #[cfg(test)]
            cut_bytes: options.cut_bytes,
        };
        Workers::start(files, options.depth as usize, options.chunk_bytes.into()).map(Self)
    }
}

impl Store for DirectStore {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>) {
        self.0.submit(requests, sink);
    }
}

/// Files opened without buffering.
struct Unbuffered {
    open: Vec<OpenFile>,
    #[cfg(test)]
    cut_bytes: Option<u32>,
}

/// Bytes that go through a buffer at once.
const BUFFER_BYTES: usize = 1 << 20;

thread_local!(static BUFFER: RefCell<Option<Arena>> = const { RefCell::new(None) });

impl Unbuffered {
    #[cfg(test)]
    fn cut(&self, bytes: usize) -> usize {
        self.cut_bytes.map_or(bytes, |cut| bytes.min(cut as usize))
    }

    #[cfg(not(test))]
    fn cut(&self, bytes: usize) -> usize {
        bytes
    }

    /// Reads the blocks around a range into a buffer, and copies the range.
    fn read_through_buffer(&self, file: usize, offset: u64, dst: &mut [u8]) -> io::Result<usize> {
        BUFFER.with_borrow_mut(|buffer| {
            if buffer.is_none() {
                *buffer = Some(Arena::new(BUFFER_BYTES)?);
            }
            let arena = buffer.as_ref().expect("made above");
            let head = (offset % BLOCK_BYTES) as usize;
            let whole = (head + dst.len()).next_multiple_of(BLOCK_BYTES as usize).min(arena.len());
            // SAFETY: inside the arena, which only this call uses; a byte has no invalid value.
            let blocks = unsafe { std::slice::from_raw_parts_mut(arena.as_ptr(), self.cut(whole)) };
            let got = self.open[file].file.read_at(blocks, offset - head as u64)?;
            let bytes = &blocks[head.min(got)..got];
            let n = bytes.len().min(dst.len());
            dst[..n].copy_from_slice(&bytes[..n]);
            Ok(n)
        })
    }
}

impl Source for Unbuffered {
    const NAME: &'static str = ENGINE;
    const BLOCK_BYTES: u64 = BLOCK_BYTES;

    fn files(&self) -> usize {
        self.open.len()
    }

    fn path(&self, file: usize) -> &Path {
        &self.open[file].path
    }

    fn len(&self, file: usize) -> u64 {
        self.open[file].file.metadata().map_or(0, |metadata| metadata.len())
    }

    fn read_at(&self, file: usize, offset: u64, dst: &mut [u8]) -> io::Result<usize> {
        let block = BLOCK_BYTES as usize;
        let is_aligned = offset.is_multiple_of(BLOCK_BYTES) && dst.as_ptr().addr().is_multiple_of(block);
        let whole = dst.len() / block * block;
        if is_aligned && whole > 0 {
            let bytes = self.cut(whole);
            self.open[file].file.read_at(&mut dst[..bytes], offset)
        } else {
            self.read_through_buffer(file, offset, dst)
        }
    }
}
