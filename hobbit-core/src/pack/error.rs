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
    /// Not a sound GGUF.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A GGUF, but no pack.
    #[error("{}: not an expert pack: key 'hobbit.pack.version' is missing; make one with `gguf-tools pack`",
        path.display())]
    NotAPack { path: PathBuf },
    /// A pack of another version of the format.
    #[error("{}: expert pack of version {found}, expected 1 to {expected}; the file is newer than this build, update, \
        or pack the model again", path.display())]
    Version { path: PathBuf, found: u64, expected: u32 },
    /// A part is missing or violates the format.
    #[error("{}: {what}: found {found}, expected {expected}; the pack is damaged, fetch it or pack the model again",
        path.display())]
    Malformed { path: PathBuf, what: String, found: String, expected: String },
    /// The path table is damaged; the rest of the pack is sound.
    #[error("{}: tensor 'hobbit.paths': {error}, and pack it again", path.display())]
    PathTable { path: PathBuf, error: PathTableError },
    /// A low pack where a whole model is needed.
    #[error("{}: holds only low-precision experts, expected a whole model; it was made from {model}", path.display())]
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

/// Why [`super::write()`] gave up. The unfinished file is removed.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The source's experts are inconsistent.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The source is a pack itself.
    #[error("{}: is an expert pack already, expected a plain GGUF; unpack it first: `gguf-tools unpack`",
        path.display())]
    AlreadyPack { path: PathBuf },
    /// A dense model, or more experts than the limit.
    #[error("{}: has {found} experts, expected 1 to {limit}; only Mixture-of-Experts models can be packed",
        path.display())]
    Experts { path: PathBuf, found: u64, limit: u64 },
    /// A tensor's name is reserved by the format.
    #[error("{}: tensor '{tensor}' has a name that packs use themselves; such a model cannot be packed",
        path.display())]
    ReservedName { path: PathBuf, tensor: String },
    /// The low types save nothing.
    #[error("{}: low type {wanted} is nowhere smaller than the high versions, expected fewer bits per weight; choose \
        a smaller type", path.display())]
    NotSmaller { path: PathBuf, wanted: String },
    /// Weights of a type that cannot be split into bit planes.
    #[error("{}: tensor '{tensor}' is {dtype}, expected q8_0: packs of bit planes keep 8-bit weights of this type in \
        two planes of 4 bits, other types have no planes that are types themselves", path.display())]
    NoPlanes { path: PathBuf, tensor: String, dtype: GgmlType },
    /// Low versions were asked for in a pack of bit planes, whose planes already give them.
    #[error("{}: the low versions of bit planes are the high ones' own bits, and {wanted} asks for others",
        path.display())]
    PlanesLow { path: PathBuf, wanted: String },
    /// A pack of bit planes with low versions only.
    #[error("{}: bit planes have both precisions in the same bytes, they cannot hold low versions only",
        path.display())]
    PlanesLowOnly { path: PathBuf },
    /// The scale of a block does not fit the high plane.
    #[error(
        "tensor '{tensor}': the scale of a block is no number of at most 543.5, beyond which its high plane is no \
            finite q4_1 block"
    )]
    Scale { tensor: String },
    /// A low pack without low types.
    #[error("{}: a low pack needs the types of its low versions", path.display())]
    NothingLow { path: PathBuf },
    /// Too many non-zero bytes outside of the tensors.
    #[error("{}: more than {limit} bytes that belong to no tensor and are not zero; this is not a model alone, cut \
        off what was appended", path.display())]
    Trailing { path: PathBuf, limit: u64 },
    /// The header could not be made.
    #[error("{}: the pack's header cannot be made: {error}", path.display())]
    Header { path: PathBuf, error: crate::gguf::WriteError },
    /// Weights could not be converted to another type.
    #[error("tensor '{tensor}': {error}")]
    Recode { tensor: String, error: RecodeError },
    /// A type that needs an importance matrix.
    #[error("tensor '{tensor}': type {dtype} needs an importance matrix, which has no entry for it")]
    NeedsImportance { tensor: String, dtype: GgmlType },
    /// A path table of another model, or one that is too long.
    #[error("{}: {error}", path.display())]
    PathTable { path: PathBuf, error: PathTableError },
    /// The importance matrix is damaged or of another model.
    #[error(transparent)]
    Imatrix(#[from] ImatrixError),
    /// The pack could not be written.
    #[error(transparent)]
    Output(#[from] PartialError),
    /// The quantiser returned the wrong number of bytes: a bug.
    #[error("tensor '{tensor}': recoding gave {found} bytes, expected {expected}; please report this")]
    RecodedLength { tensor: String, found: u64, expected: u64 },
    /// The source changed after its header was read, or cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The source could not be read.
    #[error("{}: cannot read: {error}", path.display())]
    Source { path: PathBuf, error: io::Error },
    /// The source was written to while it was packed.
    #[error("{}: was changed while it was being packed; pack it again", path.display())]
    SourceChanged { path: PathBuf },
    /// The finished pack cannot be read back: a bug, or a disk error.
    #[error("the finished pack cannot be read: {0}; report this if it happens again")]
    ReadBack(#[source] PackError),
}

/// Why a pack was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The pack is damaged or holds no model.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// Experts of a layer differ in type, which a plain GGUF cannot express.
    #[error("{}: layer {layer}: expert {expert} has types {found}, expert 0 has {expected}; a plain GGUF has one type \
        for all experts of a tensor, use the pack as it is", path.display())]
    MixedTypes { path: PathBuf, layer: u16, expert: u16, found: String, expected: String },
    /// The header could not be made.
    #[error("{}: the plain header cannot be made: {error}", path.display())]
    Header { path: PathBuf, error: crate::gguf::WriteError },
    /// The model could not be written.
    #[error(transparent)]
    Output(#[from] PartialError),
    /// The digest of the unpacked model differs from the one that the pack records.
    #[error("{}: unpacks to SHA-256 {found}, expected {expected}; the pack is damaged, `gguf-tools verify` says where",
        path.display())]
    Digest { path: PathBuf, found: Sha256, expected: Sha256 },
}
