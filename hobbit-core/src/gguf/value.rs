//! Metadata values: the format's thirteen types, and how they are written.

use std::fmt;

/// Type of a metadata value or of an array's elements, by id as stored in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    /// One byte, 0 or 1.
    Bool = 7,
    /// Length-prefixed bytes, normally UTF-8.
    Str = 8,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

/// Every type, its name in messages, and the bytes of one value; strings have any number.
const TYPES: [(ValueType, &str, Option<u64>); 12] = [
    (ValueType::U8, "u8", Some(1)),
    (ValueType::I8, "i8", Some(1)),
    (ValueType::U16, "u16", Some(2)),
    (ValueType::I16, "i16", Some(2)),
    (ValueType::U32, "u32", Some(4)),
    (ValueType::I32, "i32", Some(4)),
    (ValueType::F32, "f32", Some(4)),
    (ValueType::Bool, "bool", Some(1)),
    (ValueType::Str, "string", None),
    (ValueType::U64, "u64", Some(8)),
    (ValueType::I64, "i64", Some(8)),
    (ValueType::F64, "f64", Some(8)),
];

impl ValueType {
    /// Id of an array; its element type and length follow.
    pub(super) const ARRAY_ID: u32 = 9;

    /// The scalar type with this id; `None` for arrays and unknown ids.
    pub fn from_id(id: u32) -> Option<Self> {
        TYPES.iter().find(|(item, ..)| *item as u32 == id).map(|(item, ..)| *item)
    }

    fn row(self) -> &'static (Self, &'static str, Option<u64>) {
        TYPES.iter().find(|(item, ..)| *item == self).expect("every type has a row")
    }

    /// Bytes of one value; `None` for strings.
    pub fn size(self) -> Option<u64> {
        self.row().2
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().1)
    }
}

/// A metadata value to be written, as stored in files: its type, and its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Value(pub(super) Vec<u8>);

/// A Rust type with a scalar metadata type of its own.
pub trait Scalar {
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
    )*};
}
scalars!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32);
scalars!(f32 => F32, u64 => U64, i64 => I64, f64 => F64);

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
        self.as_str().encode(out);
    }
}

impl<T: Scalar> From<T> for Value {
    fn from(value: T) -> Self {
        let mut bytes = Vec::from((T::TYPE as u32).to_le_bytes());
        value.encode(&mut bytes);
        Self(bytes)
    }
}

impl Value {
    /// An array of scalars: `Value::array(["a", "b"])`, `Value::array(vec![0.5f32; n])`.
    pub fn array<T: Scalar>(items: impl IntoIterator<Item = T>) -> Self {
        let mut bytes = [ValueType::ARRAY_ID.to_le_bytes(), (T::TYPE as u32).to_le_bytes()].concat();
        bytes.extend([0; 8]); // the length, which comes last
        let mut len = 0u64;
        for item in items {
            item.encode(&mut bytes);
            len += 1;
        }
        bytes[8..16].copy_from_slice(&len.to_le_bytes());
        Self(bytes)
    }
}

/// Appends a length-prefixed string.
pub(super) fn encode_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}
