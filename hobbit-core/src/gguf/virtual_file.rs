//! The model as the one GGUF file that llama.cpp reads.
//!
//! A single file is shown as it is, byte by byte. A split model (or a file whose data are not laid out as llama.cpp
//! demands) gets a new header: the first shard's keys without `split.*`, then all tensors in shard order. Tensor data
//! are never copied; [`Segment`]s say where in the sources they lie.

use super::experts::parse_name;
use super::{GgmlType, Gguf, HeaderBuilder, TensorInfo, WriteError};
use crate::expert::Extent;

/// A run of the virtual file that belongs to one tensor, or to none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte in the virtual file.
    pub start: u64,
    /// Length in bytes; never 0.
    pub len: u64,
    /// Where a source file has these bytes; `None` where no file has them in one piece: the experts of a pack.
    pub source: Option<Extent>,
    /// Loading leaves the bytes in the file: they are an expert weight tensor's, or a table's that is read by row.
    pub in_file: bool,
    /// Index into [`Gguf::tensors`]; `None` for what lies between tensors of a file shown as it is.
    pub tensor: Option<u32>,
}

impl Segment {
    /// One past the last byte in the virtual file.
    pub const fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// Contents of the virtual file from a position to the end of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    Header(&'a [u8]),
    /// The rest of a segment: `source` starts at the position.
    Source {
        segment: &'a Segment,
        /// Its bytes from the position on.
        source: Extent,
    },
    /// The rest of a segment without source. Reads as zeros.
    Absent {
        segment: &'a Segment,
        /// Bytes from the position on.
        len: u64,
    },
    Zeros(u64),
    /// Nothing: the position is at or beyond the end.
    End,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct VirtualGguf {
    /// The first bytes, up to the padding before the data.
    pub header: Vec<u8>,
    /// The rest, ascending and disjoint. What neither the header nor a segment covers is zero.
    pub segments: Vec<Segment>,
    pub len: u64,
}

impl VirtualGguf {
    pub fn segment_at(&self, pos: u64) -> Piece<'_> {
        if pos >= self.len {
            return Piece::End;
        }
        if let Some(rest) = self.header.get(pos as usize..).filter(|rest| !rest.is_empty()) {
            return Piece::Header(rest);
        }
        let next = self.segments.partition_point(|s| s.end() <= pos);
        match self.segments.get(next) {
            Some(segment) if segment.start <= pos => {
                let skip = pos - segment.start;
                let len = segment.len - skip;
                match segment.source {
                    Some(source) => {
                        Piece::Source { segment, source: Extent { offset: source.offset + skip, len, ..source } }
                    }
                    None => Piece::Absent { segment, len },
                }
            }
            Some(segment) => Piece::Zeros(segment.start - pos),
            None => Piece::Zeros(self.len - pos),
        }
    }
}

impl Gguf {
    /// The model as one file that llama.cpp accepts.
    pub fn virtual_file(&self) -> VirtualGguf {
        match &self.views {
            Some(views) => views.shown.clone(),
            None if self.is_contiguous => self.as_stored(),
            None => self.merged(),
        }
    }

    /// The model as one file: a single file exactly as stored, even where llama.cpp would refuse it, shards merged.
    pub(crate) fn one_file(&self) -> VirtualGguf {
        match &self.views {
            Some(views) => views.stored.clone(),
            None if self.files.len() == 1 => self.as_stored(),
            None => self.merged(),
        }
    }

    fn as_stored(&self) -> VirtualGguf {
        let len = self.files[0].len;
        let mut segments = Vec::new();
        let mut pos = self.header_bytes.len() as u64;
        // The reader checked that none overlap; only in a contiguous file are they in the order of their data.
        let mut tensors: Vec<Segment> = segments_of(&self.tensors, &self.tensors).collect();
        tensors.sort_unstable_by_key(|segment| segment.start);
        for segment in tensors {
            segments.extend(between(pos, segment.start));
            pos = segment.end();
            segments.push(segment);
        }
        segments.extend(between(pos, len));
        VirtualGguf { header: self.header_bytes.clone(), segments, len }
    }

    pub(super) fn merged(&self) -> VirtualGguf {
        self.rewritten(|key| !key.starts_with("split."), |tensor| tensor.dtype)
            .expect("keys and tensors come from checked headers, names and shapes included")
    }

    /// The model as one file with a new header: keys chosen by `keep`, tensors of the types from `dtype`.
    pub fn rewritten(
        &self,
        keep: impl Fn(&str) -> bool,
        dtype: impl Fn(&TensorInfo) -> GgmlType,
    ) -> Result<VirtualGguf, WriteError> {
        let mut header = HeaderBuilder::new(self.alignment)?;
        self.copy_keys(&mut header, keep)?;
        for tensor in &self.tensors {
            header.tensor(&tensor.name, dtype(tensor), &tensor.dims)?;
        }
        let layout = header.finish();
        let segments = segments_of(&layout.tensors, &self.tensors).collect();
        Ok(VirtualGguf { header: layout.header, segments, len: layout.len })
    }
}

/// The segments of tensors that a file `shows`, in whose `sources` their bytes are.
fn segments_of(shows: &[TensorInfo], sources: &[TensorInfo]) -> impl Iterator<Item = Segment> {
    shows.iter().zip(sources).enumerate().filter(|(_, (shown, _))| shown.extent.len > 0).map(|(i, (shown, source))| {
        let Extent { offset: start, len, .. } = shown.extent;
        let in_file = parse_name(&shown.name).is_some();
        Segment { start, len, source: Some(source.extent), in_file, tensor: Some(i as u32) }
    })
}

impl VirtualGguf {
    /// Makes the experts absent.
    pub fn without_experts(mut self) -> Self {
        self.segments.iter_mut().filter(|s| s.in_file).for_each(|s| s.source = None);
        self
    }

    /// Loading then leaves these tensors (by index) in the file, as it leaves experts.
    pub fn leaving(mut self, is_left: impl Fn(u32, bool) -> bool) -> Self {
        self.segments.iter_mut().for_each(|s| s.in_file = s.tensor.is_some_and(|tensor| is_left(tensor, s.in_file)));
        self
    }
}

/// Bytes of the only file that belong to no tensor.
fn between(start: u64, end: u64) -> Option<Segment> {
    let len = end.checked_sub(start)?;
    let source = Some(Extent { file: 0, offset: start, len });
    (len > 0).then_some(Segment { start, len, source, in_file: false, tensor: None })
}
