//! The norm of every expert's weights.

use std::path::Path;
use std::sync::Mutex;

use hobbit::engine::Ggml;
use hobbit_core::expert::Precision;
use hobbit_core::pack::NORMS_KEY;
use hobbit_core::profile::{LayerNorms, ProfileError, layer_norms, norms_of_json};
use hobbit_core::store::Original;

use crate::shared::{Bar, Opened};

/// The norms that a pack carries, else those of the weights, which are read once.
pub fn of(opened: &Opened, path: &Path, threads: usize) -> anyhow::Result<Vec<LayerNorms>> {
    if let Some(json) = opened.pack_norms.as_ref().and_then(Option::as_deref) {
        let key = |reason| ProfileError::Key { path: path.to_owned(), key: NORMS_KEY, reason };
        return Ok(norms_of_json(json).map_err(key)?);
    }
    let catalog = &opened.catalog;
    let files = opened.gguf.files.iter().map(|file| Original::open(&file.path, file.state));
    let files: Vec<Original> = files.collect::<Result<_, _>>()?;
    let total = catalog.read_bytes(Precision::High);
    let bar = Mutex::new((Bar::new()?, 0));
    let pace = |bytes, _| {
        let (bar, done) = &mut *bar.lock().expect("no thread panics");
        *done += bytes;
        bar.show("norms", *done, total)
    };
    let mut all = Vec::new();
    for layer in &catalog.layers {
        match layer_norms(catalog, layer, &files, &Ggml, threads, &pace)? {
            Some(norms) => all.push(norms),
            None => break,
        }
    }
    hobbit_common::signals::check()?;
    Ok(all)
}
