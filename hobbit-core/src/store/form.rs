//! How the bytes of a read become those of its memory, and in which pieces that is done.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::slot_ptr::SlotPtr;
use super::window::BLOCK_BYTES;
use crate::expert::Extent;
use crate::planes::{self, HIGH_BYTES, LOW_BYTES, Q4_1_BYTES, Q8_0_BYTES};

/// Bytes that are read before they are put together: no buffer is larger.
pub(super) const BUFFER_BYTES: usize = 1 << 20;

/// Bytes of all buffers of a store, at the most.
pub const PLANE_BUFFERS_BYTES: u64 = (BUFFERS_MAX * BUFFER_BYTES) as u64;

/// Buffers at a time: as many bytes as a loader has in flight. Half as many of twice the size were no faster. Engines with
/// threads have one for each thread, which are fewer.
pub(super) const BUFFERS_MAX: usize = 16;

/// Blocks of one unit of a part: planes of whole [`BLOCK_BYTES`] (of which 2048 blocks are 9 and 8), each about half a MiB.
const UNIT_BLOCKS: u64 = 14 * 2048;

/// How the bytes of a read become those of its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// As they are.
    AsIs,
    /// Planes ([`crate::planes`]) that whoever completes the read puts together, matrix by matrix.
    Planes(Vec<Part>),
    /// Rows in another order of their bytes, which whoever completes the read gives them, matrix by matrix.
    Rows(Vec<Rows>),
}

/// One matrix whose rows are kept in another order of their bytes than files have them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes, in the file and in memory.
    pub bytes: u64,
    /// Bytes of as many rows as are rearranged together: they take the place that they have in the file.
    pub group_bytes: u64,
    /// Where the first row goes, in bytes from the request's `dst`.
    pub to: usize,
    /// What is done to them.
    pub order: Order,
}

/// What gives bytes another order, on any thread.
pub trait Rearrange: Send + Sync {
    /// Writes rows, of whole groups, as they are to lie in memory: as many bytes.
    fn rearrange(&self, rows: &[u8], out: &mut [u8]);
}

/// An order of rows' bytes. Equal ones are the same value.
#[derive(Clone)]
pub enum Order {
    /// As files have them.
    AsIs,
    /// Another.
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

/// Bytes of one unit of rows, at the most: with the rest of its first and last block it fits into a buffer.
const UNIT_ROWS_BYTES: u64 = BUFFER_BYTES as u64 - 2 * BLOCK_BYTES;

impl Rows {
    /// That its bytes lie in `extent`, fit in `capacity` bytes of memory, and are groups that fit into a buffer.
    pub(super) fn is_sound(&self, extent: Range<u64>, capacity: usize) -> bool {
        let end = usize::try_from(self.bytes).ok().and_then(|bytes| bytes.checked_add(self.to));
        let in_file =
            self.offset >= extent.start && self.offset.checked_add(self.bytes).is_some_and(|end| end <= extent.end);
        in_file
            && end.is_some_and(|end| end <= capacity)
            && (1..=UNIT_ROWS_BYTES).contains(&self.group_bytes)
            && self.bytes.is_multiple_of(self.group_bytes)
    }

    /// As many groups as fit into a buffer, from the byte `first` on.
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
    /// Bytes that are read of an extent of `len`, without what alignment adds.
    pub(super) fn bytes(&self, len: u64) -> u64 {
        match self {
            Self::AsIs => len,
            Self::Planes(parts) => parts.iter().map(Part::bytes).sum(),
            Self::Rows(matrices) => matrices.iter().map(|rows| rows.bytes).sum(),
        }
    }

