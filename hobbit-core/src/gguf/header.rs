//! Reads and checks a GGUF header. Nothing else in this crate interprets raw header bytes.
//! Structure and limits follow `gguf_init_from_reader` in llama.cpp's gguf.cpp.

use std::io::Read;
use std::ops::Range;
use std::path::Path;

use super::value::ValueType;
use super::window::Window;
use super::{GgmlType, GgufError, TensorInfo};
use crate::expert::Extent;

/// Most tensors in a model (all shards together).
pub(super) const TENSORS_MAX: u64 = 1 << 18;
/// Most key-value pairs in a file.
pub(super) const KEYS_MAX: u64 = 1 << 16;
/// Longest key, in bytes (the format's own limit).
pub(super) const KEY_BYTES_MAX: u64 = (1 << 16) - 1;
/// Longest tensor name, in bytes: `GGML_MAX_NAME` less the terminator.
pub(super) const NAME_BYTES_MAX: u64 = 63;
/// Longest string value, in bytes.
pub(super) const STRING_BYTES_MAX: u64 = 64 << 20;
/// Default alignment of tensor data, in bytes.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;

const DIMS_MAX: u32 = 4;

/// A key-value pair, and its place in the header.
#[derive(Clone, Debug)]
pub struct KvEntry {
    pub key: String,
    /// Type of the value, or of an array's elements.
    pub item: ValueType,
    pub array_len: Option<u64>,
    /// Bytes of the whole pair, from the key's length to the end of the value.
    pub(super) pair: Range<usize>,
    /// Bytes of the value, without type fields; an array's without its length.
    pub(super) value: Range<usize>,
}

/// A checked header. Every tensor lies within the file, is aligned and overlaps no other.
#[derive(Clone, Debug)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Key-value pairs in file order, keys unique.
    pub kv: Vec<KvEntry>,
    /// Tensors in file order, names unique.
    pub tensors: Vec<TensorInfo>,
    /// Alignment of tensor data in bytes, a power of two.
    pub alignment: u64,
    /// First byte of tensor data, from the start of the file.
    pub data_start: u64,
    /// The header itself, without the padding before the data.
    pub(super) bytes: Vec<u8>,
}

impl Header {
    /// Reads the header of a file of `file_len` bytes from `source`, which stands at its first byte.
    pub(super) fn read(source: impl Read, file_len: u64, path: &Path) -> Result<Self, GgufError> {
        if file_len == 0 {
            let reason = "file is empty, expected a GGUF header; the download probably failed, fetch it again";
            return Err(GgufError::refused(path, reason));
        }
        if file_len > i64::MAX as u64 {
            // No file system has such files; below, sums of offsets and lengths cannot overflow.
            return Err(GgufError::too_large(path, "length of the file, in bytes,", file_len, i64::MAX as u64));
        }
        let mut window = Window::new(source, file_len, path);
        let version = magic_and_version(&mut window)?;
        let n_tensors = count(&mut window, "number of tensors", TENSORS_MAX)?;
        let n_kv = count(&mut window, "number of keys", KEYS_MAX)?;

        let kv: Vec<KvEntry> = (0..n_kv).map(|i| key_value(&mut window, i)).collect::<Result<_, _>>()?;
        if let Some(key) = duplicate(kv.iter().map(|entry| &entry.key)) {
            return Err(malformed(path, format!("key '{key}'"), "two values", "one"));
        }
        let alignment = alignment(&kv, &window)?;

        let mut tensors: Vec<TensorInfo> = (0..n_tensors).map(|i| tensor(&mut window, i)).collect::<Result<_, _>>()?;
        let header_len = window.pos as u64;
        let data_start = header_len.next_multiple_of(alignment);
        place(&mut tensors, alignment, data_start, file_len, path)?;
        if let Some(tensor) = duplicate(tensors.iter().map(|tensor| &tensor.name)) {
            return Err(super::occurs_twice(path, tensor, path));
        }
        refuse_overlaps(&tensors, path)?;
        Ok(Self { version, kv, tensors, alignment, data_start, bytes: window.into_bytes() })
    }

    /// Bytes of the header itself, without the padding before the data.
    pub fn header_len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Tensors follow each other with nothing but alignment between them. llama.cpp refuses other files.
    pub(super) fn is_contiguous(&self) -> bool {
        let mut next = self.data_start;
        self.tensors.iter().all(|t| {
            let fits = t.extent.offset == next;
            next = t.extent.end().next_multiple_of(self.alignment);
            fits
        })
    }
}

