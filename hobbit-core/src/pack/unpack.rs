//! Unpacking: from a pack back to a plain GGUF.

use std::collections::HashMap;
use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;

use super::bytes::{self, Body};
use super::error::UnpackError;
use super::format::{self, Sha256};
use super::partial::{self, Partial, PartialError};
use super::{Pack, PackError, SliceTypes};
use crate::files::Input;
use crate::gguf::experts::parse_name;
use crate::gguf::{LayerCatalog, Segment, SliceSource, Stored, TensorInfo, VersionSource, VirtualGguf};

/// Writes the plain model of `pack` to `out`: the source bit for bit, with zeros between its tensors; or a GGUF with
/// the types of the pack's high versions, if they differ. `out` appears once it is complete and its digest matches.
/// `progress` receives bytes done and total bytes, and returns whether to continue. Returns the length.
pub fn unpack(
    pack: &Pack,
    out: &Path,
    force: bool,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<u64, UnpackError> {
    partial::check(out, force, &[Input { flag: "the pack", path: &pack.path }])?;
    let view = plain_file(pack)?;
    let partial = Partial::open(out, force, view.len)?;
    let written = stream(pack, &view, &partial.path, progress, |bytes, at| partial.write(bytes, at));
    partial.finish(written.and_then(|found| match pack.info.plain_sha256 {
        Some(expected) if expected != found => Err(UnpackError::Digest { path: pack.path.clone(), found, expected }),
        _ => Ok(view.len),
    }))
}

pub(super) fn digest(
    pack: &Pack,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Sha256, UnpackError> {
    stream(pack, &plain_file(pack)?, &pack.path, progress, |_, _| Ok(()))
}

/// Passes the plain model to `sink`, with the position of each piece, and returns its digest.
fn stream(
    pack: &Pack,
    view: &VirtualGguf,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    mut sink: impl FnMut(&[u8], u64) -> Result<(), PartialError>,
) -> Result<Sha256, UnpackError> {
    let io = |error| UnpackError::Pack(PackError::io(&pack.path, "read")(error));
    let files = [File::open(&pack.path).map_err(io)?];
    let mut done = 0;
    let take = |bytes: &[u8]| {
        sink(bytes, done)?;
        done += bytes.len() as u64;
        match progress(done, view.len) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(UnpackError::Output(PartialError::Stopped { path: out.to_owned() })),
        }
    };
    bytes::digest(view, &files, |segment| slices_of(pack, segment), take)
        .map_err(|ended| ended.or_read(|_, error| io(error)))
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
    if pack.raw.tensor(format::GAPS).is_some() {
        let reason = "keeps bytes from outside of the model's tensors, as earlier programs did; pack the model again";
        return Err(UnpackError::Unfit { path: pack.path.clone(), reason: reason.to_owned() });
    }
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
    rewritten.map_err(|error| {
        let reason = format!("the plain header cannot be made: {error}");
        UnpackError::Unfit { path: pack.path.clone(), reason }
    })
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
            let (layer, found, expected) = (layer.layer, words(&types_of(layer, index)), words(&types));
            let reason = format!(
                "layer {layer}: expert {index} has types {found}, expert 0 has {expected}; a plain GGUF has one type \
                 for all experts of a tensor, use the pack as it is"
            );
            return Err(UnpackError::Unfit { path: pack.path.clone(), reason });
        }
        if pack.experts.layer(layer.layer).is_none_or(|source| SliceTypes::own(source) != types) {
            changed.insert(layer.layer, types);
        }
    }
    Ok(changed)
}
