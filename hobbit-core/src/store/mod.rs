//! Reads of expert bytes.
//!
//! A [`Store`] takes [`ReadRequest`]s and answers each of them exactly once with a [`ReadDone`]. It decides nothing:
//! [`crate::load`] orders the requests, [`mode::choose`] picks the engine.
//!
//! * [`direct`]: past the page cache: `io_uring` and `O_DIRECT`, on Windows unbuffered files and threads;
//! * buffered: `pread` through the page cache;
//! * [`faulty`]: any of them, with faults;
//! * [`copies`]: several of them, on disks with the same files.

pub mod arena;
pub mod copies;
#[cfg(target_os = "linux")]
pub mod direct;
#[cfg(windows)]
#[path = "direct_windows.rs"]
pub mod direct;
#[cfg(not(any(target_os = "linux", windows)))]
#[path = "no_direct.rs"]
pub mod direct;
mod dispatch;
pub mod faulty;
mod form;
pub mod measure;
pub mod mirror;
pub mod mode;
pub mod original;
pub mod probe;
pub mod threads;
mod workers;

#[cfg(all(test, any(target_os = "linux", windows)))]
mod tests;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use arena::Arena;
pub use copies::{Copies, CopyReport};
pub use form::{Form, HighPlane, Order, PLANE_BUFFERS_BYTES, Part, Rearrange, Rows};
pub use measure::{Bandwidth, measure_random_read};
pub use mirror::Mirror;
pub use mode::{Choice, Conditions, IoMode, StoreKind, choose};
pub use original::Original;
#[cfg(test)]
pub(crate) use workers::MemoryStore;

use crate::expert::Extent;
use crate::files::FileExt;
use direct::{DirectOptions, DirectStore, ENGINE};
use original::{BUFFERED, OpenFile};
use probe::open_direct;
use workers::{CHUNK_BYTES, Source, Workers};

/// A source of expert bytes.
///
/// The contract of an implementation:
/// * every submitted request is answered exactly once, in any order, from any thread, also when it fails;
/// * `submit` never waits for I/O, and may be called from inside [`Completion::complete`];
/// * after the answer nothing of the store touches the request's memory any more;
/// * dropping a store answers what it has accepted first.
pub trait Store: Send + Sync {
    /// The engine's name as the user reads it: `direct`, `buffered`, `memory`.
    fn name(&self) -> &'static str;

    /// Starts reading. Reads begin in the order given; a read that is split keeps that order too, so that the
    /// first slice lands first.
    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>);

    /// The copies that it reads, the model's own files first; empty if there are no others.
    fn copies(&self) -> Vec<CopyReport> {
        Vec::new()
    }
}

