//! Tolerance of a model for lower quality: thresholds, mixes, and a width for each expert.
//!
//! `gguf-tools profile` runs a model over a text and writes a [`Profile`]. `gguf-tools pack --profile` chooses
//! [`widths()`] from it, and `--max-loss` of the programs chooses a mix ([`LossBound`]). `gguf-tools plan` writes a
//! [`VirtualPlan`]. This module holds formats and decisions; running the model is the tool's part.

mod format;
mod hull;
mod loss;
mod loss_bound;
mod mixes;
mod norms;
pub mod planner;
mod uses;
mod virtual_plan;
mod widths;

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

pub use crate::pack::SliceTypes;
pub use format::{
    Bounded, ChosenThresholds, FORMAT, LayerNorms, LayerWidth, ModelId, Profile, TextId, VERSION, Width, norms_of_json,
    norms_to_json,
};
pub use loss::{Loss, log_softmax, nll};
pub use loss_bound::{ChosenMix, Here, LossBound, in_percent};
pub use mixes::{
    MeasuredMix, Mix, Mixes, Part, RUNS_MAX, beside, mixes_of_json, mixes_to_json, search_mixes, text_sha256,
};
pub use norms::{NORMS_FORMAT, NORMS_VERSION, NormsFile, layer_norms, read_norms};
pub use uses::{Uses, divide, most_sensitive, take_measured};
pub use virtual_plan::{PLAN_FORMAT, PLAN_VERSION, PlanOutcome, PlannedLayer, VirtualPlan, VirtualPlanError};
pub use widths::{Goal, Widths, adjust, bounds, widths};

use crate::expert::ExpertId;
use crate::files;
use crate::gguf::RecodeError;
use crate::predict::{PathTable, PathTableError};
use crate::units::Percent;

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("{}: cannot {action}: {error}", path.display())]
    Io { path: PathBuf, action: &'static str, error: io::Error },
    #[error("{}: {reason}", path.display())]
    Malformed { path: PathBuf, reason: String },
    /// A path table that cannot be read or written, or is another model's.
    #[error("{}: {error}", path.display())]
    PathTable { path: PathBuf, error: PathTableError },
    #[error("{}: {expert}: {error}", path.display())]
    Weights { path: PathBuf, expert: ExpertId, error: RecodeError },
    #[error("{}: key '{key}': {reason}", path.display())]
    Key { path: PathBuf, key: &'static str, reason: String },
    #[error(
        "the profile was made of {profiled}, not of {}: {what} is {found}, expected {expected}", model.display()
    )]
    OtherModel { profiled: String, model: PathBuf, what: &'static str, found: String, expected: String },
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WidthsError {
    #[error("the profile has no widths")]
    NoWidths,
    #[error(
        "{target} bytes cannot be reached; with every expert at its smallest width the file has {smallest} bytes \
         (predicted loss {:.2})", Percent(*loss)
    )]
    TargetSize { target: u64, smallest: u64, loss: f64 },
    #[error("layer {layer}: the profile has {found} experts, expected {expected}; it was made of another model")]
    Layer { layer: u16, found: usize, expected: usize },
}

/// The measurements say nothing about the loss here.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{}: {reason}", file.display())]
pub struct LossBoundError {
    pub file: PathBuf,
    pub reason: String,
    /// The model to measure, within this loss and with these expert caches.
    pub model: PathBuf,
    pub max_loss: f64,
    pub expert_caches: String,
}

/// Reads a path table. Reads at most [`PathTable::BYTES_MAX`] bytes of any file.
pub fn read_path_table(path: &Path) -> Result<PathTable, ProfileError> {
    let io = |error| ProfileError::Io { path: path.to_owned(), action: "read", error };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(io)?;
    file.take(PathTable::BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io)?;
    PathTable::from_bytes(&bytes).map_err(|error| ProfileError::PathTable { path: path.to_owned(), error })
}

pub fn write_path_table(path: &Path, table: &PathTable) -> Result<(), ProfileError> {
    let of_table = |error| ProfileError::PathTable { path: path.to_owned(), error };
    let io = |error| ProfileError::Io { path: path.to_owned(), action: "write", error };
    let bytes = table.encode().map_err(of_table)?;
    files::create(path, files::Kind::PathTable).and_then(|mut file| file.write_all(&bytes)).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::{PathTableBuilder, PredictShape};

    #[test]
    fn files_are_read_as_they_were_written_and_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.paths");
        let shape = PredictShape::new([(1, 4), (2, 4)], |_| 2);
        let mut builder = PathTableBuilder::new(shape);
        builder.observe(1, [0, 3]);
        builder.observe(2, [1, 2]);
        let table = builder.build();
        write_path_table(&path, &table).unwrap();
        assert_eq!(read_path_table(&path).unwrap(), table);

        let mut bytes = std::fs::read(&path).unwrap();
        bytes[30] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let message = read_path_table(&path).unwrap_err().to_string();
        assert!(message.contains("a.paths: path table") && message.contains("profile the model again"), "{message}");
        std::fs::write(&path, "GGUF").unwrap();
        let message = read_path_table(&path).unwrap_err().to_string();
        assert!(message.contains("a.paths: not a path table"), "{message}");
        // A sparse file of zeros.
        File::create(&path).unwrap().set_len(PathTable::BYTES_MAX + 2).unwrap();
        assert!(read_path_table(&path).unwrap_err().to_string().contains("not a path table"));
        let message = read_path_table(&dir.path().join("none")).unwrap_err().to_string();
        assert!(message.contains("none: cannot read"), "{message}");
    }
}
