//! One read: where from, where to, and its answer.

use std::sync::Arc;
use std::time::Instant;

use super::error::StoreError;
use super::form::Form;
use super::slot_ptr::SlotPtr;
use crate::expert::Extent;

/// Asks for the bytes of `extent` at `dst + lead`.
///
/// The bytes of the slot outside `[lead, lead + extent.len)` may be overwritten too: a direct read covers whole
/// blocks. With `lead ==` [`super::lead_of`]`(extent)`, `dst` page-aligned and `capacity >=`
/// [`super::slot_stride`]`(extent.len)`, no engine copies a byte; any other lead costs a copy.
///
/// Where the bytes come in planes, or rows get another order, each part says where it goes; `lead` means nothing then.
#[derive(Debug)]
pub struct ReadRequest {
    /// The caller's name for the read; comes back in [`ReadDone`].
    pub ticket: u64,
    /// What to read; where that comes in planes or rows, the smallest run of bytes that has them all.
    pub extent: Extent,
    /// Start of the slot.
    pub dst: SlotPtr,
    /// Bytes at `dst`.
    pub capacity: usize,
    /// Where the extent's first byte lands, in bytes from `dst`.
    pub lead: usize,
    /// How the bytes become those of the memory.
    pub form: Form,
}

impl ReadRequest {
    /// Bytes that are read, without what alignment adds.
    pub fn bytes(&self) -> u64 {
        self.form.bytes(self.extent.len)
    }

    /// Refuses requests that no engine may start: after this check `lead + extent.len <= capacity` (of planes and rows, each
    /// lies in the extent and its weights in the memory), the range does not overflow, and the file exists.
    pub(super) fn check(&self, files: usize) -> Result<(), StoreError> {
        let Extent { file, offset, len } = self.extent;
        if file as usize >= files {
            return Err(StoreError::NoSuchFile { file, files });
        }
        let extent = offset..offset.saturating_add(len);
        let fits = match &self.form {
            Form::AsIs => usize::try_from(len)
                .ok()
                .and_then(|len| len.checked_add(self.lead))
                .is_some_and(|end| end <= self.capacity),
            Form::Planes(parts) => parts.iter().all(|part| part.is_sound(extent.clone(), self.capacity)),
            Form::Rows(matrices) => matrices.iter().all(|rows| rows.is_sound(extent.clone(), self.capacity)),
        };
        // The end is rounded up to a block later on, and file offsets are signed.
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
    /// The request's ticket.
    pub ticket: u64,
    /// Bytes moved from the device, page cache or memory: at least `extent.len`, more where whole blocks were read.
    pub result: Result<u64, StoreError>,
    /// Time from the store's acceptance to this answer, in microseconds.
    pub elapsed_us: u64,
}

impl ReadDone {
    pub(super) fn new(ticket: u64, result: Result<u64, StoreError>, started: Instant) -> Self {
        let elapsed_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        Self { ticket, result, elapsed_us }
    }
}

/// Where answers go. Called on the store's threads, so it must be short and must not wait for I/O; it may call
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
