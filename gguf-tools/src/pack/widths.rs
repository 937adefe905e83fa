//! Each expert's own width, from a profile.

use std::path::PathBuf;

use hobbit_common::output::tell;
use hobbit_core::gguf::{ExpertClass, ExpertMap, Gguf};
use hobbit_core::pack::{TypeChoice, Widths, fitting};
use hobbit_core::profile::{self, Goal, Profile, mixes_to_json, norms_to_json};
use hobbit_core::store::BLOCK_BYTES;
use hobbit_core::units::{Bytes, Percent};

use crate::shared::{percent, size};

/// Flags of `pack` that need a profile.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Profile of the model, made by gguf-tools profile: thresholds, mixes, and the losses for the flags below
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Lower the most robust experts' high precision while predicted perplexity rises by at most this: 2%
    #[arg(long, value_name = "N%", requires = "profile", value_parser = percent)]
    #[arg(conflicts_with_all = ["high", "only_low", "target_size"])]
    max_loss: Option<f64>,
    /// With --max-loss: choose between two of the profile's widths only, with all experts at which the model was
    /// measured just within and beyond the loss, and lower as many experts as profile --bounds N% has measured to be
    /// within it, else as are predicted to be (EdgeMoE)
    #[arg(long, requires = "max_loss")]
    bounds: bool,
    /// Lower the most robust experts' high precision until the pack is this small: 6GiB
    #[arg(long, value_name = "SIZE", requires = "profile", value_parser = size)]
    #[arg(conflicts_with_all = ["high", "only_low"])]
    target_size: Option<u64>,
}

/// A pack's contents that come from a profile.
#[derive(Default)]
pub struct Chosen {
    pub widths: Option<Widths>,
    pub thresholds: Option<(f32, f32)>,
    /// Norms of the experts' weights.
    pub norms: Option<String>,
    pub mixes: Option<String>,
}

impl Args {
    /// Widths and thresholds for a pack of `source` with these low versions.
    pub fn choose(&self, source: &Gguf, low: Option<&TypeChoice>) -> anyhow::Result<Chosen> {
        let Some(path) = &self.profile else { return Ok(Chosen::default()) };
        let profile = Profile::read(path)?;
        let map = source.experts()?;
        profile.check_model(source, &map)?;
        let norms = (!profile.norms.is_empty()).then(|| norms_to_json(&profile.norms));
        let mixes = (!profile.mixes.is_empty()).then(|| mixes_to_json(&profile.mixes));
        let thresholds = profile.thresholds.as_ref().map(|chosen| (chosen.t1, chosen.t2));
        let goal = match (self.max_loss, self.target_size) {
            (Some(max_loss), _) if self.bounds => Goal::Bounded(max_loss),
            (Some(max_loss), _) => Goal::MaxLoss(max_loss),
            (None, Some(bytes)) => Goal::TargetSize { bytes, other: other_bytes(source, &map, low) },
            (None, None) => return Ok(Chosen { widths: None, thresholds, norms, mixes }),
        };
        let chosen = profile::widths(&profile, &map, goal)?;
        let counts: Vec<_> = chosen.counts.iter().map(|(dtype, n)| format!("{n} at {dtype}")).collect();
        let (what, loss) = chosen.measured.map_or(("predicted", chosen.loss), |loss| ("measured", loss));
        tell(format_args!(
            "{} experts lowered ({}): {what} perplexity {:+.2}, high-precision records {}",
            chosen.types.len(),
            if counts.is_empty() { "none".to_owned() } else { counts.join(", ") },
            Percent(loss),
            Bytes(chosen.record_bytes)
        ));
        if let (Goal::Bounded(max_loss), None) = (goal, chosen.measured) {
            let max_loss = profile::in_percent(max_loss);
            tell(format_args!("note: gguf-tools profile --bounds {max_loss}% measures the loss of this choice"));
        }
        let widths = chosen.types.into_iter().collect();
        Ok(Chosen { widths: Some(widths), thresholds, norms, mixes })
    }
}

/// Upper bound of a pack's bytes outside high-precision records: ordinary tensors and low records at block borders,
/// the source's header, and the pack's own header, index and checksums.
fn other_bytes(source: &Gguf, map: &ExpertMap, low: Option<&TypeChoice>) -> u64 {
    let ordinary: u64 = (source.tensors.iter())
        .filter(|tensor| !map.layers.iter().flat_map(|layer| &layer.tensors).any(|expert| expert.name == tensor.name))
        .map(|tensor| tensor.extent.len.next_multiple_of(BLOCK_BYTES))
        .sum();
    let low = low.map_or(0, |choice| {
        let record = |layer: &hobbit_core::gguf::LayerExperts| {
            let slices = layer.tensors.iter().map(|tensor| {
                let lower = fitting(choice.of(tensor.kind), tensor.ne0);
                let smaller = lower.row_bytes(tensor.ne0) < tensor.dtype.row_bytes(tensor.ne0);
                (tensor.kind, if smaller { lower } else { tensor.dtype }, tensor.ne0, tensor.ne1)
            });
            ExpertClass::packed(slices).map_or(0, |class| class.stride * u64::from(layer.n_expert))
        };
        map.layers.iter().map(record).sum()
    });
    let n_versions: u64 = map.layers.iter().map(|layer| 2 * u64::from(layer.n_expert)).sum();
    let n_tensors = source.tensors.len() as u64;
    let header = source.header_bytes.len() as u64;
    ordinary + low + 2 * header + 72 * n_versions + 256 * n_tensors + 32 * BLOCK_BYTES
}
