//! Unpacking: from a pack back to a plain GGUF.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use sha2::Digest;

use super::bytes::{self, Body};
use super::format::Sha256;
use super::{Pack, PackError, SliceTypes};
use crate::files::sole::{self, SoleError};
use crate::files::{self, Input, Kind, Output, OutputError};
use crate::gguf::experts::parse_name;
use crate::gguf::{LayerCatalog, Segment, SliceSource, Stored, TensorInfo, VersionSource, VirtualGguf};

/// Why a pack was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The pack is damaged or holds no model.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// Experts of a layer differ in type, which a plain GGUF cannot express.
    #[error("{}: layer {layer}: expert {expert} has types {found}, expert 0 has {expected}; a plain GGUF has one type for all experts of a tensor, use the pack as it is", path.display())]
    MixedTypes { path: PathBuf, layer: u16, expert: u16, found: String, expected: String },
    /// The header could not be made.
    #[error("{}: the plain header cannot be made: {error}", path.display())]
    Header { path: PathBuf, error: crate::gguf::WriteError },
    /// The output exists already.
    #[error("{}: this file exists already", path.display())]
    Exists { path: PathBuf },
    /// The output, or a link on its path, is the pack or is not a model.
    #[error(transparent)]
    Overwrites(#[from] OutputError),
    /// Another process is writing the same output.
    #[error("{}: another process is writing this file; wait for it, or give another output", path.display())]
    Busy { path: PathBuf },
    /// The path of the unfinished file is a link or a second name of another file.
    #[error("{}: this is {found}, expected a file that an interrupted run has left, or none; remove it", path.display())]
    NotOurs { path: PathBuf, found: &'static str },
    /// Not enough free disk space.
    #[error("{}: {needed} bytes are needed here, {available} are free; make room or choose another disk", path.display())]
    Space { path: PathBuf, needed: u64, available: u64 },
    /// The output could not be written. Its unfinished file is removed.
    #[error("{}: cannot {action}: {error}", path.display())]
    Output { path: PathBuf, action: &'static str, error: io::Error },
    /// The progress callback stopped the run. The unfinished output is removed.
    #[error("{}: stopped, nothing was written", path.display())]
    Stopped { path: PathBuf },
    /// The digest of the unpacked model differs from the one that the pack records.
    #[error("{}: unpacks to SHA-256 {found}, expected {expected}; the pack is damaged, `gguf-tools verify` says where", path.display())]
    Digest { path: PathBuf, found: Sha256, expected: Sha256 },
}

/// Writes the plain model of `pack` to `out`: the source bit for bit, or, if the pack's high versions have other types,
/// a plain GGUF with these. `out` appears once it is complete and its digest matches. `progress` receives bytes done
/// and total bytes, and returns whether to continue.
///
/// # Errors
/// [`UnpackError`]; the unfinished output is removed.
pub fn unpack(
    pack: &Pack,
    out: &Path,
    force: bool,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<u64, UnpackError> {
    if out.exists() && !force {
        return Err(UnpackError::Exists { path: out.to_owned() });
    }
    let view = plain_file(pack)?;
    let directory = files::directory_of(out);
    let failed = |path: &Path, action: &'static str| {
        let path = path.to_owned();
        move |error| UnpackError::Output { path, action, error }
    };
    let available = fs4::available_space(directory).map_err(failed(directory, "ask for the free space of"))?;
    if available < view.len {
        return Err(UnpackError::Space { path: directory.to_owned(), needed: view.len, available });
    }
    let partial = super::partial_path(out);
    let written = [(out, Kind::Model), (&partial, Kind::PartialModel)];
    let written = written.map(|(path, kind)| Output { flag: "the output", path, kind });
    files::check(&written, &[Input { flag: "the pack", path: &pack.path }])?;
    let mut file = sole::open(&partial).map_err(|error| match error {
        SoleError::Busy => UnpackError::Busy { path: partial.clone() },
        SoleError::NotOurs(found) => UnpackError::NotOurs { path: partial.clone(), found },
        SoleError::Io(error) => failed(&partial, "create")(error),
    })?;
    if out.exists() && !force {
        // Another process has just finished the output. Our partial file is empty, or left over from an interrupted
        // run.
        sole::remove_empty(&partial, &file);
        return Err(UnpackError::Exists { path: out.to_owned() });
    }
    file.set_len(0).map_err(failed(&partial, "empty"))?;
    let written = stream(pack, &view, out, progress, |bytes| file.write_all(bytes).map_err(failed(&partial, "write")));
    let finished = written.and_then(|found| {
        if let Some(expected) = pack.info.plain_sha256.filter(|expected| *expected != found) {
            return Err(UnpackError::Digest { path: pack.path.clone(), found, expected });
        }
        file.sync_all().map_err(failed(&partial, "flush"))?;
        fs::rename(&partial, out).map_err(failed(&partial, "rename"))
    });
    if finished.is_err() {
        let _ = fs::remove_file(&partial); // the reason why is the error to report
    }
    finished.map(|()| view.len)
}

/// Digest of the output of [`unpack`].
pub(super) fn digest(
    pack: &Pack,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Sha256, UnpackError> {
    stream(pack, &plain_file(pack)?, &pack.path, progress, |_| Ok(()))
}

/// Passes the plain model to `sink` and returns its digest.
fn stream(
    pack: &Pack,
    view: &VirtualGguf,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    mut sink: impl FnMut(&[u8]) -> Result<(), UnpackError>,
) -> Result<Sha256, UnpackError> {
    let io = |error| UnpackError::Pack(PackError::io(&pack.path, "read")(error));
    let files = [File::open(&pack.path).map_err(io)?];
    let (mut hash, mut done) = (sha2::Sha256::new(), 0);
    let walked = bytes::walk(
        view,
        &files,
        |segment| slices_of(pack, segment),
        |bytes| {
            hash.update(bytes);
            sink(bytes)?;
            done += bytes.len() as u64;
            if progress(done, view.len).is_break() {
                Err(UnpackError::Stopped { path: out.to_owned() })
            } else {
                Ok(())
            }
        },
    );
    walked.map_err(|ended| ended.or_read(|_, error| io(error)))?;
    Ok(Sha256(hash.finalize().into()))
}

/// Locations of the slices of an expert tensor, expert by expert.
fn slices_of(pack: &Pack, segment: &Segment) -> Vec<Body> {
    let tensor = segment.tensor.and_then(|i| pack.plain.tensors.get(i as usize));
    let Some((layer, kind)) = tensor.and_then(|tensor| parse_name(&tensor.name)) else { return Vec::new() };
    let catalog = &pack.catalog;
    let high = catalog.layer(layer).map_or(&[][..], |layer| &layer.high);
    let slice = |version: &VersionSource| {
        let class = &catalog.classes[usize::from(version.class)];
        let position = class.slices.iter().position(|slice| slice.kind == kind)?;
        let SliceSource { extent, stored, .. } = version.slices[position];
        Some(match stored {
            Stored::Both { low } => Body::Planes { high: extent, low },
            Stored::Whole | Stored::High => Body::Whole(extent),
        })
    };
    high.iter().filter_map(slice).collect()
}

/// The plain model as one file; expert tensors without source.
fn plain_file(pack: &Pack) -> Result<VirtualGguf, UnpackError> {
    pack.require_full()?;
    let plain = &pack.plain;
    let changed = changed_types(pack)?;
    if changed.is_empty() {
        return Ok(plain.one_file());
    }
    let dtype = |tensor: &TensorInfo| {
        let changed = parse_name(&tensor.name).and_then(|(layer, kind)| changed.get(&layer)?.get(kind));
        changed.unwrap_or(tensor.dtype)
    };
    let rewritten = plain.rewritten(|_| true, dtype).map(VirtualGguf::without_experts);
    rewritten.map_err(|error| UnpackError::Header { path: pack.path.clone(), error })
}

/// The layers whose high versions have other types than the source, with these types.
fn changed_types(pack: &Pack) -> Result<HashMap<u16, SliceTypes>, UnpackError> {
    let catalog = &pack.catalog;
    let types_of = |layer: &LayerCatalog, index: usize| -> SliceTypes {
        let class = &catalog.classes[usize::from(layer.high[index].class)];
        class.slices.iter().map(|slice| (slice.kind, slice.dtype)).collect()
    };
    let words = |types: &SliceTypes| super::types::describe([*types].iter());
    let mut changed = HashMap::new();
    for layer in catalog.layers.iter().filter(|layer| !layer.high.is_empty()) {
        let types = types_of(layer, 0);
        if let Some(index) = (1..layer.high.len()).find(|index| types_of(layer, *index) != types) {
            return Err(UnpackError::MixedTypes {
                path: pack.path.clone(),
                layer: layer.layer,
                expert: index as u16,
                found: words(&types_of(layer, index)),
                expected: words(&types),
            });
        }
        if pack.experts.layer(layer.layer).is_none_or(|source| SliceTypes::own(source) != types) {
            changed.insert(layer.layer, types);
        }
    }
    Ok(changed)
}
