//! A virtual file from its first byte to its last, in pieces.

use std::fs::File;
use std::io;

use super::positioned::read_exact_at;
use crate::gguf::{Piece, Segment, VirtualGguf};

/// Bytes of a piece at most.
pub(super) const CHUNK: u64 = 4 << 20;

/// Why a walk ended early.
#[derive(Debug)]
pub(super) enum Interrupted<E> {
    /// A source file, by index, could not be read.
    Read(u32, io::Error),
    /// The caller's own reason.
    Sink(E),
}

/// Takes the next bytes.
pub(super) type Put<'a, E> = dyn FnMut(&[u8]) -> Result<(), Interrupted<E>> + 'a;

/// Hands all bytes of `view` to `sink`, in order. `absent` supplies a segment that no file has, whole.
pub(super) fn walk<E>(
    view: &VirtualGguf,
    files: &[File],
    mut absent: impl FnMut(&Segment, &mut Put<'_, E>) -> Result<(), Interrupted<E>>,
    mut sink: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), Interrupted<E>> {
    let mut buffer = vec![0; CHUNK.min(view.len()) as usize];
    let mut at = 0;
    loop {
        let n = |len: u64| len.min(CHUNK) as usize;
        at += match view.segment_at(at) {
            Piece::End => return Ok(()),
            Piece::Header(bytes) => {
                sink(bytes).map_err(Interrupted::Sink)?;
                bytes.len() as u64
            }
            Piece::Zeros(len) => {
                let part = &mut buffer[..n(len)];
                part.fill(0);
                sink(part).map_err(Interrupted::Sink)?;
                part.len() as u64
            }
            Piece::Source { source, .. } => {
                let part = &mut buffer[..n(source.len)];
                let file = &files[source.file as usize];
                read_exact_at(file, part, source.offset).map_err(|error| Interrupted::Read(source.file, error))?;
                sink(part).map_err(Interrupted::Sink)?;
                part.len() as u64
            }
            Piece::Absent { segment, len } => {
                absent(segment, &mut |bytes| sink(bytes).map_err(Interrupted::Sink))?;
                len
            }
        };
    }
}
