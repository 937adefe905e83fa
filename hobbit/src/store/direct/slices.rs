//! A slice on its way: which of its chunks are in the kernel's hands, and where its bytes land.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::super::arena::Arena;
use super::super::error::StoreError;
use super::super::past_cache::ENGINE;
use super::super::request::{Completion, ReadDone, ReadRequest};
use super::super::window::{BLOCK_BYTES, Chunk, Progress, Window, lead_of};
use super::OpenFile;

/// Times that a chunk may be asked to try again before that counts as a failure.
const RETRIES_MAX: u32 = 1000;

/// A request being read.
pub(super) struct Slice {
    request: ReadRequest,
    sink: Arc<dyn Completion>,
    started: Instant,
    window: Window,
    /// File offset of the next chunk to issue.
    next: u64,
    /// Rests of short reads, to be issued first.
    rests: Vec<Chunk>,
    /// Chunks in the kernel's hands.
    in_flight: u32,
    /// Bytes read so far.
    moved: u64,
    retries: u32,
    error: Option<StoreError>,
    /// Stands in for a slot that is not aligned, or too small for the window.
    bounce: Option<Arena>,
}

impl Slice {
    /// A slice to read. `None` when it needs memory of its own and there is none: it has been answered then.
    pub fn new(request: ReadRequest, sink: Arc<dyn Completion>, started: Instant) -> Option<Self> {
        let window = Window::around(&request.extent);
        let aligned = request.dst.as_ptr().addr().is_multiple_of(BLOCK_BYTES as usize);
        let fits = window.len() <= request.capacity as u64;
        let bounce = match (!aligned || !fits).then(|| Arena::new(window.len() as usize)).transpose() {
            Ok(bounce) => bounce,
            Err(source) => {
                let error = StoreError::Memory { bytes: window.len(), source };
                sink.complete(ReadDone::new(request.ticket, Err(error), started));
                return None;
            }
        };
        Some(Self {
            request,
            sink,
            started,
            window,
            next: window.start,
            rests: Vec::new(),
            in_flight: 0,
            moved: 0,
            retries: 0,
            error: None,
            bounce,
        })
    }

    pub fn file(&self) -> usize {
        self.request.extent.file as usize
    }

    /// The next chunk to give to the kernel; `None` when all are issued.
    pub fn take_chunk(&mut self, chunk_bytes: u32) -> Option<Chunk> {
        if self.error.is_some() {
            return None;
        }
        let chunk = self.rests.pop().or_else(|| {
            (self.next < self.window.end).then(|| {
                let chunk = Chunk::at(&self.window, self.next, chunk_bytes);
                self.next += u64::from(chunk.len);
                chunk
            })
        })?;
        self.in_flight += 1;
        Some(chunk)
    }

    /// Where a chunk's bytes go.
    pub fn address(&self, chunk: &Chunk) -> *mut u8 {
        debug_assert!(chunk.offset >= self.window.start && chunk.offset + u64::from(chunk.len) <= self.window.end);
        // The window fits into its memory (`new`), the chunk lies in the window.
        self.memory().wrapping_add((chunk.offset - self.window.start) as usize)
    }

    fn memory(&self) -> *mut u8 {
        self.bounce.as_ref().map_or(self.request.dst.as_ptr(), Arena::as_ptr)
    }

    /// Takes the kernel's answer for a chunk: a byte count, or a negated error number. True when there is a rest to
    /// issue again.
    pub fn landed(&mut self, chunk: Chunk, answer: i32, file: &OpenFile) -> bool {
        self.in_flight -= 1;
        let Ok(got) = u32::try_from(answer) else {
            let error = io::Error::from_raw_os_error(answer.saturating_neg());
            let again = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
            self.retries += u32::from(again);
            if again && self.retries <= RETRIES_MAX {
                self.rests.push(chunk);
                return self.error.is_none();
            }
            self.fail_read(error, file);
            return false;
        };
        self.moved += u64::from(got);
        match chunk.after(got, self.request.extent.end()) {
            Progress::Complete => false,
            Progress::Rest(rest) => {
                self.rests.push(rest);
                self.error.is_none()
            }
            Progress::EndOfFile => {
                let file_len = file.file.metadata().map_or(0, |metadata| metadata.len());
                self.error.get_or_insert_with(|| StoreError::Shrank {
                    path: file.path.clone(),
                    offset: self.request.extent.offset,
                    len: self.request.extent.len,
                    file_len,
                });
                false
            }
        }
    }

    fn fail_read(&mut self, source: io::Error, file: &OpenFile) {
        let (offset, len) = (self.request.extent.offset, self.request.extent.len);
        self.error.get_or_insert_with(|| StoreError::Read { path: file.path.clone(), offset, len, source });
    }

    /// No chunk is in flight and none is left to issue.
    pub fn is_over(&self) -> bool {
        self.in_flight == 0 && (self.error.is_some() || (self.rests.is_empty() && self.next >= self.window.end))
    }

    /// Moves the bytes to their lead where the window put them elsewhere, and answers.
    pub fn finish(self) {
        assert!(self.is_over());
        if self.error.is_none() {
            let extent = &self.request.extent;
            // SAFETY: the window's bytes are in `memory()`, and the extent lies in the window at its natural lead.
            let from = unsafe { self.memory().add(lead_of(extent)) };
            // SAFETY: `ReadRequest::check` held `lead + len <= capacity`.
            let to = unsafe { self.request.dst.as_ptr().add(self.request.lead) };
            if from != to {
                // SAFETY: both ranges of `len` bytes lie in memory that the maker of the `SlotPtr` has given to this
                // request, or in its own bounce memory; `copy` allows overlap; the kernel is done with both.
                unsafe { std::ptr::copy(from, to, extent.len as usize) };
            }
        }
        let result = self.error.map_or(Ok(self.moved), Err);
        self.sink.complete(ReadDone::new(self.request.ticket, result, self.started));
    }

    /// Answers a request that never reached the kernel.
    pub fn refuse(mut self) {
        self.error = Some(StoreError::Stopped { engine: ENGINE });
        self.finish();
    }
}