/// Why a store could not be opened or a read failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("too many reads wait to start (the next is of {len} bytes at offset {offset})")]
    TooManyReads { offset: u64, len: u64 },
    #[error("cannot open {path} for {engine} reads: {source}")]
    Open { path: PathBuf, engine: &'static str, source: io::Error },
    #[error("reading {len} bytes at offset {offset} of {path} failed: {source}; check the disk and its connection")]
    Read { path: PathBuf, offset: u64, len: u64, source: io::Error },
    #[error(
        "file shrank while running: {path} now has {file_len} bytes, but {len} bytes at offset {offset} are needed; \
         restore the file"
    )]
    Shrank { path: PathBuf, offset: u64, len: u64, file_len: u64 },
    #[error(
        "{}: this file was replaced or written to after it was opened ({what}), so that old and new weights would be \
         mixed; start again, and change no model while it is in use", path.display()
    )]
    Changed { path: PathBuf, what: &'static str },
    #[error(
        "{}: a part of this file cannot be read any more: it was cut while in use; put it back and start again",
        path.display()
    )]
    Cut { path: PathBuf },
    #[error(
        "{}: the {len} bytes at offset {offset} are not the planes of weights that they should be (a scale is no sound \
         number); the pack is damaged, `gguf-tools verify` says where", path.display()
    )]
    Planes { path: PathBuf, offset: u64, len: u64 },
    #[error("a read names source file {file}, but the model has {files} (expected 0..{files})")]
    NoSuchFile { file: u32, files: usize },
    #[error("a slot of {capacity} bytes cannot take {len} bytes from offset {offset} at lead {lead}")]
    SlotTooSmall { offset: u64, len: u64, lead: usize, capacity: usize },
    #[error("the {engine} engine is not available: {reason}; use buffered reads instead")]
    Unavailable { engine: &'static str, reason: String },
    #[error("cannot allocate {bytes} bytes for reads: {source}")]
    Memory { bytes: u64, source: io::Error },
    #[error("cannot start an I/O thread for {engine} reads: {source}")]
    Thread { engine: &'static str, source: io::Error },
    #[error("the {engine} store has stopped and takes no more reads")]
    Stopped { engine: &'static str },
}

// A read: source, destination, and answer.

/// Alignment of file offset, length and memory of a direct read, in bytes: one page, and a multiple of every logical
/// block size in use.
pub const BLOCK_BYTES: u64 = 4096;

/// Offset of the first byte of `extent` in its slot after a read of whole blocks.
pub(crate) const fn lead_of(extent: &Extent) -> usize {
    (extent.offset % BLOCK_BYTES) as usize
}

/// Bytes of a slot that can take any slice of `slice_bytes`, whatever its lead: a multiple of [`BLOCK_BYTES`].
pub const fn slot_stride(slice_bytes: u64) -> u64 {
    slice_bytes.next_multiple_of(BLOCK_BYTES) + BLOCK_BYTES
}

/// Start of a slot's memory. Page-aligned (4096) where it is to be filled by direct reads without a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotPtr(*mut u8);

impl SlotPtr {
    /// Names memory that reads may fill.
    ///
    /// # Safety
    /// For every [`ReadRequest`] made with this pointer, from its submission to its [`ReadDone`] (or to its
    /// withdrawal), the `capacity` bytes at `ptr` must be mapped, initialised, writable from any thread, and neither
    /// read nor written by others.
    pub const unsafe fn new(ptr: *mut u8) -> Self {
        Self(ptr)
    }

    pub const fn as_ptr(self) -> *mut u8 {
        self.0
    }

    /// The address `bytes` further, in the same memory.
    const fn at(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

// SAFETY: the pointer is only dereferenced for a request in flight, and by the contract of `SlotPtr::new` the memory
// may then be written from any thread.
unsafe impl Send for SlotPtr {}
// SAFETY: a shared `SlotPtr` gives the address only.
unsafe impl Sync for SlotPtr {}

/// Asks for the bytes of `extent` at `dst + lead`.
///
/// The bytes of the slot outside `[lead, lead + extent.len)` may be overwritten too: a direct read covers whole
/// blocks. With `lead == lead_of(extent)`, `dst` page-aligned and `capacity >=`
/// [`slot_stride`]`(extent.len)`, no engine copies a byte; any other lead costs a copy.
///
/// Each part of bit planes or rearranged rows has its own destination; `lead` is unused then.
#[derive(Clone, Debug)]
pub struct ReadRequest {
    /// The caller's name for the read, repeated in [`ReadDone`].
    pub ticket: u64,
    /// Bytes to read; of planes or rows, the smallest range with all of them.
    pub extent: Extent,
    pub dst: SlotPtr,
    /// Bytes at `dst`.
    pub capacity: usize,
    /// Offset of the extent's first byte from `dst`.
    pub lead: usize,
    /// Conversion of the bytes on their way to memory.
    pub form: Form,
}

impl ReadRequest {
    /// Bytes to read, without alignment.
    pub fn bytes(&self) -> u64 {
        self.form.bytes(self.extent.len)
    }

    /// Refuses requests that no engine may start: after this check `lead + extent.len <= capacity` (planes and rows lie
    /// in the extent, and their weights in the memory), the range does not overflow, and the file exists.
    fn check(&self, files: usize) -> Result<(), StoreError> {
        let Extent { file, offset, len } = self.extent;
        if file as usize >= files {
            return Err(StoreError::NoSuchFile { file, files });
        }
        let fits = match &self.form {
            Form::AsIs => len.checked_add(self.lead as u64).is_some_and(|end| end <= self.capacity as u64),
            form => form.is_sound(&self.extent, self.capacity),
        };
        // The end is rounded up to a block later, and file offsets are signed.
        let in_range = offset.checked_add(len).is_some_and(|end| end < i64::MAX as u64 - BLOCK_BYTES);
        if fits && in_range {
            Ok(())
        } else {
            Err(StoreError::SlotTooSmall { offset, len, lead: self.lead, capacity: self.capacity })
        }
    }
}

/// The answer to a read.
#[derive(Debug)]
pub struct ReadDone<E = StoreError> {
    /// The read's ticket.
    pub ticket: u64,
    /// Bytes moved from the device, page cache or memory: at least those of the read, more if whole blocks were read.
    pub result: Result<u64, E>,
}

/// Receiver of answers. Called on the store's threads, so it must be short and must not wait for I/O; it may call
/// [`Store::submit`].
pub trait Completion: Send + Sync {
    /// Takes one answer.
    fn complete(self: Arc<Self>, done: ReadDone);
}

impl Completion for crossbeam_channel::Sender<ReadDone> {
    fn complete(self: Arc<Self>, done: ReadDone) {
        // A receiver that has gone away no longer wants the answer.
        let _ = self.send(done);
    }
}

// Opening.

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
            let files: Vec<_> = files.into_iter().map(OpenFile::for_threads).collect();
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

/// Has the system drop a range from the page cache. A failure costs memory only.
#[cfg(target_os = "linux")]
pub fn advise_unneeded(file: &File, offset: u64, len: u64) {
    let (fd, offset, len) = (std::os::fd::AsRawFd::as_raw_fd(file), offset as i64, len as i64);
    // SAFETY: the descriptor is open; the call takes no memory, and refuses what is no range.
    unsafe { libc::posix_fadvise(fd, offset, len, libc::POSIX_FADV_DONTNEED) };
}

/// Nothing: only Linux takes this advice.
#[cfg(not(target_os = "linux"))]
pub fn advise_unneeded(_: &File, _offset: u64, _len: u64) {}

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