fn malformed(path: &Path, what: String, found: impl ToString, expected: impl ToString) -> GgufError {
    let remedy = "the header is damaged or written by a faulty tool, fetch or convert the model again";
    let (found, expected) = (found.to_string(), expected.to_string());
    GgufError::Malformed { path: path.to_owned(), what, found, expected, remedy }
}

fn magic_and_version(window: &mut Window<'_, impl Read>) -> Result<u32, GgufError> {
    let path = window.path;
    let n = window.remaining().min(4);
    let magic = window.take(n, format_args!("magic"))?;
    let found = &window.bytes[magic];
    if found != b"GGUF" {
        let remedy = match found {
            b"vers" => "this is a Git LFS pointer, run `git lfs pull` to fetch the model itself",
            b"<!DO" | b"<htm" => "this is a web page, fetch the model through the download link",
            b"lmgg" | b"fmgg" | b"tjgg" | b"algg" => "this is an old GGML file, fetch a GGUF conversion of the model",
            b"PK\x03\x04" => "this is a ZIP or PyTorch file, convert it with llama.cpp's convert_hf_to_gguf.py",
            _ => "check the path, or convert the model with llama.cpp's convert_hf_to_gguf.py",
        };
        let found = found.escape_ascii();
        let reason = format!("not a GGUF file: starts with \"{found}\", expected \"GGUF\"; {remedy}");
        return Err(GgufError::refused(path, reason));
    }
    let version = window.u32(format_args!("version"))?;
    let remedy = match version {
        2 | 3 => return Ok(version),
        0 => "the header is damaged, fetch the file again",
        1 => "convert the model again with a current llama.cpp",
        v if v & 0xffff == 0 => "the file is big-endian, convert it with gguf-py's gguf_convert_endian.py",
        _ => "the file is newer than this build, update",
    };
    Err(GgufError::refused(path, format!("GGUF version {version}, expected 2 or 3; {remedy}")))
}

fn count(window: &mut Window<'_, impl Read>, what: &str, limit: u64) -> Result<u64, GgufError> {
    let found = window.u64(format_args!("{what}"))?;
    if found > limit {
        return Err(GgufError::too_large(window.path, what, found, limit));
    }
    Ok(found)
}

fn name(window: &mut Window<'_, impl Read>, limit: u64, what: std::fmt::Arguments<'_>) -> Result<String, GgufError> {
    let range = window.string(limit, what)?;
    let bytes = &window.bytes[range];
    let fault = |found: String| malformed(window.path, what.to_string(), found, "a non-empty UTF-8 string without NUL");
    match std::str::from_utf8(bytes) {
        Ok("") => Err(fault("an empty string".to_owned())),
        Ok(s) if s.contains('\0') => Err(fault(format!("\"{}\"", s.escape_debug()))),
        Ok(s) => Ok(s.to_owned()),
        Err(_) => Err(fault(format!("\"{}\"", bytes[..bytes.len().min(80)].escape_ascii()))),
    }
}

fn key_value(window: &mut Window<'_, impl Read>, i: u64) -> Result<KvEntry, GgufError> {
    let pair_start = window.pos;
    let key = name(window, KEY_BYTES_MAX, format_args!("key {i}"))?;
    let mut id = window.u32(format_args!("type of key '{key}'"))?;
    let mut array_len = None;
    if id == ValueType::ARRAY_ID {
        id = window.u32(format_args!("element type of key '{key}'"))?;
        if id == ValueType::ARRAY_ID {
            return Err(malformed(window.path, format!("key '{key}'"), "an array of arrays", "an array of scalars"));
        }
        array_len = Some(window.u64(format_args!("array length of key '{key}'"))?);
    }
    let Some(item) = ValueType::from_id(id) else {
        return Err(malformed(window.path, format!("type of key '{key}'"), id, "0 to 12"));
    };
    let n = array_len.unwrap_or(1);
    let value_start = window.pos;
    match item.size() {
        Some(size) => {
            // A product that overflows exceeds every file; `take` then names the key.
            window.take(n.saturating_mul(size), format_args!("value of key '{key}'"))?;
        }
        None if n > window.remaining() / 8 => {
            // Each string has at least a length: refused before looping over what cannot be there.
            window.take(n.saturating_mul(8), format_args!("strings of key '{key}'"))?;
        }
        None => {
            for j in 0..n {
                window.string(STRING_BYTES_MAX, format_args!("string {j} of key '{key}'"))?;
            }
        }
    }
    Ok(KvEntry { key, item, array_len, pair: pair_start..window.pos, value: value_start..window.pos })
}

