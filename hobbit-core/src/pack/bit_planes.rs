//! Records of bit planes. For each Q8_0 expert, a record has first the high planes of all its slices, then the low
//! planes. The first part alone is the low version, both together are the high version, bit for bit
//! ([`crate::planes`]). docs/PACK.md describes the layout.

use crate::expert::{Extent, Precision};
use crate::gguf::{ExpertClass, GgmlType, LayerExperts, SliceSource, Stored, VersionSource};
use crate::pack::SliceTypes;
use crate::planes::{HIGH_BYTES, LOW_BYTES};
use crate::store::BLOCK_BYTES;

/// Value of `hobbit.pack.nested`: the type of both planes together, and of the high planes alone.
pub(super) const PLANES: &str = "q8_0/q4_1";

/// The type of a version in memory.
pub(super) const fn type_of(precision: Precision) -> GgmlType {
    match precision {
        Precision::High => GgmlType::Q8_0,
        Precision::Low => GgmlType::Q4_1,
    }
}

pub(super) fn types_of(layer: &LayerExperts, precision: Precision) -> SliceTypes {
    layer.tensors.iter().map(|tensor| (tensor.kind, type_of(precision))).collect()
}

/// One part of a record: a version's own planes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Planes {
    /// For each slice of the class, the offset in this part, a multiple of [`BLOCK_BYTES`], and the bytes without
    /// padding.
    pub slices: Vec<(u64, u64)>,
    /// Total bytes, a multiple of [`BLOCK_BYTES`].
    pub bytes: u64,
}

impl Planes {
    /// Planes that only the version of this precision has: high planes for a low version, low planes for a high one.
    /// `None` if sizes overflow.
    pub fn of(class: &ExpertClass, precision: Precision) -> Option<Self> {
        let block = match precision {
            Precision::Low => HIGH_BYTES as u64,
            Precision::High => LOW_BYTES as u64,
        };
        let (mut slices, mut at) = (Vec::new(), 0u64);
        for shape in &class.slices {
            let bytes = (shape.bytes / shape.dtype.type_size()).checked_mul(block)?;
            slices.push((at, bytes));
            at = at.checked_add(bytes.checked_next_multiple_of(BLOCK_BYTES)?)?;
        }
        Some(Self { slices, bytes: at })
    }

    /// Source of the planes in a part that begins at `offset`. The caller sets what they are planes of.
    pub fn source(&self, class: u16, offset: u64) -> VersionSource {
        let slice = |&(at, len): &(u64, u64)| SliceSource {
            extent: Extent { file: 0, offset: offset + at, len },
            lead: 0,
            stored: Stored::High,
        };
        let record = Some(Extent { file: 0, offset, len: self.bytes });
        VersionSource { class, slices: self.slices.iter().map(slice).collect(), record }
    }
}

/// The high version that combines the planes of `own` with those of `low`; `None` unless `own` directly follows `low`.
pub(super) fn joined(own: &VersionSource, low: &VersionSource) -> Option<VersionSource> {
    let (first, second) = (low.record?, own.record?);
    let record = (first.end() == second.offset).then(|| Extent { len: first.len + second.len, ..first });
    let both =
        |(low, own): (&SliceSource, &SliceSource)| SliceSource { stored: Stored::Both { low: own.extent }, ..*low };
    let slices = low.slices.iter().zip(&own.slices).map(both).collect();
    Some(VersionSource { class: own.class, slices, record: Some(record?) })
}
