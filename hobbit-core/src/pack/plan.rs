//! Content and layout of a pack, decided before a byte is written.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::Path;

use super::bit_planes::{self, Planes};
use super::bytes;
use super::error::WriteError;
use super::format::{self, PackKind, Row, Sha256, VERSIONS_MAX, key};
use super::types::{SliceTypes, TypeChoice, describe, fitting};
use crate::expert::{ExpertId, Extent, Precision, Version};
use crate::gguf::experts::parse_name;
use crate::gguf::writer::Layout;
use crate::gguf::{
    ExpertMap, ExpertTensor, GgmlType, Gguf, GgufError, HeaderBuilder, LayerExperts, Recode, RecodeError,
    WriteError as HeaderError,
};
use crate::pack::imatrix::Imatrix;
use crate::store::BLOCK_BYTES;

/// High types of experts that differ from the others; slices without an entry keep the layer's type.
pub type Widths = HashMap<ExpertId, SliceTypes>;

#[derive(Default)]
pub struct PackSpec<'a> {
    /// A whole model, or low versions only.
    pub kind: PackKind,
    /// Types of the low versions; `None` for none.
    pub low: Option<TypeChoice>,
    /// Types of the high versions; `None` for the source's own.
    pub high: Option<TypeChoice>,
    /// Low versions are bits of the high ones, which are all Q8_0. Requires no `low`.
    pub bit_planes: bool,
    /// Exceptions from `high`, by expert.
    pub widths: Option<Widths>,
    /// Calibrated T1 and T2, `0.0..=1.0`.
    pub thresholds: Option<(f32, f32)>,
    /// Norms of the experts' weights, as `profile::norms_to_json` writes them.
    pub norms: Option<String>,
    /// Measured mixes, as `profile::mixes_to_json` writes them.
    pub mixes: Option<String>,
    pub importance: Option<&'a Imatrix>,
    /// Threads that recode, at least 1.
    pub threads: usize,
    pub force: bool,
}

impl PackSpec<'_> {
    /// The source's experts as they are, one thread.
    pub fn new(kind: PackKind) -> Self {
        Self { kind, threads: 1, ..Self::default() }
    }
}

/// A type that did not fit a tensor's rows, and its replacement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fallback {
    /// Tensor of the plain model.
    pub tensor: String,
    pub ne0: u64,
    pub wanted: GgmlType,
    pub taken: GgmlType,
}

/// One piece of a writer's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Copy an ordinary tensor: index into the source's tensors.
    Tensor(usize),
    /// Make a record: index into [`Plan::rows`].
    Record(usize),
}

/// A pack without its bytes.
pub(super) struct Plan<'a> {
    pub source: &'a Gguf,
    pub spec: &'a PackSpec<'a>,
    pub experts: ExpertMap,
    pub rows: Vec<Row>,
    pub jobs: Vec<Job>,
    /// Target of each job; file 0 is the pack.
    pub targets: Vec<Extent>,
    pub source_header: Vec<u8>,
    pub source_size: u64,
    pub fingerprint: Sha256,
    pub fallbacks: Vec<Fallback>,
    /// Whether a plain GGUF can express the high versions, and whether it equals the source.
    pub plain: PlainForm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlainForm {
    /// The source, bit for bit.
    Source,
    /// A plain GGUF with other expert types, or without what the source has between its tensors.
    Changed,
    /// Nothing: experts of a layer differ in type, or there are no high versions.
    None,
}

