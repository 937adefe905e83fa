//! Opening a pack. The reader trusts nothing in the file: every count has a limit, every record must lie in its tensor
//! and have the length that its types require.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::SliceTypes;
use super::bit_planes::{self, Planes};
use super::error::PackError;
use super::format::{self, PackKind, ROW_BYTES, Row, Sha256, VERSIONS_MAX, key};
use crate::expert::{Extent, Precision, Version};
use crate::files::FileExt;
use crate::files::FileState;
use crate::gguf::experts::parse_name;
use crate::gguf::{
    Catalog, ExpertMap, GgmlType, Gguf, LayerCatalog, LayerExperts, Segment, SliceSource, SourceFile, Stored,
    TensorInfo, VersionSource, VirtualGguf,
};
use crate::store::BLOCK_BYTES;

/// Maximum number of slot classes: types times shapes. Real packs have a handful.
const CLASSES_MAX: usize = 1024;
/// Maximum bytes of a plain model's header; the GGUF reader's own limit.
const HEADER_BYTES_MAX: u64 = 256 << 20;

#[derive(Clone, Debug, PartialEq)]
pub struct PackInfo {
    /// Types of the high versions, for people: `q8_0`, `q4_K,down=q6_K`. `None` in a low pack.
    pub high: Option<String>,
    /// Types of the low versions; `None` if there are none.
    pub low: Option<String>,
    /// Low versions are bits of the high ones.
    pub bit_planes: bool,
    /// File name of the model it was made from.
    pub source_name: String,
    /// Size of the source in bytes; for a split model, the size of its shards merged.
    pub source_size: u64,
    /// Digest of the source; for a split model, of its shards merged.
    pub source_sha256: Sha256,
    /// Fingerprint of the source. `None` in full packs and in packs from before fingerprints.
    pub source_fingerprint: Option<Sha256>,
    /// Digest of the output of [`super::unpack()`]; `None` if no plain GGUF can express the pack.
    pub plain_sha256: Option<Sha256>,
    /// Highest unimportance loaded in high precision, calibrated on the model.
    pub t1: Option<f32>,
    /// Highest unimportance loaded at all.
    pub t2: Option<f32>,
    /// Norms of the experts' weights, as `profile::norms_to_json` wrote them.
    pub norms: Option<String>,
    /// Measured mixes, as `profile::mixes_to_json` wrote them.
    pub mixes: Option<String>,
}

/// An expert pack: a GGUF in which every expert is one record, at one or two precisions.
#[derive(Debug)]
pub struct Pack {
    pub path: PathBuf,
    pub kind: PackKind,
    pub info: PackInfo,
    /// The pack itself, as any GGUF reader sees it.
    pub raw: Gguf,
    /// The model that the pack stands for, with the source's keys and tensors; its only file is the pack. Its header,
    /// as shown to llama.cpp, is unchanged (laid out anew if llama.cpp would refuse the source's layout).
    ///
    /// Ordinary tensors' extents lie in the pack. Expert tensors have name, type and shape, but their extents lie
    /// beyond every file: reading them by mistake fails. In a low pack this holds for all tensors.
    pub plain: Gguf,
    /// Shapes, names and types of the plain model's expert tensors. Their locations are meaningless: use the catalog.
    /// Types are the source's; the pack's high versions may have others.
    pub experts: ExpertMap,
    /// Location of every version; file 0 is the pack. In a low pack no layer has high versions ([`LayerCatalog::high`]
    /// is empty): it is used beside the model.
    pub catalog: Catalog,
    /// Every version in the order of the index.
    pub versions: Vec<Row>,
    /// As stored; see [`format::CHECKSUMS`].
    pub(super) checksums: Vec<u64>,
}

impl Pack {
    pub fn is_pack(gguf: &Gguf) -> bool {
        gguf.metadata.value_type(key::VERSION).is_some()
    }

