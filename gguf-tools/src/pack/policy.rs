//! A fitted policy that goes into a pack.

use std::path::Path;

use hobbit::fitted::FittedPolicy;
use hobbit::gguf::Gguf;

/// Reads what `hobbit-sim calibrate` wrote for this model.
///
/// # Errors
/// A file that cannot be read, is damaged, or is another model's.
pub fn read(path: &Path, source: &Gguf) -> anyhow::Result<FittedPolicy> {
    let fitted = FittedPolicy::read(path)?;
    let architecture = source.architecture();
    let key = |name: &str| source.metadata.get_u64(&format!("{architecture}.{name}"));
    // Layers that predict several tokens come last, and are never run.
    let end = key("block_count").map(|blocks| blocks - key("nextn_predict_layers").unwrap_or(0).min(blocks));
    let map = source.experts()?;
    let runs = |layer: u16| end.is_none_or(|end| u64::from(layer) < end);
    let layers: Vec<(u16, u16)> = (map.layers.iter())
        .filter(|layer| runs(layer.layer))
        .map(|layer| (layer.layer, u16::try_from(layer.n_expert).unwrap_or(u16::MAX)))
        .collect();
    fitted.check_model(architecture, &layers, &path.display().to_string(), &source.files[0].path)?;
    Ok(fitted)
}
