//! The norm of every expert's weights.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::Context;
use hobbit::engine::Ggml;
use hobbit_core::gguf::{ExpertMap, ExpertTensor, Gguf, Recode};
use hobbit_core::pack::NORMS_KEY;
use hobbit_core::profile::{LayerNorms, ProfileError, norms_of_json};

use crate::shared::Bar;

/// The Frobenius norm of each expert's matrices together, from dequantised weights, of a plain
/// model. Memory: a slice and its floats per thread.
pub fn of(gguf: &Gguf, map: &ExpertMap, threads: usize) -> anyhow::Result<Vec<LayerNorms>> {
    let n_slices = map.layers.iter().flat_map(|layer| &layer.tensors).map(|tensor| u64::from(tensor.n_expert)).sum();
    let bar = Bar::of_units("norms of experts", n_slices)?;
    let mut all = Vec::new();
    for layer in &map.layers {
        let mut squares = vec![0.0; layer.n_expert as usize];
        for tensor in &layer.tensors {
            let path = &gguf.files[tensor.file as usize].path;
            let file = File::open(path).with_context(|| format!("{}: cannot open", path.display()))?;
            let experts: Vec<u16> = (0..tensor.n_expert as u16).collect();
            for group in experts.chunks(threads.max(1)) {
                let sums: Vec<anyhow::Result<f64>> = std::thread::scope(|scope| {
                    let square = |&expert: &u16| {
                        let file = &file;
                        scope.spawn(move || square(file, tensor, expert))
                    };
                    let workers: Vec<_> = group.iter().map(square).collect();
                    let join = |worker: std::thread::ScopedJoinHandle<'_, _>| {
                        worker.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")))
                    };
                    workers.into_iter().map(join).collect()
                });
                for (expert, sum) in group.iter().zip(sums) {
                    squares[usize::from(*expert)] +=
                        sum.with_context(|| format!("{}: tensor '{}', expert {expert}", path.display(), tensor.name))?;
                    bar.step(1)?;
                }
            }
        }
        let norms = squares.into_iter().map(|sum: f64| sum.sqrt() as f32).collect();
        all.push(LayerNorms { layer: layer.layer, norms });
    }
    Ok(all)
}

fn square(file: &File, tensor: &ExpertTensor, expert: u16) -> anyhow::Result<f64> {
    let extent = tensor.extent(expert);
    let mut bytes = vec![0; usize::try_from(extent.len)?];
    file.read_exact_at(&mut bytes, extent.offset)?;
    let mut floats = Vec::new();
    Ggml.dequantise(tensor.dtype, tensor.ne0, &bytes, &mut floats)?;
    Ok(floats.iter().map(|x| f64::from(*x).powi(2)).sum())
}

/// The norms that a pack carries, as its JSON; none if it has none.
pub fn of_pack(path: &Path, json: Option<&str>) -> Result<Vec<LayerNorms>, ProfileError> {
    let norms = json.map_or(Ok(Vec::new()), norms_of_json);
    norms.map_err(|reason| ProfileError::Key { path: path.to_owned(), key: NORMS_KEY, reason })
}