impl<'a> Plan<'a> {
    /// Plans the pack of `source` that `spec` describes; `fingerprint` is `source`'s.
    pub fn new(
        source: &'a Gguf,
        spec: &'a PackSpec<'a>,
        recode: &dyn Recode,
        fingerprint: Sha256,
    ) -> Result<Self, WriteError> {
        let path = &source.files[0].path;
        let unfit = |reason| WriteError::Unfit { path: path.clone(), reason };
        if super::Pack::is_pack(source) {
            return Err(WriteError::PackAlready { path: path.clone() });
        }
        let experts = source.experts()?;
        let n_experts: u64 = experts.layers.iter().map(|layer| u64::from(layer.n_expert)).sum();
        if n_experts == 0 || n_experts * Precision::COUNT as u64 > VERSIONS_MAX {
            return Err(unfit(format!(
                "has {n_experts} experts, expected 1 to {}; only MoE models can be packed",
                VERSIONS_MAX / 2
            )));
        }
        if let Some(tensor) = source.tensors.iter().find(|t| format::is_reserved(&t.name)) {
            return Err(unfit(format!(
                "tensor '{}' has a name that packs use themselves; it cannot be packed",
                tensor.name
            )));
        }
        let mut fallbacks = BTreeSet::new();
        let mut rows = rows(&experts, spec, &mut fallbacks);
        if spec.bit_planes {
            rows = plane_rows(&experts, spec, &rows, path)?;
        }
        if let Some(low) = &spec.low
            && !rows.iter().any(|row| row.version.precision == Precision::Low)
        {
            return Err(not_smaller(path, low, &experts, spec));
        }
        if rows.is_empty() {
            return Err(WriteError::NothingLow { path: path.clone() });
        }
        check_recoding(&experts, &rows, spec, recode)?;

        let view = source.one_file();
        let mut plan = Self {
            source,
            spec,
            plain: plain_form(source, spec.kind, &experts, &rows)?,
            experts,
            rows,
            jobs: Vec::new(),
            targets: Vec::new(),
            source_header: view.header,
            source_size: view.len,
            fingerprint,
            fallbacks: fallbacks.into_iter().collect(),
        };
        plan.place()?;
        Ok(plan)
    }

    /// The file's layout with these digests. Digests do not change offsets.
    pub fn layout(&self, source: Sha256, plain: Option<Sha256>) -> Result<Layout, WriteError> {
        self.try_layout(source, plain).map_err(|error| self.header_error(error))
    }

    fn try_layout(&self, source: Sha256, plain: Option<Sha256>) -> Result<Layout, HeaderError> {
        let mut header = HeaderBuilder::new(BLOCK_BYTES)?;
        let copied = |key: &str| !key.starts_with("split.") && !key.starts_with(format::PREFIX);
        self.source.copy_keys(&mut header, copied)?;
        let version = if self.spec.bit_planes { format::VERSION_BIT_PLANES } else { format::VERSION };
        header.key(key::VERSION, version)?.key(key::KIND, self.spec.kind.name())?;
        for (precision, key) in [(Precision::High, key::HIGH), (Precision::Low, key::LOW)] {
            let types: Vec<_> =
                self.rows.iter().filter(|row| row.version.precision == precision).map(|row| row.types).collect();
            if !types.is_empty() {
                header.key(key, describe(types.iter()))?;
            }
        }
        if self.spec.bit_planes {
            header.key(key::PLANES, bit_planes::PLANES)?;
        }
        let name = self.source.files[0].path.file_name().unwrap_or_default();
        header.key(key::SOURCE_NAME, name.to_string_lossy().into_owned())?;
        header.key(key::SOURCE_SIZE, self.source_size)?.key(key::SOURCE_SHA256, source.to_string())?;
        // A full pack works without another file, so it needs no fingerprint.
        if self.spec.kind == PackKind::Low {
            header.key(key::SOURCE_FINGERPRINT, self.fingerprint.to_string())?;
        }
        if self.plain != PlainForm::None {
            header.key(key::PLAIN_SHA256, plain.unwrap_or(source).to_string())?;
        }
        if let Some((t1, t2)) = self.spec.thresholds {
            header.key(key::T1, t1)?.key(key::T2, t2)?;
        }
        let PackSpec { norms, mixes, .. } = self.spec;
        for (key, text) in [(key::NORMS, norms), (key::MIXES, mixes)] {
            if let Some(text) = text {
                header.key(key, text.clone())?;
            }
        }
        for i in self.ordinary() {
            let tensor = &self.source.tensors[i];
            header.tensor(&tensor.name, tensor.dtype, &tensor.dims)?;
        }
        for run in self.runs() {
            let bytes = run.iter().map(|row| row.record.len).sum();
            header.tensor(&self.home(&run[0]), GgmlType::I8, &[bytes])?;
        }
        header.tensor(format::HEADER, GgmlType::I8, &[self.source_header.len() as u64])?;
        header.tensor(format::INDEX, GgmlType::I64, &[8, self.rows.len() as u64])?;
        let n_checksums = self.ordinary().count() + format::OWN_CHECKSUMS;
        header.tensor(format::CHECKSUMS, GgmlType::I64, &[n_checksums as u64])?;
        Ok(header.finish())
    }

