//! A slice being read: its chunks with the kernel, and the memory that they fill.

use std::io;
use std::sync::Arc;

use super::super::StoreError;
use super::super::arena::Arena;
use super::super::form::BUFFER_BYTES;
use super::super::{BLOCK_BYTES, Completion, ReadDone, ReadRequest, lead_of};
use super::units::{Buffers, Next, UnitChunk, Units};
use super::{ENGINE, OpenFile};
use crate::expert::Extent;

/// Retries of a slice's chunks before a read fails.
const RETRIES_MAX: u32 = 1000;

/// A request being read.
pub(super) struct Slice {
    request: ReadRequest,
    sink: Arc<dyn Completion>,
    way: Way,
    /// Rests of short reads, which are issued first.
    rests: Vec<Operation>,
    /// Chunks with the kernel.
    in_flight: u32,
    /// Bytes read so far.
    moved: u64,
    retries: u32,
    error: Option<StoreError>,
}

/// The way of the bytes to the request's memory.
enum Way {
    Straight(Straight),
    Units(Units),
}

/// Reads directly to the destination, or to its window and then one move.
struct Straight {
    window: Window,
    /// File offset of the next chunk to issue.
    next: u64,
    /// Memory in place of a slot that is not aligned, or too small for the window.
    bounce: Option<Arena>,
}

/// One read operation of the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operation {
    pub chunk: Chunk,
    pub address: *mut u8,
    /// End of the needed bytes in the file.
    end: u64,
    unit: Option<usize>,
}

/// The next operation of a slice, or the reason why there is none.
pub(super) enum Issue {
    Operation(Operation),
    /// Other slices use all buffers.
    Wait,
    /// Everything is issued.
    Nothing,
}

impl Slice {
    /// A slice to read. `None` if it needs memory of its own and there is none: the request is answered then.
    pub fn new(request: ReadRequest, sink: Arc<dyn Completion>) -> Option<Self> {
        let way = match request.form.units(&request.extent) {
            None => Straight::new(&request).map(Way::Straight),
            Some(units) => Ok(Way::Units(Units::new(units))),
        };
        match way {
            Ok(way) => {
                let (rests, in_flight, moved, retries, error) = (Vec::new(), 0, 0, 0, None);
                Some(Self { request, sink, way, rests, in_flight, moved, retries, error })
            }
            Err(error) => {
                sink.complete(ReadDone { ticket: request.ticket, result: Err(error) });
                None
            }
        }
    }

    pub fn file(&self) -> usize {
        self.request.extent.file as usize
    }

    /// The next operation to give to the kernel.
    pub fn issue(&mut self, chunk_bytes: u32, buffers: &mut Buffers) -> Issue {
        if self.error.is_some() {
            return Issue::Nothing;
        }
        let operation = match (self.rests.pop(), &mut self.way) {
            (Some(rest), _) => rest,
            (None, Way::Straight(straight)) => match straight.next(&self.request, chunk_bytes) {
                Some(operation) => operation,
                None => return Issue::Nothing,
            },
            (None, Way::Units(units)) => match units.next(chunk_bytes, buffers) {
                Next::Chunk(UnitChunk { chunk, address, unit, end }) => {
                    Operation { chunk, address, end, unit: Some(unit) }
                }
                Next::NoBuffer => return Issue::Wait,
                Next::Nothing => return Issue::Nothing,
                Next::Failed(source) => {
                    self.error = Some(StoreError::Memory { bytes: BUFFER_BYTES as u64, source });
                    return Issue::Nothing;
                }
            },
        };
        self.in_flight += 1;
        Issue::Operation(operation)
    }

