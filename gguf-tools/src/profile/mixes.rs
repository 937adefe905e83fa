//! The cheapest ways to give up a little, measured with single tokens through the real cache.

use std::path::Path;

use anyhow::Context;
use hobbit::options::RoutingOptions;
use hobbit::perplexity::estimate::Sums;
use hobbit::profile::{MeasuredMix, Mix, Mixes, Part, RUNS_MAX, nll, search_mixes, text_sha256};
use hobbit::route::Thresholds;
use hobbit_programs::output::tell;

use super::text::{Runner, Text};
use super::{LowVersions, Run};
use crate::bar::Bar;

/// Low versions that mixes may have.
pub struct Low<'a> {
    pub versions: LowVersions<'a>,
    /// What was found with low versions alone.
    pub thresholds: Thresholds,
}

/// Searches on the first half of the text and judges on the second; `None`, with a word, where that has no two windows.
///
/// # Errors
/// A model that cannot be run, an expert cache in which everything fits.
pub fn find(run: &Run, text: &Text, file: &Path, low: Option<&Low>, max_loss: f64) -> anyhow::Result<Option<Mixes>> {
    let half = text.windows.len() / 2;
    if half == 0 {
        tell(format_args!(
            "note: --max-loss: the text has one window, and none to hold out: no mix is sought; give more --tokens, or a \
             smaller --context"
        ));
        return Ok(None);
    }
    let bytes = std::fs::read(file).with_context(|| format!("{}: cannot read", file.display()))?;
    let low_versions = low.map(|low| low.versions);
    let mut measurer =
        Measurer { run, text, half, low: low_versions, runner: None, low_types: None, exact: Default::default() };
    let mut exact_bytes = 0.0;
    for (at, part) in [Part::Search, Part::HeldOut].into_iter().enumerate() {
        let (losses, bytes) = measurer.decode(Mix::EXACT, part)?;
        (measurer.exact[at], exact_bytes) = (losses, bytes);
    }
    let session = &measurer.runner(false)?.session;
    let (plan, high) = (session.plan(), session.precision().high.types.clone());
    let cache_share = plan.cache_share();
    anyhow::ensure!(
        !plan.is_fully_resident() && plan.n_experts > 0,
        "--expert-cache {}: every expert fits, nothing is missed and nothing can be saved; give a smaller one",
        run.expert_cache_word
    );
    let lows = low.map_or_else(Vec::new, |low| {
        let Thresholds { t1, t2 } = low.thresholds;
        let mut lows = vec![Thresholds { t1, t2 }, Thresholds { t1, t2: 1.0 }];
        lows.dedup();
        lows
    });
    let mut n = 0;
    let mixes = search_mixes(&lows, max_loss, |mix, part| {
        n += 1;
        debug_assert!(n <= RUNS_MAX, "as many as users are told");
        measurer.measure(mix, part)
    })?;
    Ok(Some(Mixes {
        text: file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        text_sha256: text_sha256(&bytes),
        tokens: text.windows[half..].iter().map(|window| window.len() as u64).sum(),
        expert_cache: run.expert_cache_word.clone(),
        cache_share,
        high,
        low: measurer.low_types,
        exact_bytes_per_token: exact_bytes,
        mixes,
    }))
}

/// Runs halves of a text.
struct Measurer<'a> {
    run: &'a Run,
    text: &'a Text,
    /// Windows of the first half.
    half: usize,
    low: Option<LowVersions<'a>>,
    /// The model that is open, and whether it has low versions.
    runner: Option<(bool, Runner)>,
    /// Types of the low versions, once they have been used.
    low_types: Option<String>,
    /// Negative log-likelihoods of the exact model, by part.
    exact: [Vec<f64>; 2],
}

impl Measurer<'_> {
    fn runner(&mut self, with_low: bool) -> anyhow::Result<&mut Runner> {
        if self.runner.as_ref().is_none_or(|(has_low, _)| *has_low != with_low) {
            // One model at a time.
            self.runner = None;
            let low = self.low.filter(|_| with_low);
            let runner = self.run.open(low, self.run.expert_cache, None)?;
            if let (true, Some(low)) = (with_low, &runner.session.precision().low) {
                self.low_types = Some(low.types.clone());
            }
            self.runner = Some((with_low, runner));
        }
        let (_, runner) = self.runner.as_mut().context("it has just been opened")?;
        Ok(runner)
    }

    fn measure(&mut self, mix: Mix, part: Part) -> anyhow::Result<MeasuredMix> {
        let (losses, bytes_per_token) = self.decode(mix, part)?;
        let mut differences = Sums::default();
        losses.iter().zip(&self.exact[part as usize]).for_each(|(own, exact)| differences.add(own - exact));
        let increase = differences.estimate();
        Ok(MeasuredMix::new(mix, increase.value, increase.uncertainty, bytes_per_token))
    }

    /// Negative log-likelihoods of a part's tokens, in nats, and expert bytes read per token.
    fn decode(&mut self, mix: Mix, part: Part) -> anyhow::Result<(Vec<f64>, f64)> {
        let (text, half) = (self.text, self.half);
        let windows = if part == Part::Search { &text.windows[..half] } else { &text.windows[half..] };
        let runner = self.runner(mix.uses_low())?;
        runner.model.set_thresholds(Thresholds { t1: mix.t1, t2: mix.t2 });
        runner.model.set_routing(&RoutingOptions::default().with(mix));
        let before = runner.session.stats().total();
        let bar = Bar::of_units(mix.words(), windows.len() as u64)?;
        let mut losses = Vec::new();
        for window in windows {
            runner.window(window, 1, |logits, next| losses.push(nll(logits, next)))?;
            bar.step()?;
        }
        let after = runner.session.stats().total();
        let tokens = (after.tokens - before.tokens).max(1);
        Ok((losses, (after.bytes_read - before.bytes_read) as f64 / tokens as f64))
    }
}