    /// Indices of the source's ordinary tensors that the pack holds.
    pub fn ordinary(&self) -> impl Iterator<Item = usize> {
        let full = self.spec.kind == PackKind::Full;
        let all = self.source.tensors.iter().enumerate().filter(move |_| full);
        all.filter(|(_, t)| parse_name(&t.name).is_none()).map(|(i, _)| i)
    }

    pub(crate) fn header_error(&self, error: HeaderError) -> WriteError {
        let reason = format!("the pack's header cannot be made: {error}");
        WriteError::Unfit { path: self.source.files[0].path.clone(), reason }
    }

    /// Error for an unreadable file of the source, by index.
    pub(crate) fn source_error(&self, file: u32, error: io::Error) -> WriteError {
        let path = self.source.files[file as usize].path.clone();
        GgufError::Io { path, action: "read".to_owned(), error }.into()
    }

    pub fn layer(&self, row: &Row) -> &LayerExperts {
        self.experts.layer(row.version.expert.layer).expect("rows are made of the map's layers")
    }

    /// Name of the tensor that holds a row's record.
    fn home(&self, row: &Row) -> String {
        format::records_name(row.version.expert.layer, row.version.precision, self.spec.bit_planes)
    }

    /// Runs of rows that share a tensor.
    fn runs(&self) -> impl Iterator<Item = &[Row]> {
        let bit_planes = self.spec.bit_planes;
        self.rows.chunk_by(move |a, b| is_together(a, b, bit_planes))
    }

    /// Assigns an offset to every row and every ordinary tensor.
    fn place(&mut self) -> Result<(), WriteError> {
        let layout = self.layout(Sha256([0; 32]), None)?;
        let at: BTreeMap<&str, u64> = layout.tensors.iter().map(|t| (t.name.as_str(), t.extent.offset)).collect();
        for i in self.ordinary().collect::<Vec<_>>() {
            let tensor = &self.source.tensors[i];
            self.jobs.push(Job::Tensor(i));
            self.targets.push(Extent { file: 0, offset: at[tensor.name.as_str()], len: tensor.extent.len });
        }
        let starts: Vec<u64> = self.runs().map(|run| at[self.home(&run[0]).as_str()]).collect();
        let bit_planes = self.spec.bit_planes;
        for (run, mut next) in self.rows.chunk_by_mut(|a, b| is_together(a, b, bit_planes)).zip(starts) {
            for row in run {
                row.record.offset = next;
                next += row.record.len;
            }
        }
        for (i, row) in self.rows.iter().enumerate() {
            self.jobs.push(Job::Record(i));
            self.targets.push(row.record);
        }
        Ok(())
    }
}

/// Why no slice of these experts gets smaller, and the types that would be.
fn not_smaller(path: &Path, low: &TypeChoice, experts: &ExpertMap, spec: &PackSpec<'_>) -> WriteError {
    let tensor = &experts.layers.iter().find(|layer| !layer.tensors.is_empty()).expect("it has experts").tensors[0];
    let (wanted, taken) = (low.of(tensor.kind), fitting(low.of(tensor.kind), tensor.ne0));
    let high = spec.high.as_ref().map_or(tensor.dtype, |choice| fitting(choice.of(tensor.kind), tensor.ne0));
    let reason = if taken == wanted {
        format!("{high} has no more bits per weight")
    } else {
        let ne0 = tensor.ne0;
        format!("rows of {ne0} weights are no whole blocks of {wanted}, and {taken} is no smaller than {high}")
    };
    let fits =
        Some(TypeChoice::below(experts)).filter(|fits| fits != low && spec.high.is_none() && fits.lowers(experts));
    let fits = fits.map(|fits| fits.to_string().to_ascii_lowercase());
    WriteError::NotSmaller { path: path.to_owned(), wanted: low.to_string(), reason, fits }
}

