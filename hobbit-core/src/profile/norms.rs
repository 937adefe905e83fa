//! Norms of the experts' weights: ‖E‖ of SwapMoE 3.2, equation 2, and the file beside a model that keeps them.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::ProfileError;
use super::format::{LayerNorms, ModelId, check_norms, read_versioned};
use crate::expert::{ExpertId, Extent};
use crate::files::FileExt;
use crate::files::{self, JSON_BYTES_MAX};
use crate::gguf::catalog::{LayerCatalog, SliceShape, SliceSource, Stored};
use crate::gguf::{Catalog, GgmlType, Recode};
use crate::planes;
use crate::store::Original;

pub const NORMS_FORMAT: &str = "hobbit-norms";
/// Format version; it increases when older readers would misread the file.
pub const NORMS_VERSION: u64 = 1;

/// Weights decoded at a time, unless a row is longer.
const PIECE_ELEMENTS: u64 = 1 << 18;

/// The file of norms beside a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NormsFile {
    pub format: String,
    pub version: u64,
    pub model: ModelId,
    /// [`pack::fingerprint()`](crate::pack::fingerprint()) of a plain model; the SHA-256 of a pack's source.
    pub weights_sha256: String,
    pub norms: Vec<LayerNorms>,
}

impl NormsFile {
    /// Default place of a model's norms: `model.norms.json` beside `model.gguf`.
    pub fn beside(model: &Path) -> PathBuf {
        model.with_extension("norms.json")
    }

    /// # Errors
    /// A file that cannot be read, or is not of this format and version.
    pub fn read(path: &Path) -> Result<Self, ProfileError> {
        let text = read_text(path)?;
        let read = read_versioned(&text, NORMS_FORMAT, NORMS_VERSION);
        let checked = read.and_then(|file: Self| check_norms(&file.norms).map(|()| file));
        checked.map_err(|reason| ProfileError::Malformed { path: path.to_owned(), reason })
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("names and numbers can always be written") + "\n"
    }
}

/// Reads the norms in a model's file of norms, in its profile or in a plan of virtual experts.
///
/// # Errors
/// A file that cannot be read, or has no norms.
pub fn read_norms(path: &Path) -> Result<Vec<LayerNorms>, ProfileError> {
    #[derive(Deserialize)]
    struct Any {
        #[serde(default)]
        norms: Vec<LayerNorms>,
    }
    let malformed = |reason: String| ProfileError::Malformed { path: path.to_owned(), reason };
    let Any { norms } = serde_json::from_str(&read_text(path)?).map_err(|error| malformed(error.to_string()))?;
    if norms.is_empty() {
        return Err(malformed("it has no norms of experts".to_owned()));
    }
    check_norms(&norms).map_err(malformed)?;
    Ok(norms)
}

fn read_text(path: &Path) -> Result<String, ProfileError> {
    let io = |error| ProfileError::Io { path: path.to_owned(), action: "read", error };
    files::read_text(path, JSON_BYTES_MAX).map_err(io)
}

/// The Frobenius norm of all matrices together of each expert of a layer, in high precision. `files` are those that
/// `catalog` refers to. `pace` is called after each piece with its bytes in the file and the time that it took, on any
/// of the `threads`; breaking stops the work. `None`: it was stopped. A norm that is no finite number is 0.
///
/// Memory of each thread: a few times 256 Ki floats, or one row.
///
/// # Errors
/// A read that fails, or a type that cannot be decoded.
pub fn layer_norms(
    catalog: &Catalog,
    layer: &LayerCatalog,
    files: &[Original],
    recode: &impl Recode,
    threads: usize,
    pace: &(dyn Fn(u64, Duration) -> ControlFlow<()> + Sync),
) -> Result<Option<LayerNorms>, ProfileError> {
    let next = AtomicU16::new(0);
    let stopped = AtomicBool::new(false);
    let norms = Mutex::new(vec![0.0; usize::from(layer.n_expert)]);
    let work = || -> Result<(), ProfileError> {
        let mut reader = Reader { files, recode, bytes: [const { Vec::new() }; 3], floats: Vec::new() };
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= layer.n_expert || stopped.load(Ordering::Relaxed) {
                return Ok(());
            }
            match reader.squares(catalog, layer, index, pace)? {
                Some(squares) => {
                    let norm = Some(squares.sqrt() as f32).filter(|norm| norm.is_finite());
                    norms.lock().expect("no thread panics")[usize::from(index)] = norm.unwrap_or(0.0);
                }
                None => stopped.store(true, Ordering::Relaxed),
            }
        }
    };
    if threads <= 1 {
        work()?;
    } else {
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().expect("no thread panics"))
        })?;
    }
    let norms = norms.into_inner().expect("no thread panics");
    Ok((!stopped.into_inner()).then_some(LayerNorms { layer: layer.layer, norms }))
}

/// Reads and decodes slices piece by piece.
struct Reader<'a, R> {
    files: &'a [Original],
    recode: &'a R,
    /// A piece as it is stored, its low plane, and both together.
    bytes: [Vec<u8>; 3],
    floats: Vec<f32>,
}