    /// Takes the kernel's answer for an operation: a byte count, or a negated error number. Returns whether there is a
    /// rest to issue.
    pub fn landed(&mut self, operation: Operation, answer: i32, file: &OpenFile, buffers: &mut Buffers) -> bool {
        self.in_flight -= 1;
        let Ok(got) = u32::try_from(answer) else {
            let error = io::Error::from_raw_os_error(answer.saturating_neg());
            let again = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
            self.retries += u32::from(again);
            if again && self.retries <= RETRIES_MAX {
                self.rests.push(operation);
                return self.error.is_none();
            }
            self.fail_read(error, file);
            return false;
        };
        self.moved += u64::from(got);
        match operation.chunk.after(got, operation.end) {
            Progress::Complete => {
                if let (Way::Units(units), Some(unit)) = (&mut self.way, operation.unit) {
                    // SAFETY: `ReadRequest::check` accepted the memory, which is the request's until it is answered.
                    let is_sound = unsafe { units.complete(unit, self.request.dst, buffers) };
                    if is_sound == Some(false) {
                        let (offset, len) = (self.request.extent.offset, self.request.extent.len);
                        let path = file.path.clone();
                        self.error.get_or_insert(StoreError::Planes { path, offset, len });
                    }
                }
                false
            }
            Progress::Rest(chunk) => {
                let address = operation.address.wrapping_add((chunk.offset - operation.chunk.offset) as usize);
                self.rests.push(Operation { chunk, address, ..operation });
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
        let is_issued = || match &self.way {
            Way::Straight(straight) => straight.next >= straight.window.end,
            Way::Units(units) => units.is_issued(),
        };
        self.in_flight == 0 && (self.error.is_some() || (self.rests.is_empty() && is_issued()))
    }

    /// Moves the bytes to their lead if the window put them at another place, and answers.
    pub fn finish(mut self, buffers: &mut Buffers) {
        assert!(self.is_over());
        match &mut self.way {
            Way::Straight(straight) if self.error.is_none() => straight.finish(&self.request),
            Way::Straight(_) => {}
            Way::Units(units) => units.close(buffers),
        }
        let result = self.error.map_or(Ok(self.moved), Err);
        self.sink.complete(ReadDone { ticket: self.request.ticket, result });
    }

    /// Answers a request that never reached the kernel.
    pub fn refuse(mut self, buffers: &mut Buffers) {
        self.error = Some(StoreError::Stopped { engine: ENGINE });
        self.finish(buffers);
    }
}

impl Straight {
    fn new(request: &ReadRequest) -> Result<Self, StoreError> {
        let window = Window::around(&request.extent);
        let aligned = request.dst.as_ptr().addr().is_multiple_of(BLOCK_BYTES as usize);
        let fits = window.len() <= request.capacity as u64;
        let bounce = (!aligned || !fits).then(|| Arena::new(window.len() as usize)).transpose();
        let bounce = bounce.map_err(|source| StoreError::Memory { bytes: window.len(), source })?;
        Ok(Self { window, next: window.start, bounce })
    }

    /// The next chunk; `None` when all are issued.
    fn next(&mut self, request: &ReadRequest, chunk_bytes: u32) -> Option<Operation> {
        let chunk = (self.next < self.window.end).then(|| Chunk::at(&self.window, self.next, chunk_bytes))?;
        self.next += u64::from(chunk.len);
        debug_assert!(chunk.offset >= self.window.start && chunk.offset + u64::from(chunk.len) <= self.window.end);
        // The window fits into its memory (`new`), the chunk lies in the window.
        let address = self.memory(request).wrapping_add((chunk.offset - self.window.start) as usize);
        Some(Operation { chunk, address, end: request.extent.end(), unit: None })
    }

    fn memory(&self, request: &ReadRequest) -> *mut u8 {
        self.bounce.as_ref().map_or(request.dst.as_ptr(), Arena::as_ptr)
    }

    /// Moves the bytes to their lead if the window put them at another place.
    fn finish(&self, request: &ReadRequest) {
        // SAFETY: the window's bytes are in `memory()`, and the extent lies in the window at its natural lead.
        let from = unsafe { self.memory(request).add(lead_of(&request.extent)) };
        // SAFETY: `ReadRequest::check` held `lead + len <= capacity`.
        let to = unsafe { request.dst.as_ptr().add(request.lead) };
        if from != to {
            // SAFETY: both ranges of `len` bytes lie in the request's memory or in its own bounce memory; `copy` allows
            // overlap; the kernel is done with both.
            unsafe { std::ptr::copy(from, to, request.extent.len as usize) };
        }
    }
}

// The arithmetic of direct reads: GGUF offsets are 32-byte aligned, direct reads need whole blocks.
//
// ```text
//   file    |....####|########|###.....|        # = extent, | = block border
//   window  |--------|--------|--------|        what is read
//   slot    ^dst ^dst + lead
// ```

/// The blocks that cover an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// File offset of the first block.
    pub start: u64,
    /// File offset after the last block.
    pub end: u64,
}

impl Window {
    /// The smallest window around a checked extent.
    pub fn around(extent: &Extent) -> Self {
        let start = extent.offset - extent.offset % BLOCK_BYTES;
        Self { start, end: extent.end().next_multiple_of(BLOCK_BYTES) }
    }

