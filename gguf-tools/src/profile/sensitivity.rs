//! How much each expert loses at each width.

use anyhow::Context;
use hobbit::Error;
use hobbit::expert::ExpertId;
use hobbit::gguf::{ExpertMap, GgmlType};
use hobbit::plan::ExpertCache;
use hobbit::profile::{Check, Checked, LayerWidth, Tolerated, Uses, Width, divide, most_lowered, spearman};

use super::lower::Lowered;
use super::text::{Runner, Text};
use super::{LowVersions, Run};

/// Layers are lowered whole while all others stay as they are: everything fits but a little, so that the engine keeps
/// low-precision versions at all.
const EXPERT_CACHE: ExpertCache = ExpertCache::Percent(90.0);

/// Measures one width.
///
/// # Errors
/// A model that cannot be run.
pub fn width(
    run: &Run,
    map: &ExpertMap,
    text: &Text,
    uses: &Uses,
    dtype: GgmlType,
    lowered: &Lowered,
) -> anyhow::Result<Width> {
    let mut runner = match run.open(Some(LowVersions::File(&lowered.path)), EXPERT_CACHE, Some(0.0)) {
        // Too much for this machine: then what it has room for.
        Err(error) if matches!(error.downcast_ref(), Some(Error::Plan(_))) => {
            run.open(Some(LowVersions::File(&lowered.path)), ExpertCache::Auto, Some(0.0))?
        }
        opened => opened?,
    };
    let precision = runner.session.precision();
    anyhow::ensure!(
        precision.is_dynamic() && precision.low.is_some(),
        "the engine uses no low-precision experts here ({precision:?}); report this with the model's shape"
    );
    let layer_set = |layer: &hobbit::gguf::LayerExperts| -> Vec<ExpertId> {
        (0..layer.n_expert as u16).map(|index| ExpertId { layer: layer.layer, index }).collect()
    };
    let mut sets = vec![map.layers.iter().flat_map(layer_set).collect()];
    sets.extend(map.layers.iter().map(layer_set));
    let losses = runner.losses(text, &sets, &format!("layers at {dtype}"))?;
    let (all, by_layer) = losses.split_first().context("nothing was measured")?;

    let sum: f64 = by_layer.iter().map(|loss| loss.kl()).sum();
    let whole = all.kl().max(all.log_increase());
    let layers = map.layers.iter().zip(by_layer).map(|(layer, loss)| {
        let importance = uses.importance(layer.layer, layer.n_expert as usize);
        let errors = &lowered.errors[&layer.layer];
        let experts = divide(loss.kl(), &importance, errors);
        LayerWidth { layer: layer.layer, types: lowered.types[&layer.layer], kl: loss.kl(), experts }
    });
    let mut width = Width {
        dtype,
        kl: all.kl(),
        perplexity_increase: all.log_increase().exp_m1(),
        scale: if sum > 0.0 { whole / sum } else { 1.0 },
        layers: layers.collect(),
        check: None,
        tolerated: None,
    };
    if let Some(count) = run.check {
        width.check = Some(check(&mut runner, text, &width, count)?);
    }
    if let Some(max_loss) = run.tolerance {
        width.tolerated = Some(tolerated(&mut runner, text, &width, max_loss)?);
    }
    Ok(width)
}

/// Lowers as many as the mixed model is measured to tolerate, most robust first (EdgeMoE, section III-B).
fn tolerated(runner: &mut Runner, text: &Text, width: &Width, max_loss: f64) -> anyhow::Result<Tolerated> {
    let of_layer = |layer: &LayerWidth| {
        let layer_number = layer.layer;
        layer.experts.iter().zip(0..).map(move |(&kl, index)| (kl, ExpertId { layer: layer_number, index })).collect()
    };
    let mut order: Vec<(f64, ExpertId)> = width.layers.iter().flat_map(|layer| -> Vec<_> { of_layer(layer) }).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    // Where the sum of the predictions reaches the tolerance.
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

/// Lowers single experts, spread evenly over the order of their predictions.
fn check(runner: &mut Runner, text: &Text, width: &Width, count: usize) -> anyhow::Result<Check> {
    let mut experts: Vec<Checked> = (width.layers.iter())
        .flat_map(|layer| {
            layer.experts.iter().enumerate().map(|(expert, &predicted)| Checked {
                layer: layer.layer,
                expert: expert as u16,
                predicted,
                measured: 0.0,
            })
        })
        .collect();
    experts.sort_by(|a, b| b.predicted.total_cmp(&a.predicted).then((a.layer, a.expert).cmp(&(b.layer, b.expert))));
    let n = count.min(experts.len());
    let mut chosen: Vec<Checked> = (0..n).map(|i| experts[i * experts.len() / n]).collect();
    let sets: Vec<_> = chosen.iter().map(|one| vec![ExpertId { layer: one.layer, index: one.expert }]).collect();
    let losses = runner.losses(text, &sets, &format!("experts at {}", width.dtype))?;
    for (one, loss) in chosen.iter_mut().zip(losses) {
        one.measured = loss.kl();
    }
    let predicted: Vec<f64> = chosen.iter().map(|one| one.predicted).collect();
    let measured: Vec<f64> = chosen.iter().map(|one| one.measured).collect();
    let ratio = predicted.iter().sum::<f64>() / measured.iter().sum::<f64>();
    let ratio = if ratio.is_finite() { ratio } else { 0.0 };
    Ok(Check { spearman: spearman(&predicted, &measured), ratio, experts: chosen })
}
