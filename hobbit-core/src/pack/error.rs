//! Errors of reading, writing and unpacking packs.

use std::io;
use std::path::{Path, PathBuf};

use super::format::Sha256;
use super::imatrix::ImatrixError;
use super::partial::PartialError;
use crate::gguf::{GgmlType, GgufError, RecodeError};
use crate::store::StoreError;

#[derive(Debug, thiserror::Error)]
pub enum PackError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("{}: not an expert pack: key 'hobbit.pack.version' is missing", path.display())]
    NotAPack { path: PathBuf },
    #[error("{}: {reason}", path.display())]
    Refused { path: PathBuf, reason: String },
    #[error("{}: {what}: found {found}, expected {expected}; the pack is damaged, fetch it or pack the model again",
        path.display())]
    Malformed { path: PathBuf, what: String, found: String, expected: String },
    #[error("{}: holds only low-precision experts, expected a whole model; it was made from {model}", path.display())]
    LowOnly { path: PathBuf, model: String },
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
        move |error| Self::Gguf(GgufError::Io { path, action, error })
    }
}

/// Why [`super::write()`] gave up. The unfinished file is removed.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("{}: is an expert pack already, expected a plain GGUF", path.display())]
    PackAlready { path: PathBuf },
    #[error("{}: {reason}", path.display())]
    Unfit { path: PathBuf, reason: String },
    #[error("{}: low type {wanted} is nowhere smaller than the high versions: {reason}", path.display())]
    NotSmaller {
        path: PathBuf,
        wanted: String,
        reason: String,
        /// Types that are smaller, if there are any.
        fits: Option<String>,
    },
    #[error("{}: tensor '{tensor}' is {dtype}, expected q8_0: packs of bit planes keep 8-bit weights of this type in \
        two planes of 4 bits, other types have no planes that are types themselves", path.display())]
    NoPlanes { path: PathBuf, tensor: String, dtype: GgmlType },
    #[error("{}: the low versions of bit planes are the high ones' own bits, and {wanted} asks for others",
        path.display())]
    PlanesLow { path: PathBuf, wanted: String },
    #[error("{}: bit planes have both precisions in the same bytes, they cannot hold low versions only",
        path.display())]
    PlanesLowOnly { path: PathBuf },
    #[error(
        "tensor '{tensor}': the scale of a block is no number of at most 543.5, beyond which its high plane is no \
            finite q4_1 block"
    )]
    Scale { tensor: String },
    #[error("{}: a low pack needs the types of its low versions", path.display())]
    NothingLow { path: PathBuf },
    #[error("tensor '{tensor}': {error}")]
    Recode { tensor: String, error: RecodeError },
    #[error(transparent)]
    Imatrix(#[from] ImatrixError),
    #[error(transparent)]
    Output(#[from] PartialError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{}: was changed while it was being packed; pack it again", path.display())]
    SourceChanged { path: PathBuf },
    #[error("the finished pack cannot be read: {0}; report this if it happens again")]
    ReadBack(#[source] PackError),
}

#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error("{}: {reason}", path.display())]
    Unfit { path: PathBuf, reason: String },
    #[error(transparent)]
    Output(#[from] PartialError),
    #[error("{}: unpacks to SHA-256 {found}, expected {expected}", path.display())]
    Digest { path: PathBuf, found: Sha256, expected: Sha256 },
}
