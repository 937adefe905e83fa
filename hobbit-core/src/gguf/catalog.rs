//! Places of all versions of all experts, and the shapes of their slots.
//!
//! A [`Catalog`] hides where versions come from: one GGUF ([`Catalog::plain`]), a second GGUF of a smaller quant
//! ([`Catalog::add_low`]), or an expert pack ([`crate::pack`]). Versions of one
//! [`ExpertClass`] fit the same slots.

use super::{ExpertMap, ExpertTensor, GgmlType, LayerExperts};
use crate::expert::{ExpertId, Extent, Precision, SliceKind, Version};
use crate::store::{BLOCK_BYTES, slot_stride};
use xxhash_rust::xxh3::Xxh3;

/// All versions of all experts of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Catalog {
    /// Shapes of slots; versions name theirs by position.
    pub classes: Vec<ExpertClass>,
    /// Layers with experts, ascending.
    pub layers: Vec<LayerCatalog>,
}

/// Versions with equal types and row lengths. A slot of the class is `stride` bytes: one region per slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertClass {
    /// In the order of [`SliceKind`].
    pub slices: Vec<SliceShape>,
    /// Bytes of a slot, a multiple of [`BLOCK_BYTES`].
    pub stride: u64,
}

/// One slice of a class, and its region in the slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceShape {
    pub kind: SliceKind,
    pub dtype: GgmlType,
    /// Row length in elements.
    pub ne0: u64,
    pub ne1: u64,
    pub bytes: u64,
    /// Start of its region in the slot, a multiple of [`BLOCK_BYTES`].
    pub region: u64,
    pub capacity: u64,
}

/// The versions of one layer's experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerCatalog {
    /// Block number.
    pub layer: u16,
    pub n_expert: u16,
    /// Every expert's high version.
    pub high: Vec<VersionSource>,
    /// Every expert's low version, if there is one; as long as `high`.
    pub low: Vec<Option<VersionSource>>,
}

/// Place of one version's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionSource {
    /// Index into [`Catalog::classes`].
    pub class: u16,
    /// In the order of the class's slices. Versions of one class and layer have equal leads.
    pub slices: Vec<SliceSource>,
    /// The whole version, if the file has it in one piece: laid out like a slot, or in planes.
    pub record: Option<Extent>,
}

impl VersionSource {
    pub fn bytes(&self) -> u64 {
        self.slices.iter().map(SliceSource::bytes).sum()
    }

    /// All low planes, if the file has them in one piece.
    pub fn rest(&self) -> Option<Extent> {
        let record = self.record?;
        match self.slices.first()?.stored {
            Stored::Both { low } => Some(Extent { offset: low.offset, len: record.end() - low.offset, ..low }),
            Stored::Whole | Stored::High => None,
        }
    }
}

/// How a slice is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stored {
    /// As it is in memory.
    #[default]
    Whole,
    /// As its high plane ([`crate::planes`]), which becomes Q4_1.
    High,
    /// As its high plane and this low plane, which together become Q8_0.
    Both { low: Extent },
}

/// Place of one slice's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceSource {
    /// In the file; of planes, the high one.
    pub extent: Extent,
    /// Distance of the first byte from the start of the slice's region: where a direct read lands in place.
    pub lead: u64,
    pub stored: Stored,
}

impl SliceSource {
    pub fn bytes(&self) -> u64 {
        match self.stored {
            Stored::Whole | Stored::High => self.extent.len,
            Stored::Both { low } => self.extent.len + low.len,
        }
    }
}

/// Why a file cannot serve as the low-precision version of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor '{tensor}': {found}, expected {expected}")]
pub struct LowMismatch {
    pub tensor: String,
    /// Value in the low file.
    pub found: String,
    /// Value in the model.
    pub expected: String,
}

impl ExpertClass {
    pub fn slice(&self, kind: SliceKind) -> Option<&SliceShape> {
        self.slices.iter().find(|slice| slice.kind == kind)
    }

    /// Bytes of weights, without alignment.
    pub fn bytes(&self) -> u64 {
        self.slices.iter().map(|slice| slice.bytes).sum()
    }

    /// A class whose regions take any window of a slice, for files that align tensors to less than a block.
    pub(crate) fn windowed(tensors: &[ExpertTensor]) -> Self {
        let slices = tensors.iter().map(|t| (t.kind, t.dtype, t.ne0, t.ne1));
        Self::laid_out(slices, |bytes| Some(slot_stride(bytes))).expect("the reader has checked types and shapes")
    }

