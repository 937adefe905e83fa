//! Reads of expert bytes.
//!
//! A [`Store`] takes [`ReadRequest`]s and answers each of them exactly once with a [`ReadDone`]. It decides nothing:
//! [`crate::load`] orders the requests, [`mode::choose`] picks the engine.
//!
//! * [`direct`]: `io_uring` and `O_DIRECT`, past the page cache, Linux only;
//! * buffered: `pread` through the page cache;
//! * [`MemoryStore`]: from bytes in RAM;
//! * [`faulty`]: any of them, with faults.

pub mod arena;
#[cfg(target_os = "linux")]
pub mod direct;
#[cfg(not(target_os = "linux"))]
#[path = "no_direct.rs"]
pub mod direct;
pub mod error;
pub mod faulty;
mod form;
pub mod measure;
pub mod mode;
mod open;
pub mod original;
pub mod probe;
mod request;
pub mod threads;
mod window;
mod workers;

#[cfg(all(test, target_os = "linux"))]
mod tests;

use std::sync::Arc;

pub use arena::Arena;
pub use error::StoreError;
pub use form::{Form, HighPlane, Order, PLANE_BUFFERS_BYTES, Part, Rearrange, Rows};
pub use measure::{Bandwidth, measure_random_read};
pub use mode::{Choice, Conditions, IoMode, StoreKind, choose};
pub use open::{advise_needed, advise_random, open, open_originals};
pub use original::Original;
pub use request::{Completion, ReadDone, ReadRequest, SlotPtr};
pub use window::{BLOCK_BYTES, lead_of, slot_stride};
pub use workers::MemoryStore;

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
