//! Threads that copy from a synchronous source: the body of the buffered store, and the store in memory.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::Store;
use super::StoreError;
use super::form::Unit;
use super::threads;
use super::{Completion, ReadDone, ReadRequest};
use crate::expert::Extent;

/// Bytes of one read of a source.
pub(super) const CHUNK_BYTES: u64 = 1 << 20;

/// Files that can be read at an offset.
pub trait Source: Send + Sync + 'static {
    const NAME: &'static str;
    /// Reads of whole blocks, into memory that is aligned to them, need no copy.
    const BLOCK_BYTES: u64 = 1;
    fn files(&self) -> usize;
    /// Name of a file in messages.
    fn path(&self, file: usize) -> &Path;
    /// Present length in bytes.
    fn len(&self, file: usize) -> u64;
    /// Reads up to `dst.len()` bytes; 0 only at the end of the file.
    fn read_at(&self, file: usize, offset: u64, dst: &mut [u8]) -> io::Result<usize>;
}

/// A fixed number of threads fed by one queue. Slices are split, so that one big slice occupies all of them.
pub(crate) struct Workers<S: Source> {
    source: Arc<S>,
    chunk_bytes: u64,
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

struct Job {
    slice: Arc<Slice>,
    work: Work,
}

enum Work {
    /// Bytes that are read to their place.
    Chunk {
        /// First byte, counted from the start of the extent.
        start: u64,
        len: u64,
    },
    /// Bit planes to merge, or rows to rearrange.
    Unit(Unit),
}

struct Slice {
    request: ReadRequest,
    sink: Arc<dyn Completion>,
    /// Chunks not yet done.
    pending: AtomicUsize,
    /// The first error; later chunks of the slice are then skipped.
    error: Mutex<Option<StoreError>>,
}

impl<S: Source> Workers<S> {
    pub(super) fn start(source: S, threads: usize, chunk_bytes: u64) -> Result<Self, StoreError> {
        assert!(threads > 0 && chunk_bytes > 0);
        let source = Arc::new(source);
        let (jobs, queue) = unbounded();
        let threads = (0..threads)
            .map(|number| {
                let (source, queue) = (Arc::clone(&source), queue.clone());
                threads::spawn(format!("hobbit-{}-{number}", S::NAME), move || work(&*source, &queue))
                    .map_err(|source| StoreError::Thread { engine: S::NAME, source })
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self { source, chunk_bytes, jobs: Some(jobs), threads })
    }

    /// The work of a checked request, at least one item.
    fn work(&self, request: &ReadRequest) -> Vec<Work> {
        let len = request.extent.len;
        // All chunks but the first start at blocks of the file.
        let skew = request.extent.offset % S::BLOCK_BYTES;
        let starts = |chunk: u64| (chunk * self.chunk_bytes).saturating_sub(skew).min(len);
        let mut work: Vec<Work> = match request.form.units(&request.extent) {
            None if len == 0 => Vec::new(),
            None => (0..(len + skew).div_ceil(self.chunk_bytes))
                .map(|chunk| Work::Chunk { start: starts(chunk), len: starts(chunk + 1) - starts(chunk) })
                .collect(),
            Some(units) => units.into_iter().map(Work::Unit).collect(),
        };
        if work.is_empty() {
            work.push(Work::Chunk { start: 0, len: 0 });
        }
        work
    }
}

impl<S: Source> Store for Workers<S> {
    fn name(&self) -> &'static str {
        S::NAME
    }

    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>) {
        for request in requests {
            if let Err(error) = request.check(self.source.files()) {
                Arc::clone(sink).complete(ReadDone { ticket: request.ticket, result: Err(error) });
                continue;
            }
            let work = self.work(&request);
            let slice = Arc::new(Slice {
                request,
                sink: Arc::clone(sink),
                pending: AtomicUsize::new(work.len()),
                error: Mutex::new(None),
            });
            for work in work {
                let job = Job { slice: Arc::clone(&slice), work };
                let jobs = self.jobs.as_ref().expect("taken on drop only");
                if jobs.send(job).is_err() {
                    slice.error().get_or_insert(StoreError::Stopped { engine: S::NAME });
                    slice.chunk_done();
                }
            }
        }
    }
}