    /// A class whose slices follow each other at block borders, as a pack stores them: (kind, type, row length, rows).
    /// `None` if a row is no whole number of blocks of its type.
    pub fn packed(slices: impl IntoIterator<Item = (SliceKind, GgmlType, u64, u64)>) -> Option<Self> {
        Self::laid_out(slices, |bytes| bytes.checked_next_multiple_of(BLOCK_BYTES))
    }

    /// Slices one after the other; `region` gives the bytes that a slice of some length takes.
    fn laid_out(
        slices: impl IntoIterator<Item = (SliceKind, GgmlType, u64, u64)>,
        region: impl Fn(u64) -> Option<u64>,
    ) -> Option<Self> {
        let mut class = Self { slices: Vec::new(), stride: 0 };
        for (kind, dtype, ne0, ne1) in slices {
            let bytes = dtype.row_bytes(ne0)?.checked_mul(ne1)?;
            let (start, capacity) = (class.stride, region(bytes)?);
            class.stride = start.checked_add(capacity)?;
            class.slices.push(SliceShape { kind, dtype, ne0, ne1, bytes, region: start, capacity });
        }
        Some(class)
    }
}

impl LayerCatalog {
    /// Place of a version of the layer's expert `index`; `None` if there is no such version.
    pub fn source(&self, index: u16, precision: Precision) -> Option<&VersionSource> {
        match precision {
            Precision::High => self.high.get(usize::from(index)),
            Precision::Low => self.low.get(usize::from(index))?.as_ref(),
        }
    }
}

/// Whether a low version is the high planes of this high one.
fn is_part(low: &VersionSource, high: &VersionSource) -> bool {
    let is_plane = |(low, high): (&SliceSource, &SliceSource)| {
        low.stored == Stored::High && matches!(high.stored, Stored::Both { .. }) && low.extent == high.extent
    };
    low.slices.len() == high.slices.len() && low.slices.iter().zip(&high.slices).all(is_plane)
}

impl Catalog {
    /// The experts of `map`, at high precision.
    pub fn plain(map: &ExpertMap) -> Self {
        let mut catalog = Self::default();
        for layer in &map.layers {
            let n_expert = layer.n_expert as u16; // the reader caps it
            let high = catalog.versions(layer);
            let low = vec![None; usize::from(n_expert)];
            catalog.layers.push(LayerCatalog { layer: layer.layer, n_expert, high, low });
        }
        catalog
    }

    /// Adds the experts of `map`, another GGUF of the same model, as low versions. Its files count from `first_file`.
    pub fn add_low(&mut self, map: &ExpertMap, first_file: u32) -> Result<(), LowMismatch> {
        if let Some(layer) = self.layers.iter().find(|layer| map.layer(layer.layer).is_none()) {
            let tensor = self.tensor_name(layer, 0);
            let expected = format!("{} experts", layer.n_expert);
            return Err(LowMismatch { tensor, found: "no such tensor".into(), expected });
        }
        let mut theirs = Self::plain(map);
        for layer in &mut theirs.layers {
            layer.low = std::mem::take(&mut layer.high).into_iter().map(Some).collect();
        }
        self.add_low_of(map, &theirs, first_file)
    }

    /// Adds low versions from `theirs`, the catalog of files with the experts of `map`, numbered from `first_file`.
    /// Layers and experts without a low version in `theirs` get none.
    pub fn add_low_of(&mut self, map: &ExpertMap, theirs: &Self, first_file: u32) -> Result<(), LowMismatch> {
        for layer in &self.layers {
            let Some(high) = layer.high.first() else { continue };
            let class = &self.classes[usize::from(high.class)];
            let low = map.layer(layer.layer);
            for (i, slice) in class.slices.iter().enumerate() {
                let expected = format!("[{}, {}, {}]", slice.ne0, slice.ne1, layer.n_expert);
                let found = low.and_then(|low| low.tensor(slice.kind));
                let found =
                    found.map_or("no such tensor".to_owned(), |t| format!("[{}, {}, {}]", t.ne0, t.ne1, t.n_expert));
                if found != expected {
                    return Err(LowMismatch { tensor: self.tensor_name(layer, i), found, expected });
                }
            }
            let extra = low.into_iter().flat_map(|low| &low.tensors).find(|t| class.slice(t.kind).is_none());
            if let Some(extra) = extra {
                let expected = "no such tensor, as in the model".to_owned();
                return Err(LowMismatch { tensor: extra.name.clone(), found: "a tensor".into(), expected });
            }
        }
        for i in 0..self.layers.len() {
            let Some(layer) = theirs.layer(self.layers[i].layer) else { continue };
            let low = layer.low.iter().map(|version| {
                let mut moved = version.clone()?;
                moved.class = self.class(theirs.classes[usize::from(moved.class)].clone());
                for slice in &mut moved.slices {
                    slice.extent.file += first_file;
                    if let Stored::Both { low } = &mut slice.stored {
                        low.file += first_file;
                    }
                }
                moved.record.iter_mut().for_each(|record| record.file += first_file);
                Some(moved)
            });
            self.layers[i].low = low.collect();
        }
        Ok(())
    }

