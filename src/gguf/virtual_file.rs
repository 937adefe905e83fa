//! The model as the one GGUF file that llama.cpp reads.
//!
//! A single file is shown as it is, byte by byte. A split model (or a file whose data are not laid out as llama.cpp
//! demands) gets a new header: the first shard's keys without `split.*`, then all tensors in shard order. Tensor data
//! are never copied; [`Segment`]s say where in the sources they lie.

use super::experts::parse_name;
use super::{Gguf, HeaderBuilder};
use crate::expert::Extent;

/// A run of the virtual file whose bytes lie in a source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte in the virtual file.
    pub start: u64,
    /// The same bytes in the source; never empty.
    pub source: Extent,
    /// The bytes are an expert weight tensor's.
    pub expert: bool,
    /// Index into [`Gguf::tensors`]; `None` for what lies between tensors of a file shown as it is.
    pub tensor: Option<u32>,
}

impl Segment {
    /// One past the last byte in the virtual file.
    pub const fn end(&self) -> u64 {
        self.start + self.source.len
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
                let Extent { file, offset, len } = segment.source;
                Piece::Source { segment, source: Extent { file, offset: offset + skip, len: len - skip } }
            }
            Some(segment) => Piece::Zeros(segment.start - pos),
            None => Piece::Zeros(self.len - pos),
        }
    }
}

impl Gguf {
    /// The model as one file.
    pub fn virtual_file(&self) -> VirtualGguf {
        if self.contiguous { self.as_stored() } else { self.merged() }
    }

    fn segment(&self, tensor: usize, start: u64) -> Option<Segment> {
        let info = &self.tensors[tensor];
        let expert = parse_name(&info.name).is_some();
        (info.extent.len > 0).then_some(Segment { start, source: info.extent, expert, tensor: Some(tensor as u32) })
    }

    fn as_stored(&self) -> VirtualGguf {
        let len = self.files[0].len;
        let mut segments = Vec::new();
        let mut pos = self.header.len() as u64;
        // Contiguous: the order of tensors is the order of their data.
        let tensors = (0..self.tensors.len()).filter_map(|i| self.segment(i, self.tensors[i].extent.offset));
        for segment in tensors {
            segments.extend(between(pos, segment.start));
            pos = segment.end();
            segments.push(segment);
        }
        segments.extend(between(pos, len));
        VirtualGguf { header: self.header.clone(), segments, len }
    }

    fn merged(&self) -> VirtualGguf {
        const SOUND: &str = "keys and tensors come from checked headers, names and shapes included";
        let mut header = HeaderBuilder::new(self.alignment).expect(SOUND);
        for entry in self.metadata.entries().iter().filter(|e| !e.key.starts_with("split.")) {
            header.raw_pair(&entry.key, &self.header[entry.pair.clone()]).expect(SOUND);
        }
        for t in &self.tensors {
            header.tensor(&t.name, t.dtype, &t.dims).expect(SOUND);
        }
        let layout = header.finish();
        let starts = layout.tensors.iter().map(|t| layout.data_start + t.offset).enumerate();
        let segments = starts.filter_map(|(i, start)| self.segment(i, start)).collect();
        VirtualGguf { header: layout.header, segments, len: layout.len }
    }
}

/// Bytes of the only file that belong to no tensor.
fn between(start: u64, end: u64) -> Option<Segment> {
    let source = Extent { file: 0, offset: start, len: end.checked_sub(start)? };
    (source.len > 0).then_some(Segment { start, source, expert: false, tensor: None })
}
