//! Conversion of bytes on their way from a file to memory, and the units of the work.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::BLOCK_BYTES;
use super::SlotPtr;
use crate::expert::Extent;
use crate::planes::{self, HIGH_BYTES, LOW_BYTES, Q4_1_BYTES, Q8_0_BYTES};

/// Bytes of a buffer, in which the parts of a unit are read before they are assembled.
pub(super) const BUFFER_BYTES: usize = 1 << 20;

/// Maximum bytes of all buffers of a store.
pub const PLANE_BUFFERS_BYTES: u64 = (BUFFERS_MAX * BUFFER_BYTES) as u64;

/// Maximum buffers at a time: as many bytes as a loader has in flight. Half as many of twice the size were no faster.
/// Engines with threads have one for each thread, which are fewer.
pub(super) const BUFFERS_MAX: usize = 16;

/// Blocks of one unit of a part. 2048 blocks are 9 [`BLOCK_BYTES`] of the high plane and 8 of the low one, so each
/// plane of a unit has whole [`BLOCK_BYTES`], about half a MiB.
const UNIT_BLOCKS: u64 = 14 * 2048;

/// Conversion of the bytes of a read on their way to memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    AsIs,
    /// Bit planes ([`crate::planes`]) are merged, matrix by matrix.
    Planes(Vec<Part>),
    /// Bytes of rows are rearranged, matrix by matrix.
    Rows(Vec<Rows>),
}

/// One matrix whose rows have another order of bytes in memory than in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes, in the file and in memory.
    pub bytes: u64,
    /// Bytes of the rows that are rearranged together, in place.
    pub group_bytes: u64,
    /// Offset of the first row from the request's `dst`.
    pub to: usize,
    pub order: Order,
}

/// A rearrangement of bytes, called on any thread.
pub trait Rearrange: Send + Sync {
    /// Writes whole groups of rows in their order in memory; `out` is as long as `rows`.
    fn rearrange(&self, rows: &[u8], out: &mut [u8]);
}

/// An order of rows' bytes. Two are equal if they are the same value.
#[derive(Clone)]
pub enum Order {
    /// The file's.
    AsIs,
    Other(Arc<dyn Rearrange>),
}

impl PartialEq for Order {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::AsIs, Self::AsIs) => true,
            (Self::Other(a), Self::Other(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl Eq for Order {}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::AsIs { "AsIs" } else { "Other" })
    }
}

/// Maximum bytes of a unit of rows: with the rest of its first and last block it fits into a buffer.
const UNIT_ROWS_BYTES: u64 = BUFFER_BYTES as u64 - 2 * BLOCK_BYTES;

impl Rows {
    /// Checks that the bytes lie in `extent`, fit in `capacity` bytes of memory, and are groups that fit into a buffer.
    fn is_sound(&self, extent: &Range<u64>, capacity: usize) -> bool {
        let end = usize::try_from(self.bytes).ok().and_then(|bytes| bytes.checked_add(self.to));
        let in_file =
            self.offset >= extent.start && self.offset.checked_add(self.bytes).is_some_and(|end| end <= extent.end);
        in_file
            && end.is_some_and(|end| end <= capacity)
            && (1..=UNIT_ROWS_BYTES).contains(&self.group_bytes)
            && self.bytes.is_multiple_of(self.group_bytes)
    }

    /// The groups that fit into a buffer, from the byte `first` on.
    fn unit(&self, first: u64) -> Unit {
        let len = self.unit_bytes().min(self.bytes - first);
        let offset = self.offset + first;
        let lead = offset % BLOCK_BYTES;
        let piece = Piece { offset: offset - lead, len: lead + len, at: 0 };
        let rows =
            MadeRows { at: lead as usize, len: len as usize, to: self.to + first as usize, order: self.order.clone() };
        Unit { pieces: vec![piece], made: vec![Made::Rows(rows)] }
    }

    fn unit_bytes(&self) -> u64 {
        UNIT_ROWS_BYTES / self.group_bytes * self.group_bytes
    }

    fn units(&self) -> impl Iterator<Item = Unit> {
        (0..self.bytes).step_by(self.unit_bytes() as usize).map(|first| self.unit(first))
    }
}

impl Form {
    /// Bytes to read of an extent of `len`, without alignment.
    pub(super) fn bytes(&self, len: u64) -> u64 {
        match self {
            Self::AsIs => len,
            Self::Planes(parts) => parts.iter().map(Part::bytes).sum(),
            Self::Rows(matrices) => matrices.iter().map(|rows| rows.bytes).sum(),
        }
    }

    /// Checks that the parts lie in `extent` and the bytes made of them in `capacity` bytes of memory.
    pub(super) fn is_sound(&self, extent: &Extent, capacity: usize) -> bool {
        let range = extent.offset..extent.offset.saturating_add(extent.len);
        match self {
            Self::AsIs => extent.len <= capacity as u64,
            Self::Planes(parts) => parts.iter().all(|part| part.is_sound(&range, capacity)),
            Self::Rows(matrices) => matrices.iter().all(|rows| rows.is_sound(&range, capacity)),
        }
    }