    /// Reads and checks header and index of the pack at `path`, without records and tensors: see [`super::verify()`].
    pub fn open(path: &Path) -> Result<Self, PackError> {
        let raw = Gguf::open(path)?;
        if !Self::is_pack(&raw) {
            return Err(PackError::NotAPack { path: path.to_owned() });
        }
        let (kind, info) = metadata(&raw, path)?;
        let file = File::open(path).map_err(PackError::io(path, "open"))?;

        let header = own_tensor(&raw, path, format::HEADER, GgmlType::I8, HEADER_BYTES_MAX)?;
        let header = read(&file, path, header)?;
        let plain = plain_model(&raw, path, kind, header, info.source_size)?;
        let experts = plain.experts()?;
        let n_experts: u64 = experts.layers.iter().map(|layer| u64::from(layer.n_expert)).sum();
        if n_experts == 0 || n_experts > VERSIONS_MAX {
            let expected = format!("1 to {VERSIONS_MAX}");
            return Err(PackError::malformed(path, "number of experts in the plain header", n_experts, expected));
        }

        let index = own_tensor(&raw, path, format::INDEX, GgmlType::I64, VERSIONS_MAX * ROW_BYTES as u64)?;
        let versions = rows(&read(&file, path, index)?, path)?;
        let catalog =
            Builder { raw: &raw, path, experts: &experts, bit_planes: info.bit_planes, classes: HashMap::new() };
        let catalog = catalog.catalog(kind, &versions)?;

        let n_ordinary = match kind {
            PackKind::Full => plain.tensors.iter().filter(|t| parse_name(&t.name).is_none()).count(),
            PackKind::Low => 0,
        };
        let n_checksums = n_ordinary + format::OWN_CHECKSUMS;
        let checksums = own_tensor(&raw, path, format::CHECKSUMS, GgmlType::I64, 8 * n_checksums as u64)?;
        if checksums.extent.len != 8 * n_checksums as u64 {
            let what = format!("number of words in tensor '{}'", format::CHECKSUMS);
            return Err(PackError::malformed(path, what, checksums.extent.len / 8, n_checksums));
        }
        let checksums = read(&file, path, checksums)?;
        let checksums = checksums.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        Ok(Self { path: path.to_owned(), kind, info, raw, plain, experts, catalog, versions, checksums })
    }

    pub fn version(&self) -> u32 {
        if self.info.bit_planes { format::VERSION_BIT_PLANES } else { format::VERSION }
    }

    /// Bytes of a version's own weights in the file, without padding.
    pub fn weight_bytes(&self, packed: &Row) -> u64 {
        let own = |slice: &SliceSource| match slice.stored {
            Stored::Both { low } => low.len,
            Stored::Whole | Stored::High => slice.extent.len,
        };
        self.catalog.source(packed.version).map_or(0, |version| version.slices.iter().map(own).sum())
    }

    /// Checks that the pack works without a plain model.
    pub fn require_full(&self) -> Result<(), PackError> {
        let (path, model) = (self.path.clone(), self.info.source_name.clone());
        if self.kind == PackKind::Full { Ok(()) } else { Err(PackError::LowOnly { path, model }) }
    }

    /// Whether `model` has header and length of the plain model that this pack was made from. Fine-tunes of the model
    /// have them too; only their weights differ.
    pub fn has_header_of(&self, model: &Gguf) -> bool {
        let (theirs, own) = (model.one_file(), self.plain.one_file());
        theirs.len == own.len && theirs.header == own.header
    }

    /// The plain model's ordinary tensors, in file order.
    pub(super) fn ordinary(&self) -> impl Iterator<Item = &TensorInfo> {
        let all = self.plain.tensors.iter().filter(|t| parse_name(&t.name).is_none());
        all.filter(|_| self.kind == PackKind::Full)
    }
}

