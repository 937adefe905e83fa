//! Why a profile cannot be read or used.

use std::io;
use std::path::PathBuf;

use crate::predict::PathTableError;
use crate::units::Percent;

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("{}: cannot {action}: {error}", path.display())]
    Io { path: PathBuf, action: &'static str, error: io::Error },
    #[error("{}: {reason}; make it again with gguf-tools profile", path.display())]
    Malformed { path: PathBuf, reason: String },
    /// A path table that cannot be read or written, or is another model's.
    #[error("{}: {error}", path.display())]
    PathTable { path: PathBuf, error: PathTableError },
    #[error("{}: key '{key}': {reason}; make the pack again with gguf-tools pack", path.display())]
    Key { path: PathBuf, key: &'static str, reason: String },
    #[error(
        "the profile was made of {profiled}, not of {}: {what} is {found}, expected {expected}; \
         make a profile of this model with gguf-tools profile", model.display()
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
