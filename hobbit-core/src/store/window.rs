//! The arithmetic of direct reads: GGUF offsets are 32-byte aligned, direct reads need whole blocks.
//!
//! ```text
//!   file    |....####|########|###.....|        # = extent, | = block border
//!   window  |--------|--------|--------|        what is read
//!   slot    ^dst ^dst + lead
//! ```

use crate::expert::Extent;

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
