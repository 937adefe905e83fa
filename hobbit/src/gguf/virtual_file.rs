//! The model as the one GGUF file that llama.cpp reads.
//!
//! A single file is shown as it is, byte by byte. A split model (or a file whose data are not laid out as llama.cpp
//! demands) gets a new header: the first shard's keys without `split.*`, then all tensors in shard order. Tensor data
//! are never copied; [`Segment`]s say where in the sources they lie.

use super::experts::parse_name;
use super::{Gguf, HeaderBuilder};
use crate::expert::Extent;

/// A run of the virtual file that belongs to one tensor, or to none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte in the virtual file.
    pub start: u64,
    /// Length in bytes; never 0.
    pub len: u64,
    /// The same bytes in a source file; `None` where no file has them in one piece: the experts of a pack.
    pub source: Option<Extent>,
    /// The bytes are an expert weight tensor's.
    pub expert: bool,
    /// Index into [`Gguf::tensors`]; `None` for what lies between tensors of a file shown as it is.
    pub tensor: Option<u32>,
}

impl Segment {
    /// One past the last byte in the virtual file.
    pub const fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// What the virtual file holds from a position on, up to the end of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// The rest of the header.
    Header(&'a [u8]),
    /// The rest of a segment: `source` starts at the position.
    Source {
        /// The segment.
        segment: &'a Segment,
        /// Its bytes from the position on.
        source: Extent,
    },
    /// The rest of a segment without source. Reads as zeros.
    Absent {
        /// The segment.
        segment: &'a Segment,
        /// Bytes from the position on.
        len: u64,
    },
    /// So many zero bytes.
    Zeros(u64),
    /// Nothing: the position is at or beyond the end.
    End,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct VirtualGguf {
    header: Vec<u8>,
    segments: Vec<Segment>,
    len: u64,
}

impl VirtualGguf {
    /// A file of `len` bytes: `header`, then `segments`, ascending and disjoint.
    pub(crate) fn new(header: Vec<u8>, segments: Vec<Segment>, len: u64) -> Self {
        debug_assert!(segments.is_sorted_by(|a, b| a.end() <= b.start));
        Self { header, segments, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never: there is always a header.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first bytes, up to the padding before the data.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// The rest, ascending and disjoint. What neither the header nor a segment covers is zero.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// What lies at `pos`.
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
    pub fn one_file(&self) -> VirtualGguf {
        match &self.views {
            Some(views) => views.stored.clone(),
            None if self.files.len() == 1 => self.as_stored(),
            None => self.merged(),
        }
    }

    fn segment(&self, tensor: usize, start: u64) -> Option<Segment> {
        let info = &self.tensors[tensor];
        let expert = parse_name(&info.name).is_some();
        let (len, source, tensor) = (info.extent.len, Some(info.extent), Some(tensor as u32));
        (len > 0).then_some(Segment { start, len, source, expert, tensor })
    }

    fn as_stored(&self) -> VirtualGguf {
        let len = self.files[0].len;
        let mut segments = Vec::new();
        let mut pos = self.header_bytes.len() as u64;
        // The reader checked that none overlap; only in a contiguous file are they in the order of their data.
        let tensors = (0..self.tensors.len()).filter_map(|i| self.segment(i, self.tensors[i].extent.offset));
        let mut tensors: Vec<Segment> = tensors.collect();
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
        const SOUND: &str = "keys and tensors come from checked headers, names and shapes included";
        let mut header = HeaderBuilder::new(self.alignment).expect(SOUND);
        self.copy_keys(&mut header, |key| !key.starts_with("split.")).expect(SOUND);
        for t in &self.tensors {
            header.tensor(&t.name, t.dtype, &t.dims).expect(SOUND);
        }
        let layout = header.finish();
        let starts = layout.tensors.iter().map(|t| t.extent.offset).enumerate();
        let segments = starts.filter_map(|(i, start)| self.segment(i, start)).collect();
        VirtualGguf { header: layout.header, segments, len: layout.len }
    }
}

impl VirtualGguf {
    /// The same file with its experts absent.
    pub(super) fn without_experts(mut self) -> Self {
        self.segments.iter_mut().filter(|s| s.expert).for_each(|s| s.source = None);
        self
    }
}

/// Bytes of the only file that belong to no tensor.
fn between(start: u64, end: u64) -> Option<Segment> {
    let len = end.checked_sub(start)?;
    let source = Some(Extent { file: 0, offset: start, len });
    (len > 0).then_some(Segment { start, len, source, expert: false, tensor: None })
}
