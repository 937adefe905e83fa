//! EdgeMoE's mixed model (section III-B): two widths, and the number of lowered experts adjusted by measured losses.

use anyhow::Context;
use hobbit::engine::Ggml;
use hobbit_common::output::tell;
use hobbit_core::expert::ExpertId;
use hobbit_core::pack::{self, PackKind, PackSpec};
use hobbit_core::profile::{Bounded, Goal, Profile, Width, Widths, adjust, bounds, widths};
use hobbit_core::units::Percent;

use super::low::{LowVersions, Source};
use super::text::Text;
use super::{Run, sensitivity};
use crate::shared::Bar;

/// Runs the model with different numbers of experts at the narrower width, for this greatest increase of perplexity.
pub fn find(run: &Run, source: &Source, text: &Text, profile: &Profile, max_loss: f64) -> anyhow::Result<Bounded> {
    let allowed = bounds(&profile.widths, max_loss);
    let wider = allowed.start().checked_sub(1).map(|at| &profile.widths[at]);
    let least = wider.map_or(0.0, |width| width.perplexity_increase);
    if allowed.start() == allowed.end() {
        return Ok(Bounded { max_loss, lowered: 0, perplexity_increase: least, runs: Vec::new() });
    }
    let narrower = &profile.widths[*allowed.start()];
    let mixed = |n| widths(profile, source.map, Goal::Lowered { max_loss, n });
    let (run, low) = open_at(run, source, &mixed(0)?, narrower)?;
    let mut runner = sensitivity::open(&run, &low)?;
    let lowered = |widths: &Widths| -> Vec<ExpertId> {
        let is_narrow = |expert: &ExpertId| {
            let layer = narrower.layers.iter().find(|layer| layer.layer == expert.layer);
            layer.is_some_and(|layer| widths.types.get(expert) == Some(&layer.types))
        };
        widths.types.keys().copied().filter(is_narrow).collect()
    };
    let n_max = lowered(&mixed(u64::MAX)?).len() as u64;
    let predicted = lowered(&widths(profile, source.map, Goal::Bounded(max_loss))?).len() as u64;
    let runs = adjust(n_max, predicted, max_loss, |n| {
        runner.model.force_low(lowered(&mixed(n)?));
        let perplexity = runner.perplexity(text, &format!("{n} at {}", narrower.dtype))?;
        let increase = perplexity / profile.text.perplexity - 1.0;
        tell(format_args!("{n} of {n_max} experts at {}: perplexity {:+.2}", narrower.dtype, Percent(increase)));
        anyhow::Ok(increase)
    })?;
    let within = runs.iter().filter(|(_, increase)| *increase <= max_loss).max_by_key(|(n, _)| *n);
    let (lowered, perplexity_increase) = within.copied().unwrap_or((0, least));
    Ok(Bounded { max_loss, lowered, perplexity_increase, runs })
}

/// The model with all experts at the wider width, and their versions at the narrower one.
fn open_at(run: &Run, source: &Source, wide: &Widths, narrower: &Width) -> anyhow::Result<(Run, LowVersions)> {
    if wide.types.is_empty() {
        return Ok((run.clone(), LowVersions::File(source.lower(narrower.dtype)?)));
    }
    let path = source.directory.join("bounds.hobbit.gguf");
    let spec = PackSpec {
        widths: Some(wide.types.clone().into_iter().collect()),
        low: Some(narrower.dtype.name().parse().context("--widths")?),
        importance: source.imatrix,
        threads: source.threads,
        force: true,
        ..PackSpec::new(PackKind::Full)
    };
    let mut bar = Bar::new()?;
    pack::write(source.gguf, &path, &spec, &Ggml, &mut |now| bar.show("bounds", now.done, now.total))
        .with_context(|| format!("--temp-dir {}", source.directory.display()))?;
    Ok((Run { file: path, ..run.clone() }, LowVersions::Own))
}
