//! Writing GGUF: first everything about the file (keys, tensor names and shapes), then the data, streamed.

use std::collections::HashSet;
use std::io::{self, Read, Write};

use super::header::{DEFAULT_ALIGNMENT, KEY_BYTES_MAX, NAME_BYTES_MAX};
use super::value::encode_bytes;
use super::{GgmlType, TensorInfo, Value};
use crate::expert::Extent;

const VERSION: u32 = 3;
const ALIGNMENT_KEY: &str = "general.alignment";

/// Why something cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("cannot write: {0}")]
    Io(#[from] io::Error),
    #[error("alignment {0}: expected a power of two below 2^32")]
    Alignment(u64),
    #[error("{what} '{name}': {fault}")]
    Name { what: &'static str, name: String, fault: &'static str },
    #[error("tensor '{tensor}' of type {dtype}: shape {dims:?}, expected 1 to 4 dimensions, rows of whole blocks of \
        {} and fewer than 2^63 bytes", dtype.block_size())]
    Shape { tensor: String, dtype: GgmlType, dims: Vec<u64> },
    #[error("tensor '{tensor}': {found} bytes of data written, expected {expected}")]
    DataLength { tensor: String, expected: u64, found: u64 },
}

/// Collects keys and tensors of a file to be written.
///
/// ```
/// use hobbit_core::gguf::{GgmlType, HeaderBuilder, Value};
/// let mut header = HeaderBuilder::new(32)?;
/// header.key("general.architecture", "llama")?;
/// header.key("tokenizer.ggml.tokens", Value::array(["a", "b"]))?;
/// header.tensor("output.weight", GgmlType::F32, &[2, 1])?;
/// let mut file = Vec::new();
/// header.finish().write(&mut file, |_tensor, out| out.write_all(&[0; 8]))?;
/// # Ok::<(), hobbit_core::gguf::WriteError>(())
/// ```
#[derive(Clone, Debug)]
pub struct HeaderBuilder {
    alignment: u64,
    kv: Vec<u8>,
    keys: HashSet<String>,
    /// Their extents are relative to the data section.
    tensors: Vec<TensorInfo>,
    names: HashSet<String>,
    /// Bytes of the data section so far, a multiple of `alignment`.
    data_len: u64,
}

impl HeaderBuilder {
    /// `alignment` of tensor data in bytes; 32 unless there is a reason.
    pub fn new(alignment: u64) -> Result<Self, WriteError> {
        if !alignment.is_power_of_two() || alignment > u64::from(u32::MAX) {
            return Err(WriteError::Alignment(alignment));
        }
        let (keys, names) = (HashSet::new(), HashSet::new());
        let mut builder = Self { alignment, kv: Vec::new(), keys, tensors: Vec::new(), names, data_len: 0 };
        if alignment != DEFAULT_ALIGNMENT {
            builder.put_key(ALIGNMENT_KEY)?;
            builder.kv.extend(Value::from(alignment as u32).0);
        }
        Ok(builder)
    }

    /// Adds a key. `general.alignment` is the builder's own.
    ///
    /// # Errors
    /// [`WriteError::Name`] if the key is empty, too long, used before, or `general.alignment`.
    pub fn key(&mut self, key: &str, value: impl Into<Value>) -> Result<&mut Self, WriteError> {
        if key == ALIGNMENT_KEY {
            let fault = "is set by the builder, pass it to HeaderBuilder::new";
            return Err(WriteError::Name { what: "key", name: key.to_owned(), fault });
        }
        self.put_key(key)?;
        self.kv.extend(value.into().0);
        Ok(self)
    }

    /// Adds a pair from a checked header, as stored there. `general.alignment` is passed over.
    pub(super) fn raw_pair(&mut self, key: &str, pair: &[u8]) -> Result<(), WriteError> {
        if key != ALIGNMENT_KEY {
            check_name("key", key, KEY_BYTES_MAX, &mut self.keys)?;
            self.kv.extend_from_slice(pair);
        }
        Ok(())
    }

