//! Errors of reading, writing and unpacking packs.

use std::io;
use std::path::{Path, PathBuf};

use super::format::Sha256;
use super::imatrix::ImatrixError;
use super::partial::PartialError;
use crate::gguf::{GgmlType, GgufError, RecodeError};
use crate::predict::PathTableError;
use crate::store::StoreError;

/// Why a file cannot be read as a pack.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("{}: not an expert pack: key 'hobbit.pack.version' is missing; make one with `gguf-tools pack`",
        path.display())]
    NotAPack { path: PathBuf },
    #[error("{}: expert pack of version {found}, expected 1 to {expected}; the file is newer than this build, update, \
        or pack the model again", path.display())]
    Version { path: PathBuf, found: u64, expected: u32 },
    #[error("{}: {what}: found {found}, expected {expected}; the pack is damaged, fetch it or pack the model again",
        path.display())]
    Malformed { path: PathBuf, what: String, found: String, expected: String },
    #[error("{}: tensor 'hobbit.paths': {error}, and pack it again", path.display())]
    PathTable { path: PathBuf, error: PathTableError },
    #[error("{}: holds only low-precision experts, expected a whole model; it was made from {model}", path.display())]
    LowOnly { path: PathBuf, model: String },
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

/// Why [`super::write()`] gave up. The unfinished file is removed.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("{}: is an expert pack already, expected a plain GGUF; unpack it first: `gguf-tools unpack`",
        path.display())]
    AlreadyPack { path: PathBuf },
    #[error("{}: has {found} experts, expected 1 to {limit}; only Mixture-of-Experts models can be packed",
        path.display())]
    Experts { path: PathBuf, found: u64, limit: u64 },
    #[error("{}: tensor '{tensor}' has a name that packs use themselves; such a model cannot be packed",
        path.display())]
    ReservedName { path: PathBuf, tensor: String },
    #[error("{}: low type {wanted} is nowhere smaller than the high versions, expected fewer bits per weight; choose \
        a smaller type", path.display())]
    NotSmaller { path: PathBuf, wanted: String },
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
    #[error("{}: more than {limit} bytes that belong to no tensor and are not zero; this is not a model alone, cut \
        off what was appended", path.display())]
    Trailing { path: PathBuf, limit: u64 },
    #[error("{}: the pack's header cannot be made: {error}", path.display())]
    Header { path: PathBuf, error: crate::gguf::WriteError },
    #[error("tensor '{tensor}': {error}")]
    Recode { tensor: String, error: RecodeError },
    #[error("tensor '{tensor}': type {dtype} needs an importance matrix, which has no entry for it")]
    NeedsImportance { tensor: String, dtype: GgmlType },
    #[error("{}: {error}", path.display())]
    PathTable { path: PathBuf, error: PathTableError },
    #[error(transparent)]
    Imatrix(#[from] ImatrixError),
    #[error(transparent)]
    Output(#[from] PartialError),
    #[error("tensor '{tensor}': recoding gave {found} bytes, expected {expected}; please report this")]
    RecodedLength { tensor: String, found: u64, expected: u64 },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{}: cannot read: {error}", path.display())]
    Source { path: PathBuf, error: io::Error },
    #[error("{}: was changed while it was being packed; pack it again", path.display())]
    SourceChanged { path: PathBuf },
    #[error("the finished pack cannot be read: {0}; report this if it happens again")]
    ReadBack(#[source] PackError),
}

/// Why a pack was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error("{}: layer {layer}: expert {expert} has types {found}, expert 0 has {expected}; a plain GGUF has one type \
        for all experts of a tensor, use the pack as it is", path.display())]
    MixedTypes { path: PathBuf, layer: u16, expert: u16, found: String, expected: String },
    #[error("{}: the plain header cannot be made: {error}", path.display())]
    Header { path: PathBuf, error: crate::gguf::WriteError },
    #[error(transparent)]
    Output(#[from] PartialError),
    #[error("{}: unpacks to SHA-256 {found}, expected {expected}; the pack is damaged, `gguf-tools verify` says where",
        path.display())]
    Digest { path: PathBuf, found: Sha256, expected: Sha256 },
}