fn metadata(raw: &Gguf, path: &Path) -> Result<(PackKind, PackInfo), PackError> {
    let found = |name: &str| match raw.metadata.value_type(name) {
        Some(_) => raw.metadata.get_str(name).map_or("another type".to_owned(), |text| format!("'{text}'")),
        None => "nothing".to_owned(),
    };
    let fault = |name: &str, expected: &str| PackError::malformed(path, format!("key '{name}'"), found(name), expected);
    let bit_planes = match raw.metadata.get_u64(key::VERSION) {
        Some(version) if version == u64::from(format::VERSION) => false,
        Some(version) if version == u64::from(format::VERSION_BIT_PLANES) => true,
        Some(found) => {
            let (latest, remedy) =
                (format::VERSION_BIT_PLANES, "the file is newer than this build, update, or pack the model again");
            let reason = format!("expert pack of version {found}, expected 1 to {latest}; {remedy}");
            return Err(PackError::Refused { path: path.to_owned(), reason });
        }
        None => return Err(fault(key::VERSION, "a number")),
    };
    let kind = match raw.metadata.get_str(key::KIND) {
        Some("full") => PackKind::Full,
        Some("low") => PackKind::Low,
        _ => return Err(fault(key::KIND, "'full' or 'low'")),
    };
    let planes = raw.metadata.value_type(key::PLANES).map(|_| raw.metadata.get_str(key::PLANES));
    if bit_planes && (planes != Some(Some(bit_planes::PLANES)) || kind != PackKind::Full) {
        return Err(fault(key::PLANES, &format!("'{}', in a full pack", bit_planes::PLANES)));
    }
    if !bit_planes && planes.is_some() {
        return Err(fault(key::PLANES, "nothing in a pack of version 1"));
    }
    let digest = |name: &str| match raw.metadata.get_str(name) {
        Some(text) => text.parse().map(Some).map_err(|()| fault(name, "64 hexadecimal digits")),
        None => Ok(None),
    };
    let threshold = |name: &str| match raw.metadata.value_type(name) {
        None => Ok(None),
        Some(_) => {
            let value = raw.metadata.get_f32(name).filter(|value| (0.0..=1.0).contains(value));
            value.map(Some).ok_or_else(|| fault(name, "a number from 0 to 1"))
        }
    };
    let text = |name: &str| raw.metadata.get_str(name).map(str::to_owned);
    let optional_text = |name: &str| match raw.metadata.value_type(name) {
        None => Ok(None),
        Some(_) => text(name).map(Some).ok_or_else(|| fault(name, "a string")),
    };
    let info = PackInfo {
        high: text(key::HIGH),
        low: text(key::LOW),
        bit_planes,
        source_name: text(key::SOURCE_NAME).ok_or_else(|| fault(key::SOURCE_NAME, "a file name"))?,
        source_size: (raw.metadata.get_u64(key::SOURCE_SIZE))
            .ok_or_else(|| fault(key::SOURCE_SIZE, "a number of bytes"))?,
        source_sha256: digest(key::SOURCE_SHA256)?.ok_or_else(|| fault(key::SOURCE_SHA256, "a digest"))?,
        source_fingerprint: digest(key::SOURCE_FINGERPRINT)?,
        plain_sha256: digest(key::PLAIN_SHA256)?,
        t1: threshold(key::T1)?,
        t2: threshold(key::T2)?,
        norms: optional_text(key::NORMS)?,
        mixes: optional_text(key::MIXES)?,
    };
    Ok((kind, info))
}

/// A tensor of the format, checked for presence, type, and a maximum length of `len_max` bytes.
fn own_tensor<'a>(
    raw: &'a Gguf,
    path: &Path,
    name: &str,
    dtype: GgmlType,
    len_max: u64,
) -> Result<&'a TensorInfo, PackError> {
    let fault = |found: String| {
        let expected = format!("{dtype}, at most {len_max} bytes");
        PackError::malformed(path, format!("tensor '{name}'"), found, expected)
    };
    match raw.tensor(name) {
        Some(tensor) if tensor.dtype == dtype && tensor.extent.len <= len_max => Ok(tensor),
        Some(tensor) => Err(fault(format!("{}, {} bytes", tensor.dtype, tensor.extent.len))),
        None => Err(fault("no such tensor".to_owned())),
    }
}

