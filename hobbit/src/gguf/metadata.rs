//! Metadata values, decoded by the `gguf-rs` crate.
//!
//! gguf-rs 0.1.8 trusts lengths (a 16-byte file may ask for a 1 GiB string), makes a JSON value of 32 bytes and more
//! from each array element, and refuses tensor types newer than MXFP4. So it never sees a model file: it gets a
//! tensor-less header made of pairs that the walk in `header` has checked, with long arrays (vocabularies) emptied.

use std::fmt;
use std::io::Cursor;
use std::path::Path;

use gguf_rs::{ByteOrder, GGUFContainer, GGUFModel};

use super::GgufError;
use super::header::{Header, KvEntry};
use super::value::ValueType;

/// Arrays up to this many elements are decoded; of longer ones only type and length are known.
pub const ARRAY_VALUES_MAX: u64 = 1024;
/// All decoded arrays of a file together have at most this many elements.
const ARRAY_VALUES_TOTAL_MAX: u64 = 1 << 16;

/// A file's key-value pairs.
pub struct Metadata {
    entries: Vec<KvEntry>,
    values: GGUFModel,
}

impl Metadata {
    pub(super) fn decode(header: &Header, path: &Path) -> Result<Self, GgufError> {
        let short = |e: &KvEntry| e.array_len.is_some_and(|n| n <= ARRAY_VALUES_MAX);
        let total = header.kv.iter().filter(|e| short(e)).filter_map(|e| e.array_len).sum();
        if total > ARRAY_VALUES_TOTAL_MAX {
            return Err(GgufError::TooLarge {
                path: path.to_owned(),
                what: "number of elements in short metadata arrays".to_owned(),
                found: total,
                limit: ARRAY_VALUES_TOTAL_MAX,
            });
        }
        let mut stream = Vec::new(); // what follows the magic
        stream.extend_from_slice(&header.version.to_le_bytes());
        stream.extend_from_slice(&0u64.to_le_bytes());
        stream.extend_from_slice(&(header.kv.len() as u64).to_le_bytes());
        for entry in &header.kv {
            if entry.array_len.is_some() && !short(entry) {
                let up_to_length = entry.pair.start..entry.value.start - 8;
                stream.extend_from_slice(&header.bytes[up_to_length]);
                stream.extend_from_slice(&0u64.to_le_bytes());
            } else {
                stream.extend_from_slice(&header.bytes[entry.pair.clone()]);
            }
        }
        let fault = |e: &dyn fmt::Display| GgufError::Metadata { path: path.to_owned(), reason: e.to_string() };
        let values = GGUFContainer::new(ByteOrder::LE, Box::new(Cursor::new(stream)), u64::MAX)
            .decode()
            .map_err(|e| fault(&e))?;
        if values.metadata().len() != header.kv.len() {
            return Err(fault(&format!("{} keys of {}", values.metadata().len(), header.kv.len())));
        }
        Ok(Self { entries: header.kv.clone(), values })
    }

    /// Keys in file order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|e| e.key.as_str())
    }

    pub(super) fn entries(&self) -> &[KvEntry] {
        &self.entries
    }

    /// Type of the value, or of the array's elements.
    pub fn value_type(&self, key: &str) -> Option<ValueType> {
        self.entry(key).map(|e| e.item)
    }

    /// A non-negative integer of any width.
    pub fn get_u64(&self, key: &str) -> Option<u64> {
        self.values.metadata().get(key)?.as_u64()
    }

    /// An integer of any width, if it fits.
    pub fn get_i64(&self, key: &str) -> Option<i64> {
        self.values.metadata().get(key)?.as_i64()
    }

    /// A finite number of any type, rounded to `f32`.
    pub fn get_f32(&self, key: &str) -> Option<f32> {
        self.values.metadata().get(key)?.as_f64().map(|v| v as f32)
    }

    /// A truth value.
    pub fn get_bool(&self, key: &str) -> Option<bool> {
        self.values.metadata().get(key)?.as_bool()
    }

    /// Text; bytes that are not UTF-8 are replaced.
    pub fn get_str(&self, key: &str) -> Option<&str> {
        self.values.metadata().get(key)?.as_str()
    }

    /// Number of elements of an array.
    pub fn get_arr_len(&self, key: &str) -> Option<u64> {
        self.entry(key)?.array_len
    }

    /// An array of non-negative integers of at most [`ARRAY_VALUES_MAX`] elements.
    pub fn get_u64_arr(&self, key: &str) -> Option<Vec<u64>> {
        let n = self.get_arr_len(key)?;
        if n > ARRAY_VALUES_MAX {
            return None;
        }
        self.values.metadata().get(key)?.as_array()?.iter().map(|v| v.as_u64()).collect()
    }

    fn entry(&self, key: &str) -> Option<&KvEntry> {
        self.entries.iter().find(|e| e.key == key)
    }
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.keys()).finish()
    }
}
