//! Systems without reads past the page cache: the direct engine does not start.

use std::io;
use std::sync::Arc;

use super::original::OpenFile;
use super::{Completion, ReadRequest, Store, StoreError};

/// Name of the engine that reads past the page cache.
pub(super) const ENGINE: &str = "direct";

/// Choices of an engine that does not start.
#[derive(Clone, Copy, Debug, Default)]
pub struct DirectOptions;

/// An engine that does not start.
pub enum DirectStore {}

pub(super) fn probe_ring() -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

impl DirectStore {
    pub(super) fn start(_: Vec<OpenFile>, _: DirectOptions) -> Result<Self, StoreError> {
        Err(StoreError::Unavailable { engine: ENGINE, reason: "it needs Linux or Windows".into() })
    }
}

impl Store for DirectStore {
    fn name(&self) -> &'static str {
        match *self {}
    }

    fn submit(&self, _: Vec<ReadRequest>, _: &Arc<dyn Completion>) {
        match *self {}
    }
}
