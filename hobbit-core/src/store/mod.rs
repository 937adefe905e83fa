//! Where expert bytes come from.
//!
//! A [`Store`] takes [`ReadRequest`]s and answers each of them exactly once with a [`ReadDone`]. It decides
//! nothing: which request goes first is [`crate::load`]'s business, which engine is used is [`mode::choose`]'s.
//!
//! * [`direct`]: `io_uring` and `O_DIRECT`, past the page cache, Linux only;
//! * [`buffered`]: `pread` through the page cache;
//! * [`memory`]: from bytes in RAM;
//! * [`faulty`]: any of them, with faults.

pub mod arena;
pub mod buffered;
#[cfg(target_os = "linux")]
pub mod direct;
pub mod error;
pub mod faulty;
mod form;
pub mod measure;
pub mod memory;
pub mod mode;
mod open;
pub mod original;
#[cfg(target_os = "linux")]
mod past_cache;
pub mod probe;
mod request;
mod slot_ptr;
pub mod threads;
mod window;
mod workers;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use arena::Arena;
pub use buffered::advise_random;
pub use error::StoreError;
pub use form::{Form, HighPlane, Order, PLANE_BUFFERS_BYTES, Part, Rearrange, Rows};
pub use measure::{Bandwidth, measure_random_read};
pub use mode::{Choice, Conditions, IoMode, StoreKind, choose};
pub use open::{open, open_originals};
pub use original::Original;
pub use request::{Completion, ReadDone, ReadRequest};
pub use slot_ptr::SlotPtr;
pub use window::{BLOCK_BYTES, lead_of, slot_stride};

/// A source of expert bytes.
///
/// The contract of an implementation:
/// * every submitted request is answered exactly once, in any order, from any thread, also when it fails;
/// * `submit` never waits for I/O, and may be called from inside [`Completion::complete`];
/// * after the answer nothing of the store touches the request's memory any more;
/// * dropping a store answers what it has accepted first.
pub trait Store: Send + Sync {
    /// The engine's name as the user reads it: `direct`, `buffered`, `memory`.
    fn name(&self) -> &'static str;

    /// Starts reading. Reads begin in the order given; a read that is split keeps that order too, so that the
    /// first slice lands first.
    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>);
}
