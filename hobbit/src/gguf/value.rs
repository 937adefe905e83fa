//! Metadata values: the format's thirteen types, and how they are written.

use std::fmt;

/// Type of a metadata value or of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ValueType {
    /// Unsigned byte.
    U8 = 0,
    /// Signed byte.
    I8 = 1,
    /// 16 bits, unsigned.
    U16 = 2,
    /// 16 bits, signed.
    I16 = 3,
    /// 32 bits, unsigned.
    U32 = 4,
    /// 32 bits, signed.
    I32 = 5,
    /// 32-bit float.
    F32 = 6,
    /// One byte, 0 or 1.
    Bool = 7,
    /// Length-prefixed bytes, normally UTF-8.
    Str = 8,
    /// 64 bits, unsigned.
    U64 = 10,
    /// 64 bits, signed.
    I64 = 11,
    /// 64-bit float.
    F64 = 12,
}

impl ValueType {
    /// Id of an array; its element type and length follow.
    pub(super) const ARRAY_ID: u32 = 9;

    /// The scalar type with this id; `None` for arrays and unknown ids.
    pub fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::Str,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Id as stored in files.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// Bytes of one value; `None` for strings.
    pub const fn size(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Str => None,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::Str => "string",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        })
    }
}

/// A metadata value to be written.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// See [`ValueType::U8`], and so on for the others.
    U8(u8),
    /// Signed byte.
    I8(i8),
    /// 16 bits, unsigned.
    U16(u16),
    /// 16 bits, signed.
    I16(i16),
    /// 32 bits, unsigned.
    U32(u32),
    /// 32 bits, signed.
    I32(i32),
    /// 32-bit float.
    F32(f32),
    /// Truth value.
    Bool(bool),
    /// Text.
    Str(String),
    /// 64 bits, unsigned.
    U64(u64),
    /// 64 bits, signed.
    I64(i64),
    /// 64-bit float.
    F64(f64),
    /// Scalars of one type; made by [`Value::array`].
    Array(Array),
}

/// Scalars of one type, already encoded.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    item: ValueType,
    len: u64,
    bytes: Vec<u8>,
}

/// A Rust type with a scalar metadata type of its own.
pub trait Scalar {
    /// The metadata type.
    const TYPE: ValueType;
    /// Appends the value as stored in files.
    fn encode(&self, out: &mut Vec<u8>);
}

macro_rules! scalars {
    ($($rust:ty => $variant:ident),*) => {$(
        impl Scalar for $rust {
            const TYPE: ValueType = ValueType::$variant;
            fn encode(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
        impl From<$rust> for Value {
            fn from(v: $rust) -> Self {
                Self::$variant(v)
            }
        }
    )*};
}
scalars!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, u64 => U64, i64 => I64, f64 => F64);

impl Scalar for bool {
    const TYPE: ValueType = ValueType::Bool;
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl Scalar for &str {
    const TYPE: ValueType = ValueType::Str;
    fn encode(&self, out: &mut Vec<u8>) {
        encode_bytes(self.as_bytes(), out);
    }
}

impl Scalar for String {
    const TYPE: ValueType = ValueType::Str;
    fn encode(&self, out: &mut Vec<u8>) {
        encode_bytes(self.as_bytes(), out);
    }
}

impl From<bool> for Value {
    fn from(v: bool) -> Self {
        Self::Bool(v)
    }
}

impl From<&str> for Value {
    fn from(v: &str) -> Self {
        Self::Str(v.to_owned())
    }
}

impl From<String> for Value {
    fn from(v: String) -> Self {
        Self::Str(v)
    }
}

impl Value {
    /// An array of scalars: `Value::array(["a", "b"])`, `Value::array(vec![0.5f32; n])`.
    pub fn array<T: Scalar>(items: impl IntoIterator<Item = T>) -> Self {
        let mut array = Array { item: T::TYPE, len: 0, bytes: Vec::new() };
        for item in items {
            item.encode(&mut array.bytes);
            array.len += 1;
        }
        Self::Array(array)
    }

    /// Appends type and value as stored in files.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        fn put<T: Scalar>(v: &T, out: &mut Vec<u8>) {
            out.extend_from_slice(&T::TYPE.id().to_le_bytes());
            v.encode(out);
        }
        match self {
            Self::U8(v) => put(v, out),
            Self::I8(v) => put(v, out),
            Self::U16(v) => put(v, out),
            Self::I16(v) => put(v, out),
            Self::U32(v) => put(v, out),
            Self::I32(v) => put(v, out),
            Self::F32(v) => put(v, out),
            Self::Bool(v) => put(v, out),
            Self::Str(v) => put(v, out),
            Self::U64(v) => put(v, out),
            Self::I64(v) => put(v, out),
            Self::F64(v) => put(v, out),
            Self::Array(a) => {
                out.extend_from_slice(&ValueType::ARRAY_ID.to_le_bytes());
                out.extend_from_slice(&a.item.id().to_le_bytes());
                out.extend_from_slice(&a.len.to_le_bytes());
                out.extend_from_slice(&a.bytes);
            }
        }
    }
}

/// Appends a length-prefixed string.
pub(super) fn encode_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}