    /// Converts a file's bytes as a read of `extent` does, in units that fit into a buffer. Returns whether all scales
    /// of planes are sound.
    ///
    /// # Panics
    /// If it does not fit into `out`, or reads past the file's end.
    pub fn assemble(&self, file: &[u8], extent: &Extent, out: &mut [u8]) -> bool {
        assert!(self.is_sound(extent, out.len()), "it fits");
        let Some(units) = self.units(extent) else {
            out[..extent.len as usize].copy_from_slice(&file[extent.offset as usize..extent.end() as usize]);
            return true;
        };
        // SAFETY: the memory is `out`'s, which this call borrows exclusively.
        let dst = unsafe { SlotPtr::new(out.as_mut_ptr()) };
        units.iter().fold(true, |is_sound, unit| {
            let mut buffer = vec![0; unit.buffer_bytes()];
            for piece in &unit.pieces {
                let (at, from) = (piece.at, piece.offset as usize);
                let len = (piece.len as usize).min(file.len() - from);
                buffer[at..at + len].copy_from_slice(&file[from..from + len]);
            }
            // SAFETY: checked above; `dst` is this call's alone.
            is_sound & unsafe { unit.assemble(dst, &buffer) }
        })
    }

    /// The units of a checked request; `None` if it needs no buffers.
    pub(super) fn units(&self, extent: &Extent) -> Option<Vec<Unit>> {
        match self {
            Self::AsIs => None,
            Self::Planes(parts) => Some(units(extent, parts)),
            Self::Rows(matrices) => Some(matrices.iter().flat_map(Rows::units).collect()),
        }
    }
}

/// One matrix in bit planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Blocks of 32 weights.
    pub n_blocks: u64,
    pub high: HighPlane,
    /// First byte of its low plane in the file, a multiple of [`BLOCK_BYTES`]. `None`: the high plane alone becomes
    /// Q4_1.
    pub low: Option<u64>,
    /// Offset of its first block from the request's `dst`.
    pub to: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HighPlane {
    /// In the file: its first byte, a multiple of [`BLOCK_BYTES`].
    File(u64),
    /// In memory, expanded to Q4_1. The rules of [`SlotPtr::new`] hold, but others may read it.
    Held(SlotPtr),
}

impl Part {
    fn is_high_read(&self) -> bool {
        matches!(self.high, HighPlane::File(_))
    }

    /// Bytes to read, without alignment.
    pub(super) fn bytes(&self) -> u64 {
        let high = if self.is_high_read() { HIGH_BYTES as u64 } else { 0 };
        let low = self.low.map_or(0, |_| LOW_BYTES as u64);
        self.n_blocks * (high + low)
    }

    /// Bytes of a block in memory.
    fn out_block(&self) -> usize {
        if self.low.is_some() { Q8_0_BYTES } else { Q4_1_BYTES }
    }

    /// Ranges of the file with these blocks: first byte and length.
    fn reads(&self, blocks: &Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let n = blocks.end - blocks.start;
        let of = |first: u64, block: usize| (first + blocks.start * block as u64, n * block as u64);
        let high = match self.high {
            HighPlane::File(first) => Some(of(first, HIGH_BYTES)),
            HighPlane::Held(_) => None,
        };
        high.into_iter().chain(self.low.map(|first| of(first, LOW_BYTES)))
    }

    /// Checks that the planes lie in `extent` at whole blocks, and the weights in `capacity` bytes.
    fn is_sound(&self, extent: &Range<u64>, capacity: usize) -> bool {
        let n_blocks = usize::try_from(self.n_blocks).ok();
        let end = n_blocks.and_then(|n| n.checked_mul(self.out_block())?.checked_add(self.to));
        let is_read = |(first, block): (u64, usize)| {
            let len = self.n_blocks.checked_mul(block as u64);
            let end = len.and_then(|len| first.checked_add(len));
            first.is_multiple_of(BLOCK_BYTES) && first >= extent.start && end.is_some_and(|end| end <= extent.end)
        };
        let high = match self.high {
            HighPlane::File(first) => Some((first, HIGH_BYTES)),
            HighPlane::Held(_) => None,
        };
        let mut planes = high.into_iter().chain(self.low.map(|first| (first, LOW_BYTES))).peekable();
        end.is_some_and(|end| end <= capacity) && planes.peek().is_some() && planes.all(is_read)
    }
}

/// A range of the file, and its offset in a unit's buffer, both at whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub offset: u64,
    pub len: u64,
    pub at: usize,
}

