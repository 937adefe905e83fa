//! One read: source, destination, and answer.

use std::sync::Arc;

use super::StoreError;
use super::form::Form;
use crate::expert::Extent;

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
    pub(super) const fn at(self, bytes: usize) -> Self {
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
/// [`super::slot_stride`]`(extent.len)`, no engine copies a byte; any other lead costs a copy.
///
/// Each part of bit planes or rearranged rows has its own destination; `lead` is unused then.
#[derive(Debug)]
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
    pub(super) fn check(&self, files: usize) -> Result<(), StoreError> {
        let Extent { file, offset, len } = self.extent;
        if file as usize >= files {
            return Err(StoreError::NoSuchFile { file, files });
        }
        let fits = match &self.form {
            Form::AsIs => len.checked_add(self.lead as u64).is_some_and(|end| end <= self.capacity as u64),
            form => form.is_sound(&self.extent, self.capacity),
        };
        // The end is rounded up to a block later, and file offsets are signed.
        let in_range = offset.checked_add(len).is_some_and(|end| end < i64::MAX as u64 - super::BLOCK_BYTES);
        if fits && in_range {
            Ok(())
        } else {
            Err(StoreError::SlotTooSmall { offset, len, lead: self.lead, capacity: self.capacity })
        }
    }
}

/// The answer to a [`ReadRequest`].
#[derive(Debug)]
pub struct ReadDone {
    pub ticket: u64,
    /// Bytes moved from the device, page cache or memory: at least `extent.len`, more where whole blocks were read.
    pub result: Result<u64, StoreError>,
}

/// Receiver of answers. Called on the store's threads, so it must be short and must not wait for I/O; it may call
/// [`super::Store::submit`].
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