    pub fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// A part of a window that one operation of the kernel reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// File offset, block-aligned.
    pub offset: u64,
    /// Bytes asked for, a multiple of the block.
    pub len: u32,
}

/// Meaning of an operation's byte count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// All needed bytes are there.
    Complete,
    /// Some were read; this is missing.
    Rest(Chunk),
    /// The file ends before the needed bytes.
    EndOfFile,
}

impl Chunk {
    /// The piece of `window` that starts at `offset`, at most `chunk_bytes` (a multiple of the block) long.
    pub fn at(window: &Window, offset: u64, chunk_bytes: u32) -> Self {
        debug_assert!(offset >= window.start && offset < window.end);
        let len = (window.end - offset).min(u64::from(chunk_bytes));
        Self { offset, len: len as u32 }
    }

    /// Judges a read of `got` bytes, where the extent ends at `extent_end`. The last window of a file may reach past
    /// its end: bytes after the extent are not missed. A direct read stops inside a block only at the end of the file.
    pub fn after(&self, got: u32, extent_end: u64) -> Progress {
        let end = self.offset + u64::from(self.len);
        if self.offset + u64::from(got) >= end.min(extent_end) {
            return Progress::Complete;
        }
        let whole = got - got % BLOCK_BYTES as u32;
        if whole == 0 {
            return Progress::EndOfFile;
        }
        Progress::Rest(Chunk { offset: self.offset + u64::from(whole), len: self.len - whole })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::slot_stride;
    use super::*;

    #[test]
    fn a_window_covers_its_extent_in_whole_blocks_and_fits_a_slot() {
        for (offset, len, start, end, lead) in [
            (0, 1, 0, 4096, 0),
            (0, 4096, 0, 4096, 0),
            (0, 4097, 0, 8192, 0),
            (4095, 1, 0, 4096, 4095),
            (4095, 2, 0, 8192, 4095),
            (4064, 8192, 0, 12288, 4064),
            (8192, 4096, 8192, 12288, 0),
            (32, 4096, 0, 8192, 32),
        ] {
            let extent = Extent { file: 0, offset, len };
            let window = Window::around(&extent);
            assert_eq!((window, lead_of(&extent)), (Window { start, end }, lead), "{extent:?}");
            assert!(window.len() <= slot_stride(len), "{extent:?}");
        }
    }

    #[test]
    fn chunks_cover_the_window_without_gap() {
        let window = Window { start: 4096, end: 4096 * 8 };
        let mut at = window.start;
        let mut lens = Vec::new();
        while at < window.end {
            let chunk = Chunk::at(&window, at, 4096 * 3);
            lens.push(chunk.len / 4096);
            at += u64::from(chunk.len);
        }
        assert_eq!((at, lens), (window.end, vec![3, 3, 1]));
    }

    #[test]
    fn a_short_read_is_complete_resumed_or_the_end_of_the_file() {
        let chunk = Chunk { offset: 8192, len: 16384 };
        let far = 1 << 30;
        for (got, extent_end, want) in [
            (16384, far, Progress::Complete),
            (16383, far, Progress::Rest(Chunk { offset: 20480, len: 4096 })),
            (8192, far, Progress::Rest(Chunk { offset: 16384, len: 8192 })),
            (4096, far, Progress::Rest(Chunk { offset: 12288, len: 12288 })),
            (4095, far, Progress::EndOfFile),
            (0, far, Progress::EndOfFile),
            (100, 8292, Progress::Complete),
            (99, 8292, Progress::EndOfFile),
            (0, 8193, Progress::EndOfFile),
            (12288, 20480, Progress::Complete),
            (12287, 20480, Progress::Rest(Chunk { offset: 16384, len: 8192 })),
        ] {
            assert_eq!(chunk.after(got, extent_end), want, "{got} bytes of an extent up to {extent_end}");
        }
    }
}
