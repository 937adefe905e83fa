//! How much each expert loses at each width.

use anyhow::Context;
use hobbit::OpenError;
use hobbit_core::expert::ExpertId;
use hobbit_core::gguf::GgmlType;
use hobbit_core::plan::ExpertCache;
use hobbit_core::profile::{LayerNorms, LayerWidth, SliceTypes, Uses, Width, divide};

use super::Run;
use super::low::{LowVersions, Source};
use super::text::Text;

/// One layer is lowered while all others stay as they are, so nearly all experts should be in memory; the engine keeps
/// low-precision versions only if some are not.
const EXPERT_CACHE: ExpertCache = ExpertCache::Percent(90.0);

pub fn width(
    run: &Run,
    source: &Source,
    text: &Text,
    uses: &Uses,
    norms: &[LayerNorms],
    dtype: GgmlType,
) -> anyhow::Result<Width> {
    let path = source.lower(dtype)?;
    let low = LowVersions::File(path.clone());
    let mut runner = match run.open(Some(&low), EXPERT_CACHE) {
        // Too much for this machine: use the cache that fits.
        Err(error) if matches!(error.downcast_ref(), Some(OpenError::Plan(_))) => {
            run.open(Some(&low), ExpertCache::Auto)?
        }
        opened => opened?,
    };
    let precision = &runner.session.description().precision;
    anyhow::ensure!(
        precision.is_dynamic() && precision.low.is_some(),
        "the engine uses no low-precision experts here ({precision:?}); report this with the model's shape"
    );
    let layer_set = |layer: &hobbit_core::gguf::LayerExperts| -> Vec<ExpertId> {
        (0..layer.n_expert as u16).map(|index| ExpertId { layer: layer.layer, index }).collect()
    };
    let layers = &source.map.layers;
    let mut sets = vec![layers.iter().flat_map(layer_set).collect()];
    sets.extend(layers.iter().map(layer_set));
    let losses = runner.losses(text, &sets, &format!("layers at {dtype}"))?;
    let (all, by_layer) = losses.split_first().context("nothing was measured")?;

    let sum: f64 = by_layer.iter().map(|loss| loss.kl()).sum();
    let whole = all.kl().max(all.log_increase());
    let layers = layers.iter().zip(norms).zip(by_layer).map(|((layer, norms), loss)| {
        let importance = uses.importance(layer.layer, layer.n_expert as usize);
        let experts = divide(loss.kl(), &importance, &norms.norms);
        LayerWidth { layer: layer.layer, types: SliceTypes::lowered(layer, dtype), kl: loss.kl(), experts }
    });
    let width = Width {
        dtype,
        kl: all.kl(),
        perplexity_increase: all.log_increase().exp_m1(),
        scale: if sum > 0.0 { whole / sum } else { 1.0 },
        layers: layers.collect(),
    };
    drop(runner);
    std::fs::remove_file(&path).with_context(|| format!("{}: cannot remove", path.display()))?;
    Ok(width)
}
