//! The form before GGUF. All numbers are 32 bits, little-endian:
//!
//! ```text
//! i32 entries, >= 1
//! per entry:  i32 length of the name, name, i32 calls, i32 values, f32 sums[values]
//! optional:   i32 chunks, i32 length of the data set's name, name
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use super::{Divisor, Entry, ImatrixError, Index, malformed};

/// More entries than any model has tensors.
const ENTRIES_MAX: u32 = 1 << 16;
/// ggml's own limit is 64 bytes.
const NAME_BYTES_MAX: u32 = 512;

pub(super) fn index(file: &File, path: &Path) -> Result<Index, ImatrixError> {
    let io = |error| ImatrixError::Io { path: path.to_owned(), action: "read the index", error };
    let len = file.metadata().map_err(io)?.len();
    let mut reader = Reader { source: BufReader::new(file), at: 0, len, path };
    reader.source.seek(SeekFrom::Start(0)).map_err(io)?;

    let n_entries = reader.number("number of entries", 1..=ENTRIES_MAX)?;
    let mut entries = HashMap::new();
    for i in 1..=n_entries {
        let name_len = reader.number(&format!("length of name {i}"), 1..=NAME_BYTES_MAX)?;
        let name = reader.text(&format!("name {i}"), name_len)?;
        let calls = reader.number(&format!("calls of '{name}'"), 0..=i32::MAX as u32)?;
        let n_values = reader.number(&format!("number of values of '{name}'"), 1..=i32::MAX as u32)?;
        let n_values = u64::from(n_values);
        let offset = reader.skip(&format!("values of '{name}'"), 4 * n_values)?;
        if entries.insert(name.clone(), Entry { offset, n_values, divisor: Divisor::Calls(calls) }).is_some() {
            return Err(malformed(path, format!("entry '{name}'"), "two".into(), "one"));
        }
    }
    let chunks = match reader.at == len {
        true => None,
        false => Some(u64::from(reader.number("number of chunks", 0..=i32::MAX as u32)?)),
    };
    Ok((entries, chunks))
}

struct Reader<'a> {
    source: BufReader<&'a File>,
    at: u64,
    len: u64,
    path: &'a Path,
}

impl Reader<'_> {
    /// Moves on by `n` bytes and returns where they start.
    fn claim(&mut self, what: &str, n: u64) -> Result<u64, ImatrixError> {
        let start = self.at;
        match start.checked_add(n).filter(|end| *end <= self.len) {
            Some(end) => self.at = end,
            None => {
                let found = format!("the end of the file at byte {}", self.len);
                return Err(malformed(self.path, what.to_owned(), found, &format!("{n} bytes from byte {start}")));
            }
        }
        Ok(start)
    }

    fn fault(&self, error: std::io::Error) -> ImatrixError {
        match error.kind() {
            ErrorKind::UnexpectedEof => malformed(self.path, "file".into(), "a shorter one".into(), "no change"),
            _ => ImatrixError::Io { path: self.path.to_owned(), action: "read the index", error },
        }
    }

    fn number(&mut self, what: &str, range: std::ops::RangeInclusive<u32>) -> Result<u32, ImatrixError> {
        self.claim(what, 4)?;
        let mut le = [0; 4];
        self.source.read_exact(&mut le).map_err(|error| self.fault(error))?;
        let number = i32::from_le_bytes(le);
        match u32::try_from(number) {
            Ok(sound) if range.contains(&sound) => Ok(sound),
            _ => {
                let expected = format!("{} to {}", range.start(), range.end());
                Err(malformed(self.path, what.to_owned(), number.to_string(), &expected))
            }
        }
    }

    fn text(&mut self, what: &str, len: u32) -> Result<String, ImatrixError> {
        self.claim(what, u64::from(len))?;
        let mut bytes = vec![0; len as usize];
        self.source.read_exact(&mut bytes).map_err(|error| self.fault(error))?;
        String::from_utf8(bytes).map_err(|_| malformed(self.path, what.to_owned(), "other bytes".into(), "UTF-8"))
    }

    fn skip(&mut self, what: &str, n: u64) -> Result<u64, ImatrixError> {
        let start = self.claim(what, n)?;
        let distance = i64::try_from(n).unwrap_or(i64::MAX); // a file is not longer
        self.source.seek_relative(distance).map_err(|error| self.fault(error))?;
        Ok(start)
    }
}