fn read(file: &File, path: &Path, tensor: &TensorInfo) -> Result<Vec<u8>, PackError> {
    let mut bytes = vec![0; tensor.extent.len as usize]; // the caller has limited it
    let action = || format!("read tensor '{}' at byte {}", tensor.name, tensor.extent.offset);
    file.read_exact_at(&mut bytes, tensor.extent.offset).map_err(PackError::io(path, action()))?;
    Ok(bytes)
}

fn rows(bytes: &[u8], path: &Path) -> Result<Vec<Row>, PackError> {
    let (rows, rest) = bytes.as_chunks();
    if !rest.is_empty() {
        let what = format!("tensor '{}'", format::INDEX);
        return Err(PackError::malformed(path, what, format!("{} bytes", bytes.len()), "rows of 64 bytes"));
    }
    let row = |(i, bytes): (usize, &[u8; ROW_BYTES])| {
        Row::decode(bytes).map_err(|(what, found, expected)| {
            PackError::malformed(path, format!("row {i} of '{}': {what}", format::INDEX), found, expected)
        })
    };
    rows.iter().enumerate().map(row).collect()
}

/// Builds the catalog from checked rows.
struct Builder<'a> {
    raw: &'a Gguf,
    path: &'a Path,
    experts: &'a ExpertMap,
    bit_planes: bool,
    /// Classes by layer and types: most rows of a layer agree.
    classes: HashMap<(u16, SliceTypes), u16>,
}

