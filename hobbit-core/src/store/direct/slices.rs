//! A slice being read: its chunks with the kernel, and the memory that they fill.

use std::io;
use std::sync::Arc;

use super::super::StoreError;
use super::super::arena::Arena;
use super::super::form::BUFFER_BYTES;
use super::super::request::{Completion, ReadDone, ReadRequest};
use super::super::window::{BLOCK_BYTES, Chunk, Progress, Window, lead_of};
use super::units::{Buffers, Next, UnitChunk, Units};
use super::{ENGINE, OpenFile};

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
