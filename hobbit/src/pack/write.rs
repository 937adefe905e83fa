//! Writing a pack: streaming, on several threads, resumable after a kill.
//!
//! Everything is written to `OUT.partial` at its final place; `OUT.partial.journal` remembers what is finished. The
//! header comes last, then the file gets its name. Memory: a few megabytes per thread, whatever the size of an expert.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use sha2::Digest;

use super::error::{WriteError, output};
use super::fingerprint::fingerprint;
use super::format::Sha256;
use super::journal::{Finished, Journal};
use super::plan::{Fallback, PackSpec, PlainForm, Plan, gaps_of};
use super::progress::{OnProgress, partial_path};
use super::writer::Writer;
use crate::files::sole::{self, SoleError};
use crate::files::{self, FileState, Input, Kind, Output};
use crate::gguf::writer::Layout;
use crate::gguf::{Gguf, Recode, SourceFile};

/// What [`write()`] has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The pack.
    pub path: PathBuf,
    /// Its length in bytes.
    pub bytes: u64,
    /// Records in it.
    pub versions: usize,
    /// Records and tensors taken over from an earlier call that was interrupted.
    pub resumed: usize,
    /// Types that did not fit and what was taken in their place.
    pub fallbacks: Vec<Fallback>,
    /// Digest of the source.
    pub source_sha256: Sha256,
    /// Digest of what [`super::unpack()`] writes, where a plain GGUF can express the pack.
    pub plain_sha256: Option<Sha256>,
}

/// Writes the pack of `source` that `spec` describes to `out`. A call that was interrupted, even by a kill, is taken up
/// by the next call with the same arguments.
///
/// # Errors
/// [`WriteError`]. After [`WriteError::Output`] and [`WriteError::Stopped`] what is finished is kept.
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
    let digest_of_plan = digest_of_plan(&plan, &empty);

    // Whoever has the partial file has the output and the journal.
    let file = sole::open(&partial).map_err(sole_error(&partial))?;
    if out.exists() && !spec.force {
        // Another writer has just finished it. Ours is empty, or work of one that was interrupted.
        sole::remove_empty(&partial, &file);
        return Err(WriteError::Exists { path: out.to_owned() });
    }
    let (mut journal, finished) = open_journal(&partial, &file, &digest_of_plan, spec.force)?;
    check_space(&partial, &file, empty.len)?;

    let mut writer =
        Writer { plan: &plan, partial: &partial, file: &file, progress, checksums: Vec::new(), finished: 0 };
    writer.take_over(&finished)?;
    let resumed = writer.finished;
    let digest = writer.work(recode, &mut journal, finished.source)?;
    check_unchanged(source)?;

    writer.finish_file(&plan.layout(digest, None).map_err(header_error)?)?;
    let plain = match plan.plain {
        PlainForm::Source => Some(digest),
        PlainForm::None => None,
        PlainForm::Changed => {
            let digest_of_plain = writer.plain_digest()?;
            writer.finish_file(&plan.layout(digest, Some(digest_of_plain)).map_err(header_error)?)?;
            Some(digest_of_plain)
        }
    };
    file.sync_all().map_err(output(&partial, "flush"))?;
    fs::rename(&partial, out).map_err(output(&partial, "rename"))?;
    sync_directory(out).map_err(output(out, "flush the directory of"))?;
    let _ = fs::remove_file(&journal.path); // a journal without its partial file is ignored
    Ok(Written {
        path: out.to_owned(),
        bytes: empty.len,
        versions: plan.rows.len(),
        resumed,
        fallbacks: plan.fallbacks.clone(),
        source_sha256: digest,
        plain_sha256: plain,
    })
}

/// What was read is what the header was read of.
fn check_unchanged(source: &Gguf) -> Result<(), WriteError> {
    let is_same = |file: &SourceFile| FileState::at(&file.path).is_ok_and(|now| now == file.state);
    match source.files.iter().find(|file| !is_same(file)) {
        None => Ok(()),
        Some(file) => Err(WriteError::SourceChanged { path: file.path.clone() }),
    }
}

/// Differs wherever the bytes of the pack may differ.
fn digest_of_plan(plan: &Plan<'_>, layout: &Layout) -> Sha256 {
    let mut hash = sha2::Sha256::new();
    hash.update(env!("CARGO_PKG_VERSION"));
    for part in [&layout.header, &plan.source_header, &plan.gaps, &plan.paths] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    // Times alone would not do: `cp -p` keeps them. The inode is left out: a model may be moved.
    hash.update(plan.fingerprint.0);
    for file in &plan.source.files {
        hash.update(file.len.to_le_bytes());
        hash.update(file.state.modified_ns().to_le_bytes());
    }
    plan.rows.iter().filter_map(|row| row.encode()).for_each(|row| hash.update(row));
    hash.update(plan.importance.to_le_bytes());
    Sha256(hash.finalize().into())
}

/// The journal of a partial file that is locked.
fn open_journal(partial: &Path, file: &File, plan: &Sha256, force: bool) -> Result<(Journal, Finished), WriteError> {
    let path = files::with_suffix(partial, ".journal");
    let fresh = file.metadata().map_err(output(partial, "read the length of"))?.len() == 0;
    let open = |fresh| Journal::open(&path, plan, fresh).map_err(sole_error(&path));
    match open(fresh)? {
        None if force => open(true)?,
        opened => opened,
    }
    .ok_or_else(|| WriteError::OtherWork { path: partial.to_owned() })
}

fn sole_error(path: &Path) -> impl FnOnce(SoleError) -> WriteError {
    let path = path.to_owned();
    move |error| match error {
        SoleError::Busy => WriteError::Busy { path },
        SoleError::NotOurs(found) => WriteError::NotOurs { path, found },
        SoleError::Io(error) => output(&path, "open")(error),
    }
}

fn check_space(partial: &Path, file: &File, len: u64) -> Result<(), WriteError> {
    let directory = files::directory_of(partial);
    let available = fs4::available_space(directory).map_err(output(directory, "ask for the free space of"))?;
    #[cfg(unix)]
    let present = {
        let metadata = file.metadata().map_err(output(partial, "read the length of"))?;
        std::os::unix::fs::MetadataExt::blocks(&metadata).saturating_mul(512)
    };
    #[cfg(not(unix))]
    let present = file.metadata().map_err(output(partial, "read the length of"))?.len();
    let needed = len.saturating_sub(present);
    if needed > available {
        return Err(WriteError::Space { path: directory.to_owned(), needed, available });
    }
    Ok(())
}

fn sync_directory(path: &Path) -> io::Result<()> {
    // Windows has no such thing, and needs none.
    if cfg!(unix) { File::open(files::directory_of(path))?.sync_all() } else { Ok(()) }
}