/// Ranges that are read into one buffer and assembled from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unit {
    pub pieces: Vec<Piece>,
    /// Parts or some blocks of one, or rows, with their places in the buffer.
    made: Vec<Made>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Made {
    Blocks(Blocks),
    Rows(MadeRows),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Blocks {
    n_blocks: usize,
    high: Source,
    low: Option<usize>,
    to: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct MadeRows {
    /// Offset in the buffer.
    at: usize,
    len: usize,
    to: usize,
    order: Order,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Buffer(usize),
    Held(SlotPtr),
}

/// The units of a checked request's parts: one if the request is a dense range that fits into a buffer, else one or
/// more for each part.
fn units(extent: &Extent, parts: &[Part]) -> Vec<Unit> {
    let planes = parts.iter().map(|part| part.reads(&(0..part.n_blocks)).count() as u64).sum::<u64>();
    let bytes: u64 = parts.iter().map(Part::bytes).sum();
    let is_dense = extent.len < bytes + planes * BLOCK_BYTES && extent.offset.is_multiple_of(BLOCK_BYTES);
    if is_dense && extent.len <= BUFFER_BYTES as u64 {
        let place = |first: u64| (first - extent.offset) as usize;
        let made = parts.iter().map(|part| {
            Made::Blocks(Blocks {
                n_blocks: part.n_blocks as usize,
                high: match part.high {
                    HighPlane::File(first) => Source::Buffer(place(first)),
                    HighPlane::Held(held) => Source::Held(held),
                },
                low: part.low.map(place),
                to: part.to,
            })
        });
        let piece = Piece { offset: extent.offset, len: extent.len, at: 0 };
        return vec![Unit { pieces: vec![piece], made: made.collect() }];
    }
    let starts = |part: &Part| (0..part.n_blocks).step_by(UNIT_BLOCKS as usize);
    parts.iter().flat_map(|part| starts(part).map(|first| unit(part, first))).collect()
}

/// Some blocks of a part, from the first one on.
fn unit(part: &Part, first: u64) -> Unit {
    let blocks = first..(first + UNIT_BLOCKS).min(part.n_blocks);
    let mut pieces = Vec::with_capacity(2);
    let mut at = 0;
    for (offset, len) in part.reads(&blocks) {
        pieces.push(Piece { offset, len, at });
        at += len.next_multiple_of(BLOCK_BYTES) as usize;
    }
    let (high, low) = match part.high {
        HighPlane::File(_) => (Source::Buffer(0), part.low.and(pieces.get(1)).map(|low| low.at)),
        HighPlane::Held(held) => (Source::Held(held.at(first as usize * Q4_1_BYTES)), part.low.map(|_| 0)),
    };
    let to = part.to + first as usize * part.out_block();
    Unit { pieces, made: vec![Made::Blocks(Blocks { n_blocks: (blocks.end - first) as usize, high, low, to })] }
}

impl Unit {
    /// Converts the bytes in `buffer` to their places in the request's memory. Returns whether all scales of planes are
    /// sound.
    ///
    /// # Safety
    /// `dst` is that of this unit's request, which was checked. During the call others neither use its memory nor write
    /// held planes.
    pub unsafe fn assemble(&self, dst: SlotPtr, buffer: &[u8]) -> bool {
        let mut is_sound = true;
        for made in &self.made {
            let &Blocks { n_blocks, high, low, to } = match made {
                Made::Blocks(blocks) => blocks,
                Made::Rows(MadeRows { at, len, to, order }) => {
                    // SAFETY: `Rows::is_sound` held that they end within `capacity`; the rest is the caller's.
                    let out = unsafe { std::slice::from_raw_parts_mut(dst.as_ptr().add(*to), *len) };
                    let rows = &buffer[*at..at + len];
                    match order {
                        Order::AsIs => out.copy_from_slice(rows),
                        Order::Other(other) => other.rearrange(rows, out),
                    }
                    continue;
                }
            };
            let block = if low.is_some() { Q8_0_BYTES } else { Q4_1_BYTES };
            // SAFETY: `Part::is_sound` held that the part ends within `capacity`; the rest is the caller's.
            let out = unsafe { std::slice::from_raw_parts_mut(dst.as_ptr().add(to), n_blocks * block) };
            let plane = |at: usize, block: usize| &buffer[at..at + n_blocks * block];
            is_sound &= match (high, low) {
                (Source::Buffer(high), Some(low)) => planes::merge(plane(high, HIGH_BYTES), plane(low, LOW_BYTES), out),
                (Source::Buffer(high), None) => planes::expand(plane(high, HIGH_BYTES), out),
                (Source::Held(held), low) => {
                    // SAFETY: by the contract of `HighPlane::Held`, blocks of Q4_1 are there.
                    let held = unsafe { std::slice::from_raw_parts(held.as_ptr(), n_blocks * Q4_1_BYTES) };
                    low.is_some_and(|low| planes::complete(held, plane(low, LOW_BYTES), out))
                }
            };
        }
        is_sound
    }

    pub fn buffer_bytes(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.at + piece.len.next_multiple_of(BLOCK_BYTES) as usize)
    }
}
