//! Expert packs: one GGUF with a whole model. Each expert, at each precision, is one record that a single direct read
//! brings into its slot.
//!
//! [`Pack::open`] reads a pack; [`write()`] makes one from a plain model, [`unpack()`] reverses it, [`verify()`] checks
//! all checksums. docs/PACK.md describes the format.
//!
//! The rest of hobbit works with [`Pack::plain`]: an ordinary [`crate::gguf::Gguf`] whose expert tensors have no bytes,
//! beside a [`crate::gguf::Catalog`] that locates the records.

mod bit_planes;
mod bytes;
mod error;
mod fingerprint;
mod format;
pub mod imatrix;
mod job;
mod partial;
mod plan;
mod read;
#[cfg(test)]
mod tests;
mod types;
mod unpack;
mod verify;
mod write;

pub use error::{PackError, UnpackError, WriteError};
pub use fingerprint::fingerprint;
pub use format::{PackKind, Row, Sha256, VERSION};
pub use partial::{PartialError, partial_path};
pub use plan::{Fallback, PackSpec, Widths};
pub use read::{Pack, PackInfo};
pub use types::{SliceTypes, TypeChoice, TypeChoiceError, fitting, slice_name};
pub use unpack::unpack;
pub use verify::{Fault, Verified, verify};
pub use write::{Progress, Stage, Written, write};

/// The key of the experts' norms, for messages.
pub const NORMS_KEY: &str = format::key::NORMS;
/// The key of the measured mixes, for messages.
pub const MIXES_KEY: &str = format::key::MIXES;