fn alignment(kv: &[KvEntry], window: &Window<'_, impl Read>) -> Result<u64, GgufError> {
    let key = "general.alignment";
    let Some(entry) = kv.iter().find(|e| e.key == key) else { return Ok(DEFAULT_ALIGNMENT) };
    let fault = |found: String| malformed(window.path, format!("key '{key}'"), found, "a u32 power of two");
    if entry.item != ValueType::U32 || entry.array_len.is_some() {
        let array = if entry.array_len.is_some() { "array of " } else { "" };
        return Err(fault(format!("{array}{}", entry.item)));
    }
    let found = window.bytes[entry.value.clone()].try_into().map_or(0, u32::from_le_bytes);
    if found.is_power_of_two() { Ok(u64::from(found)) } else { Err(fault(found.to_string())) }
}

/// Its extent is still relative to the data section; see [`place`].
fn tensor(window: &mut Window<'_, impl Read>, i: u64) -> Result<TensorInfo, GgufError> {
    let path = window.path;
    let name = name(window, NAME_BYTES_MAX, format_args!("name of tensor {i}"))?;
    let n_dims = window.u32(format_args!("number of dimensions of tensor '{name}'"))?;
    if n_dims > DIMS_MAX {
        return Err(malformed(path, format!("tensor '{name}': number of dimensions"), n_dims, "at most 4"));
    }
    let mut dims = Vec::with_capacity(DIMS_MAX as usize);
    for d in 0..n_dims {
        dims.push(window.u64(format_args!("dimension {d} of tensor '{name}'"))?);
    }
    if dims.is_empty() {
        dims.push(1); // a scalar: ggml fills up with ones
    }
    let id = window.u32(format_args!("type of tensor '{name}'"))?;
    let offset = window.u64(format_args!("offset of tensor '{name}'"))?;
    let Some(dtype) = GgmlType::from_id(id) else {
        let (found, remedy) = GgmlType::describe_missing(id);
        let reason = format!("tensor '{name}' has ggml type {id} ({found}), which current llama.cpp lacks; {remedy}");
        return Err(GgufError::refused(path, reason));
    };
    let elements = dims.iter().try_fold(1u64, |n, ne| n.checked_mul(*ne)).filter(|n| i64::try_from(*n).is_ok());
    if elements.is_none() || dims.iter().any(|ne| i64::try_from(*ne).is_err()) {
        return Err(malformed(
            path,
            format!("tensor '{name}': shape"),
            format!("{dims:?}"),
            "fewer than 2^63 elements",
        ));
    }
    if !dims[0].is_multiple_of(dtype.block_size()) {
        let expected = format!("a multiple of {}, the block size of {dtype}", dtype.block_size());
        return Err(malformed(path, format!("tensor '{name}': row length"), dims[0], expected));
    }
    let Some(len) = dtype.tensor_bytes(&dims) else {
        return Err(malformed(path, format!("tensor '{name}': shape"), format!("{dims:?}"), "fewer than 2^64 bytes"));
    };
    Ok(TensorInfo { name, dtype, dims, extent: Extent { file: 0, offset, len } })
}

/// Turns offsets into the data section into offsets into the file, and checks them.
fn place(
    tensors: &mut [TensorInfo],
    alignment: u64,
    data_start: u64,
    file_len: u64,
    path: &Path,
) -> Result<(), GgufError> {
    for t in tensors {
        let Extent { offset, len, .. } = t.extent;
        if !offset.is_multiple_of(alignment) {
            let expected = format!("a multiple of the alignment {alignment}");
            return Err(malformed(path, format!("tensor '{}': offset", t.name), offset, expected));
        }
        let start = data_start.saturating_add(offset);
        let end = start.saturating_add(len);
        if end > file_len {
            let what = format!("data of tensor '{}'", t.name);
            return Err(GgufError::Truncated { path: path.to_owned(), what, start, end, len: file_len });
        }
        t.extent.offset = start;
    }
    Ok(())
}

/// The first name that occurs twice.
fn duplicate<'a>(names: impl Iterator<Item = &'a String>) -> Option<&'a String> {
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names.windows(2).find(|w| w[0] == w[1]).map(|w| w[0])
}

fn refuse_overlaps(tensors: &[TensorInfo], path: &Path) -> Result<(), GgufError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().filter(|t| t.extent.len > 0).collect();
    order.sort_unstable_by_key(|t| t.extent.offset);
    match order.windows(2).find(|w| w[0].extent.end() > w[1].extent.offset) {
        Some(w) => {
            let (first, second, offset) = (&w[0].name, &w[1].name, w[1].extent.offset);
            let remedy = "the header is damaged, fetch the file again";
            let reason = format!("tensors '{first}' and '{second}' overlap at byte {offset}; {remedy}");
            Err(GgufError::refused(path, reason))
        }
        None => Ok(()),
    }
}
