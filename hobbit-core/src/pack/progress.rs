//! The progress of a writer, and the name of its unfinished file.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use crate::files;

/// How far a writer has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Current stage.
    pub stage: Stage,
    /// Bytes done in this stage.
    pub done: u64,
    /// Bytes of this stage.
    pub total: u64,
    /// Records and tensors written.
    pub finished: usize,
}

/// Stage of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Writing tensors and records.
    Writing,
    /// Hashing the source, or the plain model of the pack.
    Hashing,
}

/// Called often; returns whether to continue.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;

/// `OUT.partial`.
pub fn partial_path(out: &Path) -> PathBuf {
    files::with_suffix(out, ".partial")
}