/// Whether the records of two rows share a tensor.
fn is_together(a: &Row, b: &Row, bit_planes: bool) -> bool {
    let (a, b) = (a.version, b.version);
    a.expert.layer == b.expert.layer && (bit_planes || a.precision == b.precision)
}

/// The rows of bit planes whose high versions are those of `rows`: for each expert the low row, then the high row, each
/// with its own planes.
fn plane_rows(experts: &ExpertMap, spec: &PackSpec<'_>, rows: &[Row], path: &Path) -> Result<Vec<Row>, WriteError> {
    if let Some(low) = &spec.low {
        return Err(WriteError::PlanesLow { path: path.to_owned(), wanted: low.to_string() });
    }
    if spec.kind == PackKind::Low {
        return Err(WriteError::PlanesLowOnly { path: path.to_owned() });
    }
    let mut halves = Vec::with_capacity(2 * rows.len());
    for row in rows {
        let layer = experts.layer(row.version.expert.layer).expect("rows are made of the map's layers");
        for tensor in &layer.tensors {
            let dtype = row.types.get(tensor.kind).unwrap_or(tensor.dtype);
            if dtype != bit_planes::type_of(Precision::High) {
                return Err(WriteError::NoPlanes { path: path.to_owned(), tensor: tensor.name.clone(), dtype });
            }
        }
        let class = row.types.class(layer).expect("types were chosen to fit the rows");
        for precision in [Precision::Low, Precision::High] {
            let planes = Planes::of(&class, precision).expect("smaller than the record");
            let version = Version { precision, ..row.version };
            let (types, record) = (bit_planes::types_of(layer, precision), unplaced(planes.bytes));
            halves.push(Row { version, types, record, ..*row });
        }
    }
    Ok(halves)
}

/// A record whose place is not known yet.
fn unplaced(len: u64) -> Extent {
    Extent { file: 0, offset: 0, len }
}

/// One row per version, by layer, precision, expert; without offsets and checksums.
fn rows(experts: &ExpertMap, spec: &PackSpec<'_>, fallbacks: &mut BTreeSet<Fallback>) -> Vec<Row> {
    let mut fit = |tensor: &ExpertTensor, wanted: GgmlType| {
        let taken = if wanted == tensor.dtype { wanted } else { fitting(wanted, tensor.ne0) };
        if taken != wanted {
            fallbacks.insert(Fallback { tensor: tensor.name.clone(), ne0: tensor.ne0, wanted, taken });
        }
        taken
    };
    let mut rows = Vec::new();
    for layer in &experts.layers {
        let mut low = Vec::new();
        for index in 0..layer.n_expert as u16 {
            let expert = ExpertId { layer: layer.layer, index };
            let own = spec.widths.as_ref().and_then(|widths| widths.get(&expert));
            let high: SliceTypes = (layer.tensors.iter())
                .map(|t| {
                    let general = spec.high.as_ref().map(|choice| choice.of(t.kind));
                    let wanted = own.and_then(|own| own.get(t.kind)).or(general).unwrap_or(t.dtype);
                    (t.kind, fit(t, wanted))
                })
                .collect();
            let lower: Option<SliceTypes> = spec.low.as_ref().map(|choice| {
                let mut smaller = |t: &ExpertTensor| {
                    let high = high.get(t.kind).unwrap_or(t.dtype);
                    let low = fit(t, choice.of(t.kind));
                    // A "low" slice that is no smaller would lose quality and save nothing.
                    if low.row_bytes(t.ne0) < high.row_bytes(t.ne0) { low } else { high }
                };
                layer.tensors.iter().map(|t| (t.kind, smaller(t))).collect()
            });
            let row = |precision, types: SliceTypes| {
                let class = types.class(layer).expect("types were chosen to fit the rows");
                let version = Version { expert, precision };
                Row { version, types, record: unplaced(class.stride), checksum: 0 }
            };
            if spec.kind == PackKind::Full {
                rows.push(row(Precision::High, high));
            }
            low.extend(lower.filter(|types| *types != high).map(|types| row(Precision::Low, types)));
        }
        rows.append(&mut low);
    }
    rows
}