impl<R: Recode> Reader<'_, R> {
    /// The sum of an expert's squared weights; `None` if `pace` stopped it.
    fn squares(
        &mut self,
        catalog: &Catalog,
        layer: &LayerCatalog,
        index: u16,
        pace: &dyn Fn(u64, Duration) -> ControlFlow<()>,
    ) -> Result<Option<f64>, ProfileError> {
        let source = &layer.high[usize::from(index)];
        let class = &catalog.classes[usize::from(source.class)];
        let expert = ExpertId { layer: layer.layer, index };
        let mut sum = 0.0;
        for (shape, slice) in class.slices.iter().zip(&source.slices) {
            let at_once = (PIECE_ELEMENTS / shape.ne0.max(1)).max(1);
            for first in (0..shape.ne1).step_by(at_once as usize) {
                let started = Instant::now();
                let rows = at_once.min(shape.ne1 - first);
                let bytes = self.read(shape, slice, first, rows, expert)?;
                sum += self.floats.iter().map(|weight| f64::from(*weight).powi(2)).sum::<f64>();
                if pace(bytes, started.elapsed()).is_break() {
                    return Ok(None);
                }
            }
        }
        Ok(Some(sum))
    }

    /// Decodes some rows of a slice to `floats`; returns the bytes that were read.
    fn read(
        &mut self,
        shape: &SliceShape,
        slice: &SliceSource,
        first: u64,
        rows: u64,
        expert: ExpertId,
    ) -> Result<u64, ProfileError> {
        // Planes have blocks of 32 weights, as Q8_0 and Q4_1 do.
        let part = |extent: &Extent, block: Option<usize>| {
            let row_bytes = block.map_or(extent.len / shape.ne1.max(1), |bytes| shape.ne0 / 32 * bytes as u64);
            Extent { offset: extent.offset + first * row_bytes, len: rows * row_bytes, ..*extent }
        };
        let [stored, low_plane, whole] = &mut self.bytes;
        let mut path = None;
        let mut fetch = |extent: Extent, into: &mut Vec<u8>| {
            let file = &self.files[extent.file as usize];
            path = Some(&file.path);
            into.resize(extent.len as usize, 0);
            let read = file.file.read_exact_at(into, extent.offset);
            read.map_err(|error| ProfileError::Io { path: file.path.clone(), action: "read the experts", error })
        };
        let (dtype, bytes) = match slice.stored {
            Stored::Whole => {
                fetch(part(&slice.extent, None), stored)?;
                (shape.dtype, &*stored)
            }
            Stored::High => {
                fetch(part(&slice.extent, Some(planes::HIGH_BYTES)), stored)?;
                whole.resize(stored.len() / planes::HIGH_BYTES * planes::Q4_1_BYTES, 0);
                planes::expand(stored, whole);
                (GgmlType::Q4_1, &*whole)
            }
            Stored::Both { low } => {
                fetch(part(&slice.extent, Some(planes::HIGH_BYTES)), stored)?;
                fetch(part(&low, Some(planes::LOW_BYTES)), low_plane)?;
                whole.resize(stored.len() / planes::HIGH_BYTES * planes::Q8_0_BYTES, 0);
                planes::merge(stored, low_plane, whole);
                (GgmlType::Q8_0, &*whole)
            }
        };
        let decoded = self.recode.dequantise(dtype, shape.ne0, bytes, &mut self.floats);
        let path = path.cloned().unwrap_or_default();
        decoded.map_err(|error| ProfileError::Weights { path, expert, error })?;
        Ok(stored.len() as u64 + if matches!(slice.stored, Stored::Both { .. }) { low_plane.len() as u64 } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> NormsFile {
        NormsFile {
            format: NORMS_FORMAT.to_owned(),
            version: NORMS_VERSION,
            model: ModelId {
                file: "m.gguf".to_owned(),
                architecture: "qwen3moe".to_owned(),
                n_layers: 1,
                n_experts: 2,
                n_expert_used: 1,
                header_sha256: String::new(),
            },
            weights_sha256: "ab".to_owned(),
            norms: vec![LayerNorms { layer: 3, norms: vec![0.1, 35.7] }],
        }
    }

    #[test]
    fn files_are_read_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = NormsFile::beside(&dir.path().join("m.gguf"));
        assert_eq!(path.file_name().unwrap(), "m.norms.json");
        std::fs::write(&path, file().to_json()).unwrap();
        assert_eq!(NormsFile::read(&path).unwrap(), file());
        assert_eq!(read_norms(&path).unwrap(), file().norms);
        std::fs::write(&path, file().to_json().replace("35.7", "-1")).unwrap();
        for error in [NormsFile::read(&path).map(drop), read_norms(&path).map(drop)] {
            let message = error.unwrap_err().to_string();
            assert!(message.contains("m.norms.json: the norm of an expert is -1"), "{message}");
        }
        std::fs::write(&path, "{}").unwrap();
        assert!(NormsFile::read(&path).is_err());
        assert!(read_norms(&path).unwrap_err().to_string().contains("it has no norms"));
    }
}
