//! What the disk gives: the roofline of everything that is read from it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use hobbit::gguf::Gguf;
use hobbit::store::{self, StoreKind, measure_random_read, probe};

/// Reads in flight that are tried for the disk's best.
const DEPTHS: [usize; 3] = [4, 8, 16];
/// Most that one depth reads, in bytes.
const BYTES_MAX: u64 = 2 << 30;

/// Bytes per second of reads of single slices of a model's experts, at the best of several depths, each measured for `time`,
/// past the page cache where that is possible.
///
/// # Errors
/// What is no model; a dense one; reads that fail.
pub fn random_reads(model: &Path, time: Duration) -> Result<f64> {
    let gguf = Gguf::open(model)?;
    let experts = gguf.experts()?;
    let tensors: Vec<_> = experts.layers.iter().flat_map(|layer| &layer.tensors).collect();
    let ranges: Vec<_> = tensors
        .iter()
        .map(|tensor| {
            let mut all = tensor.extent(0);
            all.len *= u64::from(tensor.n_expert);
            all
        })
        .collect();
    let slice_bytes = tensors.iter().map(|tensor| tensor.slice_bytes).sum::<u64>() / tensors.len().max(1) as u64;
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