    /// Adds a tensor of shape `dims`, fastest first. Data are laid out in the order of these calls.
    pub fn tensor(&mut self, name: &str, dtype: GgmlType, dims: &[u64]) -> Result<&mut Self, WriteError> {
        let shape = || WriteError::Shape { tensor: name.to_owned(), dtype, dims: dims.to_owned() };
        if dims.len() > 4 {
            return Err(shape());
        }
        let len = dtype.tensor_bytes(dims).ok_or_else(shape)?;
        let end = self.data_len.checked_add(len).and_then(|end| end.checked_next_multiple_of(self.alignment));
        let end = end.filter(|end| i64::try_from(*end).is_ok()).ok_or_else(shape)?;
        check_name("tensor", name, NAME_BYTES_MAX, &mut self.names)?;
        let extent = Extent { file: 0, offset: self.data_len, len };
        self.tensors.push(TensorInfo { name: name.to_owned(), dtype, dims: dims.to_owned(), extent });
        self.data_len = end;
        Ok(self)
    }

    /// Encodes the header.
    pub fn finish(mut self) -> Layout {
        let mut bytes = Vec::from(*b"GGUF");
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&(self.keys.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&self.kv);
        for t in &self.tensors {
            encode_bytes(t.name.as_bytes(), &mut bytes);
            bytes.extend_from_slice(&(t.dims.len() as u32).to_le_bytes());
            for ne in &t.dims {
                bytes.extend_from_slice(&ne.to_le_bytes());
            }
            bytes.extend_from_slice(&t.dtype.id().to_le_bytes());
            bytes.extend_from_slice(&t.extent.offset.to_le_bytes());
        }
        let data_start = (bytes.len() as u64).next_multiple_of(self.alignment);
        self.tensors.iter_mut().for_each(|t| t.extent.offset += data_start);
        Layout { header: bytes, data_start, len: data_start + self.data_len, tensors: self.tensors }
    }

    fn put_key(&mut self, key: &str) -> Result<(), WriteError> {
        check_name("key", key, KEY_BYTES_MAX, &mut self.keys)?;
        encode_bytes(key.as_bytes(), &mut self.kv);
        Ok(())
    }
}

fn check_name(what: &'static str, name: &str, limit: u64, used: &mut HashSet<String>) -> Result<(), WriteError> {
    let fault = match name {
        "" => "is empty",
        _ if name.len() as u64 > limit => "is too long",
        _ if name.contains('\0') => "contains a NUL byte",
        _ if used.insert(name.to_owned()) => return Ok(()),
        _ => "occurs twice",
    };
    Err(WriteError::Name { what, name: name.to_owned(), fault })
}

/// A file about to be written: every byte's place is known.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The header, without the padding before the data.
    pub header: Vec<u8>,
    pub data_start: u64,
    pub len: u64,
    /// Tensors in the order of their data.
    pub tensors: Vec<TensorInfo>,
}

impl Layout {
    /// Writes the file. `data` is called once per tensor, in order, and writes exactly that tensor's bytes.
    pub fn write(
        &self,
        out: &mut impl Write,
        mut data: impl FnMut(&TensorInfo, &mut dyn Write) -> io::Result<()>,
    ) -> Result<(), WriteError> {
        out.write_all(&self.header)?;
        let mut pos = self.header.len() as u64;
        for tensor in &self.tensors {
            let len = tensor.extent.len;
            pad(out, &mut pos, tensor.extent.offset)?;
            let mut exact = Exact { out, left: len, attempted: 0 };
            let result = data(tensor, &mut exact);
            let (left, attempted) = (exact.left, exact.attempted);
            if left > 0 && result.is_ok() || attempted > len {
                let (expected, found) = (len, attempted);
                return Err(WriteError::DataLength { tensor: tensor.name.clone(), expected, found });
            }
            result?;
            pos += len;
        }
        pad(out, &mut pos, self.len)?;
        out.flush()?;
        Ok(())
    }
}

fn pad(out: &mut impl Write, pos: &mut u64, to: u64) -> io::Result<()> {
    *pos += io::copy(&mut io::repeat(0).take(to - *pos), out)?;
    Ok(())
}

/// Passes on no more than `left` bytes.
struct Exact<'a, W> {
    out: &'a mut W,
    left: u64,
    attempted: u64,
}

impl<W: Write> Write for Exact<'_, W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if buf.len() as u64 > self.left {
            self.attempted = self.attempted.saturating_add(buf.len() as u64);
            return Err(io::Error::other("more data than the tensor's shape has"));
        }
        let n = self.out.write(buf)?;
        self.left -= n as u64;
        self.attempted += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
