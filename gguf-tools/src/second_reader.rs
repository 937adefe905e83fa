//! Headers as the crate gguf-rs reads them, compared with hobbit's reading of the same bytes.

use std::fs::File;
use std::io::{Cursor, Read as _};

use anyhow::{Context, anyhow, bail, ensure};
use gguf_rs::{ByteOrder, GGMLType, GGUFContainer};
use hobbit_core::gguf::{Gguf, Header};

/// Most elements of arrays outside of the vocabulary: gguf-rs keeps each as a JSON value.
const ELEMENTS_MAX: u64 = 1 << 16;
/// Longest header of a file without tensors, in bytes.
const EMPTY_MAX: u64 = 64 << 20;
/// Bytes before the version, which gguf-rs expects to be read already.
const MAGIC: u64 = 4;

/// Reads the headers of a model's files again, by gguf-rs. Returns why it cannot read one of them, if so.
///
/// # Errors
/// The readers differ, or a file cannot be read any more.
pub fn compare(gguf: &Gguf) -> anyhow::Result<Option<String>> {
    for (number, file) in gguf.files.iter().enumerate() {
        let of_file = gguf.tensors.iter().filter(|tensor| tensor.extent.file as usize == number);
        let end = of_file.map(|tensor| tensor.extent.offset).min().unwrap_or(file.len.min(EMPTY_MAX));
        let path = || file.path.display().to_string();
        let mut bytes = Vec::new();
        File::open(&file.path).and_then(|opened| opened.take(end).read_to_end(&mut bytes)).with_context(path)?;
        // hobbit's limits hold for what gguf-rs is given.
        let (header, _) = Gguf::parse_header(&bytes, file.len, &file.path)?;
        bytes.truncate(header.header_len() as usize);
        if let Some(reason) = unreadable(&header) {
            return Ok(Some(reason));
        }
        compare_header(&header, bytes).with_context(path)?;
    }
    Ok(None)
}

/// Why gguf-rs cannot read a header, if so.
fn unreadable(header: &Header) -> Option<String> {
    let is_unknown = |id| matches!(GGMLType::try_from(id), Ok(GGMLType::Count) | Err(_));
    if let Some(tensor) = header.tensors.iter().find(|tensor| is_unknown(tensor.dtype.id())) {
        return Some(format!("it does not know the type {}", tensor.dtype));
    }
    if !header.alignment.is_multiple_of(8) {
        return Some(format!("it ignores an alignment of {} bytes", header.alignment));
    }
    let kept = header.kv.iter().filter(|entry| !entry.key.starts_with("tokenizer."));
    let elements = kept.filter_map(|entry| entry.array_len).fold(0, u64::saturating_add);
    (elements > ELEMENTS_MAX).then(|| format!("it would keep {elements} elements of arrays in memory"))
}

fn compare_header(header: &Header, bytes: Vec<u8>) -> anyhow::Result<()> {
    let differ = |what: String| anyhow!("{what}; fetch or convert the model again, or report this file");
    let mut reader = Cursor::new(bytes);
    reader.set_position(MAGIC);
    let decoded = GGUFContainer::new(ByteOrder::LE, Box::new(reader), 0).decode();
    let theirs = decoded.map_err(|error| differ(format!("gguf-rs cannot read the header: {error}")))?;
    let (n_keys, n_tensors) = (theirs.metadata().len(), theirs.tensors().len());
    if (n_keys, n_tensors) != (header.kv.len(), header.tensors.len()) {
        let (own_keys, own_tensors) = (header.kv.len(), header.tensors.len());
        bail!(differ(format!(
            "hobbit finds {own_keys} keys and {own_tensors} tensors, gguf-rs {n_keys} and {n_tensors}"
        )));
    }
    if let Some(entry) = header.kv.iter().find(|entry| !theirs.metadata().contains_key(&entry.key)) {
        bail!(differ(format!("hobbit finds the key '{}', gguf-rs does not", entry.key)));
    }
    for (own, tensor) in header.tensors.iter().zip(theirs.tensors()) {
        // A scalar has no dimensions in the file.
        let shape = if tensor.shape.is_empty() { &vec![1] } else { &tensor.shape };
        let ours = (&own.name, own.dtype.id(), &own.dims, own.extent.offset);
        let other = (&tensor.name, tensor.kind, shape, theirs.data_offset().saturating_add(tensor.offset));
        ensure!(
            ours == other,
            differ(format!("hobbit reads the tensor (name, type, shape, offset) {ours:?}, gguf-rs {other:?}"))
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hobbit_core::gguf::{GgmlType, HeaderBuilder};
    use std::path::Path;

    use super::*;

    /// A header with one tensor, read by hobbit, and its bytes.
    fn header(name: &str, dtype: GgmlType, dims: &[u64], alignment: u64) -> (Header, Vec<u8>) {
        let mut header = HeaderBuilder::new(alignment).unwrap();
        header.key("general.architecture", "toy").unwrap();
        header.tensor(name, dtype, dims).unwrap();
        let bytes = header.finish().header;
        (Gguf::parse_header(&bytes, 1 << 30, Path::new("toy.gguf")).unwrap().0, bytes)
    }

    #[test]
    fn equal_readings_pass_and_others_are_named() {
        let (ours, bytes) = header("a.weight", GgmlType::Q8_0, &[32, 2], 32);
        compare_header(&ours, bytes.clone()).unwrap();
        let others = [
            ("b.weight", GgmlType::Q8_0, [32, 2], 32),
            ("a.weight", GgmlType::Q4_0, [32, 2], 32),
            ("a.weight", GgmlType::Q8_0, [64, 1], 32),
            ("a.weight", GgmlType::Q8_0, [32, 2], 4096),
        ];
        for (name, dtype, dims, alignment) in others {
            let (_, bytes) = header(name, dtype, &dims, alignment);
            let error = compare_header(&ours, bytes).unwrap_err().to_string();
            assert!(error.contains("gguf-rs") && error.contains("report this file"), "{error}");
        }
        let error = compare_header(&ours, bytes[..bytes.len() - 1].to_vec()).unwrap_err().to_string();
        assert!(error.contains("gguf-rs cannot read the header"), "{error}");
    }

    #[test]
    fn headers_beyond_gguf_rs_are_not_given_to_it() {
        let (ours, _) = header("a.weight", GgmlType::Q8_0, &[32, 2], 32);
        assert_eq!(unreadable(&ours), None);
        let (newer, _) = header("a.weight", GgmlType::from_name("nvfp4").unwrap(), &[64, 2], 32);
        assert_eq!(unreadable(&newer).unwrap(), "it does not know the type nvfp4");
        let (packed, _) = header("a.weight", GgmlType::Q8_0, &[32, 2], 4);
        assert_eq!(unreadable(&packed).unwrap(), "it ignores an alignment of 4 bytes");
        let mut long = HeaderBuilder::new(32).unwrap();
        long.key("a", hobbit_core::gguf::Value::array(std::iter::repeat_n(1u8, 1 << 17))).unwrap();
        let bytes = long.finish().header;
        let (long, _) = Gguf::parse_header(&bytes, 1 << 30, Path::new("toy.gguf")).unwrap();
        assert_eq!(unreadable(&long).unwrap(), "it would keep 131072 elements of arrays in memory");
    }
}