impl Builder<'_> {
    fn catalog(mut self, kind: PackKind, versions: &[Row]) -> Result<Catalog, PackError> {
        let (experts, mut catalog) = (self.experts, Catalog::default());
        let empty = |layer: &LayerExperts| vec![None; layer.n_expert as usize];
        let mut found: Vec<[Vec<Option<VersionSource>>; Precision::COUNT]> =
            experts.layers.iter().map(|layer| [empty(layer), empty(layer)]).collect();
        for packed in versions {
            let Version { expert, precision } = packed.version;
            let fault = |found: &str, expected: &str| {
                PackError::malformed(self.path, format!("index row of {}", packed.version), found, expected)
            };
            let Ok(i) = experts.layers.binary_search_by_key(&expert.layer, |layer| layer.layer) else {
                return Err(fault("a layer without experts", "one of the plain header's"));
            };
            if kind == PackKind::Low && precision == Precision::High {
                return Err(fault("a high version", "low versions only, as in every low pack"));
            }
            let place = match found[i][precision.index()].get_mut(usize::from(expert.index)) {
                None => return Err(fault("no such expert", "one of the plain header's")),
                Some(Some(_)) => return Err(fault("two of them", "one")),
                Some(place) => place,
            };
            *place = Some(self.source(&mut catalog, &experts.layers[i], packed)?);
        }
        for (layer, [mut high, low]) in experts.layers.iter().zip(found) {
            if self.bit_planes {
                self.join(layer, &mut high, &low)?;
            }
            if kind == PackKind::Full
                && let Some(index) = high.iter().position(Option::is_none)
            {
                let what = format!("index row of layer {} expert {index} (high)", layer.layer);
                return Err(PackError::malformed(self.path, what, "none", "one for every expert"));
            }
            let high = high.into_iter().flatten().collect();
            let n_expert = layer.n_expert as u16; // the GGUF reader caps it
            catalog.layers.push(LayerCatalog { layer: layer.layer, n_expert, high, low });
        }
        Ok(catalog)
    }

    /// Gives the high versions of a layer the planes of the low ones, which precede their own.
    fn join(
        &self,
        layer: &LayerExperts,
        high: &mut [Option<VersionSource>],
        low: &[Option<VersionSource>],
    ) -> Result<(), PackError> {
        for (index, (high, low)) in high.iter_mut().zip(low).enumerate() {
            let Some(own) = high else { continue };
            let fault = |found: String, expected: &str| {
                let what = format!("index row of layer {} expert {index} (low)", layer.layer);
                PackError::malformed(self.path, what, found, expected)
            };
            let low =
                low.as_ref().ok_or_else(|| fault("none".to_owned(), "one for every expert, as bit planes have"))?;
            let found = || {
                let ends = [low, own].map(|version| version.record.map_or(0, |record| record.offset));
                format!("records at {} (low) and {} (high)", ends[0], ends[1])
            };
            *own = bit_planes::joined(own, low)
                .ok_or_else(|| fault(found(), "the high version's own part right behind it"))?;
        }
        Ok(())
    }

    fn source(
        &mut self,
        catalog: &mut Catalog,
        layer: &LayerExperts,
        packed: &Row,
    ) -> Result<VersionSource, PackError> {
        let fault = |what: &str, found: String, expected: String| {
            PackError::malformed(self.path, format!("index row of {}: {what}", packed.version), found, expected)
        };
        let class = match self.classes.get(&(layer.layer, packed.types)) {
            Some(class) => *class,
            None => {
                let class = packed.types.class(layer).ok_or_else(|| {
                    let kinds: Vec<_> = layer.tensors.iter().map(|t| t.kind.tensor_stem()).collect();
                    let found = format!("{:?}", packed.types.iter().collect::<Vec<_>>());
                    fault("types", found, format!("types for {} whose blocks fit the rows", kinds.join(", ")))
                })?;
                if catalog.classes.len() >= CLASSES_MAX && !catalog.classes.contains(&class) {
                    let found = (CLASSES_MAX + 1).to_string();
                    return Err(fault("shapes of records so far", found, format!("at most {CLASSES_MAX}")));
                }
                let class = catalog.class(class);
                self.classes.insert((layer.layer, packed.types), class);
                class
            }
        };
        let shape = &catalog.classes[usize::from(class)];
        let precision = packed.version.precision;
        let planes = match self.bit_planes {
            true if packed.types != bit_planes::types_of(layer, precision) => {
                let found = format!("{:?}", packed.types.iter().collect::<Vec<_>>());
                return Err(fault("types", found, format!("{} for every slice", bit_planes::type_of(precision))));
            }
            true => Planes::of(shape, precision),
            false => None,
        };
        let Extent { offset, len, .. } = packed.record;
        let expected = planes.as_ref().map_or(shape.stride, |planes| planes.bytes);
        if len != expected {
            return Err(fault("bytes of the record", len.to_string(), expected.to_string()));
        }
        if !offset.is_multiple_of(BLOCK_BYTES) {
            return Err(fault("offset", offset.to_string(), format!("a multiple of {BLOCK_BYTES}")));
        }
        let name = format::records_name(layer.layer, precision, self.bit_planes);
        let home = self.raw.tensor(&name).filter(|tensor| tensor.dtype == GgmlType::I8);
        let home = home.ok_or_else(|| fault("tensor", format!("no i8 tensor '{name}'"), "one".to_owned()))?.extent;
        if offset < home.offset || offset.checked_add(len).is_none_or(|end| end > home.end()) {
            let expected = format!("inside tensor '{name}', {}..{}", home.offset, home.end());
            return Err(fault("record", format!("{len} bytes at {offset}"), expected));
        }
        if let Some(planes) = planes {
            return Ok(planes.source(class, offset));
        }
        let slice = |slice: &crate::gguf::SliceShape| SliceSource {
            extent: Extent { file: 0, offset: offset + slice.region, len: slice.bytes },
            lead: 0,
            stored: Stored::Whole,
        };
        let slices = shape.slices.iter().map(slice).collect();
        Ok(VersionSource { class, slices, record: Some(packed.record) })
    }
}

/// Builds the plain model of `header`, the source's header of a file of `source_size` bytes.
fn plain_model(raw: &Gguf, path: &Path, kind: PackKind, header: Vec<u8>, source_size: u64) -> Result<Gguf, PackError> {
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