impl<S: Source> Drop for Workers<S> {
    fn drop(&mut self) {
        // With the sender gone the threads finish what is queued and end.
        self.jobs = None;
        let me = thread::current().id();
        for thread in self.threads.drain(..) {
            // The last owner may be a completion on one of the threads: it cannot wait for itself.
            if thread.thread().id() != me {
                // A panic of the thread has already been printed.
                let _ = thread.join();
            }
        }
    }
}

impl Slice {
    fn error(&self) -> MutexGuard<'_, Option<StoreError>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn chunk_done(&self) {
        // AcqRel: the last one must see the bytes and the error that the others wrote.
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            let result = self.error().take().map_or(Ok(self.request.bytes()), Err);
            Arc::clone(&self.sink).complete(ReadDone { ticket: self.request.ticket, result });
        }
    }
}

fn work<S: Source>(source: &S, queue: &Receiver<Job>) {
    // For units; at most [`super::form::BUFFER_BYTES`].
    let mut buffer = Vec::new();
    for Job { slice, work } in queue {
        let request = &slice.request;
        let done = || match work {
            Work::Chunk { start, len } => read_chunk(source, request, start, len),
            Work::Unit(unit) => read_unit(source, request, &unit, &mut buffer),
        };
        if slice.error().is_none()
            && let Err(error) = done()
        {
            slice.error().get_or_insert(error);
        }
        slice.chunk_done();
    }
}

fn read_chunk<S: Source>(source: &S, request: &ReadRequest, start: u64, len: u64) -> Result<(), StoreError> {
    let (at, offset) = (request.lead + start as usize, request.extent.offset + start);
    let (head, tail) = margins::<S>(request, start, len);
    // SAFETY: `ReadRequest::check` held `lead + extent.len <= capacity`, and `start + len <= extent.len`. By the
    // contract of `SlotPtr::new` the `capacity` bytes are initialised and ours until the answer, and the chunks of one
    // slice do not overlap. The margins are inside the capacity, before the first chunk and after the last one.
    let dst = unsafe {
        let first = request.dst.as_ptr().add(at - head);
        std::slice::from_raw_parts_mut(first, head + len as usize + tail)
    };
    read_to(source, &request.extent, offset - head as u64, head + len as usize, dst)
}

/// Bytes before and after a chunk that may be read with it, so that whole blocks are read. None where the slot has no
/// room for them, or its memory is not aligned as the file.
fn margins<S: Source>(request: &ReadRequest, start: u64, len: u64) -> (usize, usize) {
    let (at, offset) = (request.lead + start as usize, request.extent.offset + start);
    let head = (offset % S::BLOCK_BYTES) as usize;
    let end = offset + len;
    let tail = (end.next_multiple_of(S::BLOCK_BYTES) - end) as usize;
    let is_aligned = (request.dst.as_ptr().addr() + at) as u64 % S::BLOCK_BYTES == head as u64;
    let room = request.capacity - at - len as usize;
    let is_last = start + len == request.extent.len;
    if len > 0 && is_aligned && head <= at && (tail == 0 || is_last && tail <= room) { (head, tail) } else { (0, 0) }
}

/// Reads planes or rows into the buffer and assembles them.
fn read_unit<S: Source>(
    source: &S,
    request: &ReadRequest,
    unit: &Unit,
    buffer: &mut Vec<u8>,
) -> Result<(), StoreError> {
    if buffer.len() < unit.buffer_bytes() {
        buffer.resize(unit.buffer_bytes(), 0);
    }
    for piece in &unit.pieces {
        let len = piece.len as usize;
        read_to(source, &request.extent, piece.offset, len, &mut buffer[piece.at..piece.at + len])?;
    }
    // SAFETY: the request was checked, the unit is its own, and units of one request make different parts of its
    // memory, which is ours by the contract of `SlotPtr::new`.
    let is_sound = unsafe { unit.assemble(request.dst, buffer) };
    let Extent { file, offset, len } = request.extent;
    let path = || source.path(file as usize).to_owned();
    if is_sound { Ok(()) } else { Err(StoreError::Planes { path: path(), offset, len }) }
}

