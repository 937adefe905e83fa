//! What a model is made of on disk: the file llama.cpp is shown, and where every version of every expert lies.

use std::path::{Path, PathBuf};

use super::error::Error;
use super::low::check_low;
use crate::gguf::{Catalog, ExpertMap, Gguf, VirtualGguf};
use crate::options::{LowSource, ModelOptions, PrecisionMode};
use crate::route::Thresholds;

/// A model's files, opened and checked.
pub(super) struct ModelSource {
    /// The plain model: of a pack, the one it stands for.
    pub(super) gguf: Gguf,
    /// What llama.cpp reads.
    pub(super) virtual_file: VirtualGguf,
    /// The plain model's expert tensors.
    pub(super) map: ExpertMap,
    /// Every version; low ones only if they are to be used.
    pub(super) catalog: Catalog,
    /// Files that extents count: the model's, then those of the low versions.
    pub(super) files: Vec<PathBuf>,
    /// Where low versions come from, for people.
    pub(super) low_name: Option<String>,
    /// Whether results may differ from llama.cpp's.
    pub(super) mode: PrecisionMode,
    /// T1 and T2.
    pub(super) thresholds: Thresholds,
}

impl ModelSource {
    /// Opens the model at `path` and the low versions that `options` name.
    pub(super) fn open(path: &Path, options: &ModelOptions) -> Result<Self, Error> {
        let gguf = Gguf::open(path)?;
        let map = gguf.experts()?;
        let mut catalog = Catalog::plain(&map);
        let mut files: Vec<PathBuf> = gguf.files.iter().map(|file| file.path.clone()).collect();
        let virtual_file = gguf.virtual_file();
        let mut low_name = None;
        let low_path = match &options.low {
            None => None,
            Some(_) if map.is_empty() => return Err(Error::NoExperts { path: path.to_owned() }),
            Some(LowSource::File(path)) => Some(path.clone()),
            Some(LowSource::Quantise { .. }) => None,
        };
        if let Some(low_path) = low_path {
            let low = Gguf::open(&low_path)?;
            check_low(&gguf, &low)?;
            let mismatch = |mismatch| Error::LowMismatch { path: low_path.clone(), mismatch };
            catalog.add_low(&low.experts()?, files.len() as u32).map_err(mismatch)?;
            files.extend(low.files.iter().map(|file| file.path.clone()));
            low_name = Some(low_path.file_name().unwrap_or_default().display().to_string());
        }
        let mode = options.precision.mode.unwrap_or(match catalog.has_low() {
            true => PrecisionMode::Dynamic,
            false => PrecisionMode::Exact,
        });
        let (t1, t2) = options.precision.thresholds(None);
        let thresholds = Thresholds::new(t1, t2)?;
        Ok(Self { gguf, virtual_file, map, catalog, files, low_name, mode, thresholds })
    }
}