/// Checks that every slice can be converted to its type.
fn check_recoding(
    experts: &ExpertMap,
    rows: &[Row],
    spec: &PackSpec<'_>,
    recode: &dyn Recode,
) -> Result<(), WriteError> {
    let mut supported = BTreeSet::new();
    for row in rows {
        let Some(layer) = experts.layer(row.version.expert.layer) else { continue };
        for t in &layer.tensors {
            // Low versions in bit planes are parts of the high ones.
            let is_plane = spec.bit_planes && row.version.precision == Precision::Low;
            let Some(to) = row.types.get(t.kind).filter(|to| *to != t.dtype && !is_plane) else { continue };
            if supported.insert(to) {
                recode.supports(to).map_err(|error| WriteError::Recode { tensor: t.name.clone(), error })?;
            }
            let importance = importance_of(spec.importance, t, row.version.expert.index)?;
            if importance.is_none() && recode.needs_importance(to) {
                let error = RecodeError::ImportanceMissing { dtype: to };
                return Err(WriteError::Recode { tensor: t.name.clone(), error });
            }
        }
    }
    Ok(())
}

/// Importance of the columns of one expert's slice, if there is any.
pub(super) fn importance_of(
    imatrix: Option<&Imatrix>,
    tensor: &ExpertTensor,
    index: u16,
) -> Result<Option<Vec<f32>>, WriteError> {
    let of = |imatrix: &Imatrix| imatrix.importance(&tensor.name, tensor.ne0, tensor.n_expert, index);
    Ok(imatrix.map(of).transpose()?.flatten())
}

fn plain_form(source: &Gguf, kind: PackKind, experts: &ExpertMap, rows: &[Row]) -> Result<PlainForm, WriteError> {
    if kind == PackKind::Low {
        return Ok(PlainForm::None);
    }
    let high: Vec<&Row> = rows.iter().filter(|row| row.version.precision == Precision::High).collect();
    let mut layers = high.chunk_by(|a, b| a.version.expert.layer == b.version.expert.layer);
    if layers.any(|run| run.iter().any(|row| row.types != run[0].types)) {
        return Ok(PlainForm::None);
    }
    let is_own =
        |row: &&Row| experts.layer(row.version.expert.layer).is_some_and(|layer| SliceTypes::own(layer) == row.types);
    let is_source = high.iter().all(is_own) && is_zero_between_tensors(source)?;
    Ok(if is_source { PlainForm::Source } else { PlainForm::Changed })
}

/// Whether `source` has only zeros between and after its tensors. Padding of other tools, and data behind the last
/// tensor, are not packed.
fn is_zero_between_tensors(source: &Gguf) -> Result<bool, WriteError> {
    let path = &source.files[0].path;
    let io = |error| WriteError::Gguf(GgufError::Io { path: path.clone(), action: "read".to_owned(), error });
    let file = std::fs::File::open(path).map_err(io)?;
    let (mut is_zero, mut buffer) = (true, Vec::new());
    for segment in source.one_file().segments.iter().filter(|segment| segment.tensor.is_none()) {
        let Some(extent) = segment.source else { continue };
        let read = bytes::read(&file, extent, &mut buffer, |bytes| {
            is_zero &= bytes.iter().all(|byte| *byte == 0);
            Ok(())
        });
        read.map_err(|ended| ended.or_read(|_, error| io(error)))?;
    }
    Ok(is_zero)
}
