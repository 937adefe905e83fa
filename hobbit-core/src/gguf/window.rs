//! The start of a file, read on demand: never beyond the file, and never more than a header may have, so that no length
//! in a file decides an allocation.

use std::fmt;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use super::GgufError;

/// A header larger than this is refused. The largest known one (vocabulary, merges, a tokenizer as JSON) has 40 MiB.
pub(super) const HEADER_BYTES_MAX: u64 = 256 << 20;

const CHUNK: u64 = 256 << 10;

pub(super) struct Window<'a, R> {
    source: R,
    pub(super) bytes: Vec<u8>,
    /// Bytes taken so far.
    pub(super) pos: usize,
    file_len: u64,
    pub(super) path: &'a Path,
}

impl<'a, R: Read> Window<'a, R> {
    /// `source` stands at byte 0 of a file of `file_len` bytes.
    pub(super) fn new(source: R, file_len: u64, path: &'a Path) -> Self {
        Self { source, bytes: Vec::new(), pos: 0, file_len, path }
    }

    /// Bytes of the file not yet taken.
    pub(super) fn remaining(&self) -> u64 {
        self.file_len - self.pos as u64
    }

    /// Everything taken so far.
    pub(super) fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.truncate(self.pos);
        self.bytes.shrink_to_fit();
        self.bytes
    }

    /// Takes the next `n` bytes and returns their place in the window.
    pub(super) fn take(&mut self, n: u64, what: fmt::Arguments<'_>) -> Result<Range<usize>, GgufError> {
        let start = self.pos as u64;
        let end = start.saturating_add(n);
        if end > self.file_len {
            return Err(self.truncated(what, start, end, self.file_len));
        }
        if end > HEADER_BYTES_MAX {
            let what = format!("header up to {what}, in bytes,");
            return Err(GgufError::too_large(self.path, what, end, HEADER_BYTES_MAX));
        }
        while (self.bytes.len() as u64) < end {
            let have = self.bytes.len() as u64;
            let got = self.source.by_ref().take(CHUNK.min(self.file_len - have)).read_to_end(&mut self.bytes);
            let got = got.map_err(|error| {
                let action = format!("read byte {have}");
                GgufError::Io { path: self.path.to_owned(), action, error }
            })?;
            if got == 0 {
                return Err(self.truncated(what, start, end, have));
            }
        }
        self.pos = end as usize;
        Ok(start as usize..self.pos)
    }

    pub(super) fn u32(&mut self, what: fmt::Arguments<'_>) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: fmt::Arguments<'_>) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn array<const N: usize>(&mut self, what: fmt::Arguments<'_>) -> Result<[u8; N], GgufError> {
        let range = self.take(N as u64, what)?;
        Ok(self.bytes[range].try_into().expect("as many as were taken"))
    }

    /// A length-prefixed string of at most `limit` bytes; the range excludes the prefix.
    pub(super) fn string(&mut self, limit: u64, what: fmt::Arguments<'_>) -> Result<Range<usize>, GgufError> {
        let len = self.u64(format_args!("length of {what}"))?;
        if len > limit {
            return Err(GgufError::too_large(self.path, format!("length of {what}, in bytes,"), len, limit));
        }
        self.take(len, what)
    }

    fn truncated(&self, what: fmt::Arguments<'_>, start: u64, end: u64, len: u64) -> GgufError {
        GgufError::Truncated { path: self.path.to_owned(), what: what.to_string(), start, end, len }
    }
}
