//! The share of a prompt's experts in low precision, for a goal.

use hobbit::perplexity::estimate::{Estimate, Sums};
use hobbit::profile::{FittedPrefill, most_lowered, nll};

use super::text::{Runner, Text};
use super::{LowVersions, Run};
use crate::bar::Bar;

/// What is tried first, in percent: Fate's own for Qwen1.5-MoE.
const FIRST: usize = 25;

/// The largest share, in whole percents, that costs at most `max_loss` while everything else is in high precision (Fate, section
/// 4.5). Measured as prompts are read, each piece of the text in one batch, through the real cache.
///
/// # Errors
/// A model that cannot be run, an expert cache in which everything fits.
pub fn for_loss(
    run: &Run,
    text: &Text,
    low: LowVersions,
    low_name: String,
    max_loss: f64,
) -> anyhow::Result<FittedPrefill> {
    let mut runner = run.open_for_misses(low, Some(0.0))?;
    let (exact, exact_bytes_per_token) = prompts(&mut runner, text, 0)?;
    // A share of nothing loses nothing.
    let mut tried = vec![(0, Estimate::default(), exact_bytes_per_token)];
    let (percent, _) = most_lowered(100, FIRST, max_loss, |percent| -> anyhow::Result<f64> {
        let (lowered, bytes_per_token) = prompts(&mut runner, text, percent)?;
        let mut differences = Sums::default();
        lowered.iter().zip(&exact).for_each(|(lowered, exact)| differences.add(lowered - exact));
        let ratio = differences.estimate().exp();
        let loss = Estimate { value: ratio.value - 1.0, ..ratio };
        tried.push((percent, loss, bytes_per_token));
        Ok(loss.value)
    })?;
    let n_measured = tried.len() as u32 - 1;
    let found = tried.into_iter().find(|(tried, ..)| *tried == percent);
    let (_, loss, bytes_per_token) = found.expect("what is answered was measured, or is 0");
    Ok(FittedPrefill {
        prefill_low: percent as f32 / 100.0,
        max_loss,
        loss: loss.value,
        loss_error: loss.uncertainty,
        bytes_per_token,
        exact_bytes_per_token,
        expert_cache: run.expert_cache_word.clone(),
        low: low_name,
        n_measured,
    })
}

/// Negative log-likelihood of each token in nats, and expert bytes read per token, with so many percent of a layer's experts in low
/// precision.
fn prompts(runner: &mut Runner, text: &Text, percent: usize) -> anyhow::Result<(Vec<f64>, f64)> {
    runner.model.set_prefill_low(percent as f32 / 100.0);
    let before = runner.session.stats().total();
    let bar = Bar::of_units(format!("{percent} % of prompts low"), text.windows.len() as u64)?;
    let mut nlls = Vec::new();
    for window in &text.windows {
        runner.window(window, window.len(), |logits, next| nlls.push(nll(logits, next)))?;
        bar.step()?;
    }
    let after = runner.session.stats().total();
    let tokens = (after.tokens - before.tokens).max(1);
    Ok((nlls, (after.bytes_read - before.bytes_read) as f64 / tokens as f64))
}
