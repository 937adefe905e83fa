//! Mixes, measured through the real cache.

use std::path::Path;

use anyhow::Context;
use hobbit::Token;
use hobbit::options::RoutingOptions;
use hobbit_common::advice::spelled;
use hobbit_common::output::tell;
use hobbit_core::perplexity::estimate::{Estimate, Sums};
use hobbit_core::profile::{MeasuredMix, Mix, Mixes, Part, Uses, nll, search_mixes, text_sha256};
use hobbit_core::route::{Shares, Thresholds, fit};

use super::Run;
use super::low::LowVersions;
use super::text::{Runner, Text};
use crate::shared::{Bar, file_name};

/// Thresholds to try, ascending in what they give up: for these percentages of high, low and skipped uses.
const SHARES: [[f64; 3]; 4] = [[90.0, 10.0, 0.0], [75.0, 25.0, 0.0], [67.0, 30.0, 3.0], [50.0, 50.0, 0.0]];

/// The thresholds to try on a text with these uses.
pub fn thresholds(uses: &Uses) -> anyhow::Result<Vec<Thresholds>> {
    let mut all = Vec::new();
    for [high, low, skip] in SHARES.map(|shares| shares.map(|percent| percent / 100.0)) {
        let target = Shares::new(high, low, skip).context("the shares add up to 1")?;
        all.push(fit(uses.n_first, uses.samples.clone(), target)?.thresholds);
    }
    all.retain(|thresholds| thresholds.t1 < 1.0);
    all.dedup();
    Ok(all)
}

/// Searches on the first half of the text and judges on the second; `None`, with a note, if the text has only one
/// window. `low` are low versions that mixes may use, with the thresholds to try.
pub fn find(
    run: &Run,
    text: &Text,
    file: &Path,
    low: Option<(&LowVersions, &[Thresholds])>,
    max_loss: f64,
) -> anyhow::Result<Option<Mixes>> {
    let half = text.windows.len() / 2;
    if half == 0 {
        // A cache in which everything fits is refused in any case.
        run.open_for_misses(None)?;
        tell(format_args!(
            "note: --max-loss: the text has one window, and none to hold out: no mix is sought; give more --tokens, \
             or a smaller --context"
        ));
        return Ok(None);
    }
    let bytes = std::fs::read(file).with_context(|| format!("{}: cannot read", file.display()))?;
    let (search, held_out) = text.windows.split_at(half);
    let (low, lows) = low.map_or((None, &[][..]), |(versions, lows)| (Some(versions), lows));
    let mut measurer =
        Measurer { run, parts: [search, held_out], low, runner: None, low_types: None, exact: [vec![], vec![]] };
    let (nlls, exact_search) = measurer.decode(Mix::EXACT, Part::Search)?;
    measurer.exact[Part::Search as usize] = nlls;
    let (nlls, exact_bytes) = measurer.decode(Mix::EXACT, Part::HeldOut)?;
    measurer.exact[Part::HeldOut as usize] = nlls;
    let description = measurer.runner(false)?.session.description();
    let (cache_share, high) = (description.plan.cache_share(), description.precision.high.types.clone());
    let mixes = search_mixes(lows, max_loss, exact_search, |mix, part| measurer.measure(mix, part))?;
    Ok(Some(Mixes {
        text: file_name(file),
        text_sha256: text_sha256(&bytes),
        tokens: held_out.iter().map(|window| window.len() as u64).sum(),
        expert_cache: run.expert_cache_word.clone(),
        cache_share,
        high,
        low: measurer.low_types,
        exact_bytes_per_token: exact_bytes,
        mixes,
    }))
}

/// Runs halves of a text, token by token.
struct Measurer<'a> {
    run: &'a Run,
    /// Windows by [`Part`].
    parts: [&'a [Vec<Token>]; 2],
    low: Option<&'a LowVersions>,
    /// The open model, and whether it has low versions.
    runner: Option<(bool, Runner)>,
    /// Types of the low versions, once they were used.
    low_types: Option<String>,
    /// Negative log-likelihoods of the exact model, by [`Part`].
    exact: [Vec<f64>; 2],
}

impl Measurer<'_> {
    fn runner(&mut self, with_low: bool) -> anyhow::Result<&mut Runner> {
        if self.runner.as_ref().is_none_or(|(has_low, _)| *has_low != with_low) {
            // One model at a time.
            self.runner = None;
            let runner = self.run.open_for_misses(self.low.filter(|_| with_low))?;
            if let (true, Some(low)) = (with_low, &runner.session.description().precision.low) {
                self.low_types = Some(low.versions.types.clone());
            }
            self.runner = Some((with_low, runner));
        }
        let (_, runner) = self.runner.as_mut().context("it has just been opened")?;
        Ok(runner)
    }

    fn measure(&mut self, mix: Mix, part: Part) -> anyhow::Result<MeasuredMix> {
        let (nlls, bytes_per_token) = self.decode(mix, part)?;
        let Estimate { value, uncertainty } = differences(&nlls, &self.exact[part as usize]);
        Ok(MeasuredMix::new(mix, value, uncertainty, bytes_per_token))
    }

    fn decode(&mut self, mix: Mix, part: Part) -> anyhow::Result<(Vec<f64>, f64)> {
        let windows = self.parts[part as usize];
        let runner = self.runner(mix.uses_low())?;
        runner.model.set_thresholds(mix.thresholds());
        runner.model.set_routing(&RoutingOptions::default().with(mix));
        score(runner, windows, mix.words(spelled))
    }
}

/// Mean of the differences, token by token.
fn differences(changed: &[f64], exact: &[f64]) -> Estimate {
    let mut sums = Sums::default();
    changed.iter().zip(exact).for_each(|(changed, exact)| sums.add(changed - exact));
    sums.estimate()
}

/// Negative log-likelihood of each token in nats, and expert bytes read per token; one token at a time.
fn score(runner: &mut Runner, windows: &[Vec<Token>], stage: String) -> anyhow::Result<(Vec<f64>, f64)> {
    let before = runner.session.stats().total();
    let bar = Bar::of_units(stage, windows.len() as u64)?;
    let mut nlls = Vec::new();
    for window in windows {
        runner.window(window, 1, |logits, next| nlls.push(nll(logits, next)))?;
        bar.step(1)?;
    }
    let after = runner.session.stats().total();
    let tokens = (after.tokens - before.tokens).max(1);
    Ok((nlls, (after.bytes_read - before.bytes_read) as f64 / tokens as f64))
}
