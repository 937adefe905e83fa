//! Why a pack was refused.

use std::io;
use std::path::{Path, PathBuf};

use crate::gguf::GgufError;
use crate::predict::PathTableError;

/// Why a file cannot be read as a pack.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// Not even a sound GGUF.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A GGUF, but no pack.
    #[error("{}: not an expert pack: key 'hobbit.pack.version' is missing; make one with `gguf-tools pack`", path.display())]
    NotAPack { path: PathBuf },
    /// A pack of another version of the format.
    #[error("{}: expert pack of version {found}, expected {expected}; the file is newer than this build, update, or pack the model again", path.display())]
    Version { path: PathBuf, found: u64, expected: u32 },
    /// A part is missing, or is not what the format demands.
    #[error("{}: {what}: found {found}, expected {expected}; the pack is damaged, fetch it or pack the model again", path.display())]
    Malformed { path: PathBuf, what: String, found: String, expected: String },
    /// The pack is sound, but for its path table.
    #[error("{}: tensor 'hobbit.paths': {error}, and pack it again; until then give another with --path-table FILE", path.display())]
    PathTable { path: PathBuf, error: PathTableError },
    /// A low pack where a whole model is needed.
    #[error("{}: holds only low-precision experts, expected a whole model; give it with --low, beside the model it was made from ({model})", path.display())]
    LowOnly { path: PathBuf, model: String },
    /// The operating system refused.
    #[error("{}: cannot {action}: {error}", path.display())]
    Io { path: PathBuf, action: String, error: io::Error },
}

impl PackError {
    pub(super) fn malformed(
        path: &Path,
        what: impl Into<String>,
        found: impl ToString,
        expected: impl ToString,
    ) -> Self {
        let (found, expected) = (found.to_string(), expected.to_string());
        Self::Malformed { path: path.to_owned(), what: what.into(), found, expected }
    }

    pub(super) fn io(path: &Path, action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let (path, action) = (path.to_owned(), action.into());
        move |error| Self::Io { path, action, error }
    }
}
