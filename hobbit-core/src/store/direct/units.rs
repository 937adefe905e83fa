//! The units of a request for bit planes or rows: each is read into a buffer and assembled from there.

use std::collections::VecDeque;

use super::super::arena::Arena;
use super::super::form::{BUFFER_BYTES, BUFFERS_MAX, Unit};
use super::super::{BLOCK_BYTES, SlotPtr};
use super::slices::{Chunk, Window};
use crate::expert::Extent;

#[derive(Default)]
pub(super) struct Buffers {
    idle: Vec<Arena>,
    n_lent: usize,
}

impl Buffers {
    /// A buffer of [`BUFFER_BYTES`]; `None` while all are in use.
    pub fn take(&mut self) -> std::io::Result<Option<Arena>> {
        if self.n_lent == BUFFERS_MAX {
            return Ok(None);
        }
        let buffer = match self.idle.pop() {
            Some(buffer) => buffer,
            None => Arena::new(BUFFER_BYTES)?,
        };
        self.n_lent += 1;
        Ok(Some(buffer))
    }

    pub fn give_back(&mut self, buffer: Arena) {
        self.n_lent -= 1;
        self.idle.push(buffer);
    }
}

/// Units of a request: those left, and those that have a buffer.
pub(super) struct Units {
    left: VecDeque<Unit>,
    /// By number; a number is never used again.
    open: Vec<Option<Open>>,
}

struct Open {
    unit: Unit,
    buffer: Arena,
    /// The piece to issue next, and its next byte in the file.
    piece: usize,
    next: u64,
    /// Chunks issued and not complete, including rests of short reads.
    pending: u32,
}

impl Open {
    fn is_issued(&self) -> bool {
        self.piece == self.unit.pieces.len()
    }
}

/// A chunk of a unit, and the address of its bytes.
pub(super) struct UnitChunk {
    pub chunk: Chunk,
    pub address: *mut u8,
    pub unit: usize,
    /// End of its piece in the file.
    pub end: u64,
}

/// The next chunk of a request, or the reason why there is none.
pub(super) enum Next {
    Chunk(UnitChunk),
    /// All buffers are in use.
    NoBuffer,
    Nothing,
    /// No memory for a buffer.
    Failed(std::io::Error),
}

impl Units {
    pub fn new(units: Vec<Unit>) -> Self {
        Self { left: units.into(), open: Vec::new() }
    }

    /// Whether everything has been issued.
    pub(crate) fn is_issued(&self) -> bool {
        self.left.is_empty() && self.open.last().is_none_or(|open| open.as_ref().is_none_or(Open::is_issued))
    }

    /// The next chunk to give to the kernel.
    pub fn next(&mut self, chunk_bytes: u32, buffers: &mut Buffers) -> Next {
        if self.is_issued() {
            return Next::Nothing;
        }
        if self.open.last().is_none_or(|open| open.as_ref().is_none_or(Open::is_issued)) {
            let buffer = match buffers.take() {
                Ok(Some(buffer)) => buffer,
                Ok(None) => return Next::NoBuffer,
                Err(error) => return Next::Failed(error),
            };
            let unit = self.left.pop_front().expect("not everything is issued");
            debug_assert!(unit.buffer_bytes() <= buffer.len());
            let next = unit.pieces.first().map_or(0, |piece| piece.offset);
            self.open.push(Some(Open { unit, buffer, piece: 0, next, pending: 0 }));
        }
        let number = self.open.len() - 1;
        let open = self.open[number].as_mut().expect("opened above");
        let piece = open.unit.pieces[open.piece];
        // Checked requests begin at whole blocks.
        let window = Window::around(&Extent { file: 0, offset: piece.offset, len: piece.len });
        let chunk = Chunk::at(&window, open.next, chunk_bytes);
        let address = open.buffer.as_ptr().wrapping_add(piece.at + (chunk.offset - piece.offset) as usize);
        open.next += u64::from(chunk.len);
        open.pending += 1;
        if open.next == window.end {
            open.piece += 1;
            open.next = open.unit.pieces.get(open.piece).map_or(0, |piece| piece.offset);
        }
        debug_assert!(piece.offset.is_multiple_of(BLOCK_BYTES));
        Next::Chunk(UnitChunk { chunk, address, unit: number, end: piece.offset + piece.len })
    }

    /// Takes a complete chunk of a unit. After the last one the unit is assembled and its buffer freed; returns then
    /// whether its scales are sound.
    ///
    /// # Safety
    /// `dst` is that of the units' request, whose memory others do not use.
    pub unsafe fn complete(&mut self, number: usize, dst: SlotPtr, buffers: &mut Buffers) -> Option<bool> {
        let open = self.open[number].as_mut().expect("a unit is open until its last chunk is complete");
        open.pending -= 1;
        if open.pending > 0 || !open.is_issued() {
            return None;
        }
        let Open { unit, buffer, .. } = self.open[number].take()?;
        // SAFETY: the arena is ours; the kernel has answered for every chunk of the unit.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len()) };
        // SAFETY: by the caller.
        let is_sound = unsafe { unit.assemble(dst, bytes) };
        buffers.give_back(buffer);
        Some(is_sound)
    }

    /// Frees the buffers of a request of which no chunk is or will be with the kernel.
    pub fn close(&mut self, buffers: &mut Buffers) {
        self.left.clear();
        self.open.drain(..).flatten().for_each(|open| buffers.give_back(open.buffer));
    }
}
