//! Bytes of the virtual GGUF, and a count of those that should have stayed in the file.

use std::fs::File;
use std::path::PathBuf;

use crate::engine::error::OpenError;
use hobbit_core::expert::Extent;
use hobbit_core::files::FileExt;
use hobbit_core::gguf::{Piece, VirtualGguf};
use hobbit_core::store::{Original, StoreError};

/// Maximum bytes delivered at once: a multiple of any page.
pub(super) const READ_BYTES_MAX: usize = 1 << 20;

/// A virtual GGUF and the files that its bytes are in.
pub(super) struct VirtualBytes {
    pub virtual_file: VirtualGguf,
    /// Source files with their paths.
    sources: Vec<(File, PathBuf)>,
    /// Bytes read of tensors that stay in the file.
    pub in_file_read: u64,
}

impl VirtualBytes {
    /// # Errors
    /// A source file that has changed since.
    pub fn new(virtual_file: VirtualGguf, files: &[Original]) -> Result<Self, OpenError> {
        let open = |file: &Original| Ok((file.again()?, file.path.clone()));
        let sources = files.iter().map(open).collect::<Result<_, StoreError>>()?;
        Ok(Self { virtual_file, sources, in_file_read: 0 })
    }

    /// First byte of the first tensor that stays in the file.
    #[cfg(unix)]
    pub fn first_in_file(&self) -> Option<u64> {
        self.virtual_file.segments.iter().find(|segment| segment.in_file).map(|expert| expert.start)
    }

    /// Reads at most [`READ_BYTES_MAX`] bytes, and no further than one part goes. 0 only at the end.
    pub fn read_at(&mut self, position: u64, out: &mut [u8]) -> Result<usize, String> {
        let piece = self.virtual_file.segment_at(position);
        let (len, is_expert) = match &piece {
            Piece::End => return Ok(0),
            Piece::Header(rest) => (rest.len() as u64, false),
            Piece::Zeros(len) => (*len, false),
            Piece::Absent { len, .. } => (*len, true),
            Piece::Source { segment, source } => (source.len, segment.in_file),
        };
        let n = len.min(out.len().min(READ_BYTES_MAX) as u64) as usize;
        let out = &mut out[..n];
        match piece {
            Piece::Header(rest) => out.copy_from_slice(&rest[..n]),
            Piece::Source { source: Extent { file, offset, .. }, .. } => {
                let (file, path) = &self.sources[file as usize];
                file.read_exact_at(out, offset)
                    .map_err(|error| format!("{}: reading {n} bytes at offset {offset}: {error}", path.display()))?;
            }
            Piece::Zeros(_) | Piece::Absent { .. } | Piece::End => out.fill(0),
        }
        if is_expert {
            self.in_file_read += n as u64;
        }
        Ok(n)
    }
}
