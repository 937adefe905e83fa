//! The disk's read bandwidth: the roofline for everything read from it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use hobbit_core::expert::Extent;
use hobbit_core::gguf::{ExpertMap, Gguf};
use hobbit_core::pack::Pack;
use hobbit_core::store::{self, StoreKind, measure_random_read, probe};

/// Queue depths to try.
const DEPTHS: [usize; 3] = [4, 8, 16];
/// Maximum bytes read per depth.
const BYTES_MAX: u64 = 2 << 30;

/// Bytes per second of random reads of single expert slices of a model, at the best of several queue depths, each
/// measured for `time`, with direct I/O where possible.
///
/// # Errors
/// A file that is not a model; a dense model; failed reads.
pub fn random_reads(model: &Path, time: Duration) -> Result<f64> {
    let gguf = Gguf::open(model)?;
    let (ranges, slice_bytes) = match Pack::is_pack(&gguf) {
        true => of_pack(&Pack::open(model)?),
        false => of_plain(&gguf.experts()?),
    };
    ensure!(slice_bytes > 0, "{}: a dense model has no experts to read", model.display());
    let files: Vec<PathBuf> = gguf.files.iter().map(|file| file.path.clone()).collect();
    let can_direct = probe::io_uring().is_ok() && files.iter().all(|file| probe::direct(file).is_ok());
    let store = store::open(if can_direct { StoreKind::Direct } else { StoreKind::Buffered }, &files)?;
    DEPTHS.into_iter().try_fold(0.0, |best: f64, depth| {
        let measured = measure_random_read(&*store, &ranges, slice_bytes, depth, BYTES_MAX, time);
        let measured = measured.with_context(|| format!("{}: measuring the disk", model.display()))?;
        Ok(best.max(measured.bytes_per_second()))
    })
}

/// The extents of a plain model's experts, and the mean bytes of a slice.
fn of_plain(experts: &ExpertMap) -> (Vec<Extent>, u64) {
    let tensors: Vec<_> = experts.layers.iter().flat_map(|layer| &layer.tensors).collect();
    let ranges = tensors.iter().map(|tensor| {
        let first = tensor.extent(0);
        Extent { len: first.len * u64::from(tensor.n_expert), ..first }
    });
    let bytes: u64 = tensors.iter().map(|tensor| tensor.slice_bytes).sum();
    (ranges.collect(), bytes / tensors.len().max(1) as u64)
}

/// The same for a pack, whose records have several slices each.
fn of_pack(pack: &Pack) -> (Vec<Extent>, u64) {
    let records = pack.raw.tensors.iter().filter(|tensor| tensor.name.contains(".ffn_exps."));
    let versions: Vec<_> = pack.catalog.layers.iter().flat_map(|layer| &layer.high).collect();
    let bytes: u64 = versions.iter().map(|version| version.bytes()).sum();
    let n_slices: usize = versions.iter().map(|version| version.slices.len()).sum();
    (records.map(|tensor| tensor.extent).collect(), bytes / n_slices.max(1) as u64)
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use hobbit_core::gguf::CopyOnly;
    use hobbit_core::pack::{PackKind, PackSpec, write};

    use super::*;

    /// The same slices, in any file.
    #[test]
    fn packs_are_read_as_plain_models() {
        let dir = tempfile::tempdir().unwrap();
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo.gguf");
        let source = Gguf::open(&model).unwrap();
        let (ranges, slice_bytes) = of_plain(&source.experts().unwrap());
        let bytes: u64 = ranges.iter().map(|range| range.len).sum();
        for bit_planes in [false, true] {
            let out = dir.path().join(format!("{bit_planes}.gguf"));
            let spec = PackSpec { bit_planes, ..PackSpec::new(PackKind::Full) };
            write(&source, &out, &spec, &CopyOnly, &mut |_| ControlFlow::Continue(())).unwrap();
            let (own, own_slice_bytes) = of_pack(&Pack::open(&out).unwrap());
            assert_eq!(own_slice_bytes, slice_bytes);
            assert!(own.iter().map(|range| range.len).sum::<u64>() >= bytes);
        }
        assert!(random_reads(&dir.path().join("true.gguf"), Duration::from_millis(1)).unwrap() > 0.0);
    }
}
