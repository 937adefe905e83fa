//! The plain model of a pack: the source's header over the pack's bytes, with its gaps.
//!
//! *Gaps* are non-zero bytes of the source outside of its tensors: padding by another tool, or data appended to the
//! file. They are kept so that unpacking restores every file. `hobbit.gaps` is a sequence of: position in the plain
//! file (u64), length (u64), bytes.

use std::path::Path;

use super::error::PackError;
use super::format::PackKind;
use crate::expert::Extent;
use crate::files::FileState;
use crate::gguf::experts::parse_name;
use crate::gguf::{Gguf, Segment, SourceFile, TensorInfo, VirtualGguf};

pub(super) const GAP_BYTES_MAX: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    /// First byte in the plain file.
    pub start: u64,
    /// Length in bytes, not 0.
    pub len: u64,
    /// First byte in `hobbit.gaps`.
    pub at: u64,
}

/// Appends a gap without its leading and trailing zeros; nothing if all bytes are zero.
pub(super) fn push_gap(out: &mut Vec<u8>, start: u64, bytes: &[u8]) {
    let (Some(first), Some(last)) = (bytes.iter().position(|b| *b != 0), bytes.iter().rposition(|b| *b != 0)) else {
        return;
    };
    let kept = &bytes[first..=last];
    out.extend_from_slice(&(start + first as u64).to_le_bytes());
    out.extend_from_slice(&(kept.len() as u64).to_le_bytes());
    out.extend_from_slice(kept);
}

/// Parses `hobbit.gaps`; `None` if it is truncated, or a gap is empty or ends beyond the maximum file size. The caller
/// checks that gaps lie between the tensors.
pub(super) fn parse_gaps(bytes: &[u8]) -> Option<Vec<Gap>> {
    let word = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let (mut gaps, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let (start, len) = (word(at)?, word(at + 8)?);
        at += 16;
        let end = start.checked_add(len)?;
        if len == 0 || len > (bytes.len() - at) as u64 || i64::try_from(end).is_err() {
            return None;
        }
        gaps.push(Gap { start, len, at: at as u64 });
        at += len as usize;
    }
    Some(gaps)
}

/// Builds the plain model of `header`, the source's header of a file of `source_size` bytes. Its gaps begin at the byte
/// `gaps_at` of the pack.
pub(super) fn model(
    raw: &Gguf,
    path: &Path,
    kind: PackKind,
    header: Vec<u8>,
    (gaps_at, gaps): (u64, &[Gap]),
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
    segments.extend(gaps.iter().map(|&Gap { start, len, at }| {
        let source = Some(Extent { file: 0, offset: gaps_at + at, len });
        Segment { start, len, source, in_file: false, tensor: None }
    }));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_trimmed_and_found_again() {
        let mut bytes = Vec::new();
        push_gap(&mut bytes, 100, &[0, 0, 7, 0, 8, 0]);
        push_gap(&mut bytes, 200, &[0; 31]);
        push_gap(&mut bytes, 300, &[1]);
        assert_eq!(bytes.len(), 16 + 3 + 16 + 1);
        let gaps = parse_gaps(&bytes).unwrap();
        assert_eq!(gaps, [Gap { start: 102, len: 3, at: 16 }, Gap { start: 300, len: 1, at: 35 }]);
        assert_eq!(bytes[16..19], [7, 0, 8]);
        for cut in 1..bytes.len() {
            assert!(parse_gaps(&bytes[..cut]).is_none() || cut == 19, "{cut}");
        }
        bytes[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(parse_gaps(&bytes), None);
    }
}
