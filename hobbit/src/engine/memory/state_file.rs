//! The file of `--cache-state`: read when the model is set up, replaced as a whole when it is closed. One that the user
//! names is reported on; of one that hobbit keeps by itself, in a directory, only details are logged.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::engine::ggml::log;
use hobbit_core::cache::{CacheState, ModelMark, StateError};
use hobbit_core::files;

/// The file and its expected content. A problem with it only causes a notice.
pub(crate) struct StateFile {
    path: PathBuf,
    model: ModelMark,
    policy: String,
    /// Whether existing content may be replaced.
    may_replace: bool,
    /// hobbit chose the name: the directory is made if it is not there, and problems are no news.
    is_own: bool,
}

impl StateFile {
    /// For a model under a policy. Reads nothing yet.
    pub(crate) fn new(path: &Path, model: ModelMark, policy: String) -> Self {
        // A symlink stays a symlink.
        Self { path: files::destination(path), model, policy, may_replace: true, is_own: false }
    }

    /// As [`StateFile::new`], in a directory that has one for each model.
    pub(crate) fn own(directory: &Path, model: ModelMark, policy: String) -> Self {
        Self { path: directory.join(model.state_name()), model, policy, may_replace: true, is_own: true }
    }

    /// The state left by an earlier run of this model, without the statistics of another policy; `None` if there is
    /// none.
    pub(crate) fn read(&mut self) -> Option<CacheState> {
        let bytes = match read(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => return self.refuse(error, false),
            Ok(bytes) => bytes,
        };
        let mut state = match CacheState::from_bytes(&bytes) {
            Err(error) => {
                let may_replace = !matches!(error, StateError::Foreign);
                return self.refuse(error, may_replace);
            }
            Ok(state) => state,
        };
        if state.model != self.model {
            let found = &state.model;
            let why = format!(
                "it is of another model, {:?} with {} bytes of weights, expected {:?} with {} in the same places",
                found.name, found.bytes, self.model.name, self.model.bytes
            );
            return self.refuse(why, true);
        }
        if state.policy != self.policy {
            state.caches.iter_mut().for_each(|cache| cache.statistics.clear());
        }
        Some(state)
    }

    /// Replaces the file atomically: readers see the old one or the new one.
    pub(crate) fn write(&self, mut state: CacheState) {
        if !self.may_replace {
            return;
        }
        (state.model, state.policy) = (self.model.clone(), self.policy.clone());
        if let Some(directory) = self.path.parent().filter(|_| self.is_own) {
            // It tells which experts were used. If it cannot be made, the next step fails.
            let mut builder = DirBuilder::new();
            #[cfg(unix)]
            std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
            let _ = builder.recursive(true).create(directory);
        }
        if let Err(error) = files::replace(&self.path, &state.to_bytes()) {
            self.notice(format_args!("{error}; the resident experts are not saved"));
        }
    }

    fn refuse(&mut self, why: impl std::fmt::Display, may_replace: bool) -> Option<CacheState> {
        self.may_replace = may_replace;
        let then = match (may_replace, self.is_own) {
            (true, _) => "it is replaced in the end",
            (false, true) => "it is left as it is",
            (false, false) => "it is left as it is: give another file",
        };
        self.notice(format_args!("{why}; caches start empty, and {then}"));
        None
    }

    fn notice(&self, what: impl std::fmt::Display) {
        let text = format_args!("cache state {}: {what}", self.path.display());
        if self.is_own { log::detail(text) } else { log::notice(text) }
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    // Opening a FIFO would block until its other end opens.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(CacheState::BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
