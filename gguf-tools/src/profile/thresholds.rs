//! T1 and T2 for a goal.

use anyhow::Context;
use hobbit::profile::{FittedThresholds, MeasuredThresholds, Trial, Uses, nll, search};
use hobbit::route::{Shares, Thresholds, fit};

use super::text::{Runner, Text};
use super::{LowVersions, Run};
use crate::bar::Bar;

/// Thresholds tried lie this many quantiles of the text's uses apart.
const QUANTILES: usize = 32;

/// For a target mix of high, low and skip.
///
/// # Errors
/// No expert was used.
pub fn for_shares(uses: &Uses, target: Shares) -> anyhow::Result<FittedThresholds> {
    let fitted = fit(uses.n_first, uses.samples.clone(), target)?;
    let Shares { high, low, skip } = target;
    Ok(FittedThresholds {
        t1: fitted.thresholds.t1,
        t2: fitted.thresholds.t2,
        goal: format!("shares {}/{}/{}", percent(high), percent(low), percent(skip)),
        shares: fitted.shares,
        measured: None,
    })
}

/// For the least traffic that costs at most `max_loss`, measured with single tokens through the real cache.
///
/// # Errors
/// A model that cannot be run, an expert cache in which everything fits.
pub fn for_loss(
    run: &Run,
    text: &Text,
    uses: &Uses,
    low: LowVersions,
    low_name: String,
    max_loss: f64,
) -> anyhow::Result<FittedThresholds> {
    let mut runner = run.open_for_misses(low, None)?;
    let mut exact: Option<(f64, f64)> = None;
    let found = search(&uses.candidates(QUANTILES), max_loss, |thresholds| -> anyhow::Result<Trial> {
        let (nll, bytes_per_token) = decode(&mut runner, text, thresholds)?;
        let (exact_nll, _) = *exact.get_or_insert((nll, bytes_per_token));
        Ok(Trial { thresholds, loss: (nll - exact_nll).exp_m1(), bytes_per_token })
    })?;
    let found = found.context("--max-loss: expected a percentage from 0 on")?;
    let Thresholds { t1, t2 } = found.thresholds;
    Ok(FittedThresholds {
        t1,
        t2,
        goal: format!("max loss {}%", percent(max_loss)),
        shares: Shares::reached(found.thresholds, uses.n_first, &uses.samples),
        measured: Some(MeasuredThresholds {
            loss: found.loss,
            bytes_per_token: found.bytes_per_token,
            exact_bytes_per_token: exact.map_or(0.0, |(_, bytes)| bytes),
            expert_cache: run.expert_cache_word.clone(),
            low: low_name,
        }),
    })
}

/// Mean negative log-likelihood of the text in nats, and expert bytes read per token.
fn decode(runner: &mut Runner, text: &Text, thresholds: Thresholds) -> anyhow::Result<(f64, f64)> {
    runner.model.set_thresholds(thresholds);
    let before = runner.session.stats().total();
    let stage = format!("T1 {:.3} T2 {:.3}", thresholds.t1, thresholds.t2);
    let bar = Bar::of_units(stage, text.windows.len() as u64)?;
    let (mut sum, mut n) = (0.0, 0u64);
    for window in &text.windows {
        runner.window(window, 1, |logits, next| {
            sum += nll(logits, next);
            n += 1;
        })?;
        bar.step()?;
    }
    let after = runner.session.stats().total();
    let tokens = (after.tokens - before.tokens).max(1);
    let bytes_per_token = (after.bytes_read - before.bytes_read) as f64 / tokens as f64;
    Ok((sum / n.max(1) as f64, bytes_per_token))
}

/// A share in percent without needless digits: `2.5`.
fn percent(share: f64) -> f64 {
    (share * 1e6).round() / 1e4
}
