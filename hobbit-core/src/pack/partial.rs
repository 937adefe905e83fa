//! Outputs under construction: `OUT.partial`, locked, and renamed once it is complete.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::files::FileExt;
use crate::files::sole::{self, SoleError};
use crate::files::{self, Input, Kind, Output, OutputError};

#[derive(Debug, thiserror::Error)]
pub enum PartialError {
    #[error("{}: this file exists already", path.display())]
    Exists { path: PathBuf },
    #[error(transparent)]
    Overwrites(#[from] OutputError),
    #[error("{}: another process is writing this file; wait for it, or give another name", path.display())]
    Busy { path: PathBuf },
    #[error("{}: this is {found}, expected a file that an interrupted run has left, or none; remove it",
        path.display())]
    NotOurs { path: PathBuf, found: &'static str },
    #[error("{}: {needed} bytes are needed here, {available} are free; make room or choose another disk",
        path.display())]
    Space { path: PathBuf, needed: u64, available: u64 },
    #[error("{}: cannot create this file: {error}; choose a directory that can be written", path.display())]
    Create { path: PathBuf, error: io::Error },
    #[error("{}: cannot {action}: {error}", path.display())]
    Write { path: PathBuf, action: &'static str, error: io::Error },
    #[error("{}: stopped, nothing was written", path.display())]
    Stopped { path: PathBuf },
}

/// `OUT.partial`, beside the file that `out` leads to.
pub fn partial_path(out: &Path) -> PathBuf {
    files::with_suffix(&files::destination(out), ".partial")
}

/// Checks that nothing is lost if `out` is written. `inputs` are files that the run reads.
pub(super) fn check(out: &Path, force: bool, inputs: &[Input<'_>]) -> Result<(), PartialError> {
    let partial = partial_path(out);
    let written = [(out, Kind::Model), (&partial, Kind::PartialModel)];
    let written = written.map(|(path, kind)| Output { flag: "the output", path, kind });
    files::check(&written, inputs).map_err(|error| match error {
        OutputError::Unwritable { path, source: error, .. } => PartialError::Create { path, error },
        other => other.into(),
    })?;
    if out.exists() && !force { Err(PartialError::Exists { path: out.to_owned() }) } else { Ok(()) }
}

/// An unfinished output. Its lock keeps other writers of the output away.
pub(super) struct Partial {
    pub path: PathBuf,
    /// The file to be, behind links.
    out: PathBuf,
    file: File,
}

impl Partial {
    /// Opens and empties the partial file of `out`, which [`check`] has allowed and which takes `needed` bytes.
    pub fn open(out: &Path, force: bool, needed: u64) -> Result<Self, PartialError> {
        let path = partial_path(out);
        let file = sole::open(&path).map_err(|error| match error {
            SoleError::Busy => PartialError::Busy { path: path.clone() },
            SoleError::NotOurs(found) => PartialError::NotOurs { path: path.clone(), found },
            SoleError::Io(error) => PartialError::Create { path: path.clone(), error },
        })?;
        let partial = Self { path, out: files::destination(out), file };
        let prepared = partial.prepare(force, needed);
        partial.unless_failed(prepared).map(|()| partial)
    }

    fn prepare(&self, force: bool, needed: u64) -> Result<(), PartialError> {
        if self.out.exists() && !force {
            // Another writer has just finished it.
            return Err(PartialError::Exists { path: self.out.clone() });
        }
        self.file.set_len(0).map_err(self.failed("empty"))?;
        let directory = files::directory_of(&self.out);
        let available = fs4::available_space(directory).map_err(self.failed("ask for the free space of"))?;
        let space = || PartialError::Space { path: directory.to_owned(), needed, available };
        if needed > available { Err(space()) } else { Ok(()) }
    }

    /// Writes all of `bytes` at `offset`, from any thread; the file grows as needed.
    pub fn write(&self, bytes: &[u8], offset: u64) -> Result<(), PartialError> {
        self.file.write_all_at(bytes, offset).map_err(self.failed("write"))
    }

    pub fn set_len(&self, len: u64) -> Result<(), PartialError> {
        self.file.set_len(len).map_err(self.failed("set the length of"))
    }

    pub fn stopped(&self) -> PartialError {
        PartialError::Stopped { path: self.path.clone() }
    }

    /// Gives the file its name if it was `written`, else removes it.
    pub fn finish<T, E: From<PartialError>>(&self, written: Result<T, E>) -> Result<T, E> {
        let renamed = written.and_then(|written| {
            self.file.sync_all().map_err(self.failed("flush"))?;
            fs::rename(&self.path, &self.out).map_err(self.failed("rename"))?;
            Ok(written)
        });
        let written = self.unless_failed(renamed)?;
        // Windows writes names with the files.
        #[cfg(unix)]
        File::open(files::directory_of(&self.out))
            .and_then(|directory| directory.sync_all())
            .map_err(self.failed("flush the directory of"))?;
        Ok(written)
    }

    fn unless_failed<T, E>(&self, result: Result<T, E>) -> Result<T, E> {
        if result.is_err() {
            let _ = fs::remove_file(&self.path); // the first error is the one to report
        }
        result
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> PartialError {
        let path = self.path.clone();
        move |error| PartialError::Write { path, action, error }
    }
}
