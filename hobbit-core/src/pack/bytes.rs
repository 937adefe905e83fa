//! Reads of parts of files piece by piece, and the digest of a virtual file.

use std::fs::File;
use std::io;

use sha2::Digest;

use super::format::Sha256;
use crate::expert::Extent;
use crate::files::FileExt;
use crate::gguf::{Piece, Segment, VirtualGguf};
use crate::planes;

pub(super) const CHUNK: u64 = 4 << 20;

#[derive(Debug)]
pub(super) enum Interrupted<E> {
    /// A file, by index, could not be read.
    Read(u32, io::Error),
    Sink(E),
}

impl<E> Interrupted<E> {
    /// The sink's error, or `read`'s error for a file that could not be read.
    pub(crate) fn or_read(self, read: impl FnOnce(u32, io::Error) -> E) -> E {
        match self {
            Self::Read(file, error) => read(file, error),
            Self::Sink(reason) => reason,
        }
    }
}

/// Passes the bytes of `extent`, a part of `file`, to `sink` piece by piece.
pub(super) fn read<E>(
    file: &File,
    extent: Extent,
    buffer: &mut Vec<u8>,
    mut sink: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), Interrupted<E>> {
    let mut at = 0;
    while at < extent.len {
        buffer.resize((extent.len - at).min(CHUNK) as usize, 0);
        file.read_exact_at(buffer, extent.offset + at).map_err(|error| Interrupted::Read(extent.file, error))?;
        sink(buffer).map_err(Interrupted::Sink)?;
        at += buffer.len() as u64;
    }
    Ok(())
}

/// Bytes of a segment without source.
#[derive(Clone, Copy, Debug)]
pub(super) enum Body {
    /// Stored unchanged.
    Whole(Extent),
    Planes {
        high: Extent,
        low: Extent,
    },
}

/// Blocks of planes merged at a time.
const PLANE_BLOCKS: u64 = CHUNK / planes::Q8_0_BYTES as u64;

/// Passes the weights of two planes to `sink`, some at a time.
fn read_planes<E>(
    file: &File,
    (high, low): (Extent, Extent),
    sink: &mut impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), Interrupted<E>> {
    let (mut highs, mut lows, mut made) = (Vec::new(), Vec::new(), Vec::new());
    let n_blocks = low.len / planes::LOW_BYTES as u64;
    let mut block = 0;
    while block < n_blocks {
        let n = PLANE_BLOCKS.min(n_blocks - block);
        for (extent, bytes, of_block) in [(high, &mut highs, planes::HIGH_BYTES), (low, &mut lows, planes::LOW_BYTES)] {
            bytes.resize(n as usize * of_block, 0);
            let read = file.read_exact_at(bytes, extent.offset + block * of_block as u64);
            read.map_err(|error| Interrupted::Read(extent.file, error))?;
        }
        made.resize(n as usize * planes::Q8_0_BYTES, 0);
        // No check here: digests of the whole file detect damage.
        planes::merge(&highs, &lows, &mut made);
        sink(&made).map_err(Interrupted::Sink)?;
        block += n;
    }
    Ok(())
}

/// Passes all bytes of `view` to `sink`, in order, and returns their digest. `absent` locates the bytes of a segment
/// without source.
pub(super) fn digest<E>(
    view: &VirtualGguf,
    files: &[File],
    absent: impl Fn(&Segment) -> Vec<Body>,
    mut sink: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<Sha256, Interrupted<E>> {
    let mut hash = sha2::Sha256::new();
    let mut sink = |bytes: &[u8]| {
        hash.update(bytes);
        sink(bytes)
    };
    let (mut buffer, mut at) = (Vec::new(), 0);
    loop {
        let (bodies, len) = match view.segment_at(at) {
            Piece::End => break,
            Piece::Header(bytes) => {
                sink(bytes).map_err(Interrupted::Sink)?;
                (Vec::new(), bytes.len() as u64)
            }
            Piece::Zeros(len) => {
                buffer.clear();
                buffer.resize(len.min(CHUNK) as usize, 0);
                sink(&buffer).map_err(Interrupted::Sink)?;
                (Vec::new(), buffer.len() as u64)
            }
            Piece::Source { source, .. } => (vec![Body::Whole(source)], source.len),
            Piece::Absent { segment, len } => (absent(segment), len),
        };
        for body in bodies {
            match body {
                Body::Whole(extent) => read(&files[extent.file as usize], extent, &mut buffer, &mut sink)?,
                Body::Planes { high, low } => read_planes(&files[high.file as usize], (high, low), &mut sink)?,
            }
        }
        at += len;
    }
    Ok(Sha256(hash.finalize().into()))
}
