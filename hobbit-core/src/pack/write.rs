//! Writing a pack: streaming, on several threads.
//!
//! Everything is written to `OUT.partial` at its final offset, the header last; then the file is renamed. So a file
//! named `OUT` is complete. Memory: a few megabytes per thread, whatever the size of an expert.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::error::{WriteError, output};
use super::fingerprint::fingerprint;
use super::format::Sha256;
use super::plan::{Fallback, PackSpec, PlainForm, Plan, gaps_of};
use super::progress::{OnProgress, partial_path};
use super::writer::Writer;
use crate::files::sole::{self, SoleError};
use crate::files::{self, FileState, Input, Kind, Output};
use crate::gguf::writer::Layout;
use crate::gguf::{Gguf, Recode, SourceFile};

/// A pack that [`write()`] made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The pack.
    pub path: PathBuf,
    /// Its length in bytes.
    pub bytes: u64,
    /// Records in it.
    pub versions: usize,
    /// Types that did not fit, and their replacements.
    pub fallbacks: Vec<Fallback>,
    /// Digest of the source.
    pub source_sha256: Sha256,
    /// Digest of the output of [`super::unpack()`], if a plain GGUF can express the pack.
    pub plain_sha256: Option<Sha256>,
}

/// Writes the pack of `source` described by `spec` to `out`. Overwrites the partial file of a killed call.
///
/// # Errors
/// [`WriteError`]. The unfinished file is removed.
pub fn write(
    source: &Gguf,
    out: &Path,
    spec: &PackSpec<'_>,
    recode: &dyn Recode,
    progress: OnProgress<'_>,
) -> Result<Written, WriteError> {
    if out.exists() && !spec.force {
        return Err(WriteError::Exists { path: out.to_owned() });
    }
    let partial = partial_path(out);
    let written = [(out, Kind::Model), (&partial, Kind::PartialModel)];
    let written = written.map(|(path, kind)| Output { flag: "the output", path, kind });
    let read: Vec<_> = source.files.iter().map(|file| Input { flag: "the model", path: &file.path }).collect();
    files::check(&written, &read)?;
    let plan = Plan::new(source, spec, recode, gaps_of(source)?, fingerprint(source)?)?;
    let header_error = |error| WriteError::Header { path: source.files[0].path.clone(), error };
    let empty = plan.layout(Sha256([0; 32]), None).map_err(header_error)?;

    // The lock on the partial file keeps other writers of this output away.
    let file = sole::open(&partial).map_err(sole_error(&partial))?;
    let written = if out.exists() && !spec.force {
        // Another writer has just finished it.
        Err(WriteError::Exists { path: out.to_owned() })
    } else {
        fill(&plan, &empty, (&file, &partial), recode, progress)
    };
    let written = written.and_then(|digests| {
        file.sync_all().map_err(output(&partial, "flush"))?;
        fs::rename(&partial, out).map_err(output(&partial, "rename"))?;
        Ok(digests)
    });
    if written.is_err() {
        let _ = fs::remove_file(&partial); // the first error is the one to report
    }
    let (source_sha256, plain_sha256) = written?;
    sync_directory(out).map_err(output(out, "flush the directory of"))?;
    Ok(Written {
        path: out.to_owned(),
        bytes: empty.len,
        versions: plan.rows.len(),
        fallbacks: plan.fallbacks.clone(),
        source_sha256,
        plain_sha256,
    })
}

/// Writes the whole pack to its partial file; returns the digests of the source and of the plain model.
fn fill(
    plan: &Plan<'_>,
    empty: &Layout,
    (file, partial): (&File, &Path),
    recode: &dyn Recode,
    progress: OnProgress<'_>,
) -> Result<(Sha256, Option<Sha256>), WriteError> {
    let header_error = |error| WriteError::Header { path: plan.source.files[0].path.clone(), error };
    file.set_len(0).map_err(output(partial, "empty"))?;
    check_space(partial, empty.len)?;
    let checksums = vec![None; plan.jobs.len()];
    let mut writer = Writer { plan, partial, file, progress, checksums, finished: 0 };
    let digest = writer.work(recode)?;
    check_unchanged(plan.source)?;
    writer.finish_file(&plan.layout(digest, None).map_err(header_error)?)?;
    let plain = match plan.plain {
        PlainForm::Source => Some(digest),
        PlainForm::None => None,
        PlainForm::Changed => {
            let plain = writer.plain_digest()?;
            writer.finish_file(&plan.layout(digest, Some(plain)).map_err(header_error)?)?;
            Some(plain)
        }
    };
    Ok((digest, plain))
}

/// Fails if a file of the source has changed since its header was read.
fn check_unchanged(source: &Gguf) -> Result<(), WriteError> {
    let is_same = |file: &SourceFile| FileState::at(&file.path).is_ok_and(|now| now == file.state);
    match source.files.iter().find(|file| !is_same(file)) {
        None => Ok(()),
        Some(file) => Err(WriteError::SourceChanged { path: file.path.clone() }),
    }
}

fn sole_error(path: &Path) -> impl FnOnce(SoleError) -> WriteError {
    let path = path.to_owned();
    move |error| match error {
        SoleError::Busy => WriteError::Busy { path },
        SoleError::NotOurs(found) => WriteError::NotOurs { path, found },
        SoleError::Io(error) => output(&path, "open")(error),
    }
}

fn check_space(partial: &Path, needed: u64) -> Result<(), WriteError> {
    let directory = files::directory_of(partial);
    let available = fs4::available_space(directory).map_err(output(directory, "ask for the free space of"))?;
    if needed > available {
        return Err(WriteError::Space { path: directory.to_owned(), needed, available });
    }
    Ok(())
}

fn sync_directory(path: &Path) -> io::Result<()> {
    // Windows cannot sync a directory and does not need to.
    if cfg!(unix) { File::open(files::directory_of(path))?.sync_all() } else { Ok(()) }
}
