//! Errors of reading and writing packs.

use std::io;
use std::path::{Path, PathBuf};

use super::imatrix::ImatrixError;
use crate::files::OutputError;
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
    #[error("{}: not an expert pack: key 'hobbit.pack.version' is missing; make one with `gguf-tools pack`", path.display())]
    NotAPack { path: PathBuf },
    /// A pack of another version of the format.
    #[error("{}: expert pack of version {found}, expected 1 to {expected}; the file is newer than this build, update, or pack the model again", path.display())]
    Version { path: PathBuf, found: u64, expected: u32 },
    /// A part is missing or violates the format.
    #[error("{}: {what}: found {found}, expected {expected}; the pack is damaged, fetch it or pack the model again", path.display())]
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
    #[error("{}: is an expert pack already, expected a plain GGUF; unpack it first: `gguf-tools unpack`", path.display())]
    AlreadyPack { path: PathBuf },
    /// A dense model, or more experts than the limit.
    #[error("{}: has {found} experts, expected 1 to {limit}; only Mixture-of-Experts models can be packed", path.display())]
    Experts { path: PathBuf, found: u64, limit: u64 },
    /// A tensor's name is reserved by the format.
    #[error("{}: tensor '{tensor}' has a name that packs use themselves; such a model cannot be packed", path.display())]
    ReservedName { path: PathBuf, tensor: String },
    /// The low types save nothing.
    #[error("{}: low type {wanted} is nowhere smaller than the high versions, expected fewer bits per weight; choose a smaller type", path.display())]
    NotSmaller { path: PathBuf, wanted: String },
    /// Weights of a type that cannot be split into planes.
    #[error("{}: tensor '{tensor}' is {dtype}, expected q8_0: nested packs keep 8-bit weights of this type in two planes of 4 bits, other types have no planes that are types themselves", path.display())]
    NotNestable { path: PathBuf, tensor: String, dtype: GgmlType },
    /// Low versions were asked for in a nested pack, whose planes already give them.
    #[error("{}: the low versions of a nested pack are the high ones' own bits, and {wanted} asks for others", path.display())]
    NestedLow { path: PathBuf, wanted: String },
    /// A nested pack of low versions only.
    #[error("{}: a nested pack has both precisions in the same bytes, it cannot hold low versions only", path.display())]
    NestedLowOnly { path: PathBuf },
    /// The scale of a block does not fit the high plane.
    #[error(
        "tensor '{tensor}': the scale of a block is no number of at most 543.5, beyond which its high plane is no finite q4_1 block"
    )]
    Scale { tensor: String },
    /// A low pack without low types.
    #[error("{}: a low pack needs the types of its low versions", path.display())]
    NothingLow { path: PathBuf },
    /// Too many non-zero bytes outside of the tensors.
    #[error("{}: more than {limit} bytes that belong to no tensor and are not zero; this is not a model alone, cut off what was appended", path.display())]
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
    /// The quantiser returned the wrong number of bytes: a bug.
    #[error("tensor '{tensor}': recoding gave {found} bytes, expected {expected}; please report this")]
    RecodedLength { tensor: String, found: u64, expected: u64 },
    /// The output, or a link on its path, is the source or is not a pack.
    #[error(transparent)]
    Overwrites(#[from] OutputError),
    /// The source changed after its header was read, or cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The path of the unfinished file is a link or a second name of another file.
    #[error("{}: this is {found}, expected a file that an interrupted run has left, or none; remove it", path.display())]
    NotOurs { path: PathBuf, found: &'static str },
    /// The source could not be read.
    #[error("{}: cannot read: {error}", path.display())]
    Source { path: PathBuf, error: io::Error },
    /// The source was written to while it was packed.
    #[error("{}: was changed while it was being packed; pack it again", path.display())]
    SourceChanged { path: PathBuf },
    /// The output exists already.
    #[error("{}: this file exists already", path.display())]
    Exists { path: PathBuf },
    /// Another process is writing the same pack.
    #[error("{}: another process is writing this pack; wait for it, or give another name", path.display())]
    Busy { path: PathBuf },
    /// Not enough free disk space.
    #[error("{}: {needed} bytes are needed here, {available} are free; make room or choose another disk", path.display())]
    Space { path: PathBuf, needed: u64, available: u64 },
    /// The output could not be created: a missing or unwritable directory, a read-only disk.
    #[error("{}: cannot create this file: {error}; choose a directory that can be written", path.display())]
    Create { path: PathBuf, error: io::Error },
    /// The output could not be written, for example on a full disk.
    #[error("{}: cannot {action}: {error}", path.display())]
    Output { path: PathBuf, action: &'static str, error: io::Error },
    /// The progress callback stopped the run.
    #[error("{}: stopped, and removed", path.display())]
    Stopped { path: PathBuf },
    /// The finished pack cannot be read back: a bug, or a disk error.
    #[error("the finished pack cannot be read: {0}; report this if it happens again")]
    ReadBack(#[source] PackError),
}

/// A failure of the output, with its path.
pub(super) fn output(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> WriteError {
    let path = path.to_owned();
    move |error| match action {
        // The file does not exist yet.
        "open" => WriteError::Create { path, error },
        _ => WriteError::Output { path, action, error },
    }
}
