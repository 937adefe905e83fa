//! Nested records: of an expert of Q8_0 first the high planes of all its slices, then the low planes. The first part alone is
//! the low version, both are the high one, bit for bit ([`crate::planes`]). docs/PACK.md draws it.

use crate::expert::{Extent, Precision, SliceKind};
use crate::gguf::{ExpertClass, GgmlType, LayerExperts, SliceSource, Stored, VersionSource};
use crate::pack::SliceTypes;
use crate::planes::{HIGH_BYTES, LOW_BYTES};
use crate::store::BLOCK_BYTES;

/// How `hobbit.pack.nested` names these planes: what both are, and what the first is read as.
pub(super) const PLANES: &str = "q8_0/q4_1";

/// The type that versions have, in memory.
pub(super) const fn type_of(precision: Precision) -> GgmlType {
    match precision {
        Precision::High => GgmlType::Q8_0,
        Precision::Low => GgmlType::Q4_1,
    }
}

/// The types of a layer's versions.
pub(super) fn types_of(layer: &LayerExperts, precision: Precision) -> SliceTypes {
    layer.tensors.iter().map(|tensor| (tensor.kind, type_of(precision))).collect()
}

/// One part of a record: the planes of a version's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Planes {
    /// By slice, in the order of [`SliceKind`].
    pub slices: Vec<Plane>,
    /// Bytes of all, a multiple of [`BLOCK_BYTES`].
    pub bytes: u64,
}

/// One slice's plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plane {
    pub kind: SliceKind,
    /// Where it begins in its part, a multiple of [`BLOCK_BYTES`].
    pub at: u64,
    /// Without padding.
    pub bytes: u64,
}

impl Planes {
    /// The planes that only a version of this precision has: the high ones of a low version, the low ones of a high one.
    /// `None` where sizes overflow.
    pub fn of(class: &ExpertClass, precision: Precision) -> Option<Self> {
        let block = match precision {
            Precision::Low => HIGH_BYTES as u64,
            Precision::High => LOW_BYTES as u64,
        };
        let (mut slices, mut at) = (Vec::new(), 0u64);
        for shape in &class.slices {
            let bytes = (shape.bytes / shape.dtype.type_size()).checked_mul(block)?;
            slices.push(Plane { kind: shape.kind, at, bytes });
            at = at.checked_add(bytes.checked_next_multiple_of(BLOCK_BYTES)?)?;
        }
        Some(Self { slices, bytes: at })
    }

    /// Where they lie in a part that begins at `offset`; what it is the planes of comes later.
    pub fn source(&self, class: u16, offset: u64) -> VersionSource {
        let slice = |plane: &Plane| SliceSource {
            extent: Extent { file: 0, offset: offset + plane.at, len: plane.bytes },
            lead: 0,
            stored: Stored::High,
        };
        let record = Some(Extent { file: 0, offset, len: self.bytes });
        VersionSource { class, slices: self.slices.iter().map(slice).collect(), record }
    }
}

/// The high version whose own planes are those of `own`, and whose others those of `low`; `None` unless they follow them at
/// once.
pub(super) fn joined(own: &VersionSource, low: &VersionSource) -> Option<VersionSource> {
    let (first, second) = (low.record?, own.record?);
    let record = (first.end() == second.offset).then(|| Extent { len: first.len + second.len, ..first });
    let both =
        |(low, own): (&SliceSource, &SliceSource)| SliceSource { stored: Stored::Both { low: own.extent }, ..*low };
    let slices = low.slices.iter().zip(&own.slices).map(both).collect();
    Some(VersionSource { class: own.class, slices, record: Some(record?) })
}
