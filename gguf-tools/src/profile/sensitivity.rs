//! How much each expert loses at each width.

use anyhow::Context;
use hobbit::OpenError;
use hobbit_core::expert::ExpertId;
use hobbit_core::gguf::GgmlType;
use hobbit_core::plan::ExpertCache;
use hobbit_core::profile::{
    LayerNorms, LayerWidth, Loss, SliceTypes, Uses, Width, divide, most_sensitive, take_measured,
};

use super::Run;
use super::low::{LowVersions, Source};
use super::text::{Runner, Text};

/// Most experts stay as they are, so nearly all should be in memory; the engine keeps low-precision versions only if
/// some are not.
const EXPERT_CACHE: ExpertCache = ExpertCache::Percent(90.0);

/// Opens the model to force experts to these low versions.
pub fn open(run: &Run, low: &LowVersions) -> anyhow::Result<Runner> {
    let runner = match run.open(Some(low), EXPERT_CACHE) {
        // Too much for this machine: use the cache that fits.
        Err(error) if matches!(error.downcast_ref(), Some(OpenError::Plan(_))) => {
            run.open(Some(low), ExpertCache::Auto)?
        }
        opened => opened?,
    };
    let precision = &runner.session.description().precision;
    anyhow::ensure!(
        precision.is_dynamic() && precision.low.is_some(),
        "the engine uses no low-precision experts here ({precision:?}); report this with the model's shape"
    );
    Ok(runner)
}

/// Measures a width: all experts lowered, each layer, and the `alone` share of experts that are expected to lose most.
pub fn width(
    run: &Run,
    source: &Source,
    text: &Text,
    (uses, norms): (&Uses, &[LayerNorms]),
    dtype: GgmlType,
    alone: f64,
) -> anyhow::Result<Width> {
    let path = source.lower(dtype)?;
    let mut runner = open(run, &LowVersions::File(path.clone()))?;
    let layer_set = |layer: &hobbit_core::gguf::LayerExperts| -> Vec<ExpertId> {
        (0..layer.n_expert as u16).map(|index| ExpertId { layer: layer.layer, index }).collect()
    };
    let layers = &source.map.layers;
    let mut sets = vec![layers.iter().flat_map(layer_set).collect()];
    sets.extend(layers.iter().map(layer_set));
    let losses = runner.losses(text, &sets, &format!("layers at {dtype}"))?;
    let (all, by_layer) = losses.split_first().context("nothing was measured")?;

    let whole = all.kl().max(all.log_increase());
    let layers = layers.iter().zip(norms).zip(by_layer).map(|((layer, norms), loss)| {
        let importance = uses.importance(layer.layer, layer.n_expert as usize);
        let experts = divide(loss.kl(), &importance, &norms.norms);
        let types = SliceTypes::lowered(layer, dtype);
        LayerWidth { layer: layer.layer, types, kl: loss.kl(), experts, measured: Vec::new() }
    });
    let mut layers: Vec<LayerWidth> = layers.collect();
    let chosen = most_sensitive(&layers, alone);
    if !chosen.is_empty() {
        let sets: Vec<Vec<ExpertId>> = chosen.iter().map(|expert| vec![*expert]).collect();
        let losses = runner.losses(text, &sets, &format!("experts at {dtype}"))?;
        let measured: Vec<_> = chosen.into_iter().zip(losses.iter().map(Loss::kl)).collect();
        take_measured(&mut layers, &measured);
    }
    let sum: f64 = layers.iter().flat_map(|layer| &layer.experts).sum();
    let width = Width {
        dtype,
        kl: all.kl(),
        perplexity_increase: all.log_increase().exp_m1(),
        scale: if sum > 0.0 { whole / sum } else { 1.0 },
        layers,
    };
    drop(runner);
    std::fs::remove_file(&path).with_context(|| format!("{}: cannot remove", path.display()))?;
    Ok(width)
}