/// Fills `rest` from a place inside `extent`, which messages name, at least with the `needed` bytes at its start.
fn read_to<S: Source>(
    source: &S,
    extent: &Extent,
    mut offset: u64,
    mut needed: usize,
    mut rest: &mut [u8],
) -> Result<(), StoreError> {
    let &Extent { file, offset: first, len: whole } = extent;
    let (file, path) = (file as usize, source.path(file as usize));
    while needed > 0 {
        match source.read_at(file, offset, rest) {
            Ok(0) => {
                let (path, file_len) = (path.to_owned(), source.len(file));
                return Err(StoreError::Shrank { path, offset: first, len: whole, file_len });
            }
            Ok(got) => {
                offset += got as u64;
                needed = needed.saturating_sub(got);
                rest = &mut rest[got..];
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(source) => return Err(StoreError::Read { path: path.to_owned(), offset: first, len: whole, source }),
        }
    }
    Ok(())
}

/// Expert bytes in RAM, for tests: copies from byte slices, one per source file, on one thread.
#[cfg(test)]
pub(crate) type MemoryStore = Workers<Vec<Arc<[u8]>>>;

#[cfg(test)]
impl MemoryStore {
    /// Serves `files`, in the order of the model's list of files.
    pub(crate) fn new(files: Vec<Arc<[u8]>>) -> Result<Self, StoreError> {
        Workers::start(files, 1, CHUNK_BYTES)
    }
}

#[cfg(test)]
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

#[cfg(test)]
mod tests {
    use super::super::tests::{SlotMemory, read_one};
    use super::*;

    /// Gives out at most `most` bytes a call and is interrupted every other time.
    struct Stutter {
        bytes: Vec<u8>,
        most: usize,
        calls: AtomicUsize,
    }

    impl Source for Stutter {
        const NAME: &'static str = "stutter";
        fn files(&self) -> usize {
            1
        }
        fn path(&self, _: usize) -> &Path {
            Path::new("stutter")
        }
        fn len(&self, _: usize) -> u64 {
            self.bytes.len() as u64
        }
        fn read_at(&self, _: usize, offset: u64, dst: &mut [u8]) -> io::Result<usize> {
            if self.calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let rest = &self.bytes[(offset as usize).min(self.bytes.len())..];
            let got = rest.len().min(dst.len()).min(self.most);
            dst[..got].copy_from_slice(&rest[..got]);
            Ok(got)
        }
    }

    #[test]
    fn short_and_interrupted_reads_are_resumed() {
        let bytes: Vec<u8> = (0..10_000u32).map(|at| (at % 251) as u8).collect();
        let source = Stutter { bytes: bytes.clone(), most: 7, calls: AtomicUsize::new(0) };
        let workers = Workers::start(source, 2, 1000).unwrap();
        let extent = Extent { file: 0, offset: 33, len: 9_900 };
        let memory = SlotMemory::new(1, 16384);
        let done = read_one(&workers, memory.request(1, extent, 0, 5));
        assert_eq!(done.result.unwrap(), 9_900);
        assert_eq!(memory.bytes(0, 5, 9_900), &bytes[33..9_933]);
    }

    #[test]
    fn the_end_of_the_file_is_an_error_not_a_loop() {
        let source = Stutter { bytes: vec![1; 500], most: 100, calls: AtomicUsize::new(0) };
        let workers = Workers::start(source, 1, 64).unwrap();
        let extent = Extent { file: 0, offset: 400, len: 101 };
        let memory = SlotMemory::new(1, 4096);
        let done = read_one(&workers, memory.request(1, extent, 0, 0));
        let error = done.result.unwrap_err();
        assert!(matches!(error, StoreError::Shrank { file_len: 500, offset: 400, len: 101, .. }), "{error}");
        assert!(error.to_string().contains("restore the file"));
    }
}
