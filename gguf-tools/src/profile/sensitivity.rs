//! How much each expert loses at each width.

use anyhow::Context;
use hobbit::OpenError;
use hobbit_core::expert::ExpertId;
use hobbit_core::gguf::GgmlType;
use hobbit_core::plan::ExpertCache;
use hobbit_core::profile::{LayerNorms, LayerWidth, SliceTypes, Tolerated, Uses, Width, divide, most_lowered};

use super::Run;
use super::low::{LowVersions, Source};
use super::text::{Runner, Text};

/// One layer is lowered while all others stay as they are, so nearly all experts should be in memory; the engine keeps
/// low-precision versions only if some are not.
const EXPERT_CACHE: ExpertCache = ExpertCache::Percent(90.0);

/// Measures one width; with a `tolerance`, also how many experts can be lowered together.
///
/// # Errors
/// A model that cannot be run.
pub fn width(
    run: &Run,
    source: &Source,
    text: &Text,
    uses: &Uses,
    norms: &[LayerNorms],
    dtype: GgmlType,
    tolerance: Option<f64>,
) -> anyhow::Result<Width> {
    let path = source.lower(dtype)?;
    let low = LowVersions::File(path.clone());
    let mut runner = match run.open(Some(&low), EXPERT_CACHE, Some(0.0)) {
        // Too much for this machine: use the cache that fits.
        Err(error) if matches!(error.downcast_ref(), Some(OpenError::Plan(_))) => {
            run.open(Some(&low), ExpertCache::Auto, Some(0.0))?
        }
        opened => opened?,
    };
    let precision = runner.session.precision();
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
    let mut width = Width {
        dtype,
        kl: all.kl(),
        perplexity_increase: all.log_increase().exp_m1(),
        scale: if sum > 0.0 { whole / sum } else { 1.0 },
        layers: layers.collect(),
        tolerated: None,
    };
    if let Some(max_loss) = tolerance {
        width.tolerated = Some(tolerated(&mut runner, text, &width, max_loss)?);
    }
    drop(runner);
    std::fs::remove_file(&path).with_context(|| format!("{}: cannot remove", path.display()))?;
    Ok(width)
}

/// Lowers as many experts as the mixed model is measured to tolerate, most robust first (EdgeMoE, section III-B).
fn tolerated(runner: &mut Runner, text: &Text, width: &Width, max_loss: f64) -> anyhow::Result<Tolerated> {
    let mut order: Vec<(f64, ExpertId)> = Vec::new();
    for own in &width.layers {
        let ids = (0..).map(|index| ExpertId { layer: own.layer, index });
        order.extend(own.experts.iter().copied().zip(ids));
    }
    order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    // Start where the sum of the predictions reaches the tolerance.
    let mut nats = 0.0;
    let guess = order.iter().take_while(|(kl, _)| (nats += kl * width.scale, nats.exp_m1() <= max_loss).1).count();
    let mut n_measured = 0;
    let (n, loss) = most_lowered(order.len(), guess, max_loss, |n| -> anyhow::Result<f64> {
        n_measured += 1;
        let set = order[..n].iter().map(|(_, expert)| *expert).collect();
        let losses = runner.losses(text, &[set], &format!("{n} experts at {}", width.dtype))?;
        Ok(losses[0].log_increase().exp_m1())
    })?;
    let experts = order[..n].iter().map(|(_, expert)| (expert.layer, expert.index)).collect();
    Ok(Tolerated { max_loss, loss, experts, n_measured })
}
