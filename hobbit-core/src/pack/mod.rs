//! Expert packs: one GGUF with a whole model in which every expert, at each precision, is one record that a single
//! direct read brings into its slot.
//!
//! [`Pack::open`] reads one; [`write()`] makes one from a plain model, [`unpack()`] goes back, [`verify()`] reads all
//! checksums. The format is drawn in docs/PACK.md.
//!
//! [`Pack::plain`] is what the rest of hobbit works with: an ordinary [`crate::gguf::Gguf`] whose expert tensors have
//! no bytes, beside a [`crate::gguf::Catalog`] that says where the records are.

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
