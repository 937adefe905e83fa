//! A model's files on disk: the file shown to llama.cpp, the location of every version of every expert.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use crate::engine::error::{LowError, OpenError};
use crate::engine::ggml::quantise::Ggml;
use crate::engine::source::low::{check_low, low_cache_path};
use crate::engine::source::tables;
use hobbit_core::gguf::{Catalog, ExpertMap, Gguf, SourceFile};
use hobbit_core::options::{LowSource, ModelOptions, PrecisionMode};
use hobbit_core::pack::{self, Pack, PackKind, PackSpec, PartialError, Sha256, TypeChoice, WriteError, fingerprint};
use hobbit_core::predict::{PathTable, PredictorKind};
use hobbit_core::profile::{LayerNorms, ProfileError, norms_of_json, read_path_table};
use hobbit_core::residency::Precisions;
use hobbit_core::route::Thresholds;
use hobbit_core::store::Original;

/// A model's files, opened and checked.
pub(crate) struct ModelSource {
    /// The plain model; for a pack, the model it was made from.
    pub(crate) gguf: Gguf,
    /// Whether the file is a pack, which llama.cpp cannot read.
    pub(crate) is_pack: bool,
    /// The plain model's expert tensors.
    pub(crate) map: ExpertMap,
    /// Every version; low ones only if they are used.
    pub(crate) catalog: Catalog,
    /// The files that extents refer to, with their state when the headers were read: the model's, then those of the low
    /// versions.
    pub(crate) originals: Vec<Original>,
    /// Source of the low versions, for messages.
    pub(crate) low_name: Option<String>,
    pub(crate) precisions: Precisions,
    /// The path table and its file; only if the predictor uses it.
    pub(crate) path_table: Option<(PathBuf, Arc<PathTable>)>,
    /// ‖E‖ of every expert, if the pack has it.
    pub(crate) norms: Vec<LayerNorms>,
    /// Digest of the model that the pack was made from.
    pub(crate) pack_source: Option<Sha256>,
}

