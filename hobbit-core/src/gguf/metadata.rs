//! Metadata values, decoded from the bytes that `header` has checked.

use std::collections::HashMap;
use std::path::Path;

use super::GgufError;
use super::header::{Header, KvEntry};
use super::value::ValueType;

/// Arrays up to this many elements are decoded; of longer ones only type and length are known.
pub(crate) const ARRAY_VALUES_MAX: u64 = 1024;
/// All decoded arrays of a file together have at most this many elements.
const ARRAY_VALUES_TOTAL_MAX: u64 = 1 << 16;

/// A file's key-value pairs.
#[derive(Debug)]
pub struct Metadata {
    pub(super) entries: Vec<KvEntry>,
    values: HashMap<String, Decoded>,
}

/// A value, decoded as far as it is used.
#[derive(Debug)]
enum Decoded {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    /// A short array of non-negative integers.
    Integers(Vec<u64>),
}

impl Decoded {
    /// The value of a pair; `None` for arrays of anything but non-negative integers.
    fn of(entry: &KvEntry, header: &Header) -> Option<Self> {
        let bytes = &header.bytes[entry.value.clone()];
        let Some(len) = entry.array_len else { return Some(Self::scalar(entry.item, bytes)) };
        let size = entry.item.size().filter(|_| len <= ARRAY_VALUES_MAX)?;
        let integer = |bytes| match Self::scalar(entry.item, bytes) {
            Self::Integer(value) => u64::try_from(value).ok(),
            _ => None,
        };
        bytes.chunks_exact(size as usize).map(integer).collect::<Option<_>>().map(Self::Integers)
    }

    /// `bytes` are as many as the type has; a text begins with its length.
    fn scalar(item: ValueType, bytes: &[u8]) -> Self {
        fn le<const N: usize>(bytes: &[u8]) -> [u8; N] {
            bytes.try_into().expect("the header has as many bytes as the type")
        }
        match item {
            ValueType::U8 => Self::Integer(u8::from_le_bytes(le(bytes)).into()),
            ValueType::I8 => Self::Integer(i8::from_le_bytes(le(bytes)).into()),
            ValueType::U16 => Self::Integer(u16::from_le_bytes(le(bytes)).into()),
            ValueType::I16 => Self::Integer(i16::from_le_bytes(le(bytes)).into()),
            ValueType::U32 => Self::Integer(u32::from_le_bytes(le(bytes)).into()),
            ValueType::I32 => Self::Integer(i32::from_le_bytes(le(bytes)).into()),
            ValueType::U64 => Self::Integer(u64::from_le_bytes(le(bytes)).into()),
            ValueType::I64 => Self::Integer(i64::from_le_bytes(le(bytes)).into()),
            ValueType::F32 => Self::Float(f32::from_le_bytes(le(bytes)).into()),
            ValueType::F64 => Self::Float(f64::from_le_bytes(le(bytes))),
            ValueType::Bool => Self::Bool(bytes != [0]),
            ValueType::Str => Self::Text(String::from_utf8_lossy(&bytes[size_of::<u64>()..]).into_owned()),
        }
    }
}

impl Metadata {
    pub(super) fn decode(header: &Header, path: &Path) -> Result<Self, GgufError> {
        let short = |e: &KvEntry| e.array_len.filter(|n| *n <= ARRAY_VALUES_MAX);
        let total = header.kv.iter().filter_map(short).sum();
        if total > ARRAY_VALUES_TOTAL_MAX {
            let what = "number of elements in short metadata arrays";
            return Err(GgufError::too_large(path, what, total, ARRAY_VALUES_TOTAL_MAX));
        }
        let value = |entry: &KvEntry| Some((entry.key.clone(), Decoded::of(entry, header)?));
        Ok(Self { entries: header.kv.clone(), values: header.kv.iter().filter_map(value).collect() })
    }

    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|e| e.key.as_str())
    }

    /// Type of the value, or of the array's elements.
    pub(crate) fn value_type(&self, key: &str) -> Option<ValueType> {
        self.entry(key).map(|e| e.item)
    }

    /// A non-negative integer of any width.
    pub fn get_u64(&self, key: &str) -> Option<u64> {
        self.integer(key)?.try_into().ok()
    }

    /// An integer of any width, if it fits.
    pub fn get_i64(&self, key: &str) -> Option<i64> {
        self.integer(key)?.try_into().ok()
    }

    /// A finite number of any type, rounded to `f32`.
    pub fn get_f32(&self, key: &str) -> Option<f32> {
        match self.values.get(key)? {
            Decoded::Integer(value) => Some(*value as f64 as f32),
            Decoded::Float(value) => Some(*value as f32).filter(|_| value.is_finite()),
            _ => None,
        }
    }

    /// A truth value.
    pub fn get_bool(&self, key: &str) -> Option<bool> {
        let Decoded::Bool(value) = self.values.get(key)? else { return None };
        Some(*value)
    }

    /// Text; bytes that are not UTF-8 are replaced.
    pub fn get_str(&self, key: &str) -> Option<&str> {
        let Decoded::Text(text) = self.values.get(key)? else { return None };
        Some(text)
    }

    pub fn get_arr_len(&self, key: &str) -> Option<u64> {
        self.entry(key)?.array_len
    }

    /// An array of non-negative integers of at most `ARRAY_VALUES_MAX` elements.
    pub fn get_u64_arr(&self, key: &str) -> Option<Vec<u64>> {
        let Decoded::Integers(values) = self.values.get(key)? else { return None };
        Some(values.clone())
    }

    fn integer(&self, key: &str) -> Option<i128> {
        let Decoded::Integer(value) = self.values.get(key)? else { return None };
        Some(*value)
    }

    fn entry(&self, key: &str) -> Option<&KvEntry> {
        self.entries.iter().find(|e| e.key == key)
    }
}
