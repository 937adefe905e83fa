//! Expert packs: one GGUF with a whole model. Each expert, at each precision, is one record that a single direct read
//! brings into its slot.
//!
//! [`Pack::open`] reads a pack; [`write()`] makes one from a plain model, [`unpack()`] reverses it, [`verify()`] checks
//! all checksums. docs/PACK.md describes the format.
//!
//! The rest of hobbit works with [`Pack::plain`]: an ordinary [`crate::gguf::Gguf`] whose expert tensors have no bytes,
//! beside a [`crate::gguf::Catalog`] that locates the records.

mod bytes;
mod error;
mod fingerprint;
mod format;
mod gaps;
pub mod imatrix;
mod job;
mod nested;
mod plain;
mod plan;
mod progress;
mod read;
#[cfg(test)]
mod tests;
mod types;
mod unpack;
mod verify;
mod write;
mod writer;

pub use error::{PackError, WriteError};
pub use fingerprint::{
    fingerprint, keep as keep_fingerprint, kept as kept_fingerprint, kept_path as kept_fingerprint_path,
    sha256 as source_sha256,
};
pub use format::{PackKind, Sha256, VERSION, VERSION_NESTED};
pub use plan::{Fallback, PackSpec, Widths};
pub use progress::{OnProgress, Progress, Stage, partial_path};
pub use read::{Pack, PackInfo, PackedVersion};
pub use types::{SliceTypes, TypeChoice, TypeChoiceError, fitting, slice_name};
pub use unpack::{UnpackError, unpack};
pub use verify::{Fault, Verified, verify};
pub use write::{Written, write};

/// The key of a tuned policy, for messages.
pub const POLICY_KEY: &str = format::key::POLICY;
/// The key of the experts' norms, for messages.
pub const NORMS_KEY: &str = format::key::NORMS;
