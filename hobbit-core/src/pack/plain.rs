//! The plain model of a pack: the source's header over the pack's bytes.

use std::path::Path;

use super::error::PackError;
use super::format::PackKind;
use crate::expert::Extent;
use crate::files::FileState;
use crate::gguf::experts::parse_name;
use crate::gguf::{Gguf, Segment, SourceFile, TensorInfo, VirtualGguf};

/// Builds the plain model of `header`, the source's header of a file of `source_size` bytes.
pub(super) fn model(
    raw: &Gguf,
    path: &Path,
    kind: PackKind,
    header: Vec<u8>,
    source_size: u64,
) -> Result<Gguf, PackError> {
    let (parsed, metadata) = Gguf::parse_header(&header, source_size, path)?;
    let in_pack = |name: &str| raw.tensor(name).map(|t| t.extent);
    let mut segments = Vec::new();
    for (i, tensor) in parsed.tensors.iter().enumerate() {
        let expert = parse_name(&tensor.name).is_some();
        let source = match raw.tensor(&tensor.name) {
            _ if expert || kind == PackKind::Low => None,
            Some(t) if t.dtype == tensor.dtype && t.dims == tensor.dims => Some(t.extent),
            found => {
                let found = found.map_or("no such tensor".to_owned(), |t| format!("{} {:?}", t.dtype, t.dims));
                let expected = format!("{} {:?} as in the plain header", tensor.dtype, tensor.dims);
                return Err(PackError::malformed(path, format!("tensor '{}'", tensor.name), found, expected));
            }
        };
        let Extent { offset: start, len, .. } = tensor.extent;
        if len > 0 {
            segments.push(Segment { start, len, source, in_file: expert, tensor: Some(i as u32) });
        }
    }
    segments.sort_unstable_by_key(|segment| segment.start);
    let mut end = header.len() as u64;
    for segment in &segments {
        if segment.start < end || segment.end() > source_size {
            let found = format!("bytes {}..{}", segment.start, segment.end());
            let expected = format!("bytes between tensors, in {end}..{source_size}");
            return Err(PackError::malformed(path, "plain layout", found, expected));
        }
        end = segment.end();
    }
    let stored = VirtualGguf { header, segments, len: source_size };
    let place = |tensor: &TensorInfo| match in_pack(&tensor.name) {
        Some(extent) if kind == PackKind::Full && parse_name(&tensor.name).is_none() => extent.offset,
        _ => i64::MAX as u64 - tensor.extent.len,
    };
    let nowhere = || SourceFile { path: path.to_owned(), len: 0, state: FileState::default() };
    let file = raw.files.first().cloned().unwrap_or_else(nowhere);
    Ok(Gguf::relocated(file, parsed, metadata, stored, place)?)
}