    /// Name of the tensor that holds this slice of the layer.
    fn tensor_name(&self, layer: &LayerCatalog, slice: usize) -> String {
        let class = &self.classes[usize::from(layer.high[0].class)];
        format!("blk.{}.{}.weight", layer.layer, class.slices[slice].kind.tensor_stem())
    }

    /// Forgets the layers that `keep` refuses.
    pub fn retain_layers(&mut self, keep: impl Fn(u16) -> bool) {
        self.layers.retain(|layer| keep(layer.layer));
    }

    /// Forgets all low versions.
    pub fn drop_low(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.low.iter_mut().for_each(|low| *low = None));
    }

    /// Adds a block of room behind each slice that needs `padding`: kernels of devices read that many bytes after it.
    /// Its version is no longer read at once, as records are laid out without that room.
    pub fn make_room(&mut self, padding: impl Fn(&SliceShape) -> u64) {
        for class in &mut self.classes {
            class.stride = 0;
            for slice in &mut class.slices {
                slice.capacity += if padding(slice) > 0 { BLOCK_BYTES } else { 0 };
                slice.region = class.stride;
                class.stride += slice.capacity;
            }
        }
        let classes = &self.classes;
        for layer in &mut self.layers {
            for version in layer.high.iter_mut().chain(layer.low.iter_mut().flatten()) {
                let is_roomy = classes[usize::from(version.class)].slices.iter().any(|slice| padding(slice) > 0);
                version.record = version.record.filter(|_| !is_roomy);
            }
        }
    }

    pub fn layer(&self, layer: u16) -> Option<&LayerCatalog> {
        self.layers.binary_search_by_key(&layer, |l| l.layer).ok().map(|i| &self.layers[i])
    }

    /// Place of a version; `None` if there is no such version.
    pub fn source(&self, version: Version) -> Option<&VersionSource> {
        let ExpertId { layer, index } = version.expert;
        self.layer(layer)?.source(index, version.precision)
    }

    /// Whether any expert has a low version.
    pub fn has_low(&self) -> bool {
        self.layers.iter().any(|layer| layer.low.iter().any(Option::is_some))
    }

    /// Whether this is a high version that contains the low version's bits.
    pub fn in_bit_planes(&self, version: Version) -> bool {
        let low = self.source(Version::low(version.expert));
        let high = self.source(version).filter(|_| version.precision == Precision::High);
        high.zip(low).is_some_and(|(high, low)| is_part(low, high))
    }

    /// Whether any version is stored in planes.
    pub fn has_planes(&self) -> bool {
        let is_in_planes = |version: &VersionSource| version.slices.iter().any(|slice| slice.stored != Stored::Whole);
        self.layers.iter().any(|layer| layer.high.iter().chain(layer.low.iter().flatten()).any(is_in_planes))
    }

    /// A hash of the high versions' shapes, types and places. An attacker can make two models with the same hash.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        let mut add = |numbers: &[u64]| numbers.iter().for_each(|number| hash.update(&number.to_le_bytes()));
        for layer in &self.layers {
            add(&[u64::from(layer.layer), u64::from(layer.n_expert)]);
            for version in &layer.high {
                let shapes = &self.classes[usize::from(version.class)].slices;
                for (shape, SliceSource { extent, .. }) in shapes.iter().zip(&version.slices) {
                    add(&[shape.kind as u64, u64::from(shape.dtype.id()), shape.ne0, shape.ne1]);
                    add(&[u64::from(extent.file), extent.offset, extent.len]);
                }
            }
        }
        hash.digest()
    }

    /// Bytes of all versions of a precision, in memory.
    pub fn bytes(&self, precision: Precision) -> u64 {
        self.versions_of(precision).map(|version| self.classes[usize::from(version.class)].bytes()).sum()
    }

    /// Bytes read from files for all versions of a precision; bytes that two versions share count for both.
    pub fn read_bytes(&self, precision: Precision) -> u64 {
        self.versions_of(precision).map(VersionSource::bytes).sum()
    }

    fn versions_of(&self, precision: Precision) -> impl Iterator<Item = &VersionSource> {
        self.layers
            .iter()
            .flat_map(move |layer| (0..layer.n_expert).filter_map(move |index| layer.source(index, precision)))
    }

    /// Bytes of all versions in files; planes that two versions share count once.
    pub fn stored_bytes(&self) -> u64 {
        let of_layer = |layer: &LayerCatalog| -> u64 {
            let is_shared =
                |index: usize, low: &VersionSource| layer.high.get(index).is_some_and(|high| is_part(low, high));
            let low = layer.low.iter().enumerate().filter_map(|(index, low)| Some((index, low.as_ref()?)));
            let low = low.filter(|(index, low)| !is_shared(*index, low)).map(|(_, low)| low.bytes());
            layer.high.iter().map(VersionSource::bytes).chain(low).sum()
        };
        self.layers.iter().map(of_layer).sum()
    }

    /// The position of `class`, which is added if it is new.
    pub fn class(&mut self, class: ExpertClass) -> u16 {
        let known = self.classes.iter().position(|known| *known == class);
        let index = known.unwrap_or_else(|| {
            self.classes.push(class);
            self.classes.len() - 1
        });
        u16::try_from(index).expect("fewer classes than layers and types")
    }

    fn versions(&mut self, layer: &LayerExperts) -> Vec<VersionSource> {
        let class = self.class(ExpertClass::windowed(&layer.tensors));
        let slice = |tensor: &ExpertTensor, index: u16| {
            let extent = tensor.extent(index);
            // Experts that are whole blocks long all begin alike: a direct read lands in place.
            let lead = if tensor.slice_bytes.is_multiple_of(BLOCK_BYTES) { extent.offset % BLOCK_BYTES } else { 0 };
            SliceSource { extent, lead, stored: Stored::Whole }
        };
        let versions = (0..layer.n_expert as u16).map(|index| VersionSource {
            class,
            slices: layer.tensors.iter().map(|tensor| slice(tensor, index)).collect(),
            record: None,
        });
        versions.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_behind_slices_moves_the_next_ones_and_ends_reads_of_whole_records() {
        let shapes = [(SliceKind::Gate, 64), (SliceKind::Up, 512), (SliceKind::Down, 64)];
        let class = |rows: [u64; 3]| {
            let slices = shapes.into_iter().zip(rows).map(|((kind, ne0), ne1)| (kind, GgmlType::Q8_0, ne0, ne1));
            ExpertClass::packed(slices).unwrap()
        };
        let classes = vec![class([1, 1, 100]), ExpertClass::packed([(SliceKind::Gate, GgmlType::F32, 64, 1)]).unwrap()];
        let record = Some(Extent { file: 0, offset: 0, len: 16384 });
        let high = (0..2).map(|class| VersionSource { class, slices: Vec::new(), record }).collect();
        let layers = vec![LayerCatalog { layer: 0, n_expert: 2, high, low: vec![None; 2] }];
        let mut catalog = Catalog { classes, layers };
        catalog.make_room(|slice| if slice.ne0 == 64 && slice.dtype == GgmlType::Q8_0 { 1 } else { 0 });
        let regions = |class: &ExpertClass| -> Vec<(u64, u64)> {
            class.slices.iter().map(|slice| (slice.region, slice.capacity)).collect()
        };
        assert_eq!(regions(&catalog.classes[0]), [(0, 8192), (8192, 4096), (12288, 12288)]);
        assert_eq!(regions(&catalog.classes[1]), [(0, 4096)]);
        assert_eq!([&catalog.classes[0], &catalog.classes[1]].map(|class| class.stride), [24576, 4096]);
        assert_eq!([&catalog.layers[0].high[0], &catalog.layers[0].high[1]].map(|own| own.record), [None, record]);
    }
}