    /// What a read of `extent` makes of a file's bytes, as engines do it: in units that fit into a buffer. Whether all scales of
    /// planes are sound.
    ///
    /// # Panics
    /// If it does not fit into `out`, or reads past the file's end.
    pub fn assemble(&self, file: &[u8], extent: &Extent, out: &mut [u8]) -> bool {
        let range = extent.offset..extent.offset.saturating_add(extent.len);
        assert!(
            match self {
                Self::AsIs => extent.len <= out.len() as u64,
                Self::Planes(parts) => parts.iter().all(|part| part.is_sound(range.clone(), out.len())),
                Self::Rows(matrices) => matrices.iter().all(|rows| rows.is_sound(range.clone(), out.len())),
            },
            "it fits"
        );
        let Some(units) = self.units(extent) else {
            out[..extent.len as usize].copy_from_slice(&file[range.start as usize..range.end as usize]);
            return true;
        };
        // SAFETY: the memory is `out`'s, for as long as this call, in which nobody else uses it.
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

    /// Of a checked request, what is read into buffers; `None`: nothing is.
    pub(super) fn units(&self, extent: &Extent) -> Option<Vec<Unit>> {
        match self {
            Self::AsIs => None,
            Self::Planes(parts) => Some(units(extent, parts)),
            Self::Rows(matrices) => Some(matrices.iter().flat_map(Rows::units).collect()),
        }
    }
}

/// One matrix that comes in planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Blocks of 32 weights.
    pub n_blocks: u64,
    /// Its high plane.
    pub high: HighPlane,
    /// First byte of its low plane in the file, a multiple of [`BLOCK_BYTES`]. `None`: Q4_1 is made of the high one alone.
    pub low: Option<u64>,
    /// Where its first block goes, in bytes from the request's `dst`.
    pub to: usize,
}

/// Where a high plane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HighPlane {
    /// In the file: its first byte, a multiple of [`BLOCK_BYTES`].
    File(u64),
    /// In memory, expanded to Q4_1. As for the request's own memory, but for being read: see [`SlotPtr::new`].
    Held(SlotPtr),
}

impl Part {
    fn is_high_read(&self) -> bool {
        matches!(self.high, HighPlane::File(_))
    }

    /// Bytes that are read, without what alignment adds.
    pub(super) fn bytes(&self) -> u64 {
        let high = if self.is_high_read() { HIGH_BYTES as u64 } else { 0 };
        let low = self.low.map_or(0, |_| LOW_BYTES as u64);
        self.n_blocks * (high + low)
    }

    /// Bytes of a block in memory.
    fn out_block(&self) -> usize {
        if self.low.is_some() { Q8_0_BYTES } else { Q4_1_BYTES }
    }

    /// Ranges of the file that are read for these blocks.
    fn reads(&self, blocks: &Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let n = blocks.end - blocks.start;
        let of = |first: u64, block: usize| (first + blocks.start * block as u64, n * block as u64);
        let high = match self.high {
            HighPlane::File(first) => Some(of(first, HIGH_BYTES)),
            HighPlane::Held(_) => None,
        };
        high.into_iter().chain(self.low.map(|first| of(first, LOW_BYTES)))
    }

    /// That its planes lie in `extent` at whole blocks, and its weights in `capacity` bytes.
    pub(super) fn is_sound(&self, extent: Range<u64>, capacity: usize) -> bool {
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

/// A range of the file, and where it goes in a unit's buffer, both at whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub offset: u64,
    pub len: u64,
    pub at: usize,
}

/// What is read into one buffer and put together from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unit {
    pub pieces: Vec<Piece>,
    /// Parts, or some blocks of one: each with where its planes are in the buffer.
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
    /// Where they are in the buffer.
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

/// The units of a checked request's parts: one where all of it is a run of bytes that fits into a buffer, else parts, or blocks of them.
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
    /// Makes of what is in `buffer` what is wanted in the memory of the request. Whether all scales of planes are sound.
    ///
    /// # Safety
    /// `dst` is that of the request whose unit this is, which was checked, and nobody else uses its memory, nor writes what
    /// it holds, now.
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
                    // SAFETY: by the maker of the part, blocks of Q4_1 are there.
                    let held = unsafe { std::slice::from_raw_parts(held.as_ptr(), n_blocks * Q4_1_BYTES) };
                    low.is_some_and(|low| planes::complete(held, plane(low, LOW_BYTES), out))
                }
            };
        }
        is_sound
    }

    /// Bytes of a buffer that takes it.
    pub fn buffer_bytes(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.at + piece.len.next_multiple_of(BLOCK_BYTES) as usize)
    }
}
