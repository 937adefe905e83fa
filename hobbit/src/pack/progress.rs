//! How far a writer has come, and where its unfinished work lies.

use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use super::write_error::WriteError;

/// How far a writer has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub stage: Stage,
    /// Bytes done in this stage.
    pub done: u64,
    /// Bytes of this stage.
    pub total: u64,
    /// Records and tensors that the journal has, of this call and earlier ones.
    pub finished: usize,
}

/// What a writer is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Checking what an earlier call has left.
    Checking,
    /// Writing tensors and records.
    Writing,
    /// Reading the source, or the plain model that the pack stands for, for its digest.
    Hashing,
}

/// Told often; answers whether to go on.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;

/// `OUT.partial`.
pub fn partial_path(out: &Path) -> PathBuf {
    with_suffix(out, ".partial")
}

pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// A failure of the output, with its path.
pub(super) fn output(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> WriteError {
    let path = path.to_owned();
    move |error| match action {
        // Nothing is there yet.
        "open" => WriteError::Create { path, error },
        _ => WriteError::Output { path, action, error },
    }
}
