//! Verification of a pack's checksums.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;

use serde::Serialize;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::bytes::{self, Interrupted};
use super::{Pack, PackError, format};
use crate::expert::{Extent, Precision};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    pub tensors: usize,
    pub versions: usize,
    pub bytes: u64,
    pub faults: Vec<Fault>,
}

/// A part of a pack that is damaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// Tensor, or record as `blk.3.ffn_exps.low`.
    pub tensor: String,
    /// Block number, where the part is a record.
    pub layer: Option<u16>,
    pub expert: Option<u16>,
    /// `high` or `low`, likewise.
    pub precision: Option<&'static str>,
    /// First byte, from the start of the file.
    pub offset: u64,
    pub len: u64,
    pub reason: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor '{}'", self.tensor)?;
        if let (Some(layer), Some(expert), Some(precision)) = (self.layer, self.expert, self.precision) {
            write!(f, ", layer {layer} expert {expert} ({precision})")?;
        }
        write!(f, ": {}, in {} bytes at {}", self.reason, self.len, self.offset)
    }
}

/// Reads everything in `pack` and compares checksums. `progress` receives bytes done and total bytes, and returns
/// whether to continue; if not, the result is `None`.
/// An unreadable part is a [`Fault`].
pub fn verify(
    pack: &Pack,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Option<Verified>, PackError> {
    let file = File::open(&pack.path).map_err(PackError::io(&pack.path, "open"))?;
    let checksums = &pack.checksums;
    let mut parts: Vec<(Fault, u64)> = Vec::new();
    for (tensor, checksum) in pack.ordinary().zip(checksums) {
        parts.push((fault(&tensor.name, tensor.extent), *checksum));
    }
    let own = &checksums[checksums.len() - format::OWN_CHECKSUMS..];
    for (name, checksum) in [format::HEADER, format::INDEX].iter().zip(own) {
        parts.extend(pack.raw.tensor(name).map(|tensor| (fault(name, tensor.extent), *checksum)));
    }
    for packed in &pack.versions {
        let (expert, precision) = (packed.version.expert, packed.version.precision);
        let general = fault(&format::records_name(expert.layer, precision, pack.info.bit_planes), packed.record);
        let precision = Some(if precision == Precision::High { "high" } else { "low" });
        let named = Fault { layer: Some(expert.layer), expert: Some(expert.index), precision, ..general };
        parts.push((named, packed.checksum));
    }
    parts.sort_by_key(|(part, _)| part.offset);

    let mut faults = Vec::new();
    let header = &pack.raw.header_bytes;
    if own.last() != Some(&xxh3_64(header)) {
        faults.push(fault("(header)", Extent { file: 0, offset: 0, len: header.len() as u64 }));
    }
    let bytes: u64 = parts.iter().map(|(part, _)| part.len).sum();
    let n_tensors = pack.ordinary().count();
    let (mut done, mut end) = (0, 0);
    for (mut fault, checksum) in parts {
        let extent = Extent { file: 0, offset: fault.offset, len: fault.len };
        let checked =
            hash(&file, extent, &mut |n| progress(done + n, bytes)).map(|found| found.map(|found| found == checksum));
        match checked {
            Ok(None) => return Ok(None),
            Ok(Some(true)) => {}
            Ok(Some(false)) => faults.push(fault.clone()),
            Err(error) => {
                fault.reason = format!("cannot be read ({error})");
                faults.push(fault.clone());
            }
        }
        if extent.len > 0 && extent.offset < end {
            fault.reason = "shares bytes with what lies before it".to_owned();
            faults.push(fault);
        }
        end = end.max(extent.end());
        done += extent.len;
    }
    Ok(Some(Verified { tensors: n_tensors, versions: pack.versions.len(), bytes, faults }))
}

/// A fault of a part that is not a record, with the reason for a checksum mismatch.
fn fault(tensor: &str, extent: Extent) -> Fault {
    Fault {
        tensor: tensor.to_owned(),
        layer: None,
        expert: None,
        precision: None,
        offset: extent.offset,
        len: extent.len,
        reason: "its checksum differs".to_owned(),
    }
}

fn hash(file: &File, extent: Extent, progress: &mut dyn FnMut(u64) -> ControlFlow<()>) -> io::Result<Option<u64>> {
    let (mut hash, mut at) = (Xxh3::new(), 0);
    let read = bytes::read(file, extent, &mut Vec::new(), |bytes| {
        hash.update(bytes);
        at += bytes.len() as u64;
        if progress(at).is_break() { Err(()) } else { Ok(()) }
    });
    match read {
        Ok(()) => Ok(Some(hash.digest())),
        Err(Interrupted::Sink(())) => Ok(None),
        Err(Interrupted::Read(_, error)) => Err(error),
    }
}