impl ModelSource {
    /// Opens the model at `path` and the low versions that `options` name. `progress` is called with 0..=1 while low
    /// versions are made, and stops that by returning false.
    pub(crate) fn open(
        path: &Path,
        options: &ModelOptions,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Self, OpenError> {
        let file = Gguf::open(path)?;
        let pack = if Pack::is_pack(&file) { Some(Pack::open(path)?) } else { None };
        let (mut map, mut catalog) = match &pack {
            Some(pack) => {
                pack.require_full()?;
                (pack.experts.clone(), pack.catalog.clone())
            }
            None => {
                let map = file.experts()?;
                let catalog = Catalog::plain(&map);
                (map, catalog)
            }
        };
        let wants_paths = options.caching.predictor == Some(PredictorKind::PathTable) && !map.is_empty();
        let path_table = match &options.path_table {
            _ if !wants_paths => None,
            Some(file) => Some((file.clone(), Arc::new(read_path_table(file)?))),
            None => return Err(OpenError::NoPathTable { path: path.to_owned() }),
        };
        let low_path = match &options.low {
            None => None,
            Some(_) if map.is_empty() => return Err(LowError::NoExperts { path: path.to_owned() }.into()),
            Some(LowSource::File(path)) => Some(path.clone()),
            Some(LowSource::Quantise { .. }) if options.precision.mode == Some(PrecisionMode::Exact) => None,
            Some(LowSource::Quantise { types, directory }) => {
                Some(quantise_low(path, types, directory.as_deref(), progress)?)
            }
        };
        let is_pack = pack.is_some();
        let mut low_name = pack.as_ref().filter(|pack| pack.catalog.has_low()).map(|_| "the pack".to_owned());
        let info = pack.as_ref().map(|pack| pack.info.clone());
        let gguf = pack.map_or(file, |pack| pack.plain);
        let mut files = gguf.files.clone();
        if let Some(low_path) = low_path {
            catalog.drop_low();
            let sha256 = info.as_ref().map(|info| info.source_sha256);
            add_low(&mut catalog, &gguf, sha256, &low_path, &mut files)?;
            low_name = Some(low_path.file_name().unwrap_or_default().display().to_string());
        }
        let mode = options.precision.mode.unwrap_or(if catalog.has_low() {
            PrecisionMode::Dynamic
        } else {
            PrecisionMode::Exact
        });
        let carried = info.as_ref().and_then(|info| info.t1.zip(info.t2));
        let (t1, t2) = options.precision.thresholds(carried);
        let precisions = Precisions::new(mode, Thresholds::new(t1, t2)?, options.precision);
        let norms = info.as_ref().and_then(|info| info.norms.as_deref()).map_or(Ok(Vec::new()), norms_of_json);
        let norms =
            norms.map_err(|reason| ProfileError::Key { path: path.to_owned(), key: pack::NORMS_KEY, reason })?;
        let originals = files.iter().map(|file| Original::open(&file.path, file.state)).collect::<Result<_, _>>()?;
        let n_layers_run = tables::n_layers_run(&gguf, options);
        map.layers.retain(|layer| u64::from(layer.layer) < n_layers_run);
        catalog.retain_layers(|layer| u64::from(layer) < n_layers_run);
        let pack_source = info.map(|info| info.source_sha256);
        Ok(Self { gguf, is_pack, map, catalog, originals, low_name, precisions, path_table, norms, pack_source })
    }
}

/// Adds the versions in `low_path`, a smaller quant of the same model or a pack of low versions made from it.
fn add_low(
    catalog: &mut Catalog,
    model: &Gguf,
    sha256: Option<Sha256>,
    low_path: &Path,
    files: &mut Vec<SourceFile>,
) -> Result<(), OpenError> {
    let mismatch = |mismatch| LowError::Mismatch { path: low_path.to_owned(), mismatch };
    let low = Gguf::open(low_path)?;
    let first_file = files.len() as u32; // shards are capped
    if !Pack::is_pack(&low) {
        check_low(model, &low)?;
        catalog.add_low(&low.experts()?, first_file).map_err(mismatch)?;
        files.extend(low.files);
        return Ok(());
    }
    let pack = Pack::open(low_path)?;
    check_made_from(&pack, model, sha256)?;
    catalog.add_low_of(&pack.experts, &pack.catalog, first_file).map_err(mismatch)?;
    files.extend(pack.raw.files.iter().cloned());
    Ok(())
}

/// Checks that the low pack was made from `model`, whose digest is `sha256` if known without reading it (a full pack
/// records its source). Compares headers, then [`pack::fingerprint()`]s, which takes milliseconds.
///
/// # Errors
/// [`LowError::OfAnotherModel`]; a model that cannot be read.
fn check_made_from(low: &Pack, model: &Gguf, sha256: Option<Sha256>) -> Result<(), OpenError> {
    let difference = match (sha256, low.info.source_fingerprint) {
        _ if !low.has_header_of(model) => "header or length differ",
        (Some(known), _) if known != low.info.source_sha256 => "the SHA-256 of what they were made from differ",
        (Some(_), _) => return Ok(()),
        (None, None) => "the pack has no fingerprint of its model; make it again",
        (None, Some(print)) if print != pack::fingerprint(model)? => "its weights differ",
        (None, Some(_)) => return Ok(()),
    };
    Err(LowError::OfAnotherModel {
        low: low.path.clone(),
        model: model.files[0].path.clone(),
        source_name: low.info.source_name.clone(),
        what: difference,
    }
    .into())
}

/// Converts a callback's answer to control flow.
fn go_on(answer: bool) -> ControlFlow<()> {
    if answer { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
}

/// Makes the low-precision versions of a model's experts once: the file is kept beside the model (or in `directory`)
/// and reused until the model changes. `types` as in `gguf-tools pack --low`. `progress` is called with 0..=1 if there
/// is work, and stops it by returning false; the next call then starts over.
///
/// # Errors
/// A model that cannot be read or is a pack, types that cannot be made of it, a directory that cannot be written, a
/// full disk; [`OpenError::Cancelled`].
pub fn quantise_low(
    model: &Path,
    types: &str,
    directory: Option<&Path>,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<PathBuf, OpenError> {
    let source = Gguf::open(model)?;
    if Pack::is_pack(&source) {
        return Err(LowError::OfPack { path: model.to_owned() }.into());
    }
    let low: TypeChoice = types.parse().map_err(LowError::Types)?;
    let path = low_cache_path(model, types, directory);
    if is_current(&path, &source) {
        return Ok(path);
    }
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    // The name marks the file as ours; it belongs to a replaced model or to another version of hobbit.
    let spec = PackSpec { low: Some(low), threads, force: true, ..PackSpec::new(PackKind::Low) };
    let written = pack::write(&source, &path, &spec, &Ggml, &mut |now| {
        go_on(progress(now.done as f32 / now.total.max(1) as f32))
    });
    match written {
        Ok(_) => Ok(path),
        Err(WriteError::Output(PartialError::Stopped { .. })) => Err(OpenError::Cancelled),
        Err(error) => Err(error.into()),
    }
}

/// Whether the file holds low versions of this model. A model file newer than the pack counts as replaced. A pack
/// without a fingerprint is made again.
fn is_current(path: &Path, model: &Gguf) -> bool {
    let age = |path: &Path| std::fs::metadata(path).and_then(|meta| meta.modified()).ok();
    let made: Option<SystemTime> = age(path);
    let newer = |file: &SourceFile| age(&file.path).is_none_or(|changed| made.is_none_or(|made| changed > made));
    let is_of_model = |pack: &Pack| {
        let print = pack.info.source_fingerprint;
        pack.has_header_of(model) && print.is_some() && fingerprint(model).ok() == print
    };
    !model.files.iter().any(newer) && Pack::open(path).is_ok_and(|pack| is_of_model(&pack))
}
